"""Reads a JSON object field by field, with types. Fields that were not read are refused."""

from collections.abc import Mapping
from typing import Any, NoReturn

from services.common.errors import InvalidArgumentError


class Fields:
    """The fields of one JSON object.

    Args:
        data: the object.
        path: of the object in the body, for error messages; "" for the body itself.
    """

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            refuse(path or "body", f"must be a JSON object, got {describe_value(data)}")
        self._data: Mapping[str, Any] = data
        self._path = path
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """The full path of a field."""
        return f"{self._path}.{field}" if self._path else field

    def value(self, field: str) -> Any:
        """The field's value of any type; None if it is absent or null."""
        self._read.add(field)
        return self._data.get(field)

    def text(self, field: str) -> str | None:
        """A string; None if absent.

        Raises:
            InvalidArgumentError: the value has another type; so do the methods below.
        """
        value: str | None = self._typed(field, str, "a string")
        return value

    def boolean(self, field: str) -> bool | None:
        """true or false; None if absent."""
        value: bool | None = self._typed(field, bool, "true or false")
        return value

    def number(self, field: str) -> float | None:
        """A number; None if absent."""
        value = self.value(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(self.name(field), f"must be a number, got {describe_value(value)}")
        try:
            return float(value)
        except OverflowError:
            refuse(self.name(field), "is too large")

    def integer(self, field: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]; None if absent."""
        value = self.value(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(self.name(field), f"must be a whole number, got {describe_value(value)}")
        if not low <= value <= high:
            refuse(self.name(field), f"must be in [{low}, {high}], got {describe_value(value)}")
        return int(value)

    def items(self, field: str, limit: int) -> list[Any] | None:
        """An array of at most `limit` items; None if absent."""
        value: list[Any] | None = self._typed(field, list, "an array")
        if value is not None and len(value) > limit:
            refuse(self.name(field), f"at most {limit} items, got {len(value)}")
        return value

    def nested(self, field: str) -> "Fields | None":
        """An object; None if absent."""
        value = self.value(field)
        return None if value is None else Fields(value, self.name(field))

    def ignore(self, *fields: str) -> None:
        """Accept fields that do not change the answer."""
        self._read.update(fields)

    def refuse_unread(self) -> None:
        """Refuse the remaining fields: ignoring them silently would look like support.

        Raises:
            InvalidArgumentError: names the first one.
        """
        for field, value in self._data.items():
            if field not in self._read and value is not None:
                refuse(self.name(field[:128]), "is not supported", reason="UNSUPPORTED_FIELD")

    def _typed(self, field: str, kind: type, expected: str) -> Any:
        value = self.value(field)
        if value is not None and not isinstance(value, kind):
            refuse(self.name(field), f"must be {expected}, got {describe_value(value)}")
        return value


def refuse(field: str, problem: str, *, reason: str | None = None) -> NoReturn:
    """Raise the error of one field, by its OpenAI name.

    Raises:
        InvalidArgumentError: always.
    """
    raise InvalidArgumentError.for_field(field, problem, reason=reason)


def describe_value(value: Any) -> str:
    """A JSON value for an error message: the value itself if it is short, else its type."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, int) and abs(value) > 10**39:
        return "a huge number"  # Python refuses to print the longest ones
    return repr(value) if len(repr(value)) <= 40 else f"a {type(value).__name__}"
