"""What the openai package's own suite asks of its helpers: `parse`, `stream`, and runs of tools."""

import enum
import json
from typing import Literal

import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.doubles.scripts import say_hello

MODEL = "tiny"
HI = [{"role": "user", "content": "How warm is it in Paris?"}]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(pydantic.BaseModel):
    city: str


class Reading(pydantic.BaseModel):
    city: str
    degrees: float
    unit: Literal["c", "f"] = "c"
    colour: Colour | None = None


@pydantic.dataclasses.dataclass
class Point:
    x: int


class Weather(pydantic.BaseModel):
    city: str


class Stock(pydantic.BaseModel):
    ticker: str


READING = '{"city": "Paris", "degrees": 14.5, "unit": "c", "colour": "red"}'
PLACE = '{"city": "Paris"}'


def call(name, **arguments):
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


@pytest.fixture(autouse=True)
def long_context(engine):
    engine.max_model_len = 8192


@pytest.fixture
def parse(client):
    return lambda **fields: client.chat.completions.parse(model=MODEL, messages=HI, **fields)


@pytest.fixture
def watch(client):
    """The events of the stream manager, and the whole answer."""

    async def watch(**fields):
        manager = client.chat.completions.stream(model=MODEL, messages=HI, **fields)
        async with manager as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_completion()

    return watch


def kinds(events):
    return {event.type for event in events}


class TestParse:
    async def test_without_a_format(self, parse, engine):
        message = (await parse()).choices[0].message
        assert (message.content, message.parsed) == (engine.reply, None)

    async def test_models_of_every_kind(self, parse, engine):
        for kind, said, value in (
            (Reading, READING, Reading(city="Paris", degrees=14.5, colour=Colour.RED)),
            (Place, PLACE, Place(city="Paris")),
            (Point, '{"x": 3}', Point(x=3)),
        ):
            engine.reply = said
            answer = await parse(response_format=kind)
            assert answer.choices[0].message.parsed == value
            sent = json.loads(engine.requests[-1].request.constraint.json_schema)
            assert set(sent["required"]) == json.loads(said).keys()

    async def test_each_choice_is_parsed(self, parse, engine):
        engine.reply = PLACE
        answer = await parse(response_format=Place, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.parsed.city for choice in answer.choices} == {"Paris"}

    async def test_what_was_cut_is_an_error_of_its_own(self, parse, engine):
        engine.reply = PLACE
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            await parse(response_format=Place, max_tokens=5)
        assert caught.value.completion.usage.completion_tokens == 5

    async def test_raw(self, client, engine):
        engine.reply = PLACE
        raw = await client.chat.completions.with_raw_response.parse(
            model=MODEL, messages=HI, response_format=Place
        )
        assert raw.parse().choices[0].message.parsed == Place(city="Paris")

    async def test_tools_that_are_models(self, parse, engine):
        engine.reply = call("Weather", city="Paris") + call("stock", ticker="X")
        tools = [
            openai.pydantic_function_tool(Weather),
            openai.pydantic_function_tool(Stock, name="stock", description="A price."),
        ]
        message = (await parse(tools=tools)).choices[0].message
        parsed = [made.function.parsed_arguments for made in message.tool_calls]
        assert parsed == [Weather(city="Paris"), Stock(ticker="X")]
        tag = json.loads(engine.requests[0].request.constraint.structural_tag)
        assert tag["format"]["type"] == "triggered_tags"  # this client sets strict

    async def test_a_strict_tool_that_is_a_dictionary(self, parse, engine):
        engine.reply = call("weather", city="Paris")
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        }
        function = {"name": "weather", "strict": True, "parameters": schema}
        answer = await parse(tools=[{"type": "function", "function": function}])
        (made,) = answer.choices[0].message.tool_calls
        assert made.function.parsed_arguments == {"city": "Paris"}


class TestStream:
    async def test_of_text(self, watch, engine):
        events, final = await watch()
        assert kinds(events) == {"chunk", "content.delta", "content.done"}
        assert final.choices[0].message.content == engine.reply

    async def test_of_a_model(self, watch, engine):
        engine.reply = PLACE
        for fields in ({}, {"n": 3}):
            events, final = await watch(response_format=Place, **fields)
            done = [event for event in events if event.type == "content.done"]
            assert [event.parsed for event in done] == [Place(city="Paris")] * len(done)
            assert len(done) == len(final.choices) == fields.get("n", 1)

    async def test_of_a_format_that_is_a_dictionary(self, watch, engine):
        engine.reply = PLACE
        schema = {"name": "place", "schema": {"type": "object"}}
        _, final = await watch(response_format={"type": "json_schema", "json_schema": schema})
        assert json.loads(final.choices[0].message.content) == {"city": "Paris"}

    async def test_that_is_cut(self, watch, engine):
        engine.reply = PLACE
        with pytest.raises(openai.LengthFinishReasonError):
            await watch(response_format=Place, max_tokens=1)

    async def test_of_log_probabilities(self, watch, engine):
        events, final = await watch(logprobs=True)
        assert {"logprobs.content.delta", "logprobs.content.done"} <= kinds(events)
        tokens = final.choices[0].logprobs.content
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == engine.reply

    async def test_of_tools_that_are_models(self, watch, engine):
        engine.reply = call("Weather", city="Paris") + call("Stock", ticker="X")
        tools = [openai.pydantic_function_tool(kind) for kind in (Weather, Stock)]
        events, final = await watch(tools=tools)
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == [
            Weather(city="Paris"),
            Stock(ticker="X"),
        ]
        assert final.choices[0].finish_reason == "tool_calls"

    async def test_of_tools_that_are_not_strict(self, watch, engine):
        engine.reply = call("weather", city="Paris")
        function = {"name": "weather", "parameters": {"type": "object"}}
        _, final = await watch(tools=[{"type": "function", "function": function}])
        (made,) = final.choices[0].message.tool_calls
        assert json.loads(made.function.arguments) == {"city": "Paris"}
        assert made.function.parsed_arguments is None

    async def test_assembled_by_the_caller(self, client, engine):
        state = ChatCompletionStreamState()
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True
        ):
            state.handle_chunk(chunk)
        final = state.get_final_completion()
        assert final.choices[0].message.content == engine.reply
        assert final.choices[0].finish_reason == "stop"


class TestRunsOfTools:
    """Call, result, answer: what a loop over `parse` or `stream` sends."""

    @pytest.fixture(autouse=True)
    def calls_until_answered(self, engine):
        async def script(request, double):
            prompt = double.tokenizer.decode(request.request.token_ids.ids)
            answered = "14 degrees" in prompt
            double.reply = "It is warm." if answered else call("Weather", city="Paris")
            async for event in say_hello(request, double):
                yield event

        engine.script = script

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_to_the_end(self, client, streamed):
        messages, tools = [*HI], [openai.pydantic_function_tool(Weather)]
        for _ in range(3):
            fields = {"model": MODEL, "messages": messages, "tools": tools}
            if streamed:
                async with client.chat.completions.stream(**fields) as stream:
                    completion = await stream.get_final_completion()
            else:
                completion = await client.chat.completions.parse(**fields)
            (choice,) = completion.choices
            messages.append(choice.message)
            if choice.finish_reason == "stop":
                break
            for made in choice.message.tool_calls:
                assert made.function.parsed_arguments == Weather(city="Paris")
                messages.append({"role": "tool", "tool_call_id": made.id, "content": "14 degrees"})
        assert messages[-1].content == "It is warm."
        assert len(messages) == 4
