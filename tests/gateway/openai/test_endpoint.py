"""How the OpenAI-compatible face refuses requests, fails, and handles disconnects."""

import asyncio
import hashlib

import httpx
import openai
import pytest

from services.common import errors
from tests.doubles.gateway import sse_events

MODEL = "tiny"
HI = [{"role": "user", "content": "hi"}]


async def post(http, path, **body) -> httpx.Response:
    return await http.post(path, json={"model": MODEL, **body})


BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"logit_bias": {"250001": -100, "249999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias[5]"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[5]"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 0, "stream": True}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": 5}, "stop"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "x"}, "suffix"),
    ({"cache_salt": "x"}, "cache_salt"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"functions": []}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
]
BAD = [("/v1/completions", {"prompt": "x", **b}, p) for b, p in BAD_COMPLETIONS]
BAD += [("/v1/chat/completions", {"messages": HI, **b}, p) for b, p in BAD_CHATS]


class TestBadInput:
    async def test_every_bad_field_is_a_400_that_names_it(self, http, engine, scripts):
        """All against one gateway, next to a stream that must not notice."""
        engine.script = scripts["hold"]
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as neighbour:
            lines = neighbour.aiter_lines()
            assert "H" in await anext(lines)
            for path, fields, param in BAD:
                response = await post(http, path, **fields)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param), (fields, error)
                assert error["type"] == "invalid_request_error"
                assert param in error["message"]
                assert response.headers["x-should-retry"] == "false"
            assert (len(engine.requests), engine.running) == (1, 1)
        await engine.wait_for(lambda: engine.running == 0)

    async def test_good_edges_pass(self, http, engine):
        for fields in (
            {"top_p": 1},
            {"top_k": 0},
            {"top_k": -1},
            {"top_k": 10**9},
            {"min_p": 0},
            {"min_p": 1},
            {"logit_bias": {"258": 1}},
            {"user": None, "suffix": None, "n": None},
            {"best_of": 2, "n": 2},
        ):
            response = await post(http, "/v1/completions", prompt="x", max_tokens=4, **fields)
            assert response.status_code == 200, (fields, response.text)
        assert not engine.requests[1].request.sampling.top_k

    @pytest.mark.parametrize(
        "content", [b"{", b"", b"[]", b"\xff", b'{"temperature": NaN}', b"[" * 100_000]
    )
    async def test_what_is_no_json_object(self, http, content):
        response = await http.post("/v1/completions", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"

    async def test_numbers_that_are_none(self, http):
        raw = b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'
        assert (await http.post("/v1/completions", content=raw)).status_code == 400

    async def test_context_length(self, http):
        response = await post(http, "/v1/completions", prompt=[5] * 256)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "256" in error["message"]

    async def test_too_large_a_body(self, http):
        response = await http.post("/v1/completions", content=b"x" * (17 * 1024 * 1024))
        assert response.status_code == 413
        assert "16777216" in response.json()["error"]["message"]

    async def test_unknown_model_path_and_method(self, http, client):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="gpt", prompt="x")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="embeddings is not supported"):
            await client.embeddings.create(model=MODEL, input="x")
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "unknown_url"
        response = await http.get("/v1/completions")
        assert response.status_code == 405
        assert "error" in response.json()


class TestErrorsOfTheFleet:
    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (errors.ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=1.5), 429),
            (errors.UnavailableError("no engine", reason="NO_ENGINE", retry_after_s=1), 503),
            (errors.DeadlineExceededError("late"), 504),
            (errors.FailedPreconditionError("no", reason="CONSTRAINT_UNSATISFIABLE"), 400),
            (errors.InternalError("bug"), 500),
            (errors.UnimplementedError("not served"), 400),
        ],
    )
    async def test_before_the_first_token_it_is_a_status(
        self, http, engine, scripts, error, status
    ):
        engine.script = scripts["fail"](error)
        for stream in (False, True):
            response = await post(http, "/v1/completions", prompt="x", stream=stream)
            assert response.status_code == status
            assert response.json()["error"]["code"] == error.reason.lower()
        if error.retry_after_s:
            assert response.headers["retry-after"] in ("1", "2")

    async def test_after_it_an_event_without_an_end(self, http, client, engine, scripts):
        engine.script = scripts["fail"](errors.AbortedError("engine lost"), after=5)
        response = await post(http, "/v1/chat/completions", messages=HI, stream=True)
        events = sse_events(response.text)
        assert events[-1]["error"]["code"] == "stream_broken"
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
        with pytest.raises(openai.APIError, match="engine lost"):
            async for _ in await client.chat.completions.create(
                model=MODEL, messages=HI, stream=True
            ):
                pass

    async def test_a_frozen_engine_is_an_error_after_the_idle_time(
        self, start_gateway, engine, scripts
    ):
        engine.script = scripts["hold"]
        running = await start_gateway(stall_timeout_s=0.3)
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as http:
            response = await post(http, "/v1/completions", prompt="x", stream=True)
        assert sse_events(response.text)[-1]["error"]["code"] == "stream_stalled"

    async def test_a_server_error_names_param_in_the_clients_words(self, http, engine, scripts):
        wrong = errors.InvalidArgumentError.for_field("constraint.json_schema", "no such keyword")
        engine.script = scripts["fail"](wrong)
        response = await post(http, "/v1/completions", prompt="x")
        assert response.json()["error"]["param"] == "response_format"
        assert response.json()["error"]["message"] == "response_format: no such keyword"

    @pytest.mark.parametrize(
        ("sent", "ours", "param"),
        [
            ({"regex": "("}, "regex", "regex"),
            ({"grammar": "root ::= x"}, "ebnf", "grammar"),
            ({"json": {"not": {}}}, "json_schema", "json"),
        ],
    )
    async def test_an_error_of_a_constraint_names_the_field_that_was_sent(
        self, http, engine, scripts, sent, ours, param
    ):
        wrong = errors.InvalidArgumentError.for_field(f"constraint.{ours}", "cannot be enforced")
        engine.script = scripts["fail"](wrong)
        response = await post(http, "/v1/completions", prompt="x", structured_outputs=sent)
        assert response.json()["error"]["param"] == f"structured_outputs.{param}"
        assert response.json()["error"]["message"].startswith(f"structured_outputs.{param}: ")


class TestHeaders:
    async def test_request_id_goes_all_the_way(self, http, engine):
        response = await http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "x"},
            headers={"X-Request-Id": "mine-1", "TraceParent": TRACE},
        )
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-trace-id"] == TRACE.split("-")[1]
        assert engine.requests[0].request.request_id == "mine-1"
        assert engine.metadata[0]["inferfleet-request-id"] == "mine-1"
        assert engine.metadata[0]["traceparent"].startswith(TRACE[:36])

    @pytest.mark.parametrize("value", ["ЖΩ", "a b", "x" * 9000])
    async def test_a_bad_request_id_is_a_400(self, http, value):
        headers = [(b"X-Request-Id", value.encode())]
        body = {"model": MODEL, "prompt": "x"}
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Request-Id"

    async def test_line_breaks_in_a_header_are_a_400(self, gateway):
        host, port = gateway.http.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nX-Tenant: a\r\nb\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()

    async def test_the_same_id_twice_is_a_409_and_the_first_goes_on(self, http, engine, scripts):
        engine.script = scripts["hold"]
        body = {"model": MODEL, "prompt": "x", "stream": True}
        headers = {"X-Request-Id": "twice"}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
            assert first.status_code == 200
            second = await http.post("/v1/completions", json=body, headers=headers)
            assert second.status_code == 409
            assert engine.running == 1
        await engine.wait_for(lambda: engine.running == 0)
        engine.script = scripts["hello"]
        third = await http.post("/v1/completions", json=body, headers=headers)
        assert third.status_code == 200


class TestKeys:
    async def test_the_client_sends_its_key(self, start_gateway, engine, tmp_path):
        keys = tmp_path / "keys"
        keys.write_text(f"acme sha256:{hashlib.sha256(b'k1').hexdigest()}\n")
        running = await start_gateway(api_keys_file=str(keys))
        base = f"http://{running.http}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="k1", max_retries=0) as known:
            await known.completions.create(model=MODEL, prompt="x")
            assert [model.id async for model in known.models.list()] == [MODEL]
        assert engine.requests[0].tenant == "acme"
        async with openai.AsyncOpenAI(base_url=base, api_key="k2", max_retries=0) as unknown:
            with pytest.raises(openai.AuthenticationError):
                await unknown.completions.create(model=MODEL, prompt="x")
            with pytest.raises(openai.AuthenticationError):
                await unknown.models.list()
        assert len(engine.requests) == 1


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class TestLeaving:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_the_engine_is_cancelled(self, gateway, engine, scripts, stream):
        engine.script = scripts["hold"]
        async with httpx.AsyncClient(base_url=f"http://{gateway.http}") as http:
            body = {"model": MODEL, "prompt": "x", "stream": stream}
            call = asyncio.create_task(http.post("/v1/completions", json=body))
            await engine.wait_for(lambda: engine.running == 1)
            call.cancel()
            await asyncio.wait({call})
        await engine.wait_for(lambda: engine.running == 0 and engine.cancelled == 1)

    async def test_of_one_stream_leaves_the_others(self, gateway, engine, scripts):
        engine.script = scripts["hold"]
        base = f"http://{gateway.http}"
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(base_url=base) as stays,
            stays.stream("POST", "/v1/completions", json=body) as kept,
        ):
            async with (
                httpx.AsyncClient(base_url=base) as leaves,
                leaves.stream("POST", "/v1/completions", json=body),
            ):
                await engine.wait_for(lambda: engine.running == 2)
            await engine.wait_for(lambda: engine.running == 1)
            assert "H" in await anext(kept.aiter_lines())
