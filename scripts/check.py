"""`make check`: runs every static check by name, and all of them even if one fails."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CHECKS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "import walls": ["lint-imports"],
    "protos": ["buf", "lint", "protos"],
    "stubs": ["python", "scripts/gen_protos.py", "--check"],
    "chart schema": ["python", "scripts/gen_helm_schema.py", "--check"],
    "types": ["mypy"],
}


def main() -> int:
    failed = [name for name, command in CHECKS.items() if not _passes(name, command)]
    if failed:
        print(f"check: failed: {', '.join(failed)} (`make format` repairs the format)")
    return 1 if failed else 0


def _passes(name: str, command: list[str]) -> bool:
    started = time.monotonic()
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"  {name:<13} {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
