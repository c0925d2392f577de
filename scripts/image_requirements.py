"""Print the part of a lock that one image needs, with digests: `… EXTRA requirements/X.lock`.

For `services` and `gateway`, pip resolves the extra under the lock's pins (metadata only) and the
lock's own entries of the result are printed. For `engine` it is the whole lock but for the stores
that only a trial on one machine uses: resolving would ask for torch, whose build is chosen
elsewhere. Standard library only: it runs in a bare image.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

_SELF = re.compile(r"inferfleet\[([\w,\s-]+)\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """The base dependencies and those of `extra`, each once; extras of the project are followed."""
    wanted = dict.fromkeys(project["dependencies"])
    for line in project["optional-dependencies"][extra]:
        reference = _SELF.fullmatch(line)
        for name in reference[1].split(",") if reference else ():
            wanted |= dict.fromkeys(requirements(project, name.strip()))
        if not reference:
            wanted[line] = None
    return list(wanted)


def entries(lock: str) -> list[tuple[str, str]]:
    """(normalised name, whole entry) of each package of a lock; one name may have several."""
    text = "\n".join(line for line in lock.splitlines() if not line.startswith("#"))
    blocks = re.split(r"\n(?=\S)", text.strip())
    return [(normalised(block), block) for block in blocks]


def normalised(requirement: str) -> str:
    """The name of a requirement as the lock spells it."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def resolved_names(wanted: list[str], lock: str) -> set[str]:
    """The names pip would install for `wanted` under the pins of `lock`."""
    pins = "\n".join(entry.split("\\")[0].rstrip() for _, entry in entries(lock))
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "pins.txt"
        constraints.write_text(pins + "\n")
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--report", "-", "-c", str(constraints), *wanted]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {normalised(item["metadata"]["name"]) for item in report["install"]}


def main() -> int:
    """Read pyproject.toml in the working directory and print the entries."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    if len(sys.argv) != 3 or sys.argv[1] not in ("services", "gateway", "engine"):
        print("usage: image_requirements.py services|gateway|engine LOCK", file=sys.stderr)
        return 2
    extra, lock = sys.argv[1], Path(sys.argv[2]).read_text()
    if extra == "engine":
        local = project["optional-dependencies"]["local"]
        trial = {normalised(line) for line in local if not _SELF.fullmatch(line)}
        names = {name for name, _ in entries(lock)} - trial
    else:
        names = resolved_names(requirements(project, extra), lock)
    print("\n".join(entry for name, entry in entries(lock) if name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
