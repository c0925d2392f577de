"""The answers of the OpenAI-compatible face, to the official client and as plain HTTP."""

import json

import httpx
import openai
import pytest

from tests.doubles.gateway import sse_events

MODEL = "tiny"
HI = [{"role": "user", "content": "hi"}]


async def post(http, path, **body) -> httpx.Response:
    return await http.post(path, json={"model": MODEL, **body})


class TestChat:
    async def test_whole(self, client, engine):
        answer = await client.chat.completions.create(model=MODEL, messages=HI, n=2)
        assert [c.message.content for c in answer.choices] == [engine.reply] * 2
        assert answer.choices[0].finish_reason == "stop"
        assert answer.object == "chat.completion"
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
        assert answer.system_fingerprint == "sha256:weights"

    async def test_streamed_equals_whole(self, client, engine):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=5,
        )
        texts, reasons, usage = ["", ""], {}, None
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            usage = chunk.usage or usage
        assert texts == ["Hé, "] * 2
        assert reasons == {0: "length", 1: "length"}
        assert usage.completion_tokens == 10

    async def test_raw_stream(self, http, engine):
        response = await post(http, "/v1/chat/completions", messages=HI, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-engine-id"] == "engine-1"
        assert len(response.headers["x-trace-id"]) == 32
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {e["id"] for e in events[:-1]} == {f"chatcmpl-{response.headers['x-request-id']}"}
        assert all("usage" not in e for e in events[:-1])
        assert [e["choices"][0]["finish_reason"] for e in events[-3:-1]] == [None, "stop"]

    async def test_logprobs_cover_the_text_and_are_finite(self, client, engine):
        body = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**body)
        entries = whole.choices[0].logprobs.content
        joined = b"".join(bytes(entry.bytes) for entry in entries)
        assert joined.decode() == engine.reply
        assert [t.logprob for t in entries[0].top_logprobs] == [-0.5, -9999.0]
        streamed = []
        async for chunk in await client.chat.completions.create(**body, stream=True):
            for choice in chunk.choices:
                streamed += choice.logprobs.content if choice.logprobs else []
        assert streamed == entries

    async def test_the_engines_request(self, client, engine):
        await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
                *HI,
            ],
            temperature=0,
            top_p=0.5,
            seed=9,
            stop=["a", "b"],
            logit_bias={"65": 3},
            user="someone",
            metadata={"a": "b"},
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
            extra_body={"top_k": -1, "min_p": 0.25, "ignore_eos": True, "min_tokens": 2},
        )
        sent = engine.requests[0].request
        assert engine.tokenizer.decode(sent.token_ids.ids, skip_special_tokens=False).startswith(
            "<|im_start|>system\nbe brief<|im_end|>"
        )
        assert (sent.sampling.temperature, sent.sampling.seed) == (0, 9)
        assert sent.sampling.HasField("temperature")
        assert (sent.sampling.top_k, sent.sampling.min_p) == (0, 0.25)
        assert dict(sent.sampling.logit_bias) == {65: 3}
        assert list(sent.stop.stop_strings) == ["a", "b"]
        assert (sent.stop.ignore_eos, sent.stop.min_tokens) == (True, 2)
        assert json.loads(sent.constraint.json_schema) == {"type": "object"}


class TestCompletions:
    async def test_whole_and_streamed(self, client, engine):
        whole = await client.completions.create(model=MODEL, prompt="ab")
        assert whole.choices[0].text == engine.reply
        assert whole.object == "text_completion"
        text = ""
        async for chunk in await client.completions.create(model=MODEL, prompt="ab", stream=True):
            text += "".join(choice.text for choice in chunk.choices)
        assert text == engine.reply

    @pytest.mark.parametrize("stream", [False, True])
    async def test_several_prompts_side_by_side(self, client, engine, stream):
        body = {"model": MODEL, "prompt": ["ab", "cd", "ef"], "n": 2, "max_tokens": 4}
        if stream:
            texts = [""] * 6
            async for chunk in await client.completions.create(**body, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            answer = await client.completions.create(**body)
            assert [c.index for c in answer.choices] == list(range(6))
            texts = [choice.text for choice in answer.choices]
            assert answer.usage.prompt_tokens == 6
        assert texts == ["Hé,"] * 6
        ids = {r.request.request_id for r in engine.requests}
        assert len(ids) == 3
        assert {bytes(r.request.token_ids.ids) for r in engine.requests} == {b"ab", b"cd", b"ef"}

    async def test_one_bad_prompt_ends_all(self, http, engine, scripts):
        engine.script = scripts["hold"]
        response = await post(http, "/v1/completions", prompt=["ab", [9999]])
        assert response.status_code == 400
        await engine.wait_for(lambda: engine.running == 0)

    async def test_token_ids_as_prompt(self, client, engine):
        await client.completions.create(model=MODEL, prompt=[104, 105])
        assert list(engine.requests[0].request.token_ids.ids) == [104, 105]

    async def test_logprobs_with_echo(self, client, engine):
        engine.reply = "abé"  # the engine begins the text with an echoed prompt
        body = {"model": MODEL, "prompt": "ab", "logprobs": 1, "echo": True}
        whole = (await client.completions.create(**body)).choices[0].logprobs
        assert whole.tokens[:3] == ["a", "b", "a"]
        assert whole.token_logprobs[:3] == [None, -1.0, -0.5]
        assert whole.top_logprobs[0] is None
        assert whole.text_offset == [0, 1, 2, 3, 4, 4]
        columns = {"tokens": [], "token_logprobs": [], "text_offset": []}
        async for chunk in await client.completions.create(**body, stream=True):
            if chunk.choices[0].logprobs:
                for name, column in columns.items():
                    column += getattr(chunk.choices[0].logprobs, name)
        assert columns == {name: getattr(whole, name) for name in columns}

    async def test_extensions_of_other_servers(self, http, engine):
        for wanted, kind in (
            ({"regex": "a+"}, "regex"),
            ({"choice": ["a", "b"]}, "choice"),
            ({"json": {"type": "object"}}, "json_schema"),
            ({"grammar": "root ::= 'a'"}, "ebnf"),
        ):
            response = await post(http, "/v1/completions", prompt="a", structured_outputs=wanted)
            assert response.status_code == 200
            assert engine.requests[-1].request.constraint.WhichOneof("kind") == kind


class TestModels:
    async def test_list_and_one(self, client, http):
        (model,) = (await client.models.list()).data
        assert (model.id, model.object) == (MODEL, "model")
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("no/such")
        assert (await http.get("/healthz")).text == "ok\n"
