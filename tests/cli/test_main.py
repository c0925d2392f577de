"""Without the services every command ends in one line that says what to do, and no traceback."""

import subprocess
import sys

import pytest

from inferfleet_cli.main import COMMANDS

WITHOUT_SERVICES = """
import sys

class NoServices:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("services", "kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoServices())
from inferfleet_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_services(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_SERVICES, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("up",),
        ("demo",),
        ("placement", "get", "--etcd=127.0.0.1:1"),
        ("placement", "plan", "--loads=loads.json", "--ranks=1", "--slots=1"),
        ("models", "list", "--etcd=127.0.0.1:1"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_that_needs_the_services_says_so(arguments, tmp_path):
    done = run_without_services(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("inferfleet: the module 'services")
    assert "clone the repository and run `make venv` there" in line


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__.split(".")[-1])
def test_help_needs_no_service(command, tmp_path):
    name = command.__name__.split(".")[-1].replace("_", "-")
    done = run_without_services(name, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: inferfleet {name}")


def test_a_command_for_a_fleet_that_does_not_run_is_one_line(tmp_path):
    done = run_without_services("trace", "x", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "start one with `inferfleet up`" in done.stderr
