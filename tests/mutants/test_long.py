"""`make mutants` in `make verify`: the faults without a valid outcome, and ten of the others."""

import shutil
import subprocess
import sys

import pytest

from tests.mutants.__main__ import RESULT
from tests.mutants.records import ROOT

pytestmark = [pytest.mark.verify, pytest.mark.services, pytest.mark.timeout(4 * 3600)]


def test_at_least_95_percent_of_the_faults_are_caught(tmp_path):
    result = shutil.copy(RESULT, tmp_path / "result.json")
    options = ["--changed", "--others", "10", "--result", str(result)]
    command = [sys.executable, "-m", "tests.mutants", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
