"""Write the Python stubs of every .proto under protos/ into inferfleet/, their own package path.

Run with --check to fail when the committed stubs differ from what the protos say.
"""

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> list[Path]:
    """Compile all protos into `out`; return the generated files relative to it."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    package = out / "inferfleet"
    return sorted(p.relative_to(out) for p in package.rglob("*_pb2*.py*") if p.suffix != ".pyc")


def check() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        stale = [
            str(p)
            for p in fresh
            if not (ROOT / p).exists()
            or not filecmp.cmp(ROOT / p, Path(scratch) / p, shallow=False)
        ]
    if stale:
        print(f"stubs differ from protos/: {', '.join(stale)}; run: make protos", file=sys.stderr)
        return 1
    print(f"stubs: {len(fresh)} files match protos/")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        return check()
    for path in generate(ROOT):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
