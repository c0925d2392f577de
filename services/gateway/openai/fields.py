"""Reads a JSON object field by field: each has a type, and one that nobody read is refused."""

from collections.abc import Mapping
from typing import Any, NoReturn

from services.common.errors import InvalidArgumentError


class Fields:
    """The fields of one JSON object.

    Args:
        data: the object.
        path: where it stands in the request, for messages; "" at the top.
    """

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            refuse(path or "body", f"must be a JSON object, got {kind_of(data)}")
        self._data: Mapping[str, Any] = data
        self._path = path
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """The full name of a field."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str) -> Any:
        """Any value; None if absent or null, which mean the same."""
        self._read.add(field)
        return self._data.get(field)

    def text(self, field: str) -> str | None:
        value: str | None = self._typed(field, str, "a string")
        return value

    def boolean(self, field: str) -> bool | None:
        value: bool | None = self._typed(field, bool, "true or false")
        return value

    def number(self, field: str) -> float | None:
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(self.name(field), f"must be a number, got {kind_of(value)}")
        try:
            return float(value)
        except OverflowError:
            refuse(self.name(field), "is too large a number")

    def integer(self, field: str, low: int, high: int) -> int | None:
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(self.name(field), f"must be a whole number, got {kind_of(value)}")
        if not low <= value <= high:
            refuse(self.name(field), f"must be in [{low}, {high}], got {kind_of(value)}")
        return int(value)

    def items(self, field: str, limit: int) -> list[Any] | None:
        value: list[Any] | None = self._typed(field, list, "an array")
        if value is not None and len(value) > limit:
            refuse(self.name(field), f"at most {limit} items, got {len(value)}")
        return value

    def nested(self, field: str) -> "Fields | None":
        value = self.take(field)
        return None if value is None else Fields(value, self.name(field))

    def ignore(self, *fields: str) -> None:
        """Accept fields that change nothing in the answer."""
        self._read.update(fields)

    def done(self) -> None:
        """Refuse what nobody asked for: silence would look like consent."""
        for field, value in self._data.items():
            if field not in self._read and value is not None:
                refuse(self.name(field[:128]), "is not supported", reason="UNSUPPORTED_FIELD")

    def _typed(self, field: str, kind: type, said: str) -> Any:
        value = self.take(field)
        if value is not None and not isinstance(value, kind):
            refuse(self.name(field), f"must be {said}, got {kind_of(value)}")
        return value


def refuse(field: str, problem: str, *, reason: str | None = None) -> NoReturn:
    """Raise the error of one field, by OpenAI's name for it."""
    raise InvalidArgumentError.for_field(field, problem, reason=reason)


def kind_of(value: Any) -> str:
    """What a person calls a JSON value's type, with the value if it is short."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, int) and abs(value) > 10**39:
        return "a huge number"  # Python refuses to write out the longest ones
    return repr(value) if len(repr(value)) <= 40 else f"a {type(value).__name__}"
