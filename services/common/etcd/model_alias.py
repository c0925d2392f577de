"""Model aliases: the record in etcd of a public name and the weighted revisions behind it.

`choose` picks the revision for a request. It is a pure function, so all gateways agree.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MODELS_PREFIX = "/inferfleet/models/"
MAX_TARGETS = 16
MAX_WEIGHT = 1_000_000.0
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class AliasError(ValueError):
    """The record cannot be used; the message begins with the field at fault."""


@dataclass(frozen=True, slots=True)
class Target:
    """One revision that serves a name."""

    model: str
    revision: str
    weight: float
    """Its share of new requests is this over the sum of all weights."""

    @property
    def key(self) -> tuple[str, str]:
        """Model and revision."""
        return self.model, self.revision


@dataclass(frozen=True, slots=True)
class AliasRecord:
    """The record that etcd holds under MODELS_PREFIX + alias."""

    targets: tuple[Target, ...]
    version: int = 1
    """Grows by one with each write; etcd's own revisions restart when a store is emptied."""
    previous: tuple[Target, ...] = ()
    """The targets of the version before, for a rollback."""
    author: str = ""
    updated_unix_ms: int = 0
    deleted: bool = False
    """Deleted on purpose; a key that is missing without this was lost and is written again."""

    @property
    def shares(self) -> Mapping[tuple[str, str], float]:
        """Share of new requests, 0 to 1, by model and revision."""
        total = sum(target.weight for target in self.targets) or 1.0
        return {target.key: target.weight / total for target in self.targets}

    def to_json(self) -> bytes:
        """The record as JSON, as it is written to etcd."""
        return json.dumps(asdict(self), sort_keys=True).encode()


def check_alias(alias: str) -> None:
    """Check that a name can be part of a key.

    Raises:
        AliasError: the name has other characters, or is too long.
    """
    if not _ALIAS.fullmatch(alias):
        raise AliasError(
            "alias: must be 1 to 128 letters, digits and . _ : / -, and begin with one of the first"
        )


def parse_record(value: bytes) -> AliasRecord:
    """Parse and check a record.

    Raises:
        AliasError: a field is malformed; the message begins with it.
    """
    try:
        record = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise AliasError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise AliasError("not a JSON object")
    version, deleted = record.get("version", 1), record.get("deleted", False)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AliasError(f"version: {version!r} is not a whole number above 0")
    author, updated = record.get("author", ""), record.get("updated_unix_ms", 0)
    if not isinstance(deleted, bool):
        raise AliasError(f"deleted: {deleted!r} is neither true nor false")
    if not isinstance(author, str) or not isinstance(updated, int):
        raise AliasError("author, updated_unix_ms: must be a text and a number")
    previous = record.get("previous") or []
    return AliasRecord(
        targets=() if deleted else _targets("targets", record.get("targets")),
        version=version,
        previous=_targets("previous", previous) if previous else (),
        author=author,
        updated_unix_ms=updated,
        deleted=deleted,
    )


def check_targets(targets: Sequence[Target], field: str = "targets") -> None:
    """Check that a target can be chosen and that none is listed twice.

    Raises:
        AliasError: a field is malformed; the message begins with it.
    """
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise AliasError(f"{field}: must name 1 to {MAX_TARGETS} revisions, not {len(targets)}")
    seen = set()
    for index, target in enumerate(targets):
        where = f"{field}[{index}]"
        if not target.model or not target.revision:
            raise AliasError(f"{where}.{'revision' if target.model else 'model'}: is empty")
        if not 0 <= target.weight <= MAX_WEIGHT:  # NaN is refused too
            raise AliasError(f"{where}.weight: {target.weight!r} is not in [0, {MAX_WEIGHT:g}]")
        if target.key in seen:
            raise AliasError(f"{where}: {target.model}@{target.revision} is listed twice")
        seen.add(target.key)
    if not sum(target.weight for target in targets) > 0:
        raise AliasError(f"{field}: no weight is above 0")


def choose(
    alias: str, targets: Iterable[Target], key: str, usable: Callable[[Target], bool]
) -> Target | None:
    """The target that a request of this key goes to; None if no usable one has a weight.

    Weighted rendezvous hashing: the shares follow the weights, a key keeps its target while the
    weights stay the same, and when a weight grows, keys only move to that target.
    """
    best: tuple[float, tuple[str, str], Target] | None = None
    for target in targets:
        if target.weight <= 0 or not usable(target):
            continue
        text = "\0".join((alias, key, target.model, target.revision))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        uniform = (int.from_bytes(digest[:6], "big") + 0.5) / 2.0**48
        # Among exponential clocks with the weights as rates, each rings first with its share.
        # Logarithms keep very small and very large weights exact.
        rings_at = math.log(-math.log(uniform)) - math.log(target.weight)
        if best is None or (rings_at, target.key) < best[:2]:
            best = rings_at, target.key, target
    return None if best is None else best[2]


def _targets(field: str, value: Any) -> tuple[Target, ...]:
    if not isinstance(value, list):
        raise AliasError(f"{field}: is not a list")
    targets = []
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise AliasError(f"{field}[{index}]: is not an object")
        model, revision, weight = (entry.get(name) for name in ("model", "revision", "weight"))
        for name, text in (("model", model), ("revision", revision)):
            if not isinstance(text, str):
                raise AliasError(f"{field}[{index}].{name}: {text!r} is not a text")
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise AliasError(f"{field}[{index}].weight: {weight!r} is not a number")
        targets.append(Target(str(model), str(revision), float(weight)))
    check_targets(targets, field)
    return tuple(targets)
