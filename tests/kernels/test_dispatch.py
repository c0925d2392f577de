"""Which kernel set is chosen, and that `kernels` is this repository's package."""

import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from kernels import dispatch

REPOSITORY = Path(__file__).resolve().parents[2]


def test_kernels_is_ours() -> None:
    """A public package of the same name would shadow it silently."""
    assert [Path(p).resolve() for p in kernels.__path__] == [REPOSITORY / "kernels"]


def test_every_named_set_loads_under_its_name() -> None:
    for name in dispatch.SETS:
        if dispatch.SETS[name].startswith("kernels.triton"):
            continue  # tests/kernels/triton loads them
        assert dispatch.load(name).name == name


def test_choosing_imports_nothing() -> None:
    code = (
        "import sys; from kernels import dispatch; dispatch.choose('cpu');"
        "ours = {m for m in sys.modules if m.startswith('kernels.')};"
        "names = {'dispatch', 'expert_products', 'interface', 'latent', 'ragged', 'round_rows'};"
        "names |= {'whole_rounds'};"
        "assert ours == {f'kernels.{name}' for name in names}, ours"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=REPOSITORY)


def test_unsupported_options_are_refused_by_name() -> None:
    with pytest.raises(dispatch.UnsupportedError, match="device=tpu"):
        dispatch.choose("tpu")
    with pytest.raises(dispatch.UnsupportedError, match="reference"):
        dispatch.load("nothing")
