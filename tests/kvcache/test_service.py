"""The service as a process, over gRPC: what an engine and a balancer see of it."""

import asyncio
import signal
import subprocess
import time
import urllib.request
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc
from services.common import rpc

pytestmark = pytest.mark.services


def fetch(url: str) -> str:
    with urllib.request.urlopen(url) as reply:
        return reply.read().decode()


def stub_of(channel: grpc.aio.Channel) -> prefix_index_pb2_grpc.PrefixIndexStub:
    return prefix_index_pb2_grpc.PrefixIndexStub(channel)


async def test_published_blocks_are_matched_counted_and_forgotten(
    start_kvcache, redis_url, blocks, publisher
):
    service = start_kvcache(redis_url).wait_ready()
    async with service.channel() as channel:
        stream = publisher(channel, "a", epoch=7)
        await stream.send(blocks(1, 2, 3))
        assert (await stream.answer(lambda a: True)).acked_sequence == 1
        match = await stub_of(channel).Match(pb.MatchRequest(block_hashes=blocks(1, 2, 9)))
        assert match == pb.MatchResponse(
            known=True, engines=[pb.EngineMatch(engine_id="a", epoch_ms=7, matched_blocks=2)]
        )
        empty = await stub_of(channel).Match(pb.MatchRequest())
        assert (empty.known, list(empty.engines)) == (True, [])
        stats = await stub_of(channel).Stats(pb.StatsRequest())
        assert (stats.store_available, stats.entries, stats.events_applied) == (True, 3, 1)
        assert list(stats.owners) == [pb.OwnerStats(engine_id="a", epoch_ms=7, last_sequence=1)]
        await stub_of(channel).Forget(pb.ForgetRequest(engine_id="a", epoch_ms=7))
        match = await stub_of(channel).Match(pb.MatchRequest(block_hashes=blocks(1)))
        assert (match.known, list(match.engines)) == (True, [])
        # The stream is open and its engine forgotten: a snapshot is requested from it.
        assert (await stream.answer(lambda a: a.need_snapshot)).need_snapshot
    scraped = await asyncio.to_thread(fetch, f"http://{service.metrics_address}/metrics")
    assert "inferfleet_kvcache_store_up 1.0" in scraped
    assert "inferfleet_kvcache_match_seconds_count" in scraped
    assert await asyncio.to_thread(fetch, f"http://{service.metrics_address}/healthz") == "ok\n"


async def test_a_gap_is_told_once_and_a_snapshot_repairs_it(
    start_kvcache, redis_url, blocks, publisher
):
    service = start_kvcache(redis_url).wait_ready()
    async with service.channel() as channel:
        stream = publisher(channel)
        await stream.send(blocks(1))
        await stream.answer(lambda a: a.acked_sequence == 1)
        stream.sequence += 1
        for _ in range(3):
            await stream.send(blocks(2))
        assert (await stream.answer(lambda a: a.need_snapshot)).acked_sequence == 1
        await stream.send(blocks(1, 2), part=0)
        await stream.send(blocks(3), part=1, last=True)
        # Nothing but acknowledgements follows: the two further batches of the gap have no answer.
        answers = [await stream.call.read() for _ in range(2)]
        assert [a.acked_sequence for a in answers] == [6, 7]
        assert not any(a.need_snapshot for a in answers)
        stats = await stub_of(channel).Stats(pb.StatsRequest())
        assert (stats.gaps, stats.resyncs) == (1, 1)


async def test_an_older_process_of_an_engine_is_told_to_stop(
    start_kvcache, redis_url, blocks, publisher
):
    service = start_kvcache(redis_url).wait_ready()
    async with service.channel() as channel:
        old, new = publisher(channel, epoch=1), publisher(channel, epoch=2)
        await old.send(blocks(1))
        await old.answer(lambda a: a.acked_sequence == 1)
        await new.send(blocks(2))
        await new.answer(lambda a: a.acked_sequence == 1)
        assert (await old.answer(lambda a: a.stale_epoch)).stale_epoch, "also while it is idle"
        late = publisher(channel, epoch=1)
        await late.send(blocks(3))
        assert (await late.answer(lambda a: True)).stale_epoch
        assert await late.call.read() is grpc.aio.EOF
        match = await stub_of(channel).Match(pb.MatchRequest(block_hashes=blocks(3)))
        assert not match.engines


async def test_bad_input_is_refused_by_its_field(start_kvcache, redis_url, publisher):
    service = start_kvcache(redis_url).wait_ready()
    async with service.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub_of(channel).Match(pb.MatchRequest(block_hashes=b"abc"))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "block_hashes" in (raised.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub_of(channel).Match(pb.MatchRequest(block_hashes=bytes(16 * 65_537)))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream = publisher(channel)
        await stream.send(b"short")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.answer(lambda a: False)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream = publisher(channel, "a")
        await stream.send()
        stream.engine = "b"
        await stream.send()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.answer(lambda a: False)
        assert "engine_id" in (raised.value.details() or "")
        assert (await stub_of(channel).Match(pb.MatchRequest())).known


async def test_only_members_of_the_fleet_may_call(start_kvcache, redis_url, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    service = start_kvcache(redis_url, fleet_token_file=token).wait_ready()
    async with service.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub_of(channel).Stats(pb.StatsRequest())
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        member = rpc.Membership(token="secret")
        await stub_of(channel).Stats(pb.StatsRequest(), metadata=member.metadata)


async def test_sigterm_ends_open_streams_and_exits_with_0(
    start_kvcache, redis_url, blocks, publisher
):
    service = start_kvcache(redis_url).wait_ready()
    async with service.channel() as channel:
        stream = publisher(channel)
        await stream.send(blocks(1))
        await stream.answer(lambda a: a.acked_sequence == 1)
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.answer(lambda a: False)
    assert service.process.wait(10) == 0, service.log


async def test_a_killed_service_loses_nothing(start_kvcache, redis_url, blocks, publisher):
    first = start_kvcache(redis_url).wait_ready()
    async with first.channel() as channel:
        stream = publisher(channel)
        await stream.send(blocks(1))
        await stream.answer(lambda a: a.acked_sequence == 1)
    first.process.kill()
    second = start_kvcache(redis_url).wait_ready()
    async with second.channel() as channel:
        again = publisher(channel)
        again.sequence = stream.sequence
        await again.send(blocks(2))
        answer = await again.answer(lambda a: True)
        assert (answer.acked_sequence, answer.need_snapshot) == (2, False)
        match = await stub_of(channel).Match(pb.MatchRequest(block_hashes=blocks(1, 2)))
        assert match.engines[0].matched_blocks == 2


class _Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return otlp.ExportTraceServiceResponse()


async def test_a_match_is_a_span_of_the_callers_trace(start_kvcache, redis_url, blocks):
    collector = _Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    service = start_kvcache(redis_url, otlp_endpoint=f"http://127.0.0.1:{port}").wait_ready()
    async with service.channel() as channel:
        trace_id, parent = "ab" * 16, "cd" * 8
        metadata = (
            ("traceparent", f"00-{trace_id}-{parent}-01"),
            (rpc.REQUEST_ID_KEY, "request-1"),
        )
        await stub_of(channel).Match(pb.MatchRequest(block_hashes=blocks(1)), metadata=metadata)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(10) == 0
    server.stop(None).wait()
    (span,) = [span for span in collector.spans if span.name == "match"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent)
    attributes = {a.key: a.value for a in span.attributes}
    assert attributes["inferfleet.request_id"].string_value == "request-1"
    assert attributes["inferfleet.match.known"].bool_value


def test_a_cluster_is_refused_with_the_reason(start_kvcache, start_redis):
    server = start_redis(settings={"cluster-enabled": "yes"})
    service = start_kvcache(server.url)
    assert service.process.wait(20) == 2
    assert "cluster mode" in service.log
    assert "single primary" in service.log


def test_a_password_in_the_url_is_refused(start_kvcache):
    service = start_kvcache("redis://user:secret@127.0.0.1:1/0")
    assert service.process.wait(20) == 2
    assert "redis_password_file" in service.log
    assert service.log.startswith("python -m services.kvcache: redis:")


def test_help_teaches(tmp_path):
    import sys

    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "services.kvcache", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--redis-password-file" in done.stdout
    assert time.monotonic() - began < 30
