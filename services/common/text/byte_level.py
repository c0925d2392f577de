"""A small complete tokenizer with one token per byte, for simulated engines and tests.

It encodes any text and any bytes, so every code path that handles text can run with it.
"""

import json
from collections.abc import Sequence

from services.common.text.assets import TextAssets

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257 and 258; the last ends an answer."""


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: a printable byte is itself, others are 256 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(256 + n): b for n, b in enumerate(others)})
    return alphabet


def byte_assets(
    *,
    special: Sequence[str] = SPECIAL,
    added: Sequence[str] = (),
    chat_template: str = CHATML,
    add_bos: bool = False,
) -> TextAssets:
    """Assets whose id n is the byte n, then `special`, then `added` (not special) tokens.

    The first special token is beginning and padding, the last one ends an answer.
    """
    vocab = byte_alphabet()
    names = [(name, True) for name in special] + [(name, False) for name in added]
    added_tokens = [
        {
            "id": 256 + n,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": is_special,
        }
        for n, (content, is_special) in enumerate(names)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    tokens = {"bos_token": special[0], "eos_token": special[-1]} if special else {}
    return TextAssets.of(
        tokenizer_json=json.dumps(spec).encode(),
        chat_template=chat_template,
        special_tokens=tokens,
        add_bos=add_bos,
    )
