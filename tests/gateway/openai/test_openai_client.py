"""What the openai package's own suite asks of each endpoint that is served, with both clients.

Its suite calls every method with the required and with all parameters, raw, as a streaming response
and with wrong path parameters. Parameters that docs/openai.md refuses are left out here;
test_surface.py tests their refusals, test_openai_helpers.py `parse`, `stream` and tools.
"""

import asyncio
import operator

import openai
import pytest

from services.common import errors

MODEL = "tiny"
MESSAGES = [
    {"role": "developer", "content": "Be brief.", "name": "owner"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
]
ALL_SHARED = {
    "frequency_penalty": -2,
    "logit_bias": {"65": 0},
    "n": 1,
    "presence_penalty": -2,
    "seed": -9007199254740991,
    "stop": "\n",
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "temperature": 1,
    "top_p": 1,
    "user": "user-1234",
}
ALL_CHAT = {
    **ALL_SHARED,
    "logprobs": True,
    "max_completion_tokens": 8,
    "metadata": {"foo": "string"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": "safe",
    "service_tier": "auto",
    "store": True,
    "tool_choice": "none",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "name",
                "description": "description",
                "parameters": {"foo": "bar"},
                "strict": False,
            },
        }
    ],
    "top_logprobs": 0,
    "extra_headers": {"X-Anything": "1"},
    "extra_query": {"anything": "1"},
}
ALL_COMPLETION = {**ALL_SHARED, "best_of": 1, "echo": True, "logprobs": 0, "max_tokens": 8}


@pytest.fixture(autouse=True)
def long_context(engine):
    engine.max_model_len = 8192


@pytest.fixture
async def call(gateway):
    """Call a function of the blocking client in a thread."""
    base = f"http://{gateway.http}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield lambda act: asyncio.to_thread(act, client)


def without_streaming(fields):
    return {name: value for name, value in fields.items() if name != "stream_options"}


class TestCreate:
    async def test_chat_with_the_required_and_with_all_parameters(self, client, engine):
        for fields in ({}, without_streaming(ALL_CHAT)):
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
            (choice,) = answer.choices
            assert choice.message.role == "assistant"
            assert engine.reply.startswith(choice.message.content)
            assert answer.object == "chat.completion"
            assert answer.usage.total_tokens > 0
        assert answer.choices[0].logprobs.content

    async def test_chat_streamed_with_all_parameters(self, client):
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, **ALL_CHAT
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].usage.total_tokens > 0

    @pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [97, 98], [[97], [98]]])
    async def test_completions_with_all_parameters(self, client, prompt):
        for fields in ({}, without_streaming(ALL_COMPLETION)):
            answer = await client.completions.create(model=MODEL, prompt=prompt, **fields)
            assert answer.object == "text_completion"
            assert answer.choices[0].finish_reason in ("stop", "length")
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, stream=True, **ALL_COMPLETION
        )
        assert [chunk async for chunk in stream][-1].usage.total_tokens > 0

    async def test_the_blocking_client(self, call, engine):
        answer = await call(lambda c: c.chat.completions.create(model=MODEL, messages=MESSAGES))
        assert answer.choices[0].message.content == engine.reply
        texts = await call(
            lambda c: [
                chunk.choices[0].text
                for chunk in c.completions.create(model=MODEL, prompt="ab", stream=True)
            ]
        )
        assert "".join(texts) == engine.reply


CHAT = {"model": MODEL, "messages": MESSAGES}
COMPLETION = {"model": MODEL, "prompt": "ab"}
METHODS = {
    "chat.completion": ("chat.completions.{}.create", CHAT),
    "chat.completion.chunk": ("chat.completions.{}.create", {**CHAT, "stream": True}),
    "text_completion": ("completions.{}.create", COMPLETION),
    "text_completion of a stream": ("completions.{}.create", {**COMPLETION, "stream": True}),
    "list": ("models.{}.list", {}),
    "model": ("models.{}.retrieve", {"model": MODEL}),
}


def method(client, form, wanted):
    path, fields = METHODS[wanted]
    return operator.attrgetter(path.format(form))(client), fields


async def kind_of(parsed):
    """The `object` of an answer, or of every event of a stream."""
    if not isinstance(parsed, openai.AsyncStream):
        return parsed.object
    (kind,) = {chunk.object async for chunk in parsed}
    return kind


class TestRaw:
    async def test_raw_responses(self, client):
        for wanted in METHODS:
            create, fields = method(client, "with_raw_response", wanted)
            raw = await create(**fields)
            assert raw.http_request.headers["x-stainless-lang"] == "python"
            assert raw.retries_taken == 0
            assert await kind_of(raw.parse()) == wanted.split()[0]
            assert raw.request_id == raw.headers.get("x-request-id")
            assert raw.request_id or not fields or wanted == "model"

    async def test_streaming_responses_are_closed_after_use(self, client):
        for wanted in METHODS:
            create, fields = method(client, "with_streaming_response", wanted)
            async with create(**fields) as response:
                assert not response.is_closed
                assert await kind_of(await response.parse()) == wanted.split()[0]
            assert response.is_closed

    async def test_the_blocking_client(self, call):
        for wanted, (path, fields) in METHODS.items():
            if "stream" in fields:
                continue
            raw = await call(
                lambda c, path=path, fields=fields: operator.attrgetter(
                    path.format("with_raw_response")
                )(c)(**fields)
            )
            assert raw.is_closed
            assert raw.parse().object == wanted

    async def test_the_answer_names_its_request(self, client):
        answer = await client.chat.completions.create(**CHAT, extra_headers={"X-Request-Id": "me"})
        assert answer._request_id == "me"

    async def test_the_lines_of_a_stream(self, client):
        create = client.chat.completions.with_streaming_response.create
        async with create(**CHAT, stream=True) as response:
            lines = [line async for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"

    async def test_a_stream_that_is_left_ends_at_the_engine(self, client, engine, scripts):
        engine.script = scripts["hold"]
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await engine.wait_for(lambda: engine.running == 0)


class TestHistory:
    async def test_an_answer_goes_back_into_the_conversation(self, client, engine):
        first = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        message = first.choices[0].message
        for said in (message, message.model_dump(), {**message.model_dump(), "parsed": None}):
            again = await client.chat.completions.create(
                model=MODEL, messages=[*MESSAGES, said, {"role": "user", "content": "more"}]
            )
            assert again.choices[0].message.content == engine.reply


class TestModels:
    async def test_list_and_retrieve(self, client, call):
        page = await client.models.list()
        assert page.object == "list"
        assert [model.id async for model in page] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "inferfleet"
        raw = await client.models.with_raw_response.list()
        assert raw.parse().data[0].id == MODEL
        assert [model.id for model in await call(lambda c: c.models.list())] == [MODEL]

    async def test_an_empty_name_never_leaves_the_client(self, client):
        with pytest.raises(ValueError, match="non-empty"):
            await client.models.retrieve("")

    async def test_models_cannot_be_deleted(self, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.models.delete(MODEL)
        assert (caught.value.status_code, caught.value.code) == (405, "method_not_allowed")


class TestStoredChats:
    """Nothing is stored (docs/openai.md), so nothing can be listed or fetched."""

    async def test_they_are_refused(self, client):
        stored = client.chat.completions
        for act in (stored.retrieve("c"), stored.delete("c"), stored.update("c", metadata={})):
            with pytest.raises(openai.NotFoundError):
                await act
        with pytest.raises(openai.APIStatusError) as caught:
            await stored.list()
        assert caught.value.status_code == 405


class TestErrors:
    async def test_each_class(self, client, engine, scripts):
        for error, kind in (
            (errors.InvalidArgumentError("bad"), openai.BadRequestError),
            (errors.FailedPreconditionError("no"), openai.BadRequestError),
            (errors.PermissionDeniedError("no"), openai.PermissionDeniedError),
            (errors.NotFoundError("no"), openai.NotFoundError),
            (errors.AlreadyExistsError("twice"), openai.ConflictError),
            (errors.ResourceExhaustedError("full"), openai.RateLimitError),
            (errors.InternalError("bug"), openai.InternalServerError),
            (errors.UnavailableError("none"), openai.InternalServerError),
            (errors.DeadlineExceededError("late"), openai.InternalServerError),
        ):
            engine.script = scripts["fail"](error)
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.completions.create(**COMPLETION, stream=stream)
                assert type(caught.value) is kind, error
                assert caught.value.code == error.reason.lower()
                assert caught.value.request_id
                assert error.message in caught.value.message

    async def test_nobody_answers(self):
        async with openai.AsyncOpenAI(
            base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()


class TestRetries:
    @pytest.fixture(autouse=True)
    def no_waiting(self, monkeypatch):
        base = openai._base_client.BaseClient
        monkeypatch.setattr(base, "_calculate_retry_timeout", lambda *_: 0.01)

    @pytest.mark.parametrize(
        ("error", "asked"),
        [
            (errors.ResourceExhaustedError("full", retry_after_s=1), 3),
            (errors.UnavailableError("none", retry_after_s=1), 3),
            (errors.InternalError("bug"), 1),
            (errors.InvalidArgumentError("bad"), 1),
            (errors.DeadlineExceededError("late"), 1),
        ],
    )
    async def test_the_client_repeats_what_may_succeed(self, client, engine, scripts, error, asked):
        engine.script = scripts["fail"](error)
        with pytest.raises(openai.APIStatusError):
            await client.with_options(max_retries=2).completions.create(**COMPLETION)
        assert len({request.request.request_id for request in engine.requests}) == asked

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_second_time_it_is_answered(self, client, engine, scripts, stream):
        fail = scripts["fail"](errors.UnavailableError("none", retry_after_s=1))

        async def fail_once(request, double):
            events = (fail if len(double.requests) == 1 else scripts["hello"])(request, double)
            async for event in events:
                yield event

        engine.script = fail_once
        create = client.with_options(max_retries=2).completions.with_raw_response.create
        raw = await create(**COMPLETION, stream=stream)
        assert raw.retries_taken == 1
        assert raw.http_request.headers["x-stainless-retry-count"] == "1"
        assert await kind_of(raw.parse()) == "text_completion"

    async def test_a_client_that_gives_up_ends_the_request(self, client, engine, scripts):
        engine.script = scripts["hold"]
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).completions.create(**COMPLETION)
        await engine.wait_for(lambda: engine.running == 0)

    async def test_a_stream_that_stands_still_times_out(self, client, engine, scripts):
        engine.script = scripts["hold"]
        stream = await client.completions.create(**COMPLETION, stream=True, timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            async for _ in stream:
                pass
        await engine.wait_for(lambda: engine.running == 0)
