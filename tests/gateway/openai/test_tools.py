"""Tools and reasoning over HTTP with the official client."""

import json

import openai
import pytest

from services.common import errors
from services.common.text import Tokenizer
from services.common.text.byte_level import CHATML, byte_assets
from tests.doubles.gateway import running_gateway

MODEL = "tiny"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "values"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "log_reading", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "log_reading"}}
ARGUMENTS = '{"name": "a</tool_call>", "values": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "log_reading", "arguments": {ARGUMENTS}}}\n</tool_call>'
THINKS = "{# <think></think> #}" + CHATML


@pytest.fixture(autouse=True)
def long_context(engine):
    engine.max_model_len = 8192


async def whole(client, **fields):
    return await client.chat.completions.create(model=MODEL, **{"messages": HI, **fields})


async def streamed(client, **fields):
    """Per choice: content, reasoning, calls by index, finish reason; and the usage."""
    choices, usage = {}, None
    stream = await client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, messages=HI, **fields
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            state = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None}
            )
            state["content"] += choice.delta.content or ""
            state["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            state["finish"] = choice.finish_reason or state["finish"]
            for part in choice.delta.tool_calls or []:
                take(state["calls"], part)
    return choices, usage


def take(calls, part):
    """One piece of a call: what comes once comes first."""
    if part.index == len(calls):
        assert part.id
        assert part.type == "function"
        assert part.function.name
        calls.append([part.id, part.function.name, ""])
    else:
        assert part.index == len(calls) - 1
        assert part.id is None
        assert part.function.name is None
    calls[-1][2] += part.function.arguments


class TestCalls:
    @pytest.mark.parametrize(
        ("choice", "finish"),
        [("auto", "tool_calls"), (None, "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")],
    )
    async def test_streamed_and_whole_agree(self, client, engine, choice, finish):
        engine.reply = CALL
        fields = {"tools": [TOOL]} | ({"tool_choice": choice} if choice else {})
        answer = (await whole(client, **fields)).choices[0]
        (call,) = answer.message.tool_calls
        assert (call.type, call.function.name) == ("function", "log_reading")
        assert call.function.arguments == ARGUMENTS
        assert answer.message.content is None
        choices, usage = await streamed(client, **fields)
        ((call_id, name, arguments),) = choices[0]["calls"]
        assert (name, arguments) == ("log_reading", ARGUMENTS)
        assert call_id.startswith("call_")
        assert call.id.startswith("call_")
        assert answer.finish_reason == choices[0]["finish"] == finish
        assert choices[0]["content"] == ""
        assert usage.completion_tokens == len(CALL) + 1

    async def test_the_clients_own_assembly(self, client, engine):
        engine.reply = f"Well.\n{CALL}\n{CALL}"
        async with client.chat.completions.stream(model=MODEL, messages=HI, tools=[TOOL]) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert {
            "tool_calls.function.arguments.delta",
            "tool_calls.function.arguments.done",
        } <= kinds
        assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS] * 2
        assert len({call.id for call in message.tool_calls}) == 2
        assert message.content == "Well."

    async def test_each_choice_has_its_own(self, client, engine):
        engine.reply = CALL
        answer = await whole(client, tools=[TOOL], n=2)
        ids = [choice.message.tool_calls[0].id for choice in answer.choices]
        assert len(set(ids)) == 2
        choices, _ = await streamed(client, tools=[TOOL], n=2)
        assert [choices[i]["calls"][0][2] for i in (0, 1)] == [ARGUMENTS] * 2

    async def test_none_leaves_text(self, client, engine):
        engine.reply = CALL
        answer = (await whole(client, tools=[TOOL], tool_choice="none")).choices[0]
        assert answer.message.content == CALL
        assert answer.message.tool_calls is None
        assert answer.finish_reason == "stop"
        assert not engine.requests[0].request.HasField("constraint")

    @pytest.mark.parametrize("most", [1, 2, 4, 10, 14])
    async def test_cut_inside_the_first_mark_is_no_content(self, client, engine, most):
        engine.reply = CALL
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": most}
        answer = (await whole(client, **fields)).choices[0]
        assert (answer.message.content or "", answer.finish_reason) == ("", "length")
        assert answer.message.tool_calls is None
        choices, _ = await streamed(client, **fields)
        assert (choices[0]["content"], choices[0]["calls"]) == ("", [])

    @pytest.mark.parametrize("more", [1, 2, 6, 12, 20])
    async def test_a_second_call_that_is_cut_is_no_content(self, client, engine, more):
        engine.reply = f"{CALL}\n{CALL}"
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": len(CALL) + more}
        answer = (await whole(client, **fields)).choices[0]
        assert (answer.message.content, answer.finish_reason) == (None, "length")
        assert [call.function.arguments for call in answer.message.tool_calls] == [ARGUMENTS]
        choices, _ = await streamed(client, **fields)
        assert (choices[0]["content"], len(choices[0]["calls"])) == ("", 1)

    async def test_a_call_that_was_cut_goes_back_into_the_conversation(self, client, engine):
        engine.reply = CALL
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": CALL.index("values")}
        cut = (await whole(client, **fields)).choices[0].message
        result = {"role": "tool", "tool_call_id": cut.tool_calls[0].id, "content": "cut"}
        engine.reply = "Again."
        again = await whole(client, tools=[TOOL], messages=[*HI, cut, result])
        assert again.choices[0].message.content == "Again."

    async def test_cut_inside_the_arguments_is_length(self, client, engine):
        engine.reply = CALL
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": CALL.index("values")}
        answer = (await whole(client, **fields)).choices[0]
        assert answer.finish_reason == "length"
        assert answer.message.tool_calls[0].function.arguments == ARGUMENTS[: ARGUMENTS.index("va")]
        choices, _ = await streamed(client, **fields)
        assert choices[0]["finish"] == "length"

    @pytest.mark.parametrize("fields", [{"parallel_tool_calls": False}, {"tool_choice": NAMED}])
    async def test_not_more_than_one(self, client, engine, fields):
        engine.reply = f"{CALL}\n{CALL}"
        answer = (await whole(client, tools=[TOOL], **fields)).choices[0]
        assert len(answer.message.tool_calls) == 1
        choices, _ = await streamed(client, tools=[TOOL], **fields)
        assert len(choices[0]["calls"]) == 1

    async def test_logprobs_cover_every_token(self, client, engine):
        engine.reply = CALL
        answer = (await whole(client, tools=[TOOL], logprobs=True)).choices[0]
        assert "".join(entry.token for entry in answer.logprobs.content) == CALL

    async def test_text_that_begins_like_a_call(self, client, engine):
        engine.reply = "a <tool_box> b"
        answer = (await whole(client, tools=[TOOL])).choices[0]
        assert answer.message.content == engine.reply
        assert (await streamed(client, tools=[TOOL]))[0][0]["content"] == engine.reply


class TestPrompt:
    async def test_tools_calls_and_their_results_are_in_it(self, client, engine):
        messages = [
            *HI,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "log_reading", "arguments": '{"name": "x"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
        ]
        await whole(client, messages=messages, tools=[TOOL])
        ids = engine.requests[0].request.token_ids.ids
        prompt = engine.tokenizer.decode(ids, skip_special_tokens=False)
        assert json.dumps(SCHEMA) in prompt  # in the caller's own order
        assert '{"name": "log_reading", "arguments": {"name": "x"}}' in prompt
        assert "<tool_response>\ndone\n</tool_response>" in prompt
        assert prompt.count("<|im_start|>user") == 2

    async def test_an_answer_can_be_sent_back_as_it_came(self, client, engine):
        engine.reply = CALL
        message = (await whole(client, tools=[TOOL])).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
        await whole(client, messages=[*HI, message, result], tools=[TOOL])
        await whole(client, messages=[*HI, message.model_dump(), result], tools=[TOOL])

    async def test_a_template_of_its_own_sees_the_tools(self, engine, start_gateway):
        engine.assets = byte_assets(chat_template="<tool_call>{{ tools | tojson }}")
        running = await start_gateway()
        async with openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x") as client:
            await whole(client, tools=[TOOL])
        prompt = engine.tokenizer.decode(engine.requests[0].request.token_ids.ids)
        assert prompt == f"<tool_call>[{json.dumps({**TOOL, 'function': function_of(TOOL)})}]"


def function_of(tool):
    """As templates know it: with a description, if only an empty one."""
    function = tool["function"]
    return {"name": function["name"], "description": "", "parameters": function["parameters"]}


BAD = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "null"}}}
            ]
        },
        "tools[0].function.parameters",
    ),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "very"}, "reasoning_effort"),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
]


class TestBadInput:
    async def test_each_is_a_400_that_names_the_field(self, http, engine):
        for fields, param in BAD:
            for stream in (False, True):
                body = {"model": MODEL, "messages": HI, "stream": stream, **fields}
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert error["param"] == param, (fields, error)
        assert not engine.requests

    async def test_a_schema_that_the_engine_refuses_names_its_tool(self, http, engine, scripts):
        pointer = "/format/tags/1/content/json_schema"
        wrong = errors.InvalidArgumentError.for_field(
            "constraint.structural_tag", f"{pointer}/properties/n/multipleOf: cannot be enforced"
        )
        engine.script = scripts["fail"](wrong)
        tools = [OTHER, TOOL]
        body = {"model": MODEL, "messages": HI, "tools": tools, "tool_choice": "required"}
        response = await http.post("/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
        assert error["message"] == (
            "tools[1].function.parameters: /properties/n/multipleOf: cannot be enforced"
        )

    async def test_a_model_whose_calls_are_not_known(self, engine, start_gateway):
        engine.assets = byte_assets(chat_template="{{ tools }}<function=")
        running = await start_gateway()
        async with openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x") as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await whole(client, tools=[TOOL])
            assert caught.value.body["param"] == "tools"
            await whole(client, tools=[TOOL], tool_choice="none")


class TestEnforced:
    async def test_what_the_engine_is_asked(self, client, engine):
        engine.reply = CALL
        await whole(client, tools=[OTHER, TOOL], tool_choice="required")
        await whole(client, tools=[OTHER, TOOL], tool_choice=NAMED)
        await whole(client, tools=[OTHER, TOOL])
        strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
        await whole(client, tools=[OTHER, strict])
        tags = [r.request.constraint.structural_tag for r in engine.requests]
        formats = [json.loads(tag)["format"] if tag else None for tag in tags]
        assert [len(formats[i]["tags"]) for i in (0, 1)] == [2, 1]
        assert formats[1]["tags"][0]["content"]["json_schema"] == SCHEMA
        assert [formats[i]["stop_after_first"] for i in (0, 1)] == [False, True]
        assert formats[2] is None
        assert (formats[3]["type"], formats[3]["at_least_one"]) == ("triggered_tags", False)


class TestReasoning:
    @pytest.fixture
    async def thinker(self, engine):
        engine.assets = byte_assets(added=("<think>", "</think>"), chat_template=THINKS)
        engine.tokenizer = Tokenizer(engine.assets)
        async with (
            running_gateway(engine) as running,
            openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x") as client,
        ):
            yield client, running

    async def test_apart_from_the_answer(self, thinker, engine):
        client, _ = thinker
        engine.reply = f"<think>\nhm\n</think>\n\nYes. {CALL}"
        answer = await whole(client, tools=[TOOL])
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "Yes.")
        assert message.tool_calls[0].function.arguments == ARGUMENTS
        spent = answer.usage.completion_tokens_details.reasoning_tokens
        assert spent == len("<think>\nhm\n</think>")
        choices, usage = await streamed(client, tools=[TOOL])
        assert (choices[0]["reasoning"], choices[0]["content"]) == ("hm", "Yes.")
        assert usage.completion_tokens_details.reasoning_tokens == spent

    async def test_an_answer_without_any(self, thinker, engine):
        client, _ = thinker
        answer = await whole(client)
        assert answer.choices[0].message.content == engine.reply
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0

    async def test_a_constraint_begins_after_it(self, thinker, engine):
        client, _ = thinker
        schema = {"name": "x", "schema": {"type": "object"}}
        await whole(client, response_format={"type": "json_schema", "json_schema": schema})
        (with_it, without) = json.loads(engine.requests[0].request.constraint.structural_tag)[
            "format"
        ]["elements"]
        assert without == {"type": "json_schema", "json_schema": {"type": "object"}}
        assert with_it["elements"][0]["value"] == "<think>"
        assert with_it["elements"][1]["end"] == "</think>"

    async def test_effort_reaches_the_template(self, engine, start_gateway):
        engine.assets = byte_assets(chat_template="{{ reasoning_effort }} {{ enable_thinking }}")
        running = await start_gateway()
        async with openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x") as client:
            await whole(client, reasoning_effort="none")
            await whole(client, reasoning_effort="low")
        prompts = [engine.tokenizer.decode(r.request.token_ids.ids) for r in engine.requests]
        assert prompts == ["none False", "low "]


class TestMistral:
    async def test_marks_that_do_not_show_in_text(self, engine, start_gateway):
        engine.assets = byte_assets(
            special=("<s>", "[TOOL_CALLS]", "</s>"), chat_template="{{ tools }}[TOOL_CALLS]"
        )
        engine.reply = '[TOOL_CALLS] [{"name": "log_reading", "arguments": {}}]'
        running = await start_gateway()
        async with openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x") as client:
            free = (await whole(client, tools=[TOOL])).choices[0].message.tool_calls[0]
            assert len(free.id) == 9
            assert list(engine.requests[0].shown_token_ids) == [257]
            await whole(client, tools=[TOOL], tool_choice="required")
        tag = json.loads(engine.requests[1].request.constraint.structural_tag)
        assert tag["format"]["elements"][0] == {"type": "token", "token": 257}
