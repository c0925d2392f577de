"""Golden token ids of llama.cpp and SentencePiece, which no test needs: run it to renew them.

    python scripts/make_tokenizer_golden.py tests/data --llama-tokenize PATH

Writes gguf_tokenizers.json: a small byte-level vocabulary trained without any split (so that its
pieces cross every border that a split can draw) with llama.cpp's ids for each name of a split, and
a small SentencePiece model with SentencePiece's ids. Wants the `sentencepiece` package and
llama.cpp's `llama-tokenize`; neither is a dependency of this project.
"""

import argparse
import base64
import io
import json
import subprocess
import tempfile
from pathlib import Path

import gguf
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from services.engine.model_files.gguf_splits import NAMES

TEXTS = (
    "Hello, world! It's 2024-11-05; I'd say they'LL've done 1234567 things.",
    "  two spaces,\ttabs\n\nand   lines \r\n end.  ",
    "naïve café — “quotes” … žluťoučký kůň, ßtraße",
    "日本の首都は東京です。中文也可以 한국어도",
    "Москва является столицей; ελληνικά; عربي ١٢٣",
    "def f(x):\n    return x**2 + 3.14e-10  # CamelCaseNames HTTPServer\n",
    "price: $1,299.99 + 15% = <b>100</b> | a^b ~ c_d `e` \\n",
    "🙂👩‍👩‍👧 e\u0301 emoji",
    "WHAT'S up? don'T we'Re i'M 'tis 12 123 1234 ¼ ½ Ⅳ",
    "a/b/c//d!!!///\n\n\n//x",
    "",
    " ",
    "x",
)
SPM_SPECIAL = ("<tool>", "<|sep|>")


def main() -> None:
    """Write the file into the folder given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-tokenize", type=Path, required=True, help="llama.cpp's program")
    args = parser.parse_args()
    tokens, merges = _byte_vocabulary()
    spm = _spm_model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v.gguf"
        bpe_ids = {}
        for name in NAMES:
            _write_bpe(path, name, tokens, merges)
            bpe_ids[name] = [_ids(args.llama_tokenize, path, text) for text in TEXTS]
        spm_ids = {}
        for prefix in (True, False):
            _write_spm(path, spm, prefix)
            texts = [*TEXTS, *_marked()]
            spm_ids[str(prefix)] = [_ids(args.llama_tokenize, path, text) for text in texts]
    value = {
        "texts": TEXTS,
        "marked_texts": _marked(),
        "bpe": {"tokens": tokens, "merges": merges, "ids": bpe_ids},
        "spm": {
            "model": base64.b64encode(spm).decode(),
            "llama_cpp_ids": spm_ids,
            "sentencepiece_ids": _spm_ids(spm),
        },
    }
    out = args.folder / "gguf_tokenizers.json"
    out.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
    print(out, out.stat().st_size, len({json.dumps(ids) for ids in bpe_ids.values()}))


def _marked() -> list[str]:
    """Texts with special pieces in them; SentencePiece itself reads none of the control ones."""
    return ["<s>Hello <tool>x</s> y", "a<|sep|>b <|sep|> c", "</s>"]


def _byte_vocabulary() -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def _spm_model() -> bytes:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.splitlines() if line] * 20),
        model_writer=out,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        user_defined_symbols=list(SPM_SPECIAL),
        minloglevel=2,
    )
    return out.getvalue()


def _spm_ids(model: bytes) -> list[list[int]]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.encode(text) for text in TEXTS]


def _write_bpe(path: Path, name: str, tokens: list[str], merges: list[str]) -> None:
    writer = _writer(path, len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    _finish(writer)


def _write_spm(path: Path, model: bytes, prefix: bool) -> None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    count = processor.vocab_size()
    writer = _writer(path, count)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(index) for index in range(count)])
    writer.add_token_scores([processor.get_score(index) for index in range(count)])
    writer.add_token_types([_type(processor, index) for index in range(count)])
    writer.add_add_space_prefix(prefix)
    _finish(writer)


def _type(processor: object, index: int) -> int:
    if processor.is_unknown(index):
        return 2
    if processor.is_control(index):
        return 3
    if processor.is_byte(index):
        return 6
    return 4 if processor.id_to_piece(index) in SPM_SPECIAL else 1


def _writer(path: Path, count: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(count)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ids(program: Path, model: Path, text: str) -> list[int]:
    if not text:
        return []
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        command = [program, "-m", model, "-f", file.name, "--ids", "--no-bos", "--no-escape"]
        done = subprocess.run([*command, "--log-disable"], capture_output=True, check=True)
    ids: list[int] = json.loads(done.stdout)
    return ids


if __name__ == "__main__":
    main()
