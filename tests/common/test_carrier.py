"""Many streams in one call, on real sockets: all come whole, and none waits for another."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from inferfleet.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet.v1 import inference_pb2
from services.common import errors, rpc
from services.common.carrier import Link, RunMany, drained, take
from services.common.carrier.call import WINDOW_BYTES
from services.common.carrier.outbox import Outbox

LIMIT_S = 20


class Peer(engine_pb2_grpc.EngineServicer):
    """Answers as a request's model says; serves RunMany unless it is of the version before."""

    def __init__(self, *, patient: bool = False) -> None:
        self.written: dict[str, int] = {}
        self.running: set[str] = set()
        self.ended: list[str] = []
        self.left: list[float | None] = []
        self.shown: list[dict[str, Any]] = []
        self.conversations = 0
        self.server: grpc.aio.Server | None = None
        self.patient = patient
        self.many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=inference_pb2.GenerateResponse.SerializeToString,
        )

    async def start(self, address: str = "127.0.0.1:0", *, old: bool = False) -> str:
        self.server = rpc.make_server()
        if old:
            run = grpc.unary_stream_rpc_method_handler(
                self.Run,
                request_deserializer=engine_pb2.EngineRequest.FromString,
                response_serializer=inference_pb2.GenerateResponse.SerializeToString,
            )
            service = "inferfleet.internal.v1.Engine"
            handler = grpc.method_handlers_generic_handler(service, {"Run": run})
            self.server.add_generic_rpc_handlers((handler,))
        else:
            engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(address)
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def RunMany(self, request_iterator: Any, context: Any) -> None:
        self.conversations += 1
        await self.many(request_iterator, context)

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Any]:
        name, how = request.request.request_id, request.request.model
        self.shown.append(dict(context.invocation_metadata()))
        self.left.append(rpc.remaining_s(context))
        context.add_done_callback(lambda _: self.ended.append(name))
        self.running.add(name)
        try:
            await context.send_initial_metadata((("engine", f"e-{name}"),))
            if how == "abort":
                await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
            if how == "refuse":
                raise errors.ResourceExhaustedError("full", retry_after_s=3)
            if how == "long":
                yield message_of(name * (rpc.MAX_RECEIVE_BYTES // len(name)), 0)
            if how == "bug":
                raise KeyError("bug")
            for number in range(request.request.stop.max_tokens):
                self.written[name] = number
                yield message_of(name, number)
                if self.patient:
                    await drained(context)
                if how == "slow":
                    await asyncio.sleep(0)
            if how == "hang":
                await asyncio.Event().wait()
        finally:
            self.running.discard(name)


def message_of(name: str, number: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(text=f"{name}/{number} ", num_tokens=1)
    )


def request_of(name: str, how: str = "", tokens: int = 10) -> bytes:
    request = engine_pb2.EngineRequest(
        request=inference_pb2.GenerateRequest(request_id=name, model=how)
    )
    request.request.stop.max_tokens = tokens
    return request.SerializeToString()


def whole(name: str, tokens: int = 10) -> list[bytes]:
    return [message_of(name, number).SerializeToString() for number in range(tokens)]


async def until(condition: Any, limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


class Linked:
    """A peer, and a link to it that carries."""

    def __init__(self, peer: Peer, address: str) -> None:
        self.peer, self.address = peer, address
        self.membership = rpc.Membership()
        self.channel = self.membership.channel(address)
        self.link = Link(self.membership, address, self.channel)

    def run(self, request: bytes, **how: Any) -> Any:
        return self.link.run(request, **{"metadata": (), "timeout_s": 30.0, **how})

    async def all_of(self, name: str, tokens: int = 10) -> list[bytes]:
        return [raw async for raw in self.run(request_of(name, "slow", tokens))]


@contextlib.asynccontextmanager
async def linked(peer: Peer, *, old: bool = False) -> AsyncIterator[Linked]:
    made = Linked(peer, await peer.start(old=old))
    try:
        if not old:
            await asyncio.wait_for(made.link.wait_carries(), LIMIT_S)
        yield made
    finally:
        await made.link.close()
        await made.channel.close()
        await peer.stop()


@pytest.fixture(params=[False, True], ids=["eager", "patient"])
async def pair(request) -> AsyncIterator[Linked]:
    async with linked(Peer(patient=request.param)) as made:
        yield made


async def test_many_streams_come_whole_in_one_call(pair):
    names = [f"s{number}" for number in range(60)]
    answers = await asyncio.gather(*(pair.all_of(name, 40) for name in names))
    for name, answer in zip(names, answers, strict=True):
        assert answer == whole(name, 40)
    assert pair.peer.conversations == 1
    await until(lambda: sorted(pair.peer.ended) == sorted(names))


async def test_what_goes_along_with_a_call(pair):
    call = pair.run(request_of("m"), metadata=(("who", "me"),), timeout_s=25.0)
    assert await take(call)
    assert dict(await call.initial_metadata()) == {"engine": "e-m"}
    assert pair.peer.shown == [{"who": "me"}]
    assert 0 < pair.peer.left[0] <= 25
    async for _ in call:
        pass
    assert await call.read() is grpc.aio.EOF
    assert call.done()
    assert not call.cancel()


async def test_no_deadline_is_none(pair):
    assert [raw async for raw in pair.run(request_of("n"), timeout_s=None)] == whole("n")
    assert pair.peer.left == [None]


async def test_a_reader_that_stops_holds_up_its_own_producer_only(pair):
    stopped = pair.run(request_of("stopped", tokens=5000))
    assert await stopped.read()
    for round_ in range(3):
        answers = await asyncio.gather(*(pair.all_of(f"r{round_}-{n}", 300) for n in range(8)))
        assert [len(answer) for answer in answers] == [300] * 8
    far = pair.peer.written["stopped"] * len(whole("stopped", 1)[0])
    assert far <= 2 * WINDOW_BYTES
    rest = [raw async for raw in stopped]
    assert [whole("stopped", 1)[0], *rest] == whole("stopped", 5000)


async def test_a_message_longer_than_the_window_passes(pair):
    long = "x" * (3 * WINDOW_BYTES)
    call = pair.run(request_of(long, tokens=3))
    assert [raw async for raw in call] == whole(long, 3)


async def test_ends_come_after_messages_that_fill_more_than_one_batch(pair):
    names = [f"{number}" * 700 for number in range(100, 300)]
    answers = await asyncio.gather(*(pair.all_of(name, 1) for name in names))
    assert answers == [whole(name, 1) for name in names]


async def test_a_cancelled_stream_ends_over_there_and_its_reader_is_told(pair):
    call = pair.run(request_of("gone", "hang", tokens=2))
    other = pair.run(request_of("stays", "hang", tokens=1))
    assert await other.read()
    await call.read()
    reading = asyncio.ensure_future(_read_on(call))
    await asyncio.sleep(0)
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    await until(lambda: pair.peer.running == {"stays"})
    assert pair.peer.ended == ["gone"]
    assert not other.done()


async def test_a_reader_whose_task_ends_cancels_its_stream(pair):
    call = pair.run(request_of("gone", "hang", tokens=1))
    reading = asyncio.create_task(_read_on(call))
    await until(lambda: "gone" in pair.peer.running)
    reading.cancel()
    await asyncio.wait({reading})
    assert call.cancelled()
    await until(lambda: not pair.peer.running)


async def test_cancelled_before_it_was_sent(pair):
    for number in range(20):
        pair.run(request_of(f"r{number}", "hang")).cancel()
    assert await pair.all_of("after") == whole("after")
    await until(lambda: not pair.peer.running)


async def test_a_deadline_ends_both_sides(pair):
    call = pair.run(request_of("late", "hang", tokens=1), timeout_s=0.2)
    assert await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not pair.peer.running)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("refuse", errors.ResourceExhaustedError),
        ("abort", errors.NotFoundError),
        ("bug", errors.InternalError),
    ],
)
async def test_statuses_are_those_of_a_call_of_its_own(pair, how, kind):
    ends = []
    async with grpc.aio.insecure_channel(pair.address) as channel:
        alone = channel.unary_stream("/inferfleet.internal.v1.Engine/Run")
        for call in (pair.run(request_of("r", how)), alone(request_of("r", how))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            ends.append(caught.value)
    carried, own = (errors.error_of(end) for end in ends)
    assert type(carried) is type(own) is kind
    assert (carried.message, carried.reason) == (own.message, own.reason)
    assert carried.retry_after_s == own.retry_after_s
    has_details = [errors.DETAILS_KEY in dict(end.trailing_metadata()) for end in ends]
    assert has_details[0] == has_details[1]


async def test_what_is_no_request_is_refused_alone(pair):
    other = pair.run(request_of("stays", "hang", tokens=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.run(b"\xff\xff\xff").read()
    assert errors.error_of(caught.value).reason == "MALFORMED_MESSAGE"
    assert await other.read()


async def test_a_message_that_is_too_long_ends_its_own_stream_only(pair):
    other = pair.run(request_of("stays", "hang", tokens=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.run(request_of("x" * 1000, "long")).read()
    assert errors.error_of(caught.value).reason == "MESSAGE_TOO_LONG"
    assert await other.read()
    assert pair.link.carries


async def test_many_that_fail_at_once_are_all_told(pair):
    calls = [pair.run(request_of(f"r{number}", "refuse")) for number in range(400)]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert errors.error_of(caught.value).retry_after_s == 3


async def test_streams_of_a_peer_that_dies_are_unavailable_and_the_next_finds_it_again(pair):
    calls = [pair.run(request_of(f"s{n}", "hang", tokens=1)) for n in range(5)]
    for call in calls:
        assert await call.read()
    await pair.peer.stop()
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert errors.DETAILS_KEY not in dict(caught.value.trailing_metadata())
    await until(lambda: not pair.link.carries)
    await pair.peer.start(pair.address)
    await asyncio.wait_for(pair.link.wait_carries(), LIMIT_S)
    assert await pair.all_of("again") == whole("again")
    assert pair.peer.conversations == 2


async def test_streams_of_a_caller_that_dies_end(pair):
    for number in range(5):
        assert await pair.run(request_of(f"s{number}", "hang", tokens=1)).read()
    await pair.link.close()
    await until(lambda: not pair.peer.running)
    assert len(pair.peer.ended) == 5


async def test_one_of_the_version_before_is_asked_with_run():
    peer = Peer()
    async with linked(peer, old=True) as made:
        for number in range(3):
            assert await made.all_of(f"r{number}") == whole(f"r{number}")
        assert not made.link.carries
        await until(lambda: len(peer.ended) == 3)


async def test_a_long_request_goes_alone(pair):
    long = request_of("long", tokens=3) + b"\x0a\x00" * 600_000
    assert [raw async for raw in pair.run(long)] == whole("long", 3)
    assert type(pair.run(request_of("short"))) is not type(pair.run(long))


async def test_a_peer_that_closes_tells_how_its_streams_ended_first(pair):
    running = pair.run(request_of("last", "slow", tokens=50))
    assert await running.read()
    closing = asyncio.create_task(pair.peer.many.close(LIMIT_S))
    assert len([raw async for raw in running]) == 49
    await asyncio.wait_for(closing, LIMIT_S)
    await until(lambda: not pair.link.carries)
    assert await pair.all_of("next") == whole("next")


async def test_a_link_that_leaves_lets_its_streams_end(pair):
    running = pair.run(request_of("last", "slow", tokens=200))
    assert await running.read()
    leaving = asyncio.create_task(pair.link.leave())
    assert len([raw async for raw in running]) == 199
    await asyncio.wait_for(leaving, LIMIT_S)
    await until(lambda: not pair.peer.running)


async def test_new_certificates_mean_a_new_call_and_old_streams_end_on_the_old_one(
    pair, monkeypatch
):
    running = pair.run(request_of("old", "slow", tokens=2000))
    assert await running.read()
    monkeypatch.setattr(rpc.Membership, "version", property(lambda _: 1))
    assert await pair.all_of("between") == whole("between")
    await asyncio.wait_for(pair.link.wait_carries(), LIMIT_S)
    assert await pair.all_of("new") == whole("new")
    assert pair.peer.conversations == 2
    assert len([raw async for raw in running]) == 1999


@pytest.mark.parametrize("seed", range(3))
async def test_random_readers_get_a_beginning_of_their_stream_and_nothing_leaks(pair, seed):
    draw = random.Random(seed)

    async def read_some(name: str, tokens: int, most: int, pauses: float) -> None:
        call = pair.run(request_of(name, draw.choice(["", "slow", "hang"]), tokens))
        got: list[bytes] = []
        while len(got) < most and (messages := await take(call)):
            got += messages
            if draw.random() < pauses:
                await asyncio.sleep(draw.random() / 50)
        call.cancel()
        assert got == whole(name, tokens)[: len(got)]
        assert len(got) >= min(most, tokens)

    await asyncio.gather(
        *(
            read_some(f"s{n}", tokens := draw.randint(1, 150), draw.randint(1, tokens), n % 3 / 4)
            for n in range(60)
        )
    )
    await until(lambda: not pair.peer.running)
    assert len(pair.peer.ended) == 60
    carrier = pair.link._carrier
    assert not carrier._calls
    await until(lambda: not (carrier._credits or carrier._cancelled or carrier._opened))


async def test_nobody_waits_for_what_has_been_written_already():
    """A stream whose last message went while it waited for credit may find the outbox busy."""
    pending, written, go_on = ["one"], [], asyncio.Event()

    async def write(frames: str) -> None:
        written.append(frames)
        await go_on.wait()

    outbox = Outbox(lambda: pending.pop() if pending else None, write)
    outbox.notify()
    task = asyncio.create_task(outbox.run())
    await until(lambda: outbox.busy)
    waiting = asyncio.create_task(outbox.collected())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(waiting, LIMIT_S)
    outbox.finish()
    await asyncio.wait_for(task, LIMIT_S)
    assert written == ["one"]


async def _read_on(call: Any) -> None:
    while await take(call):
        pass
