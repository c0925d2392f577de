"""`make mutants` as part of `make verify`: every fault, in a process of its own."""

import subprocess
import sys

import pytest

from tests.mutants.records import ROOT

pytestmark = [pytest.mark.verify, pytest.mark.services, pytest.mark.timeout(4 * 3600)]


def test_at_least_95_percent_of_the_faults_are_caught(tmp_path):
    command = [sys.executable, "-m", "tests.mutants", "--result", str(tmp_path / "result.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
