"""The Engine service over real sockets, with a core that says what the test wants."""

import asyncio

import grpc
import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common import errors, rpc
from services.common.text import TextAssets
from services.engine.contract.messages import (
    AbortRequest,
    AddRequest,
    Load,
    RequestFailure,
    TokenLogprobs,
)


async def take(call, kind):
    """Events up to the first of a kind, which comes last."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
        if event.WhichOneof("event") == kind:
            return events
    raise AssertionError(f"no {kind}")


def text_of(events):
    return "".join(event.delta.text for event in events)


def ids_of(events):
    return [token_id for event in events for token_id in event.delta.token_ids]


async def whole(call):
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole(call)
    return errors.error_of(caught.value)


async def test_a_stream_from_start_to_summary(front, run_request, out):
    call = front.engine.Run(run_request(sampling=inference_pb2.SamplingParams(seed=7)))
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "Pa", num_cached_tokens=2))
    first = await take(call, "delta")
    front.core.say(out(key, "ris"))
    front.core.say(out(key, [258], "EOS", matched_token_id=258))
    events = first + await take(call, "summary")

    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:2] == ["started", "delta"]
    assert kinds[-2:] == ["finished", "summary"]
    started = events[0].started
    assert (started.request_id, started.model, started.model_revision) == (
        "r-1",
        "tiny",
        "sha256:0123",
    )
    assert (started.prompt_tokens, started.cached_tokens, started.seed) == (3, 2, 7)
    assert started.engine_id == "engine-under-test"
    assert text_of(events) == "Paris"
    assert ids_of(events) == [*b"Paris", 258]
    assert events[-2].finished.reason == inference_pb2.FINISH_REASON_EOS
    usage = events[-1].summary.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 2, 6)
    assert await call.read() is grpc.aio.EOF
    sent = dict(await call.initial_metadata())
    assert sent[rpc.ENGINE_ID_KEY] == "engine-under-test"
    assert sent[rpc.REQUEST_ID_KEY] == "r-1"
    assert not [m for m in front.core.received if isinstance(m, AbortRequest)]


async def test_nothing_is_sent_before_the_first_token(front, run_request, out):
    call = front.engine.Run(run_request())
    key = (await front.core.got(AddRequest)).request_key
    reading = asyncio.ensure_future(call.read())
    front.core.say(load=Load(waiting_requests=1))
    done, _ = await asyncio.wait({reading}, timeout=0.2)
    assert not done
    front.core.say(out(key, "x"))
    assert (await reading).WhichOneof("event") == "started"


async def test_a_stop_string_ends_the_request_in_the_core_at_once(front, run_request, out):
    stop = inference_pb2.StopParams(stop_strings=["</s>", "QR"])
    call = front.engine.Run(run_request(stop=stop))
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "ab<"))
    front.core.say(out(key, "/s>never"))
    assert (await front.core.got(AbortRequest)).request_key == key
    events = await take(call, "summary")
    assert text_of(events) == "ab"
    assert bytes(ids_of(events)) == b"ab</s>"
    assert events[-2].finished.stop_string == "</s>"
    assert events[-1].summary.usage.completion_tokens == 6


async def test_logprobs_carry_exact_bytes(front, run_request, out):
    wanted = inference_pb2.ResponseOptions(logprobs=True, top_logprobs=1, prompt_logprobs=True)
    call = front.engine.Run(run_request(response=wanted))
    key = (await front.core.got(AddRequest)).request_key
    entries = [TokenLogprobs(0xC3, -0.5, [(0xC4, -0.25)]), TokenLogprobs(0xA9, -1.0, [])]
    prompt = [TokenLogprobs(66, -2.0, []), TokenLogprobs(67, -3.0, [])]
    front.core.say(out(key, [0xC3, 0xA9], "MAX_TOKENS", logprobs=entries, prompt_logprobs=prompt))
    events = await take(call, "summary")
    started = events[0].started
    assert [entry.token_id for entry in started.prompt_logprobs] == [65, 66, 67]
    assert not started.prompt_logprobs[0].HasField("logprob")
    assert started.prompt_logprobs[2].logprob == -3.0
    (delta,) = [event.delta for event in events if event.HasField("delta")]
    assert delta.text == "é"
    assert [entry.token for entry in delta.logprobs] == [b"\xc3", b"\xa9"]
    assert delta.logprobs[0].top[0].token == b"\xc4"


async def test_echo_no_text_and_interval(front, run_request, out):
    echo = inference_pb2.ResponseOptions(echo=True, stream_interval=3)
    call = front.engine.Run(run_request("a", response=echo))
    key = (await front.core.got(AddRequest)).request_key
    for char in "wxyz":
        front.core.say(out(key, char, "MAX_TOKENS" if char == "z" else None))
    events = await take(call, "summary")
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert deltas[0].text.startswith("ABCwxy")
    assert all(delta.num_tokens >= 3 for delta in deltas[:-1])
    assert text_of(events) == "ABCwxyz"

    silent = inference_pb2.ResponseOptions(no_text=True, echo=True)
    call = front.engine.Run(run_request("b", response=silent))
    key = (await front.core.got(AddRequest, 2)).request_key
    front.core.say(out(key, "hi", "MAX_TOKENS"))
    events = await take(call, "summary")
    assert not any(event.delta.HasField("text") for event in events)
    assert bytes(ids_of(events)) == b"hi"


async def test_several_choices_end_one_by_one(front, run_request, out):
    request = run_request(
        sampling=inference_pb2.SamplingParams(n=2),
        stop=inference_pb2.StopParams(stop_strings=["!"]),
    )
    call = front.engine.Run(request)
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "a!b", choice=1), out(key, "c", choice=0))
    abort = await front.core.got(AbortRequest)
    assert (abort.request_key, abort.choice) == (key, 1)
    front.core.say(out(key, "late", choice=1), out(key, "d", "MAX_TOKENS", choice=0))
    events = await take(call, "summary")
    texts = dict.fromkeys((0, 1), "")
    for event in events:
        texts[event.delta.choice] += event.delta.text
    assert texts == {0: "cd", 1: "a"}
    assert {e.finished.choice for e in events if e.HasField("finished")} == {0, 1}
    assert events[-1].summary.usage.completion_tokens == 4
    assert len([m for m in front.core.received if isinstance(m, AbortRequest)]) == 1


async def test_a_continued_stream_says_nothing_twice(front, run_request, out):
    request = run_request(stop=inference_pb2.StopParams(stop_strings=["cde"]))
    # The first engine sent "ab" and held "c" back.
    request.continuation.choices.add(index=0, token_ids=list(b"abc"))
    call = front.engine.Run(request)
    added = await front.core.got(AddRequest)
    assert added.request.continued == (tuple(b"abc"),)
    front.core.say(out(added.request_key, "dx", "MAX_TOKENS"))
    events = await take(call, "summary")
    assert text_of(events) == "cdx"
    assert bytes(ids_of(events)) == b"dx"
    assert events[-1].summary.usage.completion_tokens == 5


async def test_a_client_that_leaves_ends_its_request_in_the_core(front, run_request, out):
    for index, moment in enumerate(("queued", "streaming")):
        call = front.engine.Run(run_request(f"r{index}"))
        key = (await front.core.got(AddRequest, index + 1)).request_key
        if moment == "streaming":
            front.core.say(out(key, "x"))
            await take(call, "delta")
        call.cancel()
        abort = await front.core.got(AbortRequest, index + 1)
        assert abort.request_key == key


async def test_a_deadline_reaches_the_core_and_ends_the_request(front, run_request):
    call = front.engine.Run(run_request(), timeout=0.3)
    added = await front.core.got(AddRequest)
    assert added.deadline_unix_s is not None
    error = await refused(call)
    assert isinstance(error, errors.DeadlineExceededError)
    await front.core.got(AbortRequest)
    call = front.engine.Run(run_request())
    assert (await front.core.got(AddRequest, 2)).deadline_unix_s is None
    call.cancel()


async def test_a_failure_of_the_core_is_a_status(front, run_request):
    call = front.engine.Run(run_request())
    key = (await front.core.got(AddRequest)).request_key
    failure = RequestFailure(key, "RESOURCE_EXHAUSTED", "QUEUE_FULL", "no room")
    front.core.say(failures=[failure], load=Load(drain_requests_per_s=2.0))
    error = await refused(call)
    assert isinstance(error, errors.ResourceExhaustedError)
    assert error.reason == "QUEUE_FULL"
    assert error.retry_after_s is not None
    assert not [m for m in front.core.received if isinstance(m, AbortRequest)]


async def test_a_failure_names_its_field_once(front, run_request):
    call = front.engine.Run(run_request())
    key = (await front.core.got(AddRequest)).request_key
    field = "constraint.ebnf"
    failure = RequestFailure(key, "INVALID_ARGUMENT", "", f"{field}: no rule", field)
    front.core.say(failures=[failure])
    error = await refused(call)
    assert error.message == "constraint.ebnf: no rule"
    assert error.violations == (errors.Violation(field, "no rule"),)


async def test_a_duplicate_id_is_refused_and_a_higher_attempt_replaces(front, run_request, out):
    first = front.engine.Run(run_request("same", attempt=1))
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "x"))
    await take(first, "delta")
    for attempt in (0, 1):
        error = await refused(front.engine.Run(run_request("same", attempt=attempt)))
        assert isinstance(error, errors.AlreadyExistsError)
    other_tenant = run_request("same")
    other_tenant.tenant = "someone"
    other = front.engine.Run(other_tenant)
    await front.core.got(AddRequest, 2)
    second = front.engine.Run(run_request("same", attempt=2))
    added = await front.core.got(AddRequest, 3)
    assert (await front.core.got(AbortRequest)).request_key == key
    assert isinstance(await refused(first), errors.AbortedError)
    front.core.say(out(added.request_key, "y", "MAX_TOKENS"))
    assert text_of(await take(second, "summary")) == "y"
    other.cancel()


async def test_a_reader_that_stops_is_cut_off_and_delays_nobody(start_front, run_request, out):
    front = await start_front(stream_buffer_tokens=2500)
    slow = front.engine.Run(run_request("slow"))
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "x"))
    await take(slow, "delta")
    quick = front.engine.Run(run_request("quick"))
    quick_key = (await front.core.got(AddRequest, 2)).request_key
    # The slow reader never reads; its window fills and its buffer after it.
    async with asyncio.timeout(30):
        while not [m for m in front.core.received if isinstance(m, AbortRequest)]:
            front.core.say(out(key, "y" * 1000), out(quick_key, "z"))
            await take(quick, "delta")
    front.core.say(out(quick_key, "!", "MAX_TOKENS"))
    assert text_of(await take(quick, "summary")).endswith("!")
    error = await refused(slow)
    assert isinstance(error, errors.ResourceExhaustedError)
    assert error.reason == "READER_TOO_SLOW"


async def test_the_core_s_death_ends_streams_by_what_they_had_sent(front, run_request, out):
    waiting = front.engine.Run(run_request("waiting"))
    await front.core.got(AddRequest)
    running = front.engine.Run(run_request("running"))
    key = (await front.core.got(AddRequest, 2)).request_key
    front.core.say(out(key, "xyz"))
    await take(running, "delta")
    front.core.die("killed by SIGKILL")
    assert isinstance(await refused(waiting), errors.UnavailableError)
    error = await refused(running)
    assert isinstance(error, errors.AbortedError)
    assert error.metadata == {"prompt_tokens": "3", "completion_tokens": "3"}
    async with asyncio.timeout(10):
        assert await front.server.failed() == "killed by SIGKILL"
    assert isinstance(await refused(front.engine.Run(run_request())), errors.UnavailableError)


async def test_malformed_bytes_and_a_message_too_large_disturb_nobody(front, run_request, out):
    stream = front.engine.Run(run_request("steady"))
    key = (await front.core.got(AddRequest)).request_key
    raw = front.channel.unary_stream("/inferfleet.internal.v1.Engine/Run")
    error = await refused(raw(b"\xff\xff\xff"))
    assert isinstance(error, errors.InvalidArgumentError)
    assert error.reason == "MALFORMED_MESSAGE"
    error = await refused(raw(b"\0" * (rpc.MAX_RECEIVE_BYTES + 1)))
    assert isinstance(error, errors.ResourceExhaustedError)
    big = run_request("big", ids=[1] * 1_200_000)
    error = await refused(front.engine.Run(big))
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    front.core.say(out(key, "fine", "MAX_TOKENS"))
    assert text_of(await take(stream, "summary")) == "fine"


async def test_bad_input_names_its_field(front, run_request):
    bad = run_request(sampling=inference_pb2.SamplingParams(temperature=-1))
    error = await refused(front.engine.Run(bad))
    assert [violation.field for violation in error.violations] == ["sampling.temperature"]
    unknown = run_request()
    unknown.request.model = "other"
    assert isinstance(await refused(front.engine.Run(unknown)), errors.NotFoundError)
    assert not [m for m in front.core.received if isinstance(m, AddRequest)]


async def test_abort_by_the_fleet(front, run_request):
    call = front.engine.Run(run_request("gone"))
    await front.core.got(AddRequest)
    answer = await front.engine.Abort(
        engine_pb2.AbortRequest(tenant="", request_ids=["gone", "unknown"])
    )
    assert answer.aborted == 1
    await front.core.got(AbortRequest)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)) as caught:
        await call.read()
    assert call.code is not None
    assert "CANCELLED" in str(getattr(caught.value, "code", lambda: "CANCELLED")())


async def test_info_and_tokenizer(front):
    info = await front.engine.GetInfo(engine_pb2.GetInfoRequest())
    assert (info.engine_id, info.model, info.vocab_size) == ("engine-under-test", "tiny", 259)
    assert info.address == front.server.address
    chunks = front.engine.GetTokenizer(engine_pb2.GetTokenizerRequest())
    assets = await TextAssets.from_chunks(chunks)
    assert assets.digest == info.tokenizer_digest
    wrong = engine_pb2.GetTokenizerRequest(digest="sha256:other")
    assert isinstance(await refused(front.engine.GetTokenizer(wrong)), errors.NotFoundError)


async def test_the_map_of_experts_in_use_is_named(front, run_request, out):
    front.core.say(placement_version=7)
    watch = front.engine.WatchLoad(engine_pb2.WatchLoadRequest())
    while (await watch.read()).placement_version != 7:
        pass
    watch.cancel()
    info = await front.engine.GetInfo(engine_pb2.GetInfoRequest())
    assert info.placement_version == 7
    call = front.engine.Run(run_request())
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "x", "MAX_TOKENS"), placement_version=7)
    await take(call, "summary")
    spans = await front.spans.by_name(1)
    assert spans["run"].attributes["inferfleet.placement_version"] == 7


async def test_watch_load(front):
    call = front.engine.WatchLoad(engine_pb2.WatchLoadRequest())
    first = await call.read()
    assert (first.engine_id, first.running_requests) == ("engine-under-test", 0)
    front.core.say(load=Load(running_requests=3, held_blocks=5, total_blocks=32))
    async with asyncio.timeout(10):
        while (report := await call.read()).running_requests != 3:
            pass
    assert (report.held_blocks, report.total_blocks) == (5, 32)
    assert report.sequence > first.sequence
    call.cancel()


async def test_drain_lets_streams_end_and_refuses_new_ones(front, run_request, out):
    running = front.engine.Run(run_request("running"))
    key = (await front.core.got(AddRequest)).request_key
    watch = front.engine.WatchLoad(engine_pb2.WatchLoadRequest())
    await watch.read()
    draining = asyncio.ensure_future(front.engine.Drain(engine_pb2.DrainRequest(grace_s=20)))
    async with asyncio.timeout(10):
        while not (await watch.read()).draining:
            pass
    error = await refused(front.engine.Run(run_request("new")))
    assert isinstance(error, errors.UnavailableError)
    assert error.reason == "DRAINING"
    front.core.say(out(key, "end", "MAX_TOKENS"))
    assert text_of(await take(running, "summary")) == "end"
    answer = await draining
    assert (answer.streams_ended, answer.streams_aborted) == (1, 0)
    info = await front.engine.GetInfo(engine_pb2.GetInfoRequest())
    assert info.draining
    watch.cancel()


async def test_drain_ends_what_outlives_the_grace(front, run_request, out):
    waiting = front.engine.Run(run_request("waiting"))
    await front.core.got(AddRequest)
    running = front.engine.Run(run_request("running"))
    key = (await front.core.got(AddRequest, 2)).request_key
    front.core.say(out(key, "x"))
    await take(running, "delta")
    answer = await front.engine.Drain(engine_pb2.DrainRequest(grace_s=0.05))
    assert (answer.streams_ended, answer.streams_aborted) == (0, 2)
    assert isinstance(await refused(waiting), errors.UnavailableError)
    assert isinstance(await refused(running), errors.AbortedError)
    await front.core.got(AbortRequest, 2)
