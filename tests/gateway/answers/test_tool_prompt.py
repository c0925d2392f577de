"""Tools in prompts, for templates with and without support for tools."""

import pytest

from inferfleet_proto.v1 import inference_pb2 as pb
from services.common.text import ChatTemplate, render_chat
from services.common.text.byte_level import CHATML, byte_assets

BEGIN = "<｜tool▁calls▁begin｜>"
PLAIN = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content is not none %}!{% endif %}"
    "{{ '" + BEGIN + "' + m.tool_calls[0]['function']['arguments'] }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools[0].function.name }}"
)
AS_JSON = PLAIN.replace("['arguments']", "['arguments'] | tojson")


def chat(*, system=""):
    made = pb.Chat()
    if system:
        made.messages.add(role="system", content=system)
    made.messages.add(role="user", content="hi")
    made.messages.add(role="assistant").tool_calls.add(id="c", name="f", arguments='{"a":1}')
    made.messages.add(role="tool", content="done", tool_call_id="c")
    made.tools.add(name="f", parameters_json='{"z": 1, "a": 2}')
    return made


def rendered(template, conversation):
    return render_chat(ChatTemplate(byte_assets(chat_template=template)), conversation)


@pytest.mark.parametrize("template", [PLAIN, AS_JSON])
def test_arguments_as_the_template_joins_them(template):
    text = rendered(template, chat())
    called = '{"a": 1}' if template is PLAIN else "!" + '{"a": 1}'
    assert text.replace(BEGIN, "") == f"hi{called}donef"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_template_without_support_for_tools(system):
    text = rendered(CHATML, chat(system=system))
    assert text.count("<|im_start|>system") == 1
    assert ("Be brief.\n\n" in text) is bool(system)
    assert '"parameters": {"z": 1, "a": 2}' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>" in text


def test_without_tools_nothing_is_added():
    conversation = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert "function" not in rendered(CHATML, conversation)


def test_a_result_is_named_by_its_call():
    template = "{% for m in messages %}{{ m.role }}:{{ m.name }} {% endfor %}{{ tools }}"
    assert rendered(template, chat()).startswith("user: assistant: tool:f ")
    conversation = chat()
    conversation.messages[-1].name = "own"
    assert "tool:own" in rendered(template, conversation)
    conversation.messages[-1].ClearField("name")
    conversation.messages[-1].tool_call_id = "other"
    assert "tool: " in rendered(template, conversation)
