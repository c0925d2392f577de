"""Reads JSON files of a model folder, and checks the types of their keys."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.contract.model_config import ModelFileError


def read_json(path: Path) -> Any:
    """The value that the file holds.

    Raises:
        ModelFileError: the file does not exist, is not JSON or is nested too deep.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ModelFileError(f"{path}: arrays or objects are nested too deep") from error


MAX_COUNT = 1 << 27
"""Largest size that a key may hold: above every vocabulary and context length in use."""
MAX_LAYERS = 10_000


class Keys:
    """A JSON object of a file. Every error names the file and the key.

    A null counts as a missing key: transformers writes both.
    """

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where
        """The file, and the object in it, for messages."""

    def __contains__(self, key: str) -> bool:
        return key in self._raw

    def __getitem__(self, key: str) -> Any:
        return self._raw[key]

    def get(self, key: str) -> Any:
        """The value without a check; None if it is missing."""
        return self._raw.get(key)

    def part(self, *names: str) -> "Keys":
        """The first of these keys whose value is not empty; an empty object if there is none.

        Raises:
            ModelFileError: a key's value is not an object.
        """
        for name in names:
            value = self._raw.get(name) or {}
            if not isinstance(value, dict):
                raise ModelFileError(f"{self.where}: {name} must be an object, got {value!r}")
            if value:
                return Keys(value, f"{self.where}: {name}")
        return Keys({}, self.where)

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """A whole number from 0 to `most`.

        Raises:
            ModelFileError: the value is not one, or is missing and has no default.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFileError(
                f"{self.where}: {key} must be a whole number of 0 or more, got {value!r}"
            )
        if value > most:
            raise ModelFileError(f"{self.where}: {key} must be at most {most}, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            ModelFileError: the value is not one, or is missing and has no default.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{self.where}: {key} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ModelFileError(f"{self.where}: {key} must be a finite number, got {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false.

        Raises:
            ModelFileError: the value is neither.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; empty if the key is missing.

        Raises:
            ModelFileError: the value is not a list.
        """
        value = self._value(key, [])
        if not isinstance(value, list):
            raise ModelFileError(f"{self.where}: {key} must be a list, got {value!r}")
        return value

    def check_fixed(self, fixed: Mapping[str, Any]) -> None:
        """Check keys that may have one value only, or be missing.

        Raises:
            ModelFileError: one has another value.
        """
        for key, value in fixed.items():
            if self._raw.get(key) not in (None, value):
                raise ModelFileError(
                    f"{self.where}: {key} {self._raw[key]!r} is not supported, only {value!r}"
                )

    def _value(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self.where}: {key!r} is missing")
        return default
