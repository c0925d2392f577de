"""Every field and endpoint of docs/openai.md does what the page says."""

import inspect
import re
from pathlib import Path

import openai
import pytest

from services.common.errors import InvalidArgumentError
from services.gateway.openai.chat_request import parse_chat

PAGE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text()
MODEL = "tiny"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {
    "model": MODEL,
    "messages": HI,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_completion_tokens": 4,
    "max_tokens": 4,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "stop": ["x"],
    "temperature": 0.5,
    "top_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "logit_bias": {"65": -5},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 7,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "low",
    "modalities": ["text"],
    "user": "me",
    "safety_identifier": "x",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "audio": {"voice": "alloy", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
    "web_search_options": {},
    "moderation": {"model": "x"},
    "functions": [],
    "function_call": "auto",
}
COMPLETION = {
    "prompt": "ab",
    "parse_special_tokens": True,
    "echo": True,
    "logprobs": 1,
    "best_of": 1,
    "suffix": "x",
    "tools": [TOOL],
}
NEEDED = {
    "tool_choice": ["tools"],
    "top_logprobs": ["logprobs"],
    "stream_options": ["stream"],
}


def rows(heading):
    """Field → supported, ignored or refused, of the first table under a heading."""
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (supported|ignored|refused) \|", part, re.MULTILINE))


@pytest.fixture(autouse=True)
def long_context(engine):
    engine.max_model_len = 8192


@pytest.mark.parametrize(
    ("heading", "path", "samples", "base"),
    [
        ("/v1/chat/completions", "/v1/chat/completions", CHAT, {"model": MODEL, "messages": HI}),
        ("/v1/completions", "/v1/completions", COMPLETION, {"model": MODEL, "prompt": "ab"}),
    ],
)
async def test_each_field(http, engine, heading, path, samples, base):
    table = rows(heading)
    assert table.keys() == samples.keys()
    for field, what in table.items():
        sample = {name: samples[name] for name in [field, *NEEDED.get(field, [])]}
        body = {**base, "max_tokens": 4, **sample}
        before = len(engine.requests)
        response = await http.post(path, json=body)
        if what == "refused":
            error = response.json()["error"]
            refusal = (response.status_code, error["param"], error["code"])
            assert refusal == (400, field, "unsupported_field"), field
            assert len(engine.requests) == before
            continue
        assert response.status_code == 200, (field, response.text)
        if what == "ignored":
            assert sent(engine.requests[-1]) == sent(engine.requests[0]), field


def test_every_parameter_of_the_openai_package_has_a_row():
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    resources = openai.resources
    chat = set(inspect.signature(resources.chat.Completions.create).parameters) - own
    assert chat <= rows("/v1/chat/completions").keys()
    text = set(inspect.signature(resources.Completions.create).parameters) - own
    assert text <= rows("/v1/completions").keys() | rows("/v1/chat/completions").keys()


def sent(request):
    """The request that an engine got, without the fields that always differ."""
    kept = type(request)()
    kept.CopyFrom(request)
    kept.request.request_id = ""
    kept.request.ClearField("sampling")
    return kept.request.stop, kept.request.token_ids, kept.request.constraint, kept.request.response


MESSAGE = {
    "role": "system",
    "content": [{"type": "refusal", "refusal": "y"}],
    "refusal": "No.",
    "name": "me",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}],
    "tool_call_id": "c",
    "reasoning_content": "hm",
    "audio": {"id": "a"},
    "function_call": {"name": "f", "arguments": "{}"},
    "annotations": [{"type": "url_citation"}],
    "cache_control": {"type": "ephemeral"},
    "id": "msg_1",
    "parsed": {"a": 1},
}


def test_each_field_of_a_message():
    part = PAGE.split("\n## Messages\n")[1].split("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| (taken|ignored|refused) \|", part, re.MULTILINE))
    assert table.keys() == MESSAGE.keys()
    for field, what in table.items():
        plain = {"role": "assistant", "content": None if field == "refusal" else "x"}
        sent = [{**plain, field: MESSAGE[field]}]
        if what == "refused":
            with pytest.raises(InvalidArgumentError) as caught:
                parse_chat({"messages": sent})
            assert caught.value.violations[0].field == f"messages[0].{field}"
            continue
        (message,) = parse_chat({"messages": sent}).requests[0].chat.messages
        without = type(message)(role="assistant", content=plain["content"] or "")
        assert (message == without) is (what == "ignored"), field


async def test_each_endpoint_that_is_not_supported(http):
    part = PAGE.split("\n## Not supported\n")[1]
    names = [name for name in re.findall(r"`([a-z_]+)`", part) if name != "unsupported_endpoint"]
    assert len(names) == 19
    for name in names:
        for path in (f"/v1/{name}", f"/v1/{name}/abc/def"):
            for method in ("GET", "POST", "DELETE"):
                response = await http.request(method, path)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (404, "unsupported_endpoint"), path
                assert path in error["message"]


async def test_the_clients_own_calls_of_them(client):
    calls = [
        client.embeddings.create(model=MODEL, input="x"),
        client.responses.create(model=MODEL, input="x"),
        client.moderations.create(input="x"),
        client.images.generate(prompt="x"),
        client.audio.speech.create(model=MODEL, voice="alloy", input="x"),
        client.files.retrieve("f"),
        client.batches.retrieve("b"),
        client.fine_tuning.jobs.retrieve("j"),
        client.files.delete("f"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="is not supported"):
            await call


async def test_parts_that_are_not_text_are_refused_by_name(client):
    for part in (
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
    ):
        for role in ("user", "tool", "system"):
            messages = [{"role": role, "content": [{"type": "text", "text": "a"}, part]}]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=MODEL, messages=messages)
            assert caught.value.body["param"] == "messages[0].content[1].type"


async def test_usage_is_sent_once_and_last(client):
    events = [
        event
        async for event in await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert [bool(event.usage) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].choices == []
    assert events[-1].usage.prompt_tokens_details.cached_tokens == 3
