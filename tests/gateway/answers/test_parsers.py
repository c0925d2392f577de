"""The parser of each call syntax: its events do not depend on how the text is divided."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.answers.deepseek import DeepseekParser
from services.gateway.answers.events import CallArguments, CallBegun, Reasoning, Text, joined
from services.gateway.answers.hermes import HermesParser
from services.gateway.answers.llama3 import Llama3Parser
from services.gateway.answers.mistral import MistralParser
from services.gateway.answers.reasoning import MISTRAL, THINK, ReasoningParser

NAMES = ("log_reading", "f", "name")
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
LIST, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def hermes(calls):
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {text}}}\n</tool_call>'
        for name, text in calls
    )


def hermes_backwards(calls):
    return "".join(
        f'<tool_call>{{"arguments": {text} , "name": {json.dumps(name)}}}</tool_call>'
        for name, text in calls
    )


def llama3(calls):
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def llama3_tagged(calls):
    return "".join(
        f'<|python_tag|>{{"type": "function", "name": "{name}", "parameters": {text}}}'
        for name, text in calls
    )


def mistral_list(calls):
    parts = (f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls)
    return f"[TOOL_CALLS] [{', '.join(parts)}]"


def mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]ab3[ARGS]{text}" for name, text in calls)


def deepseek_v3(calls):
    parts = (f"{CALL}function{SEP}{name}\n```json\n{text}\n```{END}" for name, text in calls)
    return LIST + "\n".join(parts) + LIST_END


def deepseek_v31(calls):
    return LIST + "".join(f"{CALL}{name}{SEP}{text}{END}" for name, text in calls) + LIST_END


FORMS = {
    "hermes": (HermesParser, hermes),
    "hermes, arguments first": (HermesParser, hermes_backwards),
    "llama3": (lambda: Llama3Parser(NAMES), llama3),
    "llama3, tagged": (lambda: Llama3Parser(NAMES), llama3_tagged),
    "mistral, list": (MistralParser, mistral_list),
    "mistral, names": (MistralParser, mistral_named),
    "deepseek v3": (DeepseekParser, deepseek_v3),
    "deepseek v3.1": (DeepseekParser, deepseek_v31),
}
MARKS = [
    "</tool_call>",
    "<tool_call>",
    '"}',
    "\\",
    "```",
    END,
    "[TOOL_CALLS]",
    "[ARGS]",
    "; {",
    "é🌶",
]
strings = st.text(max_size=6) | st.sampled_from(MARKS)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(strings, values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
steps = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def pieces(text, sizes):
    """The text in pieces of these sizes, over and over."""
    place, turn = 0, 0
    while place < len(text):
        size = sizes[turn % len(sizes)]
        yield text[place : place + size]
        place, turn = place + size, turn + 1


def read(parser, text, sizes=(10**9,)):
    events = [event for piece in pieces(text, sizes) for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def called(events):
    """Names and arguments of the calls, in order."""
    out = []
    for event in events:
        if isinstance(event, CallBegun):
            out.append([event.name, ""])
        elif isinstance(event, CallArguments):
            out[-1][1] += event.text
    return out


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(calls=calls, sizes=steps, ascii_only=st.booleans())
def test_any_calls_in_any_pieces(form, calls, sizes, ascii_only):
    make, write = FORMS[form]
    texts = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in calls]
    events = read(make(), write(texts), sizes)
    assert called(events) == [list(pair) for pair in texts]
    assert not [event for event in events if isinstance(event, Text)]


SNIPPETS = [
    "Hello",
    " ",
    "\n\n",
    "<",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": "x"}}',
    '{"name": "f", "parameters": {}}',
    '{"name": "Paris"}',
    '{"a": 1}',
    "{",
    "}",
    "[TOOL_CALLS]",
    "[",
    "]",
    "f",
    "[ARGS]",
    "<|python_tag|>",
    "; ",
    LIST,
    CALL,
    SEP,
    END,
    LIST_END,
    "```json\n",
    "<think>",
    "</think>",
    "<tool",
    '"',
    "\\",
]
MAKERS = [
    HermesParser,
    lambda: Llama3Parser(NAMES),
    MistralParser,
    DeepseekParser,
    lambda: ReasoningParser(THINK, opened=False),
    lambda: ReasoningParser(THINK, opened=True),
    lambda: ReasoningParser(MISTRAL, opened=False),
]


@settings(max_examples=200)
@given(
    maker=st.sampled_from(MAKERS),
    snippets=st.lists(st.sampled_from(SNIPPETS), max_size=10),
    sizes=steps,
)
def test_events_do_not_depend_on_the_division_of_any_text(maker, snippets, sizes):
    text = "".join(snippets)
    assert read(maker(), text, sizes) == read(maker(), text)


@settings(max_examples=50)
@given(text=st.text(st.sampled_from('ab <\n{["f|'), max_size=30), sizes=steps)
def test_text_without_a_call_is_returned_in_full(text, sizes):
    for make in (HermesParser, MistralParser, DeepseekParser, lambda: Llama3Parser(NAMES)):
        events = read(make(), text, sizes)
        assert "".join(event.text for event in events) == text


class TestText:
    def test_text_before_between_and_after(self):
        one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        events = read(HermesParser(), f"Let me.\n{one}\n\nAnd:\n{one}\n")
        assert events == [
            Text("Let me."),
            CallBegun("f"),
            CallArguments("{}"),
            Text("And:"),
            CallBegun("f"),
            CallArguments("{}"),
        ]

    @pytest.mark.parametrize("form", FORMS)
    def test_a_mark_is_never_returned_as_text(self, form):
        make, write = FORMS[form]
        parser, events = make(), []
        for character in write([("f", '{"a": 1}')]):
            events += parser.feed(character)
        assert not [event for event in events if isinstance(event, Text)]

    def test_what_is_not_a_mark_is_returned_once_that_is_certain(self):
        parser = HermesParser()
        assert parser.feed("a <tool") == [Text("a")]
        assert parser.feed("box") == [Text(" <toolbox")]
        assert parser.feed("<tool_") == []
        assert parser.finish() == [Text("<tool_")]

    def test_a_mark_without_a_call_is_text(self):
        assert read(HermesParser(), "<tool_call>\nnot JSON</tool_call>") == [
            Text("<tool_call>\nnot JSON</tool_call>")
        ]

    def test_text_after_a_list_of_calls(self):
        events = read(MistralParser(), '[TOOL_CALLS] [{"name": "f", "arguments": {}}] Done')
        assert events[-1] == Text("Done")
        assert read(DeepseekParser(), deepseek_v3([("f", "{}")]) + "\nDone")[-1] == Text("Done")


class TestArguments:
    def test_arguments_are_returned_as_they_are_written(self):
        parser = HermesParser()
        assert parser.feed('<tool_call>{"name": "f"') == [CallBegun("f")]
        assert parser.feed(', "arguments": {"a') == [CallArguments('{"a')]
        assert parser.feed('": 1') == [CallArguments('": 1')]
        assert parser.feed("}") == [CallArguments("}")]
        assert parser.feed("}") == []

    @pytest.mark.parametrize(
        ("written", "read_as"),
        [
            ('{"name": "f"}', "{}"),
            ('{"name": "f", "arguments": null}', "{}"),
            (r'{"name": "f", "arguments": "{\"a\": 1}"}', '{"a": 1}'),
            ('{"name": "f", "arguments": {}, "id": "x"}', "{}"),
            ('{"name": "f", "arguments": 5}', "5"),
        ],
    )
    def test_unusual_calls(self, written, read_as):
        events = read(HermesParser(), f"<tool_call>{written}</tool_call>")
        assert events == [CallBegun("f"), CallArguments(read_as)]

    @pytest.mark.parametrize(("form", "end"), [("hermes", 2), ("mistral, names", 1)])
    def test_cut_inside(self, form, end):
        make, write = FORMS[form]
        whole = write([("f", '{"a": "xyz"}')])
        cut = whole[: whole.index("yz")]
        assert read(make(), cut, (3,)) == [CallBegun("f"), CallArguments('{"a": "x')]
        assert read(make(), whole[: whole.index("f", 12)]) == []


class TestLlama3:
    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "Paris", "parameters": {}}',
            '{"name": "f"}',
            '{"name": "f", "x": 1}',
            '{"capital": "Paris"}',
            "{",
            "Paris is {",
        ],
    )
    def test_json_that_calls_none_of_the_tools_is_the_answer(self, text):
        assert read(Llama3Parser(NAMES), text, (1,)) == [Text(text)]

    def test_a_program_is_text_without_its_tag(self):
        events = read(Llama3Parser(NAMES), '<|python_tag|>search.call(query="x")')
        assert events == [Text('search.call(query="x")')]


class TestReasoning:
    @pytest.mark.parametrize(
        ("opened", "text", "reasoning", "answer"),
        [
            (False, "<think>\nhm\n\nso\n</think>\n\nYes", "hm\n\nso", "Yes"),
            (True, "\nhm</think>Yes", "hm", "Yes"),
            (True, "hm <b> </thin", "hm <b> </thin", ""),
            (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
            (False, "\n<think></think>\nYes", "", "Yes"),
            (False, "<thin", "", "<thin"),
            (False, "", "", ""),
        ],
    )
    def test_separation(self, opened, text, reasoning, answer):
        for size in (1, 2, 3, 100):
            events = read(ReasoningParser(THINK, opened=opened), text, (size,))
            joined_up = dict.fromkeys((Reasoning, Text), "")
            for event in events:
                joined_up[type(event)] += event.text
            assert joined_up == {Reasoning: reasoning, Text: answer}

    def test_state(self):
        parser = ReasoningParser(THINK, opened=False)
        parser.feed("<think>a")
        assert (parser.reasoned, parser.answering) == (True, False)
        parser.feed("</think>")
        assert (parser.reasoned, parser.answering) == (True, True)
