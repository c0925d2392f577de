"""What compiled kernels take beside the committed table, and what the comparison finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.triton.resources import (
    TARGETS,
    Resources,
    problems,
    read_reasons,
    read_table,
    write_table,
)

TABLE = Path(__file__).parent / "data" / "resources.json"
MULTIPLIES = (
    *("gate_up", "down", "linear"),
    *("decode_split", "extend", "latent", "index_scores"),
    *("v4_window", "v4_chosen", "v4_dense"),
)


def test_kernels_of_the_table_spill_for_a_reason_and_products_use_tensor_cores():
    table, reasons = read_table(TABLE), read_reasons(TABLE)
    assert "sm_90" in table
    assert set(table) <= {f"sm_{capability}" for capability in TARGETS}
    for target, kernels in table.items():
        spilled = {name: own.spilled for name, own in kernels.items() if own.spilled}
        assert spilled.keys() <= reasons.keys(), target
        assert max(spilled.values(), default=0) <= 16, target
        plain = {name for name in kernels if name.startswith(MULTIPLIES)}
        assert {name for name in plain if not kernels[name].products} == set(), target
        assert max(own.registers for own in kernels.values()) <= 255


def test_a_difference_is_named(tmp_path):
    table = {"sm_90": {"one": Resources(40, 0, 512, 8), "two": Resources(40, 8, 512, 8)}}
    path = tmp_path / "table.json"
    write_table(path, table, {"one": "it did once", "two": "why"})
    reasons = read_reasons(path)
    assert read_table(path) == table
    assert reasons == {"two": "why"}
    assert problems(table, read_table(path), reasons) == []
    assert problems(table, table, {}) == ["sm_90 two: spills 8 bytes, and the table has no reason"]
    found = {"sm_90": {"one": Resources(40, 16, 512, 8), "new": Resources(1, 0, 300_000, 0)}}
    wrong = "\n".join(problems(found, table, reasons))
    assert "sm_90 one: is Resources(registers=40, spilled=16" in wrong
    assert "sm_90 new: not in the table" in wrong
    assert "sm_90 new: 300000 bytes of shared memory" in wrong
    assert "sm_90 two: in the table, but there is no such kernel" in wrong


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_compiled_kernels_are_as_in_the_table():
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.triton.resources", "--check", str(TABLE)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
