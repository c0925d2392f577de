"""What compiled kernels take of a GPU that this machine need not have, and a table to compare with.

Run as `python -m kernels.triton.resources --check TABLE` (or `--write TABLE`). Every kernel is
compiled for each target; registers, spilled bytes and shared memory come from the `cuobjdump` that
Triton brings. A kernel with a product must have instructions of the tensor cores, and one that
spills a reason in the table, which is written by hand.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kernels.triton.ahead_of_time import Variant, compile_variant, variants
from kernels.triton.experts.variants import expert_variants
from kernels.triton.ragged.variants import attention_variants
from kernels.triton.v4.variants import v4_variants

TARGETS = (80, 90, 100)
"""Compute capabilities times ten: A100, H100 and H200, B200."""
SHARED_LIMITS: Mapping[int, int] = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a block may have. Source: CUDA C++ Programming Guide, table of
compute capabilities."""
ELEMENT = "bf16"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_TENSOR_CORES = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?[A-Z0-9]*MMA[.\s]", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread's stack and local memory: values that found no register."""
    shared: int
    """Bytes of a block."""
    products: int
    """Instructions of the tensor cores."""


Table = dict[str, dict[str, Resources]]
"""By target (`sm_90`) and kernel."""
Reasons = dict[str, str]
"""Why a kernel may spill, by kernel."""


def measure(variant: Variant, capability: int) -> Resources:
    """Compile a kernel and read what it takes.

    Raises:
        RuntimeError: cuobjdump's answer has no such figures.
    """
    import triton

    compiled = compile_variant(variant, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage, code = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = _USAGE.search(usage)
    if found is None:
        raise RuntimeError(f"{variant.name}: cuobjdump printed no resources: {usage[:200]!r}")
    registers, stack, _static, local = map(int, found.groups())
    products = len(_TENSOR_CORES.findall(code))
    return Resources(registers, stack + local, compiled.metadata.shared, products)


def measure_all(capabilities: tuple[int, ...]) -> Table:
    """Resources of all kernels on some targets."""
    every = [
        *variants(ELEMENT),
        *expert_variants(ELEMENT),
        *attention_variants(ELEMENT),
        *v4_variants(ELEMENT),
    ]
    return {
        f"sm_{capability}": {variant.name: measure(variant, capability) for variant in every}
        for capability in capabilities
    }


def problems(found: Table, wanted: Table, reasons: Reasons) -> list[str]:
    """How the figures differ from the table, and which of them no device could run well."""
    wrong = []
    for target, kernels in found.items():
        limit = SHARED_LIMITS[int(target.removeprefix("sm_"))]
        for name, own in kernels.items():
            at = f"{target} {name}"
            if own.shared > limit:
                wrong.append(f"{at}: {own.shared} bytes of shared memory, a block has {limit}")
            if own.spilled and name not in reasons:
                wrong.append(f"{at}: spills {own.spilled} bytes, and the table has no reason")
            kept = wanted.get(target, {}).get(name)
            if kept is None:
                wrong.append(f"{at}: not in the table")
            elif kept != own:
                wrong.append(f"{at}: is {own}, the table has {kept}")
        gone = wanted.get(target, {}).keys() - kernels.keys()
        wrong += [f"{target} {name}: in the table, but there is no such kernel" for name in gone]
    return wrong


def read_table(path: Path) -> Table:
    """A table that `write_table` wrote."""
    stored = json.loads(path.read_text())
    return {
        target: {name: Resources(*figures) for name, figures in kernels.items()}
        for target, kernels in stored["kernels"].items()
    }


def read_reasons(path: Path) -> Reasons:
    """The reasons for spills of a table that `write_table` wrote."""
    reasons: Reasons = json.loads(path.read_text())["spills"]
    return reasons


def write_table(path: Path, table: Table, reasons: Reasons) -> None:
    """Write a table, one line per kernel, and the reasons of the kernels that spill."""
    import triton

    parts = []
    for target, kernels in table.items():
        lines = [
            f"   {json.dumps(name)}: {json.dumps(list(asdict(own).values()))}"
            for name, own in sorted(kernels.items())
        ]
        parts.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    columns = json.dumps([field.name for field in fields(Resources)])
    spilled = {name for kernels in table.values() for name, own in kernels.items() if own.spilled}
    kept = {name: reason for name, reason in sorted(reasons.items()) if name in spilled}
    spills = json.dumps(kept, indent=2).replace("\n}", "\n }")
    head = f' "triton": "{triton.__version__}",\n "columns": {columns},\n "spills": {spills}'
    path.write_text("{\n" + head + ',\n "kernels": {\n' + ",\n".join(parts) + "\n }\n}\n")


def main() -> int:
    """Compare or write a table; 1 if something differs."""
    parser = argparse.ArgumentParser(prog="kernels.triton.resources", description=__doc__)
    parser.add_argument(
        "--target", action="append", help="sm_80, sm_90 or sm_100; default: those of the table"
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--check", type=Path, metavar="TABLE")
    way.add_argument("--write", type=Path, metavar="TABLE")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 is set, so nothing would be compiled: unset it", file=sys.stderr)
        return 2
    path = args.check or args.write
    kept, reasons = (read_table(path), read_reasons(path)) if path.exists() else ({}, {})
    names = args.target or list(kept) or [f"sm_{capability}" for capability in TARGETS]
    table = measure_all(tuple(int(name.removeprefix("sm_")) for name in names))
    if args.write:
        write_table(args.write, kept | table, reasons)
        return 0
    wrong = problems(table, kept, reasons)
    print(
        "\n".join(wrong) or f"{sum(map(len, table.values()))} compiled kernels are as in the table"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
