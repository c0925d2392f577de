"""The models that can be asked for, as the engine registry tells; engines and balancers watched."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf import json_format

from inferfleet.internal.v1 import engine_pb2
from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError

log = logging.getLogger(__name__)

ENGINES_PREFIX = "/inferfleet/engines/"
BALANCERS_PREFIX = "/inferfleet/balancers/"
# etcd that was paused deletes all leases when it resumes; engines need a moment to come back.
GONE_GRACE_S = 30.0


class View(Protocol):
    """A watched part of the registry (services.common.registry.RegistryView is one)."""

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


class Catalog:
    """Follows the engines' keys; answers by name from memory."""

    def __init__(
        self,
        view: View,
        aliases: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._aliases = dict(pair.split("=", 1) for pair in aliases)
        self._clock = clock
        self._seen: dict[str, tuple[engine_pb2.EngineInfo, float]] = {}
        self._models: dict[str, ModelView] = {}

    @property
    def models(self) -> tuple[ModelView, ...]:
        """All models, by name."""
        return tuple(self._models[name] for name in sorted(self._models))

    def find(self, name: str) -> ModelView:
        """The model of a name or alias.

        Raises:
            InvalidArgumentError: the name is empty.
            NotFoundError: no engine serves it.
            UnavailableError: the registry has not been read yet.
        """
        if not name:
            raise InvalidArgumentError.for_field("model", "must not be empty")
        model = self._models.get(self._aliases.get(name, name))
        if model is not None:
            return model
        if not self._models and not self._view.connected:
            raise UnavailableError("the engine registry cannot be reached yet", retry_after_s=1)
        raise NotFoundError(f"model {name[:128]!r} is not served here", reason="MODEL_NOT_FOUND")

    def refresh(self) -> None:
        """Take the view's snapshot; engines that vanished stay for GONE_GRACE_S."""
        now = self._clock()
        for key, value in self._view.snapshot().items():
            info = engine_of(key, value)
            if info is not None:
                self._seen[key] = (info, now + GONE_GRACE_S)
        self._seen = {key: pair for key, pair in self._seen.items() if pair[1] > now}
        self._models = models_of(info for info, _ in self._seen.values())

    async def follow(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Keep up with the view for ever; `on_change` runs after each refresh."""
        version = 0
        while True:
            self.refresh()
            await on_change()
            try:
                async with asyncio.timeout(GONE_GRACE_S / 4):
                    version = await self._view.wait_change(version)
            except TimeoutError:
                continue  # nothing came, but an engine's grace may be over


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
    return ModelView(
        name=name,
        revision=revision,
        max_model_len=min(e.max_model_len for e in chosen),
        vocab_size=min(e.vocab_size for e in chosen),
        tokenizer_digest=digest,
        eos_token_ids=frozenset(chosen[0].eos_token_ids),
        engines=tuple(sorted(chosen, key=lambda e: e.engine_id)),
        created_unix_s=min(e.epoch_ms for e in chosen) // 1000,
    )
