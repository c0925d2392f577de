"""Tokenizers and chat templates, fetched from an engine that has them and cached by digest."""

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
from services.common.tasks import cancel_and_wait
from services.common.text import ChatTemplate, TextAssets, Tokenizer, template_of
from services.common.text.chat_template import Template
from services.gateway.answers.profile import ChatProfile, detect
from services.gateway.models.catalog import ModelView

log = logging.getLogger(__name__)

MAX_CACHED = 8
FETCH_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ModelText:
    """The tokenizer, chat template and answer syntax of a model."""

    tokenizer: Tokenizer
    template: Template
    profile: ChatProfile
    """How the model writes calls and reasoning, by its template."""


class TextStore:
    """Fetches each digest once, for all requests that wait for it.

    Args:
        pool: threads that build tokenizers.
    """

    def __init__(self, membership: Membership, pool: Executor) -> None:
        self._membership = membership
        self._pool = pool
        self._ready: OrderedDict[str, ModelText] = OrderedDict()
        self._fetches: dict[str, asyncio.Task[ModelText]] = {}

    async def get(self, model: ModelView) -> ModelText:
        """The text of a model, at once if its digest is cached.

        Raises:
            UnavailableError: no engine could send it.
        """
        digest = model.tokenizer_digest
        ready = self._ready.get(digest)
        if ready is not None:
            self._ready.move_to_end(digest)
            return ready
        # Shielded: a client that disconnects must not cancel the fetch for the others.
        return await asyncio.shield(self._fetch_task(model))

    def prefetch(self, models: Sequence[ModelView]) -> None:
        """Fetch the texts of these models in the background; a request repeats a failed fetch."""
        for model in models:
            if model.tokenizer_digest not in self._ready:
                self._fetch_task(model)

    async def close(self) -> None:
        """Cancel running fetches."""
        await cancel_and_wait(*self._fetches.values())

    def _fetch_task(self, model: ModelView) -> asyncio.Task[ModelText]:
        digest = model.tokenizer_digest
        fetch = self._fetches.get(digest)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(digest, model.engines))
            self._fetches[digest] = fetch
            fetch.add_done_callback(lambda done: self._store(digest, done))
        return fetch

    def _store(self, digest: str, fetch: asyncio.Task[ModelText]) -> None:
        self._fetches.pop(digest, None)
        if fetch.cancelled() or fetch.exception() is not None:
            return
        self._ready[digest] = fetch.result()
        while len(self._ready) > MAX_CACHED:
            self._ready.popitem(last=False)

    async def _fetch(self, digest: str, engines: Sequence[engine_pb2.EngineInfo]) -> ModelText:
        problem = "no engine serves the model"
        for engine in engines:
            try:
                assets = await self._request_assets(engine.address, digest)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool, _build, assets)
            except grpc.aio.AioRpcError as error:
                problem = f"engine {engine.engine_id}: {error.code().name}: {error.details()}"
            except ValueError as error:
                problem = f"engine {engine.engine_id}: {error}"
            log.warning("cannot fetch tokenizer %s: %s", digest, problem)
        raise UnavailableError(
            f"cannot fetch the model's tokenizer: {problem}",
            reason="TOKENIZER_UNAVAILABLE",
            retry_after_s=1,
        )

    async def _request_assets(self, address: str, digest: str) -> TextAssets:
        async with self._membership.channel(address) as channel:
            peer = self._membership.peer(channel, address, registered=True)
            stub: Any = engine_pb2_grpc.EngineStub(channel)
            chunks = stub.GetTokenizer(
                engine_pb2.GetTokenizerRequest(digest=digest),
                metadata=await peer.metadata(),
                timeout=FETCH_TIMEOUT_S,
            )
            assets = await TextAssets.from_chunks(chunks)
        if assets.digest != digest:
            raise ValueError(f"sent tokenizer {assets.digest} instead of {digest}")
        return assets


def _build(assets: TextAssets) -> ModelText:
    tokenizer, template = Tokenizer(assets), template_of(assets)
    profile = detect(template.source, uses_tools=template.uses_tools, tokenizer=tokenizer)
    text = ModelText(tokenizer, template, profile)
    if isinstance(template, ChatTemplate):
        template.prepare(tokenizer.control)
    try:
        tokenizer.prepare()
    except ValueError as error:  # requests whose text needs it are refused
        log.warning("%s: %s", assets.digest, error)
    if text.template.problem and assets.chat_template:
        log.warning("%s: %s", assets.digest, text.template.problem)
    return text
