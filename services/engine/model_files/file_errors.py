"""Adds the file's name to errors about its contents."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from services.engine.contract.model_config import ModelFileError


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Prefix the message of a ModelFileError in the body with the path, unless it has it already.

    Raises:
        ModelFileError: the body raised one.
    """
    try:
        yield
    except ModelFileError as error:
        text = str(error)
        if str(path) in text:
            raise
        raise ModelFileError(f"{path}: {text}") from error
