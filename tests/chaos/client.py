"""Clients that keep streams open at the gateways and compare every answer with the undisturbed one.

A client is what an application is: it sees gateways only. When its own gateway dies it repeats the
request at another, as any client must; that is counted and must give the same answer.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc
from services.common import errors
from tests.chaos.workload import Answer, Case, compare

REQUEST_TIMEOUT_S = 240.0
_OPTIONS = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100)]


class BrokenStreamError(Exception):
    """The stream did not have the shape that the contract promises."""


@dataclass
class Counts:
    """What became of the requests of one scenario."""

    requests: int = 0
    failed: int = 0
    duplicated: int = 0
    missing: int = 0
    changed: int = 0
    continuations: int = 0
    repeated: int = 0
    """Sent again by the client because its gateway was killed."""
    refused: int = 0
    """RESOURCE_EXHAUSTED with a RetryInfo; repeated after that time."""
    tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def violations(self) -> int:
        return self.failed + self.duplicated + self.missing + self.changed


@dataclass(eq=False)
class OpenStream:
    """One running stream, for those who wait until it moves."""

    case: str
    began: float
    heard: float = 0.0
    engine_id: str = ""
    ended: bool = False

    def moved_since(self, moment: float) -> float | None:
        """When it ended or gave a message after `moment`, else None."""
        return self.heard if self.heard > moment else None


class Clients:
    """Many clients of a few gateways.

    Args:
        gateways: addresses; a client begins with its own and goes to the next when that is away.
    """

    def __init__(self, gateways: Sequence[str]) -> None:
        self._gateways = list(gateways)
        self._channels = [grpc.aio.insecure_channel(a, options=_OPTIONS) for a in gateways]
        self._expected: dict[str, Answer] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._may_repeat = asyncio.Event()
        self._may_repeat.set()
        self._numbers = itertools.count()
        self.counts = Counts()
        self.open: set[OpenStream] = set()
        self.may_break: Callable[[str, bool], bool] = lambda _, __: False
        """(gateway, whether the stream had begun) → whether its loss is to be repeated."""
        self.slowest = ""
        """Of the streams that had begun, the case that moved last in `all_flow_since`."""
        self.tokens_heard = 0
        """By all clients, ever."""

    async def close(self) -> None:
        await self.stop()
        for channel in self._channels:
            await channel.close()

    def channel(self, number: int) -> grpc.aio.Channel:
        """To one of the gateways, in turn."""
        return self._channels[number % len(self._channels)]

    async def served(self) -> bool:
        """Whether every gateway has the model."""
        for channel in self._channels:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                reply = await stub.ListModels(pb.ListModelsRequest(), timeout=2.0)
            except grpc.RpcError:
                return False
            if not reply.models:
                return False
        return True

    async def learn(self, cases: Sequence[Case]) -> None:
        """Run every case once, undisturbed; its answer is the expected one from now on.

        Raises:
            BrokenStreamError, grpc.RpcError: the fleet is not well even without a fault.
        """
        width = asyncio.Semaphore(4)

        async def one(case: Case) -> None:
            async with width:
                answer = await self._stream(case, next(self._numbers), OpenStream(case.name, 0.0))
                self._expected[case.name] = answer

        await asyncio.gather(*(one(c) for c in cases if c.name not in self._expected))

    def start(self, cases: Sequence[Case], streams: int, gateway: int | None = None) -> None:
        """Keep `streams` requests open until `stop`, each client going through all the cases.

        Args:
            gateway: the one they all use; default: in turn.
        """
        self._stopping = False
        for number in range(streams):
            turn = [*cases[number % len(cases) :], *cases[: number % len(cases)]]
            first = number if gateway is None else gateway
            self._workers.add(asyncio.create_task(self._work(turn, first)))

    async def stop(self) -> None:
        """Let the running requests end, and no more."""
        self._stopping = True
        workers, self._workers = self._workers, set()
        await asyncio.gather(*workers)

    def fresh_counts(self) -> Counts:
        """Begin to count anew."""
        self.counts = Counts()
        return self.counts

    def hold_repeats(self) -> None:
        """Clients whose gateway dies wait until `release_repeats`."""
        self._may_repeat.clear()

    def release_repeats(self) -> None:
        """Let them repeat."""
        self._may_repeat.set()

    async def all_flow_since(self, moment: float, limit_s: float) -> tuple[float, float]:
        """Wait until each stream that is open now has moved, or for `limit_s`.

        Returns:
            Seconds from `moment` until the last one did, of those that had begun and of those that
            still waited for their first token; `limit_s` where one never did.
        """
        begun = {stream: stream.heard > 0 for stream in self.open}
        waiting, last = set(begun), {True: 0.0, False: 0.0}
        while waiting and time.monotonic() < moment + limit_s:
            for stream in list(waiting):
                moved = stream.moved_since(moment)
                if moved is not None:
                    waiting.discard(stream)
                    self._note(stream, moved - moment, begun[stream], last)
            await asyncio.sleep(0.01)
        for stream in waiting:
            self._note(stream, limit_s, begun[stream], last)
        return last[True], last[False]

    def _note(
        self, stream: OpenStream, seconds: float, begun: bool, last: dict[bool, float]
    ) -> None:
        if seconds > last[begun]:
            last[begun] = seconds
            if begun:
                self.slowest = stream.case

    async def _work(self, cases: list[Case], gateway: int) -> None:
        for case in itertools.cycle(cases):
            if self._stopping:
                return
            await self._ask(case, gateway)

    async def _ask(self, case: Case, gateway: int) -> None:
        counts = self.counts
        counts.requests += 1
        stream = OpenStream(case.name, time.monotonic())
        self.open.add(stream)
        try:
            answer = await self._until_answered(case, gateway, stream)
            self._judge(case, answer, counts)
        except (grpc.RpcError, BrokenStreamError) as error:
            counts.failed += 1
            counts.problems.append(f"{case.name}: {_describe(error)}")
        finally:
            stream.ended, stream.heard = True, time.monotonic()
            self.open.discard(stream)

    def _judge(self, case: Case, answer: Answer, counts: Counts) -> None:
        difference = compare(answer, self._expected[case.name])
        counts.duplicated += difference.duplicated
        counts.missing += difference.missing
        counts.changed += difference.changed
        counts.failed += bool(difference.other)
        counts.continuations += answer.continuations
        counts.tokens += answer.completion_tokens
        if difference:
            counts.problems.append(f"{case.name}: {difference}")

    async def _until_answered(self, case: Case, gateway: int, stream: OpenStream) -> Answer:
        give_up = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            address = self._gateways[gateway % len(self._gateways)]
            try:
                return await self._stream(case, gateway, stream)
            except grpc.RpcError as error:
                pause_s = self._pause_before_repeat(error, address, stream)
                if pause_s is None or time.monotonic() > give_up:
                    raise
            gateway += 1
            await asyncio.sleep(pause_s)
            await self._may_repeat.wait()

    def _pause_before_repeat(
        self, error: grpc.RpcError, address: str, stream: OpenStream
    ) -> float | None:
        """Seconds until the request may be repeated; None if it has failed."""
        found = errors.error_of(error)
        if isinstance(found, errors.ResourceExhaustedError) and found.retry_after_s:
            self.counts.refused += 1
            return found.retry_after_s
        gone = not _from_fleet(error) or found.reason == "DRAINING"
        if gone and self.may_break(address, bool(stream.engine_id)):
            self.counts.repeated += 1
            return 0.05
        return None

    async def _stream(self, case: Case, gateway: int, stream: OpenStream) -> Answer:
        call = inference_pb2_grpc.InferenceStub(self.channel(gateway)).Generate(
            case.request(), timeout=REQUEST_TIMEOUT_S
        )
        reader = _Reader(case.n)
        stream.engine_id = ""
        try:
            async for event in call:
                stream.heard = time.monotonic()
                if event.HasField("started"):
                    stream.engine_id = event.started.engine_id
                reader.take(event)
                self.tokens_heard += len(event.delta.token_ids)
        finally:
            call.cancel()
        return reader.end()


class _Reader:
    """Holds a stream to its grammar: Started, Deltas, one Finished a choice, Summary."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._started = False
        self._summed = False
        self._answer = Answer.empty()

    def take(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if self._summed or self._started == (kind == "started"):
            raise BrokenStreamError(f"a {kind} out of order")
        self._started = True
        if kind == "delta":
            self._delta(event.delta)
        elif kind == "finished":
            self._finished(event.finished)
        elif kind == "summary":
            self._summary(event.summary)

    def end(self) -> Answer:
        if not self._summed:
            raise BrokenStreamError("the stream ended without its Summary")
        if len(self._answer.reasons) != self._n:
            raise BrokenStreamError(f"{len(self._answer.reasons)} of {self._n} choices finished")
        return self._answer

    def _delta(self, delta: pb.Delta) -> None:
        if delta.choice in self._answer.reasons:
            raise BrokenStreamError("a Delta after its choice's Finished")
        self._answer.tokens.setdefault(delta.choice, []).extend(delta.token_ids)
        text = self._answer.text.get(delta.choice, "")
        self._answer.text[delta.choice] = text + delta.text

    def _finished(self, finished: pb.Finished) -> None:
        if finished.choice in self._answer.reasons:
            raise BrokenStreamError("two Finished of one choice")
        self._answer.reasons[finished.choice] = finished.reason

    def _summary(self, summary: pb.Summary) -> None:
        self._summed = True
        self._answer.continuations = summary.continuations
        self._answer.exact = summary.exact
        self._answer.completion_tokens = summary.usage.completion_tokens


def _from_fleet(error: grpc.RpcError) -> bool:
    """Whether the status is from the fleet, and not from a broken connection."""
    return any(key == errors.DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
