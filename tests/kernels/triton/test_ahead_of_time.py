import os
import subprocess
import sys

import pytest


def compiled(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environ
    command = [sys.executable, "-m", "kernels.triton.ahead_of_time", *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_every_kernel_compiles_for_a_gpu_that_this_machine_lacks(element):
    done = compiled("--target", "sm_90", "--element", element)
    assert done.returncode == 0, done.stderr
    sizes = {line.split()[0]: int(line.split()[3]) for line in done.stdout.splitlines()}
    expected = {"rms_norm", "rope", "kv_write", "silu_mul", "attend_split", "combine_splits"}
    assert set(sizes) == expected | {"sample_tile", "sample_row"}
    assert min(sizes.values()) > 1000


def test_the_interpreter_is_not_a_compiler():
    done = compiled(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
