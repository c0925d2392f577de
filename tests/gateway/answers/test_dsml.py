"""DeepSeek V4 through DeepSeek's own library: prompts, token ids and calls."""

import builtins

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferfleet_proto.v1 import inference_pb2 as pb
from services.common.errors import InvalidArgumentError, UnimplementedError
from services.common.text import Tokenizer, chat_ids, render_chat, template_of
from services.common.text.byte_level import byte_assets
from services.common.text.deepseek_recipe import MARK
from services.gateway.answers.dsml import DsmlParser
from services.gateway.answers.events import CallArguments, CallBegun, Text, joined
from services.gateway.answers.plan import plan_answer
from services.gateway.answers.profile import ChatProfile, detect
from services.gateway.answers.tools import read_tools

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = (BOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", MARK, EOS)
ASSETS = byte_assets(special=SPECIAL, chat_template="")
NEWER = byte_assets(special=("<｜System｜>", *SPECIAL), chat_template="")
CALLS = (
    'Sure <b>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="city" string="true">Pa"ris\n</x></｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">{"a": "</"}</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="g">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
READ = [
    Text("Sure <b>"),
    CallBegun("f"),
    CallArguments('{"city": "Pa\\"ris\\n</x>", "n": {"a": "</"}}'),
    CallBegun("g"),
    CallArguments("{}"),
]


def chat(content="hi", **args):
    made = pb.Chat(messages=[pb.ChatMessage(role="user", content=content)])
    made.tools.add(name="f", parameters_json='{"type": "object", "properties": {"b": {}, "a": {}}}')
    made.template_args.update(args)
    return made


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_calls_in_any_pieces(sizes, older):
    text = CALLS.replace("｜ calls", "｜tool_calls").replace("｜ ", "｜") if older else CALLS
    parser, events, place, turn = DsmlParser(), [], 0, 0
    while place < len(text):
        size = sizes[turn % len(sizes)]
        events += parser.feed(text[place : place + size])
        place, turn = place + size, turn + 1
    assert joined([*events, *parser.finish()]) == READ


def test_a_prompt_with_tools_and_their_results():
    conversation = chat(reasoning_effort="low")
    conversation.messages.insert(0, pb.ChatMessage(role="system", content="Be brief."))
    answer = conversation.messages.add(role="assistant", reasoning_content="hm")
    answer.tool_calls.add(id="c", name="f", arguments='{"b": 1}')
    conversation.messages.add(role="tool", content="done", tool_call_id="c")
    for assets in (ASSETS, NEWER):
        prompt = render_chat(template_of(assets), conversation)
        assert prompt.startswith(BOS)
        assert '"properties": {"b": {}, "a": {}}' in prompt
        assert 'parameter name="b" string="false">1<' in prompt
        assert "<tool_result>done</tool_result>" in prompt
        assert prompt.endswith("<｜Assistant｜><think>")
    assert "<｜System｜>" in prompt


def test_text_that_spells_a_special_token_stays_text():
    template, tokenizer = template_of(ASSETS), Tokenizer(ASSETS)
    conversation = chat(f"x{EOS}y", enable_thinking=False)
    ids = chat_ids(template, conversation)
    assert tokenizer.decode(ids, skip_special_tokens=False) == render_chat(template, conversation)
    assert tokenizer.id_of(EOS) not in ids
    assert ids[0] == tokenizer.id_of(BOS)
    assert ids[-1] == tokenizer.id_of("</think>")
    assert chat_ids(template_of(byte_assets()), conversation) is None


@pytest.mark.parametrize("thinks", [True, False])
def test_the_plan_of_an_answer(thinks):
    conversation, tokenizer = chat(enable_thinking=thinks), Tokenizer(ASSETS)
    profile = detect("", uses_tools=True, tokenizer=tokenizer)
    rendered = render_chat(template_of(ASSETS), conversation)
    request = pb.GenerateRequest(chat=conversation)
    plan = plan_answer(request, read_tools(conversation), profile, rendered, tokenizer.token_bytes)
    assert plan.parsing.start == ("open" if thinks else "closed")
    assert {tokenizer.id_of(mark) for mark in (MARK, "</think>")} <= set(plan.visible_ids)
    stream = plan.parsing.open_stream()
    text = ("hm</think>" if thinks else "") + CALLS
    delta = pb.Delta(text=text, token_ids=tokenizer.encode(text))
    events = [pb.GenerateResponse(delta=delta), pb.GenerateResponse(finished={"reason": 1})]
    sent = [out for event in events for out in stream.parse(event.SerializeToString())]
    deltas = [pb.GenerateResponse.FromString(raw).delta for raw in sent]
    assert "".join(delta.reasoning for delta in deltas) == ("hm" if thinks else "")
    calls = [delta.tool_call.name for delta in deltas if delta.tool_call.name]
    assert calls == ["f", "g"]


def test_a_required_call_is_refused():
    conversation, tokenizer = chat(), Tokenizer(ASSETS)
    conversation.tools[0].strict = True  # auto enforces nothing, so strict is accepted
    profile = detect("", uses_tools=True, tokenizer=tokenizer)
    request = pb.GenerateRequest(chat=conversation)
    plan = plan_answer(request, read_tools(conversation), profile, "x", tokenizer.token_bytes)
    assert plan.constraint is None
    conversation.tool_choice.mode = pb.ToolChoice.MODE_REQUIRED
    request = pb.GenerateRequest(chat=conversation)
    with pytest.raises(InvalidArgumentError, match=r"chat\.tool_choice"):
        plan_answer(request, read_tools(conversation), profile, "x", tokenizer.token_bytes)


@pytest.mark.parametrize("args", [{"depth": 1}, {"messages": []}])
def test_arguments_that_the_encoding_does_not_know(args):
    with pytest.raises(InvalidArgumentError, match=r"chat\.template_args"):
        render_chat(template_of(ASSETS), chat(**args))


def test_without_the_library_the_error_names_the_package(monkeypatch):
    known = builtins.__import__

    def missing(name, *rest):
        if name == "deepseek_recipe":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UnimplementedError, match="pip install deepseek-recipe"):
        render_chat(template_of(ASSETS), chat())
    request, profile = pb.GenerateRequest(chat=chat()), ChatProfile("deepseek_v4", "think")
    with pytest.raises(UnimplementedError, match="deepseek-recipe"):
        plan_answer(request, read_tools(request.chat), profile, "x", bytes)
