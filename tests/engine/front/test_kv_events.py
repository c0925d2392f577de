import asyncio
from contextlib import AsyncExitStack

import pytest

from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from services.common import rpc
from services.engine.contract.messages import (
    AddRequest,
    ClearedBlocks,
    RemovedBlocks,
    RoundReport,
    SendSnapshot,
    StoredBlocks,
)
from services.engine.front.kv_events import KvEventLog, KvEventPublisher


def block(n):
    return n.to_bytes(32, "big")


def short(*numbers):
    return b"".join(block(n)[:16] for n in numbers)


def stored(*numbers, parent=None):
    return StoredBlocks(hashes=[block(n) for n in numbers], parent=parent)


def test_batches_are_numbered_and_kept_until_acknowledged():
    log = KvEventLog("e", 7)
    log.append([stored(1, 2), RemovedBlocks(hashes=[block(3)])])
    first, second = log.batches_after(0)
    assert (first.sequence, second.sequence) == (1, 2)
    assert (first.engine_id, first.epoch_ms) == ("e", 7)
    assert first.events[0].WhichOneof("event") == "cleared"
    assert second.events[0].stored.block_hashes == short(1, 2)
    assert second.events[0].stored.kind == prefix_index_pb2.BLOCK_KIND_HISTORY
    assert second.events[1].removed.block_hashes == short(3)
    assert log.batches_after(1) == [second]
    log.acknowledge(1)
    assert log.batches_after(0) == [second]


def test_snapshots_of_state_are_events_of_their_own_kind():
    held = StoredBlocks(hashes=[block(1)], parent=None, kind="state")
    log = KvEventLog("e", 7)
    log.append([stored(1), held, RemovedBlocks(hashes=[block(1)], kind="state")])
    history, state, removed = log.batches_after(1)[0].events
    assert history.stored.kind == prefix_index_pb2.BLOCK_KIND_HISTORY
    assert state.stored.kind == removed.removed.kind == prefix_index_pb2.BLOCK_KIND_STATE
    assert state.stored.block_hashes == removed.removed.block_hashes == short(1)
    log.replace_with_snapshot([stored(1), held])
    (part,) = log.batches_after(2)
    assert [event.stored.kind for event in part.events] == [
        prefix_index_pb2.BLOCK_KIND_HISTORY,
        prefix_index_pb2.BLOCK_KIND_STATE,
    ]


def test_a_full_log_drops_all_so_that_a_number_is_missed():
    log = KvEventLog("e", 7, max_batches=3)
    for n in range(5):
        log.append([stored(n)])
    assert log.num_dropped > 0
    numbers = [batch.sequence for batch in log.batches_after(0)]
    assert numbers[-1] == log.last_sequence == 6
    assert numbers[0] > 1
    assert len(numbers) <= 3


def test_a_snapshot_replaces_what_waits_and_is_cut_into_parts():
    log = KvEventLog("e", 7)
    log.append([stored(1)])
    log.replace_with_snapshot([stored(*range(10_000), parent=block(77)), stored(5)])
    parts = log.batches_after(0)
    assert [part.snapshot.part for part in parts] == [0, 1, 2]
    assert [part.snapshot.last for part in parts] == [False, False, True]
    assert [part.sequence for part in parts] == [3, 4, 5]
    hashes = b"".join(event.stored.block_hashes for part in parts for event in part.events)
    assert hashes == short(*range(10_000), 5)
    first_of_second = parts[1].events[0].stored
    assert first_of_second.parent == parts[0].events[-1].stored.block_hashes[-16:]
    assert all(part.ByteSize() < 100_000 for part in parts)


def test_an_empty_snapshot_is_one_part():
    log = KvEventLog("e", 7)
    log.replace_with_snapshot([])
    (part,) = log.batches_after(0)
    assert part.snapshot.last
    assert not part.events


class Index(prefix_index_pb2_grpc.PrefixIndexServicer):
    """Records batches; answers each with an acknowledgement unless `answers` has another."""

    def __init__(self):
        self.batches = []
        self.answers = []
        self.news = asyncio.Event()

    async def Publish(self, request_iterator, context):
        async for batch in request_iterator:
            self.batches.append(batch)
            self.news.set()
            answer = prefix_index_pb2.PublishResponse(acked_sequence=batch.sequence)
            if self.answers:
                answer = self.answers.pop(0)
            yield answer

    async def until(self, holds):
        async with asyncio.timeout(20):
            while not holds(self.batches):
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def serve():
    async with AsyncExitStack() as stack:

        async def start(servicer, port=0):
            server = rpc.make_server()
            prefix_index_pb2_grpc.add_PrefixIndexServicer_to_server(servicer, server)
            chosen = rpc.Membership().bind(server, f"127.0.0.1:{port}")
            await server.start()
            stack.push_async_callback(server.stop, None)
            return server, chosen

        yield start


def report(*events, snapshot=None):
    return RoundReport(step=1, cache_events=list(events), snapshot=snapshot)


def kinds(batches):
    return [event.WhichOneof("event") for batch in batches for event in batch.events]


@pytest.fixture
async def publisher():
    async with AsyncExitStack() as stack:

        def start(port, request_snapshot=lambda: None, heartbeat_s=60.0):
            log = KvEventLog("e", 7)
            made = KvEventPublisher(
                f"127.0.0.1:{port}",
                rpc.Membership(),
                log,
                request_snapshot=request_snapshot,
                heartbeat_s=heartbeat_s,
            )
            made.start()
            stack.push_async_callback(made.stop)
            return made

        yield start


async def test_an_idle_engine_announces_a_clear_then_events_in_order(serve, publisher):
    index = Index()
    _, port = await serve(index)
    made = publisher(port)
    await index.until(lambda batches: len(batches) == 1)
    assert kinds(index.batches) == ["cleared"]
    made.add_report(report())
    for n in range(20):
        made.add_report(report(stored(n)))
    await index.until(lambda batches: len(batches) == 21)
    assert [batch.sequence for batch in index.batches] == list(range(1, 22))
    hashes = [batch.events[0].stored.block_hashes for batch in index.batches[1:]]
    assert hashes == [short(n) for n in range(20)]


async def test_it_connects_again_and_sends_what_was_not_acknowledged(serve, publisher):
    index = Index()
    server, port = await serve(index)
    made = publisher(port)
    await index.until(lambda batches: len(batches) == 1)
    await server.stop(None)
    made.add_report(report(stored(1)))
    made.add_report(report(ClearedBlocks()))
    successor = Index()
    await serve(successor, port)
    await successor.until(lambda batches: kinds(batches)[-2:] == ["stored", "cleared"])


async def test_a_service_that_comes_later_than_the_engine(serve, publisher):
    index = Index()
    server, port = await serve(index)
    await server.stop(None)
    made = publisher(port)
    made.add_report(report(stored(1)))
    _, again = await serve(index, port)
    assert again == port
    await index.until(lambda batches: kinds(batches) == ["cleared", "stored"])


async def test_a_snapshot_on_request(serve, publisher):
    index = Index()
    requested = asyncio.Event()
    _, port = await serve(index)
    index.answers = [prefix_index_pb2.PublishResponse(need_snapshot=True)]
    made = publisher(port, requested.set)
    async with asyncio.timeout(20):
        await requested.wait()
    made.add_report(report(stored(1)))  # the snapshot that comes will have it
    await asyncio.sleep(0.1)
    assert kinds(index.batches) == ["cleared"]
    made.add_report(report(snapshot=[stored(1, 2)]))
    made.add_report(report(stored(3)))
    await index.until(lambda batches: kinds(batches) == ["cleared", "stored", "stored"])
    assert index.batches[1].snapshot.last
    assert index.batches[1].events[0].stored.block_hashes == short(1, 2)
    assert not index.batches[2].HasField("snapshot")
    assert index.batches[2].sequence == index.batches[1].sequence + 1


async def test_an_idle_engine_shows_that_it_lives(serve, publisher):
    index = Index()
    _, port = await serve(index)
    publisher(port, heartbeat_s=0.05)
    await index.until(lambda batches: len(batches) >= 4)
    assert [batch.sequence for batch in index.batches[:4]] == [1, 2, 3, 4]
    assert kinds(index.batches) == ["cleared"]


async def test_a_newer_process_of_the_same_name_silences_this_one(serve, publisher):
    index = Index()
    _, port = await serve(index)
    index.answers = [prefix_index_pb2.PublishResponse(stale_epoch=True)]
    made = publisher(port, heartbeat_s=0.05)
    async with asyncio.timeout(20):
        await made.ended()
    assert made.stale
    made.add_report(report(stored(1)))
    assert len(index.batches) == 1


async def test_the_front_publishes_and_asks_its_core(serve, start_front, run_request, out):
    index = Index()
    _, port = await serve(index)
    index.answers = [
        prefix_index_pb2.PublishResponse(acked_sequence=1),
        prefix_index_pb2.PublishResponse(need_snapshot=True),
    ]
    front = await start_front(kvcache=f"127.0.0.1:{port}")
    front.core.say(cache_events=[stored(9)])
    await front.core.got(SendSnapshot)
    front.core.say(snapshot=[stored(9)])
    await index.until(lambda batches: batches[-1].HasField("snapshot"))
    assert index.batches[0].engine_id == "engine-under-test"
    # Without the service, requests are served as before.
    front = await start_front(kvcache="127.0.0.1:1")
    call = front.engine.Run(run_request())
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "x", "MAX_TOKENS"), cache_events=[stored(1)])
    while not (await call.read()).HasField("summary"):
        pass
