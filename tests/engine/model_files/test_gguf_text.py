"""Tokenizers of GGUF files and of tokenizer.model against llama.cpp's and SentencePiece's ids (see
scripts/make_tokenizer_golden.py)."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from services.common.text.assets import TextAssets
from services.common.text.tokenizer import Tokenizer
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files import load_text_assets
from services.engine.model_files.gguf_splits import NAMES
from services.engine.model_files.gguf_text import eos_ids, text_assets
from services.engine.model_files.spm_file import read_spm
from tests.doubles.tiny_model import write_tiny_model

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "data" / "gguf_tokenizers.json").read_text(encoding="utf-8")
)
TEXTS = GOLDEN["texts"]
BPE, SPM = GOLDEN["bpe"], GOLDEN["spm"]


@pytest.fixture(scope="module")
def spm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(base64.b64decode(SPM["model"]))
    return path


def _bpe_metadata(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": BPE["tokens"],
        "merges": BPE["merges"],
        "token_type": [1] * len(BPE["tokens"]),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


def _spm_metadata(path: Path, **changes: Any) -> dict[str, Any]:
    """A GGUF's lists, of the vocabulary that another reader gave."""
    model = json.loads(read_spm(path).to_str())
    vocab = model["model"]["vocab"]
    added = {token["content"]: token["special"] for token in model["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    types = [_type(token, added) for token in tokens]
    ranks = {left + right: -at for at, (left, right) in enumerate(model["model"]["merges"])}
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": [float(ranks.get(token, -1e6)) for token in tokens],
        "token_type": types,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


def _type(token: str, added: dict[str, bool]) -> int:
    if token in added:
        return 3 if added[token] else 4
    if token == "<unk>":
        return 2
    return 6 if token.startswith("<0x") and len(token) == 6 else 1


def _ids(assets: TextAssets, texts: list[str]) -> list[list[int]]:
    tokenizer = Library.from_str(assets.tokenizer_json.decode())
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_each_split_gives_the_ids_of_llama_cpp(name: str) -> None:
    assert _ids(text_assets(_bpe_metadata(pre=name)), TEXTS) == BPE["ids"][name]


def test_the_splits_differ_where_their_patterns_do() -> None:
    names = ("default", "gpt-2", "smollm", "deepseek-coder", "llama-bpe", "qwen2", "tekken")
    assert len({json.dumps(BPE["ids"][name]) for name in names}) == len(names)


def test_bytes_come_back_from_byte_level_ids() -> None:
    tokenizer = Tokenizer(text_assets(_bpe_metadata(pre="tekken")))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_sentencepiece_file_gives_the_ids_of_sentencepiece(spm_path: Path) -> None:
    tokenizer = read_spm(spm_path)
    got = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert got == SPM["sentencepiece_ids"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_in_a_gguf_gives_the_ids_of_llama_cpp(prefix: bool, spm_path: Path) -> None:
    assets = text_assets(_spm_metadata(spm_path, add_space_prefix=prefix))
    texts = [*TEXTS, *GOLDEN["marked_texts"]]
    assert _ids(assets, texts) == SPM["llama_cpp_ids"][str(prefix)]
    assert assets.add_bos


def test_unknown_characters_fall_back_to_bytes_and_come_back(spm_path: Path) -> None:
    tokenizer = Tokenizer(text_assets(_spm_metadata(spm_path)))
    for text in (*TEXTS, "\u0e01\U0001f9ea"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    lone = tokenizer.encode("\U0001f9ea", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in lone)[-4:] == "\U0001f9ea".encode()


def test_a_folder_with_tokenizer_model_alone_is_served(tmp_path: Path, spm_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(spm_path.read_bytes())
    assert _ids(load_text_assets(str(folder)), TEXTS) == SPM["sentencepiece_ids"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff", "not a SentencePiece model"),
        (b"\x0a\x7f", "ends within a field"),
        (b"\x12\x02\x18\x01", "only BPE is served"),
        (b"\x12\x02\x18\x02\x1a\x03\x12\x01x", "normalizer changes"),
        (b"\x12\x02\x18\x02\x1a\x02\x20\x00", "neither all bytes nor an unknown piece"),
    ],
)
def test_a_tokenizer_model_that_cannot_be_served_says_why(
    data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        read_spm(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "youtu"}, "pre 'youtu' is not supported"),
        ({"model": "t5"}, "model 't5' is not supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["q qqqq"]}, "merges does not fit the tokens"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "1 scores and"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_served_names_the_key(changes: dict, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        text_assets(_bpe_metadata(**changes))


def test_every_end_of_a_turn_ends_a_text() -> None:
    metadata = _bpe_metadata(
        tokens=["a", "<|eot_id|>", "<|im_end|>", "</s>", "<|eom_id|>"],
        token_type=[1, 3, 1, 3, 3],
        eos_token_id=3,
        eot_token_id=1,
    )
    assert eos_ids(metadata) == (3, 1, 4)  # <|im_end|> is an ordinary token here


def test_the_beginning_is_added_where_a_file_says_nothing_and_its_model_wants_it() -> None:
    assert text_assets(_bpe_metadata(pre="llama-bpe")).add_bos
    assert not text_assets(_bpe_metadata(pre="qwen2")).add_bos
    assert not text_assets(_bpe_metadata(pre="llama-bpe", add_bos_token=False)).add_bos
