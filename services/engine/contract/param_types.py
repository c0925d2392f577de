"""Which Python types the fields of `SamplingParams` take, and the one form each is kept in.

Numbers of NumPy count as numbers; bools never do. A text where texts are listed is one of them.
"""

from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from services.common.errors import InvalidArgumentError


def flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        InvalidArgumentError: it is neither; so do the others here.
    """
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
    """A whole number of an integer type."""
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise _wrong(name, "an integer", value)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Integers, from anything that lists them."""
    ids = _listed(name, "a list of token ids", value)
    if set(map(type, ids)) <= {int}:
        return ids  # type: ignore[return-value]
    return tuple(integer(f"{name}[{index}]", each) for index, each in enumerate(ids))


def texts(name: str, value: object) -> tuple[str, ...]:
    """Texts; a single one counts as a list of it."""
    listed = (value,) if isinstance(value, str) else _listed(name, "a list of texts", value)
    for index, each in enumerate(listed):
        if not isinstance(each, str):
            raise _wrong(f"{name}[{index}]", "a text", each)
    return listed  # type: ignore[return-value]


def biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, sorted by id; from a mapping too."""
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
