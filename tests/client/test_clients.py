"""`Client` and `AsyncClient` against a real gateway."""

import asyncio
import subprocess
import sys

import pytest

import inferfleet
from inferfleet import AsyncClient, Client, Delta, Finished, InferfleetError, Started, Summary
from inferfleet.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from inferfleet.requests import build_request
from services.common import errors
from tests.doubles.scripts import fail_with, hold_after_first

HI = [{"role": "user", "content": "hi"}]
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
async def client(gateway):
    async with AsyncClient(gateway.address) as client:
        yield client


class TestAsyncClient:
    async def test_events(self, client, engine):
        stream = await client.generate("ab", max_tokens=3, seed=4, traceparent=TRACE)
        started, *deltas, finished, summary = [event async for event in stream]
        assert [type(e) for e in (started, finished, summary)] == [Started, Finished, Summary]
        assert all(isinstance(delta, Delta) for delta in deltas)  # one or two: they may be joined
        assert started.seed == 4
        assert "".join(delta.text for delta in deltas) == "Hé"
        assert [token for delta in deltas for token in delta.token_ids] == [72, 0xC3, 0xA9]
        assert finished.reason == "MAX_TOKENS"
        assert summary.usage.completion_tokens == 3
        ids = await stream.ids()
        assert ids.request_id == started.request_id
        assert (ids.trace_id, ids.engine_id) == (TRACE.split("-")[1], "engine-1")

    async def test_texts_and_the_whole(self, client, engine):
        stream = await client.generate(messages=HI)
        assert "".join([text async for text in stream.texts()]) == engine.reply
        answer = await client.complete(token_ids=[65], n=2, logprobs=True, top_logprobs=1)
        assert answer.text == engine.reply
        assert len(answer.choices) == 2
        assert answer.choices[0].logprobs[0].top[0].token_id == 65

    async def test_calls_of_tools(self, roomy_gateway, engine):
        called = '{"name": "f", "arguments": {"a": 1}}'
        engine.reply = f"<tool_call>{called}</tool_call>"
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}
        arguments = {"messages": HI, "tools": [tool], "parallel_tool_calls": False}
        openai_s = {**arguments, "tools": [{"type": "function", "function": tool}]}
        async with AsyncClient(roomy_gateway.address) as client:
            for form in (arguments, openai_s):
                answer = await client.complete(**form, tool_choice="f")
                (call,) = answer.choices[0].tool_calls
                assert (call.index, call.name, call.arguments) == (0, "f", '{"a": 1}')
                tag = engine.requests[-1].request.constraint.structural_tag
                assert '"properties": {"b": {}, "a": {}}' in tag
            stream = await client.generate(**arguments, tool_choice="auto")
            pieces = [e.tool_call for e in [event async for event in stream] if type(e) is Delta]
        pieces = [piece for piece in pieces if piece is not None]
        assert [piece.name for piece in pieces if piece.id] == ["f"]
        assert "".join(piece.arguments for piece in pieces) == '{"a": 1}'

    async def test_text_and_models(self, client):
        (model,) = await client.models()
        assert model.name == "tiny"
        tokens = await client.tokenize(messages=HI)
        assert tokens.rendered.startswith("<|im_start|>user\nhi")
        assert await client.detokenize(tokens.token_ids, keep_special_tokens=True) == (
            tokens.rendered
        )

    async def test_errors_have_the_details_of_the_server(self, client, engine):
        with pytest.raises(InvalidArgumentError) as caught:
            await client.complete("x", temperature=3.0)
        assert caught.value.violations[0].field == "sampling.temperature"
        assert len(caught.value.trace_id) == 32
        assert caught.value.request_id.startswith("req-")
        with pytest.raises(NotFoundError) as caught:
            await client.complete("x", model="gpt")
        assert caught.value.reason == "MODEL_NOT_FOUND"
        full = errors.ResourceExhaustedError("full", retry_after_s=2.5, metadata={"a": "b"})
        engine.script = fail_with(full, after=1)
        stream = await client.generate("x")
        with pytest.raises(ResourceExhaustedError) as caught:
            async for _ in stream:
                pass
        assert (caught.value.retry_after_s, caught.value.metadata) == (2.5, {"a": "b"})

    async def test_leaving_early_cancels(self, client, engine):
        engine.script = hold_after_first
        async with await client.generate("x") as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        await engine.wait_for(lambda: engine.running == 0 and engine.cancelled == 1)

    async def test_a_deadline(self, client, engine):
        engine.script = hold_after_first
        with pytest.raises(InferfleetError) as caught:
            await client.complete("x", timeout_s=0.3)
        assert caught.value.status == "DEADLINE_EXCEEDED"
        await engine.wait_for(lambda: engine.running == 0)

    async def test_no_server_there(self):
        async with AsyncClient("127.0.0.1:1", model="m") as client:
            with pytest.raises(UnavailableError):
                await client.complete("x")


class TestClient:
    async def test_all_calls(self, gateway, engine):
        await asyncio.to_thread(self.use, gateway.address, engine)

    def use(self, address, engine):
        with Client(address, timeout_s=20) as client:
            assert "".join(client.generate("ab").texts()) == engine.reply
            assert client.complete(messages=HI, temperature=0.0).text == engine.reply
            assert client.models()[0].name == "tiny"
            assert client.detokenize(client.tokenize("é").token_ids) == "é"
            with client.generate("ab") as stream:
                assert isinstance(next(iter(stream)), Started)
                assert stream.ids.engine_id == "engine-1"
            with pytest.raises(InvalidArgumentError, match="top_p"):
                client.complete("x", top_p=0.0)
            with pytest.raises(InvalidArgumentError) as caught:
                list(client.generate("x", stop=[""]))
            assert caught.value.violations[0].field == "stop.stop_strings[0]"

    async def test_leaving_early_cancels(self, gateway, engine):
        engine.script = hold_after_first

        def leave():
            with Client(gateway.address) as client:
                for _ in client.generate("x"):
                    break

        await asyncio.to_thread(leave)
        await engine.wait_for(lambda: engine.running == 0 and engine.cancelled == 1)


class TestBuildRequest:
    def test_every_parameter_has_its_place(self):
        request = build_request(
            "m",
            "p",
            None,
            None,
            {
                "temperature": 0.0,
                "logit_bias": {3: 1.5},
                "allowed_token_ids": [1, 2],
                "stop": "x",
                "ignore_eos": True,
                "choice": ["a"],
                "top_logprobs": 0,
                "session_id": "s",
                "bypass_cache": True,
                "request_id": "r",
            },
        )
        assert request.sampling.HasField("temperature")
        assert dict(request.sampling.logit_bias) == {3: 1.5}
        assert list(request.sampling.allowed_token_ids) == [1, 2]
        assert list(request.stop.stop_strings) == ["x"]
        assert request.response.HasField("top_logprobs")
        assert list(request.constraint.choice.texts) == ["a"]
        assert (request.routing.session_id, request.cache.bypass) == ("s", True)

    @pytest.mark.parametrize(
        ("prompts", "params", "kind"),
        [
            ((None, None, None), {}, ValueError),
            (("a", None, [1]), {}, ValueError),
            (("a", None, None), {"temprature": 1}, TypeError),
            (("a", None, None), {"temperature": "hot"}, TypeError),
            (("a", None, None), {"max_tokens": -1}, ValueError),
        ],
    )
    def test_mistakes_raise_before_anything_is_sent(self, prompts, params, kind):
        with pytest.raises(kind):
            build_request("m", *prompts, params)


class TestPackage:
    def test_the_client_needs_no_service(self):
        """In a fresh interpreter: only what the wheel depends on is imported."""
        code = (
            "import sys, inferfleet; inferfleet.Client; inferfleet.AsyncClient;"
            "bad = {'services', 'torch', 'opentelemetry', 'starlette'} & set(sys.modules);"
            "sys.exit(str(bad) if bad else 0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=50)

    def test_names(self):
        assert inferfleet.InferfleetError is InferfleetError
        with pytest.raises(AttributeError, match="nothing"):
            _ = inferfleet.nothing
