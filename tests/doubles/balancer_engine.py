"""A fake engine, prefix index and registry: real sockets, and every way to misbehave.

`python -m tests.doubles.balancer_engine --engine-id x` runs a fake engine in a process of its own,
to be killed and stopped.
"""

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf import json_format

from inferfleet_proto.internal.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    prefix_index_pb2,
    prefix_index_pb2_grpc,
)
from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.etcd.registry import ENGINES_PREFIX
from services.common.rpc.carrier import RunMany

MODEL = "tiny"


def token_of(seed: int, choice: int, position: int) -> int:
    """The token an undisturbed run gives at a place."""
    digest = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 1000


def stream_of(
    request: engine_pb2.EngineRequest, info: engine_pb2.EngineInfo
) -> Iterator[inference_pb2.GenerateResponse]:
    """What a deterministic engine streams, continuations included."""
    inner = request.request
    prompt_tokens, max_tokens = len(inner.token_ids.ids), inner.stop.max_tokens or 4
    known = {choice.index: choice for choice in request.continuation.choices}
    num_choices = max(inner.sampling.n, 1)
    yield inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=inner.request_id,
            model=inner.model,
            prompt_tokens=prompt_tokens,
            seed=inner.sampling.seed,
            engine_id=info.engine_id,
        )
    )
    for choice in range(num_choices):
        so_far = known.get(choice, engine_pb2.ContinuedChoice())
        if so_far.finished:
            continue
        yield from _choice(choice, so_far, inner.sampling.seed, max_tokens)
    usage = inference_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=1)
    if not known:
        usage.completion_tokens = max_tokens * num_choices
    yield inference_pb2.GenerateResponse(
        summary=inference_pb2.Summary(usage=usage, exact=True, engine_id=info.engine_id)
    )


def _choice(
    choice: int, so_far: engine_pb2.ContinuedChoice, seed: int, max_tokens: int
) -> Iterator[inference_pb2.GenerateResponse]:
    said, skip = "", so_far.sent_text_bytes
    for position in range(max_tokens):
        token = token_of(seed, choice, position)
        text = f"{token} " + ("the end." if position == max_tokens - 1 else "")
        fresh = text[max(skip - len(said), 0) :]
        said += text
        if position >= len(so_far.token_ids):
            yield inference_pb2.GenerateResponse(
                delta=inference_pb2.Delta(
                    choice=choice, text=fresh, token_ids=[token], num_tokens=1
                )
            )
    yield inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            choice=choice, reason=inference_pb2.FINISH_REASON_MAX_TOKENS
        )
    )


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Serves Run, WatchLoad and Drain; tests set how it misbehaves."""

    def __init__(self, engine_id: str, *, serves_many: bool = True, **info: Any) -> None:
        facts = {
            "epoch_ms": 1,
            "model": MODEL,
            "numerics_id": "n1",
            "block_size": 4,
            "num_blocks": 100,
            "max_num_seqs": 8,
            "max_model_len": 1000,
            "hash_namespace": b"space",
            "deterministic": True,
        }
        self.info = engine_pb2.EngineInfo(engine_id=engine_id, **{**facts, **info})
        self.load = engine_pb2.LoadReport(
            engine_id=engine_id,
            epoch_ms=self.info.epoch_ms,
            total_blocks=100,
            prefill_tokens_per_s=1000,
            decode_round_s=0.01,
        )
        self.requests: list[engine_pb2.EngineRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []
        """Metadata of the calls that hold many."""
        self.running = 0
        self.refuse_with: Exception | None = None
        self.drain_with: Exception | None = None
        self.break_after: int | None = None
        self.break_with: Exception | None = None
        """None: the connection's own UNAVAILABLE, without details."""
        self.hang_after: int | None = None
        self.end_early = False
        self.token_delay_s = 0.0
        self.report_every_s = 0.05
        self.silent = False
        self._server: grpc.aio.Server | None = None
        self.serves_many = serves_many
        """False: one of the version before."""
        self.many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=inference_pb2.GenerateResponse.SerializeToString,
        )
        self._report = asyncio.Event()
        self._core_runs = asyncio.Event()
        self._core_runs.set()
        self._waits_since: float | None = None

    def stop_core(self) -> None:
        """From now on requests are accepted and nothing becomes of them, as if only the front
        ran: it reports the core's last numbers, and how long it has waited for an answer."""
        self._core_runs.clear()

    def continue_core(self) -> None:
        """The core goes on."""
        self._core_runs.set()
        self._waits_since = None

    async def start(self) -> str:
        self._server = rpc.make_server()
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.info.address or "127.0.0.1:0")
        await self._server.start()
        self.info.address = f"127.0.0.1:{port}"
        return self.info.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def report_now(self) -> None:
        self._report.set()

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            if not self.silent:
                self.load.sequence += 1
                report = engine_pb2.LoadReport()
                report.CopyFrom(self.load)
                if self._waits_since is not None:
                    report.last_progress_age_s = time.monotonic() - self._waits_since
                yield report
            self._report.clear()
            try:
                async with asyncio.timeout(self.report_every_s):
                    await self._report.wait()
            except TimeoutError:
                continue

    async def Drain(self, request: engine_pb2.DrainRequest, context: Any) -> Any:
        if self.drain_with is not None:
            raise self.drain_with
        self.load.draining = True
        return engine_pb2.DrainResponse(streams_ended=self.running)

    async def RunMany(self, request_iterator: Any, context: Any) -> None:
        if not self.serves_many:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "as before it was there")
        self.shown.append(dict(context.invocation_metadata()))
        await self.many(request_iterator, context)

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.running += 1
        try:
            if self.refuse_with is not None:
                raise self.refuse_with
            if not self._core_runs.is_set() and self._waits_since is None:
                self._waits_since = time.monotonic()
            await self._core_runs.wait()
            for number, message in enumerate(stream_of(request, self.info)):
                if number == self.break_after:
                    if self.break_with is not None:
                        raise self.break_with
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                if number == self.hang_after:
                    await asyncio.Event().wait()
                if self.end_early and message.HasField("summary"):
                    return
                if self.token_delay_s:
                    await asyncio.sleep(self.token_delay_s)
                yield message
        finally:
            self.running -= 1


class FakeIndex(prefix_index_pb2_grpc.PrefixIndexServicer):
    """Answers Match as told."""

    def __init__(self) -> None:
        self.reply = prefix_index_pb2.MatchResponse(known=True)
        self.delay_s = 0.0
        self.requests: list[prefix_index_pb2.MatchRequest] = []
        self.address = ""

    def holds(self, engine: FakeEngine, blocks: int) -> None:
        self.reply.engines.add(
            engine_id=engine.info.engine_id, epoch_ms=engine.info.epoch_ms, matched_blocks=blocks
        )

    async def Match(self, request: prefix_index_pb2.MatchRequest, context: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        return self.reply


class FakeKeys:
    """What RegistryView shows, set by hand."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.connected = True
        self._version = 0
        self._changed = asyncio.Condition()

    def snapshot(self) -> dict[str, bytes]:
        return dict(self.items)

    async def wait_change(self, version: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._version != version)
            return self._version

    async def set(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.items.pop(key, None)
        else:
            self.items[key] = value
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def register(self, engine: FakeEngine) -> None:
        value = json_format.MessageToJson(engine.info).encode()
        await self.set(ENGINES_PREFIX + engine.info.engine_id, value)

    async def forget(self, engine: FakeEngine) -> None:
        await self.set(ENGINES_PREFIX + engine.info.engine_id, None)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--epoch-ms", type=int, default=1)
    parser.add_argument("--token-delay-s", type=float, default=0.02)
    args = parser.parse_args()
    engine = FakeEngine(args.engine_id, epoch_ms=args.epoch_ms)
    engine.token_delay_s = args.token_delay_s
    await engine.start()
    print(json.dumps(json_format.MessageToDict(engine.info)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
