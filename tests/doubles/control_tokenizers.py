"""Small tokenizers of each common kind, all with special, added and ordinary added tokens."""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from services.common.text import TextAssets
from services.common.text.byte_level import byte_alphabet

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "<|user|>", "<|assistant|>", "<|system|>", "[UNK]")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]")
ORDINARY = ("\n\n", "covid")
_CHARACTERS = [chr(c) for c in range(33, 127)]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = "{% for m in messages %}{{ '<|' ~ m.role | trim ~ '|>' }}{{ m.content }}{% endfor %}"
THINKING = (
    "{{ bos_token }}{% for m in messages %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- if m.content is string and '</think>' in m.content %}"
    "<|im_start|>{{ m.role }}\n<think>\n"
    "{{- m.content.split('</think>')[0].split('<think>')[-1] | trim }}\n</think>\n\n{{ content }}"
    "{%- else %}{{ '<|im_start|>%s\n' % m.role }}"
    "{{- content.replace('[x]', '<|user|>') }}{% endif %}"
    "{%- if m.reasoning_content %}{{ ''.join(['<think>', m.reasoning_content, '</think>']) }}"
    "{%- endif %}{{ '[INST]' if m.name and m.name[:1] != '<' }}{{ m.name | upper }}"
    "{%- for c in m.tool_calls or [] %}{{ '<tool_call>\n' }}{{ c.function | tojson }}"
    "{{ c.function.name }}{{ '\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- for t in tools or [] %}{{ loop.index }}<{{ t.function.name }}>{{ t | tojson(indent=1) }}"
    "{% endfor %}{{ extra | default('') }}"
)
TEMPLATES = {"chatml": CHATML, "pieces": PIECES, "thinking": THINKING}


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: BPE over bytes."""
    vocab = {c: i for i, c in enumerate(byte_alphabet())}
    for text in (*SPECIAL[:3], "Ġa", "in", "th"):
        vocab[text] = len(vocab)
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("i", "n"), ("t", "h")], ignore_merges=True)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: BPE over characters, rare ones as bytes, spaces as ▁."""
    texts = ["[UNK]", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *_CHARACTERS, "▁a", "<|"]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(texts)},
            merges=[("▁", "a"), ("<", "|")],
            unk_token="[UNK]",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def unigram() -> tokenizers.Tokenizer:
    """As T5: Unigram, NFKC, spaces as ▁; its control tokens are in the vocabulary too."""
    texts = ["[UNK]", "▁", *_CHARACTERS, "▁a", *SPECIAL[:-1]]
    made = tokenizers.Tokenizer(models.Unigram([(text, -1.0) for text in texts], unk_id=0))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return made


def word_piece() -> tokenizers.Tokenizer:
    """As BERT: WordPiece, lower case; removes control characters."""
    texts = [*SPECIAL, *MARKS, "hello", "user", *_CHARACTERS, *(f"##{c}" for c in _CHARACTERS)]
    made = tokenizers.Tokenizer(
        models.WordPiece({text: i for i, text in enumerate(texts)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


KINDS = (byte_level, byte_fallback, unigram, word_piece)


def assets_of(
    made: tokenizers.Tokenizer,
    template: str = CHATML,
    *,
    bos: bool = False,
    normalized: tuple[str, ...] = (),
) -> TextAssets:
    """Assets of a tokenizer with control tokens.

    Args:
        bos: the post-processor puts <s> before every text.
        normalized: control tokens that are searched in the normalised text.
    """
    made.add_special_tokens([AddedToken(t, special=True, rstrip=t == "<s>") for t in SPECIAL])
    marks = [AddedToken(t, normalized=t in normalized, lstrip=t == "<think>") for t in MARKS]
    made.add_tokens([*marks, *(AddedToken(t, normalized=False) for t in ORDINARY)])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return TextAssets.of(
        tokenizer_json=made.to_str().encode(),
        chat_template=template,
        special_tokens={"bos_token": "<s>"},
    )
