"""Tokenizers and chat templates, fetched from any engine that has them and kept by digest."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from services.common.errors import UnavailableError
from services.common.rpc import Membership
from services.common.text import TextAssets, Tokenizer, template_of
from services.common.text.chat_template import Template
from services.gateway.answers.profile import ChatProfile, detect
from services.gateway.models.catalog import ModelView

log = logging.getLogger(__name__)

KEPT = 8
FETCH_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ModelText:
    """One model's ways with text."""

    tokenizer: Tokenizer
    template: Template
    profile: ChatProfile
    """How it writes calls and reasoning, by its template."""


class TextStore:
    """Fetches each digest once, however many requests wait for it."""

    def __init__(self, membership: Membership, pool: Executor) -> None:
        self._membership = membership
        self._pool = pool
        self._ready: OrderedDict[str, ModelText] = OrderedDict()
        self._fetches: dict[str, asyncio.Task[ModelText]] = {}

    async def get(self, model: ModelView) -> ModelText:
        """The text of a model, at once if its digest is known.

        Raises:
            UnavailableError: no engine gave it.
        """
        digest = model.tokenizer_digest
        ready = self._ready.get(digest)
        if ready is not None:
            self._ready.move_to_end(digest)
            return ready
        # Shielded: a client that leaves must not take the others' tokenizer along.
        return await asyncio.shield(self._fetching(model))

    def prefetch(self, models: Sequence[ModelView]) -> None:
        """Begin to fetch the texts of these models; one that fails is left for a request."""
        for model in models:
            if model.tokenizer_digest not in self._ready:
                self._fetching(model)

    async def close(self) -> None:
        """End fetches that still run."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    def _fetching(self, model: ModelView) -> asyncio.Task[ModelText]:
        digest = model.tokenizer_digest
        fetch = self._fetches.get(digest)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(digest, model.engines))
            self._fetches[digest] = fetch
            fetch.add_done_callback(lambda done: self._landed(digest, done))
        return fetch

    def _landed(self, digest: str, fetch: asyncio.Task[ModelText]) -> None:
        self._fetches.pop(digest, None)
        if fetch.cancelled() or fetch.exception() is not None:
            return
        self._ready[digest] = fetch.result()
        while len(self._ready) > KEPT:
            self._ready.popitem(last=False)

    async def _fetch(self, digest: str, engines: Sequence[engine_pb2.EngineInfo]) -> ModelText:
        problem = "no engine to ask"
        for engine in engines:
            try:
                assets = await self._ask(engine.address, digest)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool, _build, assets)
            except grpc.aio.AioRpcError as error:
                problem = f"engine {engine.engine_id}: {error.code().name}: {error.details()}"
            except ValueError as error:
                problem = f"engine {engine.engine_id}: {error}"
            log.warning("cannot fetch tokenizer %s: %s", digest, problem)
        raise UnavailableError(
            f"the model's tokenizer cannot be fetched: {problem}",
            reason="TOKENIZER_UNAVAILABLE",
            retry_after_s=1,
        )

    async def _ask(self, address: str, digest: str) -> TextAssets:
        async with self._membership.channel(address) as channel:
            stub: Any = engine_pb2_grpc.EngineStub(channel)
            chunks = stub.GetTokenizer(
                engine_pb2.GetTokenizerRequest(digest=digest),
                metadata=self._membership.metadata,
                timeout=FETCH_TIMEOUT_S,
            )
            assets = await TextAssets.from_chunks(chunks)
        if assets.digest != digest:
            raise ValueError(f"sent {assets.digest} for {digest}")
        return assets


def _build(assets: TextAssets) -> ModelText:
    tokenizer, template = Tokenizer(assets), template_of(assets)
    profile = detect(template.source, uses_tools=template.uses_tools, tokenizer=tokenizer)
    text = ModelText(tokenizer, template, profile)
    if text.template.problem and assets.chat_template:
        log.warning("%s: %s", assets.digest, text.template.problem)
    return text
