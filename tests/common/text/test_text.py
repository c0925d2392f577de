"""Tokenizer, assets and chat template, on the byte-level tokenizer and hand-made ones."""

import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.text import ChatTemplate, TextAssets, Tokenizer, render_chat
from services.common.text.byte_level import byte_assets

ASSETS = byte_assets(added=("<think>", "</think>", "é!"))
TOKENIZER = Tokenizer(ASSETS)
THINK, END_THINK = 259, 260


def template(source, **tokens):
    return ChatTemplate(
        TextAssets.of(tokenizer_json=b"", chat_template=source, special_tokens=tokens),
        now=lambda: datetime(2026, 11, 29, 12),
    )


class TestAssets:
    async def test_survive_the_stream_in_parts(self):
        chunks = list(ASSETS.chunks(chunk_bytes=1000))
        assert len(chunks) > 3
        assert await TextAssets.from_chunks(chunks) == ASSETS

    async def test_damage_is_noticed(self):
        chunks = list(ASSETS.chunks(chunk_bytes=1000))
        del chunks[1]
        with pytest.raises(ValueError, match=r"digest is sha256:.*, expected sha256:"):
            await TextAssets.from_chunks(chunks)

    async def test_an_empty_stream_is_an_error(self):
        with pytest.raises(ValueError, match="empty"):
            await TextAssets.from_chunks([])

    def test_digest_is_of_the_content(self):
        assert byte_assets().digest == byte_assets().digest
        others = [byte_assets(add_bos=True), byte_assets(chat_template="x"), byte_assets(added="y")]
        assert len({a.digest for a in [byte_assets(), *others]}) == 4


class TestTokenizer:
    @given(st.text())
    def test_text_survives(self, text):
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
        assert TOKENIZER.token_bytes_of(ids) == text.encode()

    def test_added_tokens_get_no_spaces_and_only_special_ones_are_dropped(self):
        ids = [THINK, *b"ok", END_THINK, *b"1", 258]
        assert TOKENIZER.decode(ids) == "<think>ok</think>1"
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<think>ok</think>1<|im_end|>"
        assert TOKENIZER.is_special(258)
        assert not TOKENIZER.is_special(THINK)

    def test_an_added_token_with_an_accent_is_its_own_text(self):
        ids = TOKENIZER.encode("é!")
        assert ids == [261]
        assert TOKENIZER.decode(ids) == "é!"
        assert TOKENIZER.token_bytes(261) == "é!".encode()

    def test_bytes_are_exact_where_text_cannot_be(self):
        assert TOKENIZER.token_bytes(0xE9) == b"\xe9"
        assert TOKENIZER.decode([0xE9]) == "�"

    def test_ids_without_a_token_are_nothing(self):
        assert TOKENIZER.vocab_size == 262
        assert TOKENIZER.token_bytes(262) == b""
        assert TOKENIZER.token_bytes(-1) == b""
        assert TOKENIZER.decode([65, 10**9]) == "A"

    def test_bos_is_added_once_and_only_if_wanted(self):
        with_bos = Tokenizer(byte_assets(add_bos=True))
        assert with_bos.encode("a") == [256, 97]
        assert with_bos.encode("<|endoftext|>a") == [256, 97]
        assert with_bos.encode("a", add_special_tokens=False) == [97]
        assert TOKENIZER.encode("a") == [97]

    def test_byte_fallback_vocabularies(self):
        spec = json.loads(ASSETS.tokenizer_json)
        spec["added_tokens"] = []
        spec["model"] = {
            "type": "BPE",
            "vocab": {"<0xC3>": 0, "▁a": 1, "<0xA9>": 2},
            "merges": [],
            "byte_fallback": True,
        }
        spec["pre_tokenizer"] = None
        replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        parts = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
        spec["decoder"] = {"type": "Sequence", "decoders": parts}
        tokenizer = Tokenizer(TextAssets.of(tokenizer_json=json.dumps(spec).encode()))
        assert tokenizer.token_bytes_of([1, 0, 2]) == " aé".encode()
        assert tokenizer.decode([1, 0, 2]) == " aé"

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 1}'])
    def test_rubbish_is_refused(self, content):
        with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
            Tokenizer(TextAssets.of(tokenizer_json=content))


class TestChatTemplate:
    def test_helpers_that_templates_expect(self):
        source = (
            "{%- for m in messages %}\n"
            "    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
            "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
            "{%- endfor %}|{{ strftime_now('%d %b %Y') }}|{{ bos_token }}|{{ enable_thinking }}"
        )
        text = template(source, bos_token="<s>").render(
            [{"role": "user", "content": "<é'>"}, {"role": "skip", "content": "no"}],
            template_args={"enable_thinking": False},
        )
        assert text == '"<é\'>"|29 Nov 2026|<s>|False'

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[7].content.x }}", "chat"),
            ("{{ 1 + 'a' }}", "unsupported operand"),
            ("{{ messages.append(1) }}", "chat"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
            ("{% if %}", "cannot be used"),
            ("", "no chat template"),
        ],
    )
    def test_what_goes_wrong_is_the_requests_error(self, source, words):
        with pytest.raises(InvalidArgumentError, match="chat") as caught:
            template(source).render([{"role": "user", "content": "x"}])
        assert words in caught.value.message
        assert caught.value.violations[0].field == "chat"

    @pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "bos_token"])
    def test_the_callers_variables_replace_none_of_ours(self, name):
        with pytest.raises(InvalidArgumentError, match=name):
            template("x", bos_token="<s>").render([], template_args={name: "evil"})


class TestRenderChat:
    def test_a_conversation_with_tools(self):
        chat = inference_pb2.Chat()
        chat.messages.add(role="user", content="Log 3")
        call = chat.messages.add(role="assistant").tool_calls.add(id="c1", name="log")
        call.arguments = '{"value": 3}'
        chat.messages.add(role="tool", content="done", tool_call_id="c1")
        chat.tools.add(name="log", description="d").parameters.update({"b": 3, "a": {"c": 1.5}})
        chat.template_args.update({"depth": 2})
        source = "{{ messages | tojson }}{{ tools | tojson }}{{ depth }}"
        text = render_chat(template(source), chat)
        assert '{"name": "log", "arguments": {"value": 3}}' in text
        assert '"parameters": {"a": {"c": 1.5}, "b": 3}' in text
        assert text.endswith("2")

    def test_plain_chatml(self):
        chat = inference_pb2.Chat(messages=[{"role": "user", "content": "hi"}])
        expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert render_chat(ChatTemplate(ASSETS), chat) == expected
        chat.template_args.update({"add_generation_prompt": False})
        assert not render_chat(ChatTemplate(ASSETS), chat).endswith("assistant\n")

    def test_no_messages_and_unknown_roles_are_named(self):
        with pytest.raises(InvalidArgumentError, match=r"chat\.messages"):
            render_chat(ChatTemplate(ASSETS), inference_pb2.Chat())
        chat = inference_pb2.Chat(messages=[{"role": "robot", "content": "hi"}])
        with pytest.raises(InvalidArgumentError, match=r"chat\.messages\[0\]\.role"):
            render_chat(ChatTemplate(ASSETS), chat)
