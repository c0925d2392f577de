"""Imports xgrammar without transformers, which takes four fifths of the import.

xgrammar imports transformers for classes that it compares arguments with. The engine gives it a
vocabulary instead, so stand-ins do. Only for a process of the engine's own: while xgrammar is being
imported, the whole process sees the stand-ins.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "transformers"
_CLASSES = ("LogitsProcessor", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast")


def load_library() -> Any:
    """Import xgrammar; returns the module.

    Raises:
        ImportError: it cannot be imported.
        OSError: a library of it cannot be loaded.
    """
    if "xgrammar" in sys.modules or _NAME in sys.modules:
        return importlib.import_module("xgrammar")
    stand_in = ModuleType(_NAME)
    stand_in.__spec__ = importlib.util.spec_from_loader(_NAME, loader=None)
    for name in _CLASSES:
        setattr(stand_in, name, type(name, (), {}))
    sys.modules[_NAME] = stand_in
    try:
        return importlib.import_module("xgrammar")
    finally:
        del sys.modules[_NAME]
