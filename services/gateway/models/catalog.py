"""The models that can be asked for, as the engine registry tells; engines and balancers watched.

A name is an alias record of etcd (revisions with weights), else a model, else an alias of the
configuration, else model@revision.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from services.common.etcd.model_alias import Target, choose
from services.gateway.models.alias_table import AliasTable

log = logging.getLogger(__name__)

ENGINES_PREFIX = "/inferfleet/engines/"
BALANCERS_PREFIX = "/inferfleet/balancers/"
# etcd that was paused deletes all leases when it resumes; engines need a moment to come back.
GONE_GRACE_S = 30.0


class View(Protocol):
    """A watched part of the registry (services.common.etcd.registry.RegistryView is one)."""

    @property
    def connected(self) -> bool:
        """Whether the last answer of the registry is current."""

    def snapshot(self) -> Mapping[str, bytes]:
        """Key to value, as last known."""

    async def wait_change(self, version: int) -> int:
        """Return the newer version once there is one."""


@dataclass(frozen=True)
class ModelView:
    """One model as its live engines describe it."""

    name: str
    revision: str
    max_model_len: int
    """The smallest among its engines."""
    vocab_size: int
    tokenizer_digest: str
    eos_token_ids: frozenset[int]
    engines: tuple[engine_pb2.EngineInfo, ...]
    created_unix_s: int
    pinned: str = ""
    """The only revision that may serve a request found by this view; "": any of the model."""

    @property
    def serving(self) -> int:
        """Its engines that take new work."""
        return sum(not engine.draining for engine in self.engines)


@dataclass(frozen=True)
class Listed:
    """One name that can be asked for, with the revisions behind it."""

    name: str
    view: ModelView
    """Of the revision with the largest share."""
    revisions: tuple[ModelView, ...]
    shares: Mapping[tuple[str, str], float]
    """Of new requests, by model and revision; empty where load decides."""


class Catalog:
    """Follows the engines' keys; answers by name from memory.

    Args:
        aliases: alias=model, from the configuration.
        records: the alias records in etcd, if there is one.
    """

    def __init__(
        self,
        view: View,
        aliases: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        records: View | None = None,
    ) -> None:
        self._view = view
        self._aliases = dict(pair.split("=", 1) for pair in aliases)
        self._clock = clock
        self.table = AliasTable(records)
        self._seen: dict[str, tuple[engine_pb2.EngineInfo, float]] = {}
        self._models: dict[str, ModelView] = {}
        self._revisions: dict[tuple[str, str], ModelView] = {}

    @property
    def models(self) -> tuple[ModelView, ...]:
        """All models, by name."""
        return tuple(self._models[name] for name in sorted(self._models))

    @property
    def revisions(self) -> tuple[ModelView, ...]:
        """All revisions of all models, by name and revision."""
        return tuple(self._revisions[key] for key in sorted(self._revisions))

    @property
    def listed(self) -> tuple[Listed, ...]:
        """Every name that `find` knows by itself: models and the aliases in etcd."""
        names: dict[str, Listed] = {}
        for name, view in self._models.items():
            behind = tuple(v for v in self.revisions if v.name == name)
            names[name] = Listed(name, view, behind, {})
        for name, record in self.table.records.items():
            shares = record.shares
            behind = tuple(v for key in shares if (v := self._revisions.get(key)) is not None)
            if behind:
                first = max(behind, key=lambda v: shares[v.name, v.revision])
                names[name] = Listed(name, first, behind, shares)
        return tuple(names[name] for name in sorted(names))

    def find(self, name: str, key: str = "", avoid: Collection[tuple[str, str]] = ()) -> ModelView:
        """The model of a name or alias.

        Args:
            key: what should stay with one revision: a session, or else a request.
            avoid: model and revision of targets that have just failed to serve this request.

        Raises:
            InvalidArgumentError: the name is empty.
            NotFoundError: no engine serves it.
            UnavailableError: the registry has not been read yet, or an alias has no engine left.
        """
        if not name:
            raise InvalidArgumentError.for_field("model", "must not be empty")
        record = self.table.records.get(name)
        if record is not None:
            return self._of_alias(name, record.targets, key, avoid)
        model = self._models.get(self._aliases.get(name, name)) or self._of_revision(name)
        if model is not None:
            return model
        if not self._models and not self._view.connected:
            raise UnavailableError("the engine registry cannot be reached yet", retry_after_s=1)
        raise NotFoundError(f"model {name[:128]!r} is not served here", reason="MODEL_NOT_FOUND")

    def _of_alias(
        self,
        alias: str,
        targets: Sequence[Target],
        key: str,
        avoid: Collection[tuple[str, str]],
    ) -> ModelView:
        def served(target: Target) -> bool:
            return target.key not in avoid and target.key in self._revisions

        def serving(target: Target) -> bool:
            return served(target) and self._revisions[target.key].serving > 0

        target = choose(alias, targets, key, serving) or choose(alias, targets, key, served)
        if target is None:
            raise UnavailableError(
                f"no engine serves a revision of model {alias[:128]!r} now",
                reason="NO_ENGINE",
                metadata={"model": alias[:128]},
                retry_after_s=1,
            )
        return replace(self._revisions[target.key], pinned=target.revision)

    def _of_revision(self, name: str) -> ModelView | None:
        model, _, revision = name.rpartition("@")
        view = self._revisions.get((model, revision))
        return None if view is None else replace(view, pinned=revision)

    def refresh(self) -> None:
        """Take the view's snapshot; engines that vanished stay for GONE_GRACE_S."""
        now = self._clock()
        self.table.refresh()
        for key, value in self._view.snapshot().items():
            info = engine_of(key, value)
            if info is not None:
                self._seen[key] = (info, now + GONE_GRACE_S)
        self._seen = {key: pair for key, pair in self._seen.items() if pair[1] > now}
        infos = [info for info, _ in self._seen.values()]
        self._models = models_of(infos)
        self._revisions = revisions_of(infos)

    async def follow(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Keep up with engines and alias records for ever; `on_change` runs after each refresh."""
        views = [view for view in (self._view, self.table.view) if view is not None]
        news = asyncio.Event()
        watches = [asyncio.create_task(_tell(view, news)) for view in views]
        try:
            while True:
                news.clear()
                self.refresh()
                await on_change()
                with contextlib.suppress(TimeoutError):  # an engine's grace may be over
                    async with asyncio.timeout(GONE_GRACE_S / 4):
                        await news.wait()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)


async def _tell(view: View, news: asyncio.Event) -> None:
    version = 0
    while True:
        version = await view.wait_change(version)
        news.set()


def engine_of(key: str, value: bytes) -> engine_pb2.EngineInfo | None:
    """What an engine wrote about itself, or None if it cannot be used."""
    try:
        info = json_format.Parse(value, engine_pb2.EngineInfo(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("registry: %s is unreadable: %s", key, error)
        return None
    if not info.address or not info.model:
        log.warning("registry: %s has no address or no model", key)
        return None
    return info


def models_of(engines: Iterable[engine_pb2.EngineInfo]) -> dict[str, ModelView]:
    """Engines grouped by the model they serve."""
    grouped: dict[str, list[engine_pb2.EngineInfo]] = {}
    for info in engines:
        grouped.setdefault(info.model, []).append(info)
    return {name: _view_of(name, group) for name, group in grouped.items()}


def revisions_of(
    engines: Iterable[engine_pb2.EngineInfo],
) -> dict[tuple[str, str], ModelView]:
    """Engines grouped by model and revision."""
    grouped: dict[tuple[str, str], list[engine_pb2.EngineInfo]] = {}
    for info in engines:
        grouped.setdefault((info.model, info.model_revision), []).append(info)
    return {key: _view_of(key[0], group) for key, group in grouped.items()}


def addresses_of(view: View) -> tuple[str, ...]:
    """The addresses of balancers, in a stable order."""
    found = set()
    for key, value in view.snapshot().items():
        try:
            address = json.loads(value)["address"]
        except (ValueError, KeyError, TypeError):
            log.warning("registry: %s is unreadable", key)
            continue
        if isinstance(address, str) and address:
            found.add(address)
    return tuple(sorted(found))


def _view_of(name: str, group: list[engine_pb2.EngineInfo]) -> ModelView:
    # While two revisions of a model run side by side, the more common one speaks for it.
    revisions = Counter((e.tokenizer_digest, e.model_revision) for e in group)
    (digest, revision), _ = max(revisions.items(), key=lambda item: (item[1], item[0]))
    chosen = [e for e in group if e.tokenizer_digest == digest]
    foreign = len(chosen) < len(group)
    return ModelView(
        name=name,
        revision=revision,
        max_model_len=min(e.max_model_len for e in chosen),
        vocab_size=min(e.vocab_size for e in chosen),
        tokenizer_digest=digest,
        eos_token_ids=frozenset(chosen[0].eos_token_ids),
        engines=tuple(sorted(chosen, key=lambda e: e.engine_id)),
        created_unix_s=min(e.epoch_ms for e in chosen) // 1000,
        # What was tokenised for one tokenizer must not go to an engine with another.
        pinned=revision if foreign else "",
    )
