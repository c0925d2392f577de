"""The models that requests can name, from the engine registry.

A name is resolved as an alias record of etcd (revisions with weights), else as a model, else as an
alias of the configuration, else as model@revision.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from services.common.etcd.model_alias import Target, choose
from services.common.etcd.registry import RegistryRecords
from services.common.tasks import cancel_and_wait
from services.gateway.models.alias_table import AliasTable

log = logging.getLogger(__name__)

# An etcd that was paused deletes all leases when it continues; engines then register again.
GONE_GRACE_S = 30.0


@dataclass(frozen=True)
class ModelView:
    """One model, or one revision of it, as its live engines describe it."""

    name: str
    revision: str
    max_model_len: int
    """Tokens; the smallest context among the engines."""
    vocab_size: int
    tokenizer_digest: str
    eos_token_ids: frozenset[int]
    engines: tuple[engine_pb2.EngineInfo, ...]
    created_unix_s: int
    pinned: str | None = None
    """The only revision that may serve the request; None: any revision of the model."""

    @property
    def serving(self) -> int:
        """Number of engines that accept new requests."""
        return sum(not engine.draining for engine in self.engines)


@dataclass(frozen=True)
class ListedModel:
    """One name that requests can use, with the revisions behind it."""

    name: str
    view: ModelView
    """The model, or the revision with the largest share."""
    revisions: tuple[ModelView, ...]
    shares: Mapping[tuple[str, str], float]
    """Shares of new requests by model and revision; empty if load decides."""


class Catalog:
    """Follows the engine registry and resolves names from memory.

    Args:
        view: the engines' records.
        aliases: alias=model, from the configuration.
        clock: seconds.
        records: the alias records in etcd; None without etcd.
    """

    def __init__(
        self,
        view: RegistryRecords,
        aliases: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        records: RegistryRecords | None = None,
    ) -> None:
        self._view = view
        self._aliases = dict(pair.split("=", 1) for pair in aliases)
        self._clock = clock
        self.table = AliasTable(records)
        self._seen: dict[str, tuple[engine_pb2.EngineInfo, float]] = {}
        self._models: dict[str, ModelView] = {}
        self._revisions: dict[tuple[str, str], ModelView] = {}
        self._has_live_engine = False

    @property
    def has_live_engine(self) -> bool:
        """Whether an engine that accepts requests is registered now, without GONE_GRACE_S."""
        return self._has_live_engine

    @property
    def models(self) -> tuple[ModelView, ...]:
        """All models, sorted by name."""
        return tuple(self._models[name] for name in sorted(self._models))

    @property
    def revisions(self) -> tuple[ModelView, ...]:
        """All revisions of all models, sorted by name and revision."""
        return tuple(self._revisions[key] for key in sorted(self._revisions))

    @property
    def listed(self) -> tuple[ListedModel, ...]:
        """The names for ListModels: models and the aliases in etcd."""
        names: dict[str, ListedModel] = {}
        for name, view in self._models.items():
            revisions = tuple(v for v in self.revisions if v.name == name)
            names[name] = ListedModel(name, view, revisions, {})
        for name, record in self.table.records.items():
            shares = record.shares
            views = (self._revisions.get(key) for key in shares)
            revisions = tuple(view for view in views if view is not None)
            if revisions:
                first = max(revisions, key=lambda v: shares[v.name, v.revision])
                names[name] = ListedModel(name, first, revisions, shares)
        return tuple(names[name] for name in sorted(names))

    def find(self, name: str, key: str = "", avoid: Collection[tuple[str, str]] = ()) -> ModelView:
        """Resolve a name.

        Args:
            key: of the session, or else of the request; one key keeps its revision.
            avoid: model and revision of targets that have just refused this request.

        Raises:
            InvalidArgumentError: the name is empty.
            NotFoundError: no engine serves the name.
            UnavailableError: the registry has not been read yet, or no engine of an alias is left.
        """
        if not name:
            raise InvalidArgumentError.for_field("model", "must not be empty")
        record = self.table.records.get(name)
        if record is not None:
            return self._find_target(name, record.targets, key, avoid)
        model = self._models.get(self._aliases.get(name, name)) or self._find_revision(name)
        if model is not None:
            return model
        if not self._models and not self._view.connected:
            raise UnavailableError(
                "the engine registry cannot be reached yet; try again", retry_after_s=1
            )
        raise NotFoundError(
            f"model {name[:128]!r} is not served by this fleet", reason="MODEL_NOT_FOUND"
        )

    def _find_target(
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
                f"no engine serves any revision of model {alias[:128]!r} now; try again",
                reason="NO_ENGINE",
                metadata={"model": alias[:128]},
                retry_after_s=1,
            )
        return replace(self._revisions[target.key], pinned=target.revision)

    def _find_revision(self, name: str) -> ModelView | None:
        model, _, revision = name.rpartition("@")
        view = self._revisions.get((model, revision))
        return None if view is None else replace(view, pinned=revision)

    def refresh(self) -> None:
        """Read the view's snapshot; engines that have disappeared stay for GONE_GRACE_S."""
        now = self._clock()
        self.table.refresh()
        self._has_live_engine = False
        for key, value in self._view.snapshot().items():
            info = parse_engine(key, value)
            if info is not None:
                self._seen[key] = (info, now + GONE_GRACE_S)
                self._has_live_engine |= not info.draining
        self._seen = {key: pair for key, pair in self._seen.items() if pair[1] > now}
        infos = [info for info, _ in self._seen.values()]
        self._models = models_of(infos)
        self._revisions = revisions_of(infos)

    async def follow(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Refresh at each change of engines or aliases, forever.

        Args:
            on_change: awaited after each refresh.
        """
        views = [view for view in (self._view, self.table.view) if view is not None]
        changed = asyncio.Event()
        watches = [asyncio.create_task(_signal_changes(view, changed)) for view in views]
        try:
            while True:
                changed.clear()
                self.refresh()
                await on_change()
                with contextlib.suppress(TimeoutError):  # the grace of an engine may have ended
                    async with asyncio.timeout(GONE_GRACE_S / 4):
                        await changed.wait()
        finally:
            await cancel_and_wait(*watches)


async def _signal_changes(view: RegistryRecords, changed: asyncio.Event) -> None:
    version = 0
    while True:
        version = await view.wait_change(version)
        changed.set()


def parse_engine(key: str, value: bytes) -> engine_pb2.EngineInfo | None:
    """Parse an engine's record; None, with a warning, if it cannot be used."""
    try:
        info = json_format.Parse(value, engine_pb2.EngineInfo(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("ignoring %s in the registry: %s", key, error)
        return None
    if not info.address or not info.model:
        log.warning("ignoring %s in the registry: no address or no model", key)
        return None
    return info


def models_of(engines: Iterable[engine_pb2.EngineInfo]) -> dict[str, ModelView]:
    """Group engines by model."""
    grouped: dict[str, list[engine_pb2.EngineInfo]] = {}
    for info in engines:
        grouped.setdefault(info.model, []).append(info)
    return {name: _view_of(name, group) for name, group in grouped.items()}


def revisions_of(
    engines: Iterable[engine_pb2.EngineInfo],
) -> dict[tuple[str, str], ModelView]:
    """Group engines by model and revision."""
    grouped: dict[tuple[str, str], list[engine_pb2.EngineInfo]] = {}
    for info in engines:
        grouped.setdefault((info.model, info.model_revision), []).append(info)
    return {key: _view_of(key[0], group) for key, group in grouped.items()}


def addresses_of(view: RegistryRecords) -> tuple[str, ...]:
    """The addresses in the balancers' records, sorted."""
    found = set()
    for key, value in view.snapshot().items():
        try:
            address = json.loads(value)["address"]
        except (ValueError, KeyError, TypeError):
            log.warning("ignoring %s in the registry: not a balancer's record", key)
            continue
        if isinstance(address, str) and address:
            found.add(address)
    return tuple(sorted(found))


def _view_of(name: str, group: list[engine_pb2.EngineInfo]) -> ModelView:
    # If two revisions of a model run side by side, the more common one describes it.
    revisions = Counter((e.tokenizer_digest, e.model_revision) for e in group)
    (digest, revision), _ = max(revisions.items(), key=lambda item: (item[1], item[0]))
    chosen = [e for e in group if e.tokenizer_digest == digest]
    mixed = len(chosen) < len(group)
    return ModelView(
        name=name,
        revision=revision,
        max_model_len=min(e.max_model_len for e in chosen),
        vocab_size=min(e.vocab_size for e in chosen),
        tokenizer_digest=digest,
        eos_token_ids=frozenset(chosen[0].eos_token_ids),
        engines=tuple(sorted(chosen, key=lambda e: e.engine_id)),
        created_unix_s=min(e.epoch_ms for e in chosen) // 1000,
        # Token ids of one tokenizer must not reach an engine with another one.
        pinned=revision if mixed else None,
    )
