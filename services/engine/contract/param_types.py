"""Checks the Python types of `SamplingParams`' fields and converts each to one form.

NumPy numbers are accepted as numbers; bools are not. A single string counts as a list of one. Each
function takes the field's path in the proto and raises InvalidArgumentError, naming it.
"""

from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from services.common.errors import InvalidArgumentError


def flag(name: str, value: object) -> bool:
    """True or False."""
    if value is True or value is False:
        return value
    raise _wrong(name, "True or False", value)


def number(name: str, value: object) -> float:
    """An int or a float."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise _wrong(name, "a number", value)


def integer(name: str, value: object) -> int:
    """A number of an integer type."""
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise _wrong(name, "an integer", value)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Integers, from any iterable."""
    ids = _listed(name, "a list of token ids", value)
    if set(map(type, ids)) <= {int}:
        return ids  # type: ignore[return-value]
    return tuple(integer(f"{name}[{index}]", each) for index, each in enumerate(ids))


def texts(name: str, value: object) -> tuple[str, ...]:
    """Strings; a single one becomes a list."""
    listed = (value,) if isinstance(value, str) else _listed(name, "a list of strings", value)
    for index, each in enumerate(listed):
        if not isinstance(each, str):
            raise _wrong(f"{name}[{index}]", "a string", each)
    return listed  # type: ignore[return-value]


def biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, sorted by id; from pairs or a mapping."""
    if isinstance(value, Mapping):
        value = value.items()
    pairs = []
    for index, pair in enumerate(_listed(name, "a mapping of token ids to biases", value)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _wrong(f"{name}[{index}]", "a pair of token id and bias", pair)
        token_id = integer(f"{name}[{index}]", pair[0])
        pairs.append((token_id, number(f"{name}[{token_id}]", pair[1])))
    return tuple(sorted(pairs))


def _listed(name: str, wanted: str, value: object) -> tuple[object, ...]:
    if type(value) is tuple:
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(name, wanted, value)
    return tuple(value)


def _wrong(name: str, wanted: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError.for_field(
        name, f"must be {wanted}, got {type(value).__name__} {str(value)[:40]!r}"
    )
