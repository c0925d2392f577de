"""Reads and writes the alias records in etcd, and lists the engines that serve their targets."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from inferfleet_cli.errors import CONFLICT, NOTHING_THERE, CliError
from inferfleet_proto.internal.v1 import engine_pb2
from services.common.etcd.client import Etcd
from services.common.etcd.model_alias import (
    MODELS_PREFIX,
    AliasError,
    AliasRecord,
    Target,
    check_alias,
    check_targets,
    parse_record,
)
from services.common.etcd.registry import BALANCERS_PREFIX, ENGINES_PREFIX

TargetsOf = Callable[[AliasRecord | None], Sequence[Target]]
"""A name's new targets, from its present record (None: it has none); no targets delete it."""


@dataclass(frozen=True)
class Alias:
    """A name and its record in etcd; `record` is None if it cannot be parsed."""

    name: str
    record: AliasRecord | None
    problem: str
    mod_revision: int


@dataclass(frozen=True)
class Listing:
    """The names, engines and balancers that etcd holds at one moment."""

    aliases: dict[str, Alias]
    engines: tuple[engine_pb2.EngineInfo, ...]
    admins: tuple[str, ...]
    """host:port of the balancers' Fleet services."""

    @property
    def named(self) -> set[str]:
        """The names whose requests are distributed by a record."""
        return {
            name
            for name, alias in self.aliases.items()
            if alias.record is None or not alias.record.deleted
        }

    @property
    def revisions(self) -> dict[tuple[str, str], list[engine_pb2.EngineInfo]]:
        """The engines by (model, revision)."""
        found: dict[tuple[str, str], list[engine_pb2.EngineInfo]] = {}
        for info in self.engines:
            found.setdefault((info.model, info.model_revision), []).append(info)
        return dict(sorted(found.items()))


async def read_listing(etcd: Etcd) -> Listing:
    """Read all names, engines and balancers."""
    aliases = {}
    for key, kv in (await etcd.get_prefix(MODELS_PREFIX)).items.items():
        name, record, problem = key[len(MODELS_PREFIX) :], None, ""
        try:
            record = parse_record(kv.value)
        except AliasError as error:
            problem = str(error)
        aliases[name] = Alias(name, record, problem, kv.mod_revision)
    listing = await etcd.get_prefix(ENGINES_PREFIX)
    engines = [info for kv in listing.items.values() if (info := _engine(kv.value)) is not None]
    balancers = (await etcd.get_prefix(BALANCERS_PREFIX)).items.values()
    admins = [admin for kv in balancers if (admin := _admin_address(kv.value)) is not None]
    return Listing(aliases, tuple(engines), tuple(admins))


def target_of(listing: Listing, text: str, weight: float = 1.0) -> Target:
    """Parse MODEL@REVISION and complete the revision, of which a unique beginning is enough.

    Raises:
        CliError: no engine serves the revision, or several revisions match.
    """
    model, at, revision = text.rpartition("@")
    if not at or not model or not revision:
        raise CliError(f"{text!r} is not MODEL@REVISION; `inferfleet models list` shows all", 2)
    served = [r for m, r in listing.revisions if m == model]
    if revision in served:
        return Target(model, revision, weight)
    matching = [r for r in served if r.startswith(revision)]
    if len(matching) == 1:
        return Target(model, matching[0], weight)
    listed = ", ".join(f"{model}@{r}" for r in matching or served) or "none"
    if matching:
        raise CliError(f"{text}: several revisions match: {listed}", 2)
    raise CliError(
        f"{text}: no engine serves it; served revisions of the model: {listed}", NOTHING_THERE
    )


async def change_record(
    etcd: Etcd,
    name: str,
    targets_of: TargetsOf,
    *,
    author: str,
    if_version: int | None,
) -> AliasRecord:
    """Write a name's next record by compare-and-swap.

    Args:
        targets_of: computes the new targets.
        author: written into the record.
        if_version: the version that the present record must have; None means any.

    Raises:
        CliError: the record would be invalid, or it was changed meanwhile.
    """
    listing = await read_listing(etcd)
    alias = listing.aliases.get(name)
    last = None if alias is None else alias.record
    version = 0 if last is None else last.version
    old = None if last is None or last.deleted else last
    if if_version is not None and if_version != version:
        raise CliError(f"{name} is at version {version}, not {if_version}", CONFLICT)
    targets = tuple(targets_of(old))
    try:
        check_alias(name)
        if targets:
            check_targets(targets)
    except AliasError as error:
        raise CliError(str(error), 2) from error
    record = AliasRecord(
        targets=targets,
        version=version + 1,
        previous=() if old is None else old.targets,
        author=author,
        updated_unix_ms=int(time.time() * 1000),
        deleted=not targets,
    )
    mod_revision = 0 if alias is None else alias.mod_revision
    key = MODELS_PREFIX + name
    if await etcd.compare_and_put(key, record.to_json(), mod_revision=mod_revision) is None:
        raise CliError(
            f"{name} was changed meanwhile: check `inferfleet models list`, and try again", CONFLICT
        )
    return record


def _admin_address(value: bytes) -> str | None:
    """The address of a balancer's Fleet service; None if its record cannot be parsed."""
    try:
        record: Any = json.loads(value)
        return str(record["admin_address"])
    except (ValueError, KeyError, TypeError):
        return None


def _engine(value: bytes) -> engine_pb2.EngineInfo | None:
    try:
        return json_format.Parse(value, engine_pb2.EngineInfo(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError):
        return None
