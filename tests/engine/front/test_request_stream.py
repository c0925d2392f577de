"""How a request ends, by what its reader has already got."""

import asyncio

import pytest

from services.common.errors import (
    AbortedError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.contract.messages import ChoiceOutput
from services.engine.contract.sampling_params import SamplingParams
from services.engine.front.request_stream import RequestStream
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, ModelFacts

FACTS = ModelFacts("tiny", "r", "n", vocab_size=259, max_model_len=64, engine_id="e")
TOKENS = Tokenizer(byte_assets())


def stream(buffer_tokens=100, **parts):
    request = AcceptedRequest("r", [65, 66], SamplingParams(seed=1), **parts)
    return RequestStream("k", request, FACTS, TOKENS, RequestTimes(), buffer_tokens=buffer_tokens)


def output(text, end=None):
    return ChoiceOutput("k", 0, list(text.encode()), end)


def kinds(events):
    return [event.WhichOneof("event") for event in events]


async def test_what_the_reader_has_not_taken_joins():
    made = stream()
    for char in "abc":
        made.add(output(char))
    started, delta = await made.take()
    assert started.WhichOneof("event") == "started"
    assert delta.delta.text == "abc"
    made.add(output("d", "MAX_TOKENS"))
    assert kinds(await made.take()) == ["delta", "finished", "summary"]
    assert await made.take() == []


async def test_an_engine_that_breaks_before_the_first_event_was_taken_sends_none():
    made = stream()
    made.add(output("abc"))
    made.breaks(UnavailableError, "gone", "CORE_DIED")
    with pytest.raises(UnavailableError) as caught:
        await made.take()
    assert caught.value.reason == "CORE_DIED"
    assert caught.value.retry_after_s is not None


async def test_one_that_breaks_later_gives_what_it_has_and_then_the_counts():
    made = stream()
    made.add(output("a"))
    await made.take()
    made.add(output("bc"))
    made.breaks(UnavailableError, "gone", "CORE_DIED")
    made.add(output("never"))
    (event,) = await made.take()
    assert event.delta.text == "bc"
    with pytest.raises(AbortedError) as caught:
        await made.take()
    assert caught.value.metadata == {"prompt_tokens": "2", "completion_tokens": "3"}


async def test_a_slow_reader_s_backlog_is_dropped_with_its_status():
    made = stream(buffer_tokens=3)
    made.add(output("a"))
    await made.take()
    made.add(output("bcd"))
    assert made.error is None
    made.add(output("e"))
    with pytest.raises(ResourceExhaustedError):
        await made.take()


async def test_the_first_error_counts_and_none_after_the_end():
    made = stream()
    waiting = asyncio.ensure_future(made.take())
    await asyncio.sleep(0)
    made.fail(InternalError("first"))
    made.fail(UnavailableError("second"))
    with pytest.raises(InternalError, match="first"):
        await waiting
    made = stream()
    made.add(output("a", "MAX_TOKENS"))
    made.fail(UnavailableError("too late"))
    assert kinds(await made.take())[-1] == "summary"


async def test_the_interval_holds_back_and_the_end_releases():
    made = stream(stream_interval=3)
    waiting = asyncio.ensure_future(made.take())
    made.add(output("ab"))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.add(output("c"))
    assert (await waiting)[1].delta.text == "abc"
    made.add(output("d", "MAX_TOKENS"))
    assert (await made.take())[0].delta.text == "d"


async def test_marks_show_to_who_asked_and_the_end_to_nobody():
    """Also after a continuation, which counts the text as it was shown."""
    begin, end = 257, 258
    for shown, text in ((frozenset({begin, end}), "a<|im_start|>b"), (frozenset(), "ab")):
        made = stream(shown_token_ids=shown)
        made.add(ChoiceOutput("k", 0, [97, begin], None))
        made.add(ChoiceOutput("k", 0, [98, end], "EOS"))
        events = await made.take()
        assert events[1].delta.text == text
        carried = stream(
            shown_token_ids=shown,
            continued=((97, begin),),
            sent_text_bytes=(len(text) - 1,),
        )
        carried.add(ChoiceOutput("k", 0, [98, end], "EOS"))
        assert (await carried.take())[1].delta.text == "b"
