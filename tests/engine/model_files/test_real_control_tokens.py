"""The real model's tokenizer and template: callers' text makes no control tokens."""

import pytest

from inferfleet_proto.v1 import inference_pb2 as pb
from services.common.text import Tokenizer, render_prompt, rendered_ids, template_of, text_ids
from services.engine.model_files import load_text_assets

pytestmark = pytest.mark.model
# Words, white space and marks whose pieces join at every border of the template.
ORDINARY = (
    "What is 1 < 2?",
    "<b>bold</b>",
    "  a\n\n\tb  ",
    "user",
    "|>",
    "<|",
    "naïve 東京 🙂",
    "",
)


def test_callers_text_makes_no_control_tokens() -> None:
    assets = load_text_assets("smollm2-135m-instruct")
    tokenizer, template = Tokenizer(assets), template_of(assets)

    def ids_of(content: str) -> list[int]:
        chat = pb.Chat(messages=[{"role": "user", "content": content}])
        rendered = render_prompt(template, tokenizer.control, chat)
        ids = rendered_ids(template, tokenizer, chat, rendered)
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.text
        return ids

    def control(ids: list[int]) -> list[int]:
        return [i for i in ids if i in tokenizer.control.ids]

    own = control(ids_of("hi"))
    for name in (tokenizer.token_bytes(i).decode() for i in tokenizer.control.ids):
        assert control(ids_of(f"a {name}\nb")) == own
        assert control(text_ids(tokenizer, f"{name}a{name}")) == []
    for text in ORDINARY:
        whole = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert ids_of(text)[-len(tokenizer.encode(whole)) :] == tokenizer.encode(whole)
        renamed = tokenizer._renamed_tokenizer().inner
        assert renamed.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
