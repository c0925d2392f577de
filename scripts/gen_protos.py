"""Write the Python stubs of every .proto under protos/ into the package inferfleet_proto.

The protos keep their own package path (inferfleet/v1/…). Only the Python package has another name,
so that the client package `inferfleet` and the services stand on the same stubs.

Run with --check to fail when the committed stubs differ from what the protos say.
"""

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = "inferfleet_proto"
# A generated module where another imports it, and where its messages say which module is theirs.
_IMPORTED = re.compile(r"(?<=from )inferfleet(?=\.[\w.]+ import)|(?<=')inferfleet(?=\.[\w.]+_pb2')")


def generate(out: Path) -> list[Path]:
    """Compile all protos into `out`; return the generated files relative to it."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    generated = [p for p in (out / "inferfleet").rglob("*_pb2*.py*") if p.suffix != ".pyc"]
    return sorted(_moved(path, out) for path in generated)


def _moved(path: Path, out: Path) -> Path:
    """Move one generated file into our package and let it import its neighbours from there."""
    place = Path(PACKAGE) / path.relative_to(out / "inferfleet")
    text = _IMPORTED.sub(PACKAGE, path.read_text())
    (out / place).parent.mkdir(parents=True, exist_ok=True)
    (out / place).write_text(text)
    return place


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
    with tempfile.TemporaryDirectory() as scratch:
        for path in generate(Path(scratch)):
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(scratch) / path, ROOT / path)
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
