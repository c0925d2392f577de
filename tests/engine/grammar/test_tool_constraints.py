"""A model that draws at random under a demanded call writes one that its own parser reads."""

import json
import random

import jsonschema
import pytest

from inferfleet_proto.v1 import inference_pb2 as pb
from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.constraint_check import check_constraint
from services.gateway.answers.events import CallArguments, CallBegun, Reasoning, Text
from services.gateway.answers.plan import plan_answer
from services.gateway.answers.profile import ChatProfile
from services.gateway.answers.reasoning import ReasoningParser
from services.gateway.answers.tools import read_tools

pytestmark = pytest.mark.timeout(240)
END = 258
SCHEMAS = {
    "log_reading": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        },
        "required": ["name", "values"],
        "additionalProperties": False,
    },
    "switch": {"properties": {"on": {"type": "boolean"}}, "required": ["on"]},
}
PROFILES = {
    "hermes": ChatProfile("hermes", "none"),
    "hermes, special marks": ChatProfile(
        "hermes", "none", special=(("</tool_call>", 256), ("<tool_call>", 257))
    ),
    "llama3": ChatProfile("llama3", "none"),
    "mistral, list": ChatProfile("mistral", "none", special=(("[TOOL_CALLS]", 257),)),
    "mistral, names": ChatProfile(
        "mistral", "none", listed=False, special=(("[ARGS]", 256), ("[TOOL_CALLS]", 257))
    ),
    "deepseek v3": ChatProfile("deepseek_v3", "none", fenced=True),
    "deepseek v3.1": ChatProfile("deepseek_v3", "none"),
}


def request(mode, name="", *, strict=None, **parts):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    for tool, schema in SCHEMAS.items():
        chat.tools.add(name=tool, parameters_json=json.dumps(schema), strict=strict)
    chat.tool_choice.mode = mode
    chat.tool_choice.name = name
    return pb.GenerateRequest(chat=chat, **parts)


def planned(profile, chat_request, rendered="x"):
    return plan_answer(
        chat_request, read_tools(chat_request.chat), profile, rendered, lambda i: bytes([i % 256])
    )


class Model:
    """Draws at random what the grammar allows; remembers the text."""

    def __init__(self, profile, built, seed, allowed_ids):
        assert built.problem is None, built.problem
        self._marks = {token_id: mark for mark, token_id in profile.special}
        self._matcher = built.grammar.matcher()
        self._allowed = allowed_ids
        self._random = random.Random(seed)
        self._written = b""

    def write(self, text):
        for byte in text.encode():
            assert self._matcher.accept(byte), text
        self._written += text.encode()

    def go_on(self, most=3000):
        """Up to the end, which it prefers."""
        for _ in range(most):
            if self._matcher.must_end:
                return
            allowed = sorted(i for i in self._allowed(self._matcher) if i <= END)
            if END in allowed:
                return
            printable = [i for i in allowed if i >= 32]
            self.draw(self._random.choice(printable or allowed))
        raise AssertionError(f"no end: {self.text[-200:]!r}")

    def draw(self, token_id):
        assert self._matcher.accept(token_id)
        mark = self._marks.get(token_id)
        self._written += mark.encode() if mark else bytes([token_id])

    @property
    def text(self):
        return self._written.decode(errors="replace")


@pytest.fixture
def model(wait_for, allowed_ids):
    def make(profile, chat_request, seed=0, rendered="x"):
        plan = planned(profile, chat_request, rendered)
        constraint = Constraint("structural_tag", plan.constraint.structural_tag)
        check_constraint(constraint)
        return Model(profile, wait_for(constraint), seed, allowed_ids), plan

    return make


def read_answer(plan, text):
    """Name and arguments of each call, the reasoning and the text of an answer."""
    parser = plan.parsing.make_call_parser()
    calls, rest, reasoning = [], "", ""
    if plan.parsing.start != "closed":
        reader = ReasoningParser(plan.parsing.marks, opened=plan.parsing.start == "open")
        pieces = [*reader.feed(text), *reader.finish()]
        reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
        text = "".join(p.text for p in pieces if isinstance(p, Text))
    for event in [*parser.feed(text), *parser.finish()]:
        if isinstance(event, CallBegun):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
        else:
            rest += event.text
    return calls, reasoning, rest


@pytest.mark.parametrize("name", PROFILES)
def test_required_and_named(model, name):
    profile = PROFILES[name]
    for seed, (mode, named) in enumerate(
        [(pb.ToolChoice.MODE_REQUIRED, ""), (pb.ToolChoice.MODE_NAMED, "switch")] * 3
    ):
        writer, plan = model(profile, request(mode, named), seed)
        writer.go_on()
        calls, _, rest = read_answer(plan, writer.text)
        assert calls, writer.text
        assert not rest
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        if named:
            assert [called for called, _ in calls] == ["switch"]


def test_not_strict_leaves_any_object(model):
    chat_request = request(pb.ToolChoice.MODE_REQUIRED, strict=False)
    writer, plan = model(PROFILES["hermes"], chat_request)
    writer.write('<tool_call>\n{"name": "switch", "arguments": {"x": [1, null]}}\n</tool_call>')
    writer.go_on()
    assert read_answer(plan, writer.text)[0] == [["switch", '{"x": [1, null]}']]


BEGINNINGS = {
    "hermes": "\n<tool_call>\n",
    "deepseek v3": "<｜tool▁calls▁begin｜>",
    "deepseek v3.1": "<｜tool▁calls▁begin｜>",
    "llama3": "{",
}


@pytest.mark.parametrize("name", PROFILES)
def test_strict_among_free_text(model, name):
    chat_request = request(pb.ToolChoice.MODE_AUTO, strict=True)
    writer, plan = model(PROFILES[name], chat_request)
    writer.write("Well, now.")
    writer.go_on()
    assert read_answer(plan, writer.text) == ([], "", "Well, now.")
    if name == "llama3":
        writer, plan = model(PROFILES[name], chat_request)
    if name in BEGINNINGS:
        writer.write(BEGINNINGS[name])
    else:
        writer.draw(257)
    writer.go_on()
    calls, _, rest = read_answer(plan, writer.text)
    assert calls, writer.text
    assert rest == ("" if name == "llama3" else "Well, now.")
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])


@pytest.mark.parametrize("rendered", ["<think>\n", "x", "<think></think>\n"])
def test_a_call_after_reasoning(model, rendered):
    profile = ChatProfile("hermes", "think")
    writer, plan = model(profile, request(pb.ToolChoice.MODE_REQUIRED), rendered=rendered)
    if rendered == "x":
        writer.write("<think>")
    if not rendered.endswith("</think>\n"):
        writer.write("I <b> {think}.</think>\n\n")
    writer.go_on()
    calls, reasoning, rest = read_answer(plan, writer.text)
    assert (len(calls), rest) == (1, "")
    assert reasoning == ("" if rendered.endswith("</think>\n") else "I <b> {think}.")


def test_an_answer_in_a_form_or_calls(model):
    wanted = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    chat_request = request(pb.ToolChoice.MODE_AUTO, constraint={"json_schema": json.dumps(wanted)})
    writer, plan = model(PROFILES["hermes"], chat_request)
    writer.write('{"a"')
    writer.go_on()
    jsonschema.validate(json.loads(read_answer(plan, writer.text)[2]), wanted)
    writer, plan = model(PROFILES["hermes"], chat_request)
    writer.write("<tool_call>")
    writer.go_on()
    assert read_answer(plan, writer.text)[0]


def test_what_cannot_be_enforced_names_its_tool():
    chat_request = request(pb.ToolChoice.MODE_REQUIRED)
    bad = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    chat_request.chat.tools.add(name="third", parameters_json=json.dumps(bad))
    for rendered in ("x", "<think>"):
        plan = planned(ChatProfile("hermes", "think"), chat_request, rendered)
        with pytest.raises(InvalidArgumentError) as caught:
            check_constraint(Constraint("structural_tag", plan.constraint.structural_tag))
        error = plan.name_callers_field(caught.value)
        assert error.violations[0].field == "chat.tools[2].parameters"
        assert error.message.startswith("chat.tools[2].parameters: /properties/n/multipleOf")
    own = pb.Constraint(json_schema=json.dumps(bad))
    plan = planned(ChatProfile("hermes", "think"), request(pb.ToolChoice.MODE_NONE, constraint=own))
    with pytest.raises(InvalidArgumentError) as caught:
        check_constraint(Constraint("structural_tag", plan.constraint.structural_tag))
    error = plan.name_callers_field(caught.value)
    assert error.message.startswith("constraint.json_schema: /properties/n/multipleOf")
