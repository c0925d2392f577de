"""The core imports xgrammar without transformers."""

import subprocess
import sys
import textwrap

FAKE = """
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
class Processor(transformers.LogitsProcessor): ...
"""
PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    from services.engine.grammar.library import load_library
    assert load_library().__file__.startswith(sys.argv[1])
    assert "transformers" not in sys.modules
    import transformers
    assert transformers.REAL
    """
)


def test_transformers_is_left_out_and_can_be_imported_later(tmp_path):
    (tmp_path / "xgrammar.py").write_text(FAKE)
    (tmp_path / "transformers.py").write_text("REAL = True")
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=60)
