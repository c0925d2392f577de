"""The one fake engine of all tests: it serves the Engine contract on a real socket.

What a Run streams is decided by a script (see `scripts.py`); attributes make the engine refuse,
break, hang or fall silent. Subclasses that need another Run override that method alone.

`python -m tests.doubles.fake_engine --engine-id x` runs a fake engine in a process of its own, for
tests that kill or stop it.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.rpc.carrier import RunMany
from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from tests.doubles.scripts import Event, Script, numbered_tokens

MODEL = "tiny"
_FACTS = {
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


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Serves all methods of Engine.

    Args:
        engine_id: its id.
        script: what a Run streams.
        serves_many: False stands for a version that does not know RunMany.
        info: fields of its EngineInfo.
    """

    def __init__(
        self,
        engine_id: str = "engine-1",
        *,
        script: Script = numbered_tokens,
        serves_many: bool = True,
        **info: Any,
    ) -> None:
        self.info = engine_pb2.EngineInfo(engine_id=engine_id, **{**_FACTS, **info})
        self.load = engine_pb2.LoadReport(
            engine_id=engine_id,
            epoch_ms=self.info.epoch_ms,
            total_blocks=100,
            prefill_tokens_per_s=1000,
            decode_round_s=0.01,
        )
        self.script = script
        self.reply = "Hé, 🌶!"
        """Text that `say_hello` answers with."""
        self.assets = byte_assets()
        self.tokenizer = Tokenizer(self.assets)
        self._record_nothing_yet()
        self._set_no_faults()
        self.serves_many = serves_many
        self.server: grpc.aio.Server | None = None
        self.many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=Event.SerializeToString,
        )
        self._report = asyncio.Event()
        self._core_runs = asyncio.Event()
        self._core_runs.set()
        self._stopped_since: float | None = None
        """When the first request met the stopped core."""

    def _record_nothing_yet(self) -> None:
        self.requests: list[engine_pb2.EngineRequest] = []
        self.metadata: list[dict[str, Any]] = []
        """Metadata of each Run."""
        self.timeouts: list[float | None] = []
        """Seconds until the deadline of each Run."""
        self.carrier_metadata: list[dict[str, Any]] = []
        """Metadata of each RunMany."""
        self.tokenizer_calls = 0
        self.running = 0
        self.cancelled = 0
        self.changed = asyncio.Condition()
        """Notified when a Run begins or ends."""

    def _set_no_faults(self) -> None:
        self.refuse_with: Exception | None = None
        self.drain_with: Exception | None = None
        self.break_after: int | None = None
        """Number of messages after which a stream breaks."""
        self.break_with: Exception | None = None
        """The error of a broken stream; None means UNAVAILABLE without details, as of a lost
        connection."""
        self.hang_after: int | None = None
        self.end_early = False
        """Streams end without their Summary."""
        self.token_delay_s = 0.0
        self.report_every_s = 0.05
        self.silent = False
        """No load reports are sent."""

    @property
    def engine_id(self) -> str:
        return str(self.info.engine_id)

    @engine_id.setter
    def engine_id(self, value: str) -> None:
        self.info.engine_id = self.load.engine_id = value

    @property
    def revision(self) -> str:
        return str(self.info.model_revision)

    @revision.setter
    def revision(self, value: str) -> None:
        self.info.model_revision = value

    @property
    def max_model_len(self) -> int:
        return int(self.info.max_model_len)

    @max_model_len.setter
    def max_model_len(self, value: int) -> None:
        self.info.max_model_len = value

    @property
    def address(self) -> str:
        """host:port on which it listens; empty before the first start."""
        return str(self.info.address)

    async def start(self, membership: rpc.Membership | None = None) -> str:
        """Listen on a free port, or again on the port of an earlier start; returns the address."""
        self.server = rpc.make_server(membership=membership, address=lambda: self.address)
        engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        listen_on = self.address or "127.0.0.1:0"
        port = (membership or rpc.Membership()).bind(self.server, listen_on)
        host = "localhost" if membership else "127.0.0.1"  # certificates name hosts
        self.info.address = f"{host}:{port}"
        await self.server.start()
        return self.address

    async def stop(self) -> None:
        """Cut all streams and close the port."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def stop_core(self) -> None:
        """Accept requests but answer none, as when only the front process runs.

        Load reports keep their last numbers, and say for how long the core has not answered.
        """
        self._core_runs.clear()

    def continue_core(self) -> None:
        """Answer requests again."""
        self._core_runs.set()
        self._stopped_since = None

    def report_now(self) -> None:
        """Send a load report at once."""
        self._report.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever a Run begins or ends."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.LoadReport]:
        while True:
            if not self.silent:
                self.load.sequence += 1
                report = engine_pb2.LoadReport()
                report.CopyFrom(self.load)
                if self._stopped_since is not None:
                    report.last_progress_age_s = time.monotonic() - self._stopped_since
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

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Any
    ) -> engine_pb2.EngineInfo:
        info = engine_pb2.EngineInfo(
            vocab_size=self.tokenizer.vocab_size, tokenizer_digest=self.assets.digest
        )
        info.MergeFrom(self.info)
        return info

    async def GetTokenizer(
        self, request: engine_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[engine_pb2.TokenizerChunk]:
        self.tokenizer_calls += 1
        for chunk in self.assets.chunks(2048):
            yield chunk

    async def RunMany(self, request_iterator: Any, context: Any) -> None:
        if not self.serves_many:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.carrier_metadata.append(dict(context.invocation_metadata()))
        await self.many(request_iterator, context)

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Event]:
        self.record_run(request, context)
        await context.send_initial_metadata(((rpc.ENGINE_ID_KEY, self.engine_id),))
        await self._count_running(1)
        try:
            if self.refuse_with is not None:
                raise self.refuse_with
            await self._wait_for_core()
            async for event in self._faulty(self.script(request, self), context):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            await asyncio.shield(self._count_running(-1))

    def record_run(self, request: engine_pb2.EngineRequest, context: Any) -> None:
        """Keep the request, its metadata and its deadline, for tests to look at."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.timeouts.append(rpc.remaining_s(context))

    def started(self, request: engine_pb2.EngineRequest) -> Event:
        """A Started event for the request, with log probabilities of the prompt if requested."""
        inner = request.request
        started = inference_pb2.Started(
            request_id=inner.request_id,
            model=inner.model,
            model_revision=self.revision,
            prompt_tokens=len(inner.token_ids.ids),
            cached_tokens=3,
            seed=inner.sampling.seed,
            engine_id=self.engine_id,
        )
        if inner.response.prompt_logprobs:
            for position, token_id in enumerate(inner.token_ids.ids):
                entry = started.prompt_logprobs.add(token_id=token_id, token=bytes([token_id]))
                if position:
                    entry.logprob = -1.0
        return Event(started=started)

    def delta(
        self, request: engine_pb2.EngineRequest, choice: int, text: str, ids: list[int]
    ) -> Event:
        """A Delta event, with log probabilities if requested."""
        delta = inference_pb2.Delta(choice=choice, text=text, token_ids=ids, num_tokens=len(ids))
        if request.request.response.logprobs:
            for token_id in ids:
                token = self.tokenizer.token_bytes(token_id)
                entry = delta.logprobs.add(token_id=token_id, logprob=-0.5, token=token)
                for alternative in range(request.request.response.top_logprobs):
                    entry.top.add(
                        token_id=65 + alternative,
                        logprob=float("-inf") if alternative else -0.5,
                        token=bytes([65 + alternative]),
                    )
        return Event(delta=delta)

    def summary(self, request: engine_pb2.EngineRequest, completion_tokens: int) -> Event:
        """A Summary event for the request."""
        usage = inference_pb2.Usage(
            prompt_tokens=len(request.request.token_ids.ids),
            cached_tokens=3,
            completion_tokens=completion_tokens,
        )
        return Event(summary={"usage": usage, "engine_id": self.engine_id, "exact": True})

    async def _wait_for_core(self) -> None:
        if not self._core_runs.is_set() and self._stopped_since is None:
            self._stopped_since = time.monotonic()
        await self._core_runs.wait()

    async def _faulty(self, events: AsyncIterator[Event], context: Any) -> AsyncIterator[Event]:
        """The script's events with the faults that are set."""
        number = 0
        async for event in events:
            if number == self.break_after:
                if self.break_with is not None:
                    raise self.break_with
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if number == self.hang_after:
                await asyncio.Event().wait()
            if self.end_early and event.HasField("summary"):
                return
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
            yield event
            number += 1

    async def _count_running(self, change: int) -> None:
        async with self.changed:
            self.running += change
            self.changed.notify_all()


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
