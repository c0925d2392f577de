"""Which parsers a model gets, by the shape of its chat template."""

import pytest

from services.common.text import ChatTemplate, Tokenizer
from services.common.text.byte_level import CHATML, byte_assets
from services.common.text.parser_names import REASONING_PARSERS, TOOL_PARSERS
from services.gateway.answers.profile import CALL_MARKS, REASONING_MARKS, detect

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
TEMPLATES = [
    (CHATML, "hermes", "none"),
    ("", "none", "none"),
    (LOOP, "none", "none"),
    (LOOP + "<tool_call>", "hermes", "none"),
    (LOOP + "<tool_call>{{ m.content.split('</think>') }}", "hermes", "think"),
    (LOOP + "<tool_call><function=", "none", "none"),
    (LOOP + "<|start_header_id|>", "llama3", "none"),
    ("<|start_header_id|>{{ messages }}", "hermes", "none"),
    (LOOP + "[TOOL_CALLS]", "mistral", "none"),
    (LOOP + "[TOOL_CALLS][ARGS][THINK][/THINK]", "mistral", "mistral"),
    (LOOP + "<｜tool▁calls▁begin｜></think>", "deepseek_v3", "think"),
    (LOOP + "<｜DSML｜function_calls></think>", "deepseek_v4", "think"),
]


def profile_of(template, **tokens):
    assets = byte_assets(chat_template=template, **tokens)
    made = ChatTemplate(assets)
    return detect(template, uses_tools=made.uses_tools, tokenizer=Tokenizer(assets))


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_by_the_template(template, tools, reasoning):
    profile = profile_of(template)
    assert (profile.tools, profile.reasoning) == (tools, reasoning)


def test_only_special_tokens_need_to_be_shown():
    special = ("<s>", "[TOOL_CALLS]", "</s>")
    profile = profile_of(LOOP + "[TOOL_CALLS]", special=special, added=("[ARGS]",))
    assert profile.visible_ids() == (257,)
    assert profile.id_of("[TOOL_CALLS]") == 257
    assert profile.id_of("[ARGS]") is None
    assert profile.configured("none", "").visible_ids() == ()


def test_configured_parsers_override_the_template():
    profile = profile_of(CHATML)
    configured = profile.configured("llama3", "think")
    assert (configured.tools, configured.reasoning) == ("llama3", "think")
    assert profile.configured("auto", "") == profile
    assert profile.configured("none", "none").tools == "none"


def test_names_are_those_of_the_configuration():
    assert set(CALL_MARKS) == set(TOOL_PARSERS) - {"auto", "none"}
    assert set(REASONING_MARKS) == set(REASONING_PARSERS) - {"auto", "none"}
