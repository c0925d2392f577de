"""Files made to break a reader are refused within a second, by file and key."""

import json
import struct
import time
from types import SimpleNamespace

import pytest

from services.common.config.settings import ConfigError
from services.common.text.assets import TextAssets
from services.engine.contract.model_config import ModelFileError
from services.engine.front import service
from services.engine.front.config import FrontConfig
from services.engine.model_files import template_check
from services.engine.model_files.gguf_header import read_header
from services.engine.model_files.hf_config import folder_config

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path, *entries: bytes, tensors: bytes = b"", num_tensors: int = 0):
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries))
    path.write_bytes(head + b"".join(entries) + tensors)
    return path


def nested(depth: int) -> bytes:
    return struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth


ABSURD = {
    "nested": (text("a.b") + nested(50_000), "a.b: arrays are nested"),
    "unknown type": (text("a.b") + struct.pack("<I", 99), "a.b: unknown GGUF value type 99"),
    "long array": (text("a.b") + struct.pack("<IIQ", ARRAY, UINT32, 1 << 62), "GGUF header"),
    "long string": (text("a.b") + struct.pack("<IQ", STRING, 1 << 62), "beyond the end"),
    "alignment": (
        text("general.alignment") + struct.pack("<II", UINT32, 0),
        "general.alignment must be",
    ),
}


@pytest.fixture(autouse=True)
def quick():
    started = time.process_time()
    yield
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("name", ABSURD)
def test_a_header_made_to_break_the_reader(tmp_path, name):
    entry, message = ABSURD[name]
    path = gguf(tmp_path / "m.gguf", entry)
    with pytest.raises(ModelFileError, match=message) as raised:
        read_header(path)
    assert str(path) in str(raised.value)


def test_a_tensor_of_too_many_dimensions(tmp_path):
    tensors = text("w") + struct.pack("<I", 4_000_000_000)
    with pytest.raises(ModelFileError, match="'w' has 4000000000 dimensions"):
        read_header(gguf(tmp_path / "m.gguf", tensors=tensors, num_tensors=1))


def test_more_strings_than_any_vocabulary_has(tmp_path, monkeypatch):
    monkeypatch.setattr("services.engine.model_files.gguf_header.MAX_ITEMS", 10)
    entry = text("a.b") + struct.pack("<IIQ", ARRAY, STRING, 11) + text("x") * 11
    with pytest.raises(ModelFileError, match=r"a\.b: more than 10 strings"):
        read_header(gguf(tmp_path / "m.gguf", entry))


CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers must be at most 10000"),
        ({"vocab_size": 10**30}, "vocab_size must be at most"),
        ({"hidden_size": 10**4000}, "hidden_size must be at most"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": 7}, "layer_types must"),
    ],
)
def test_an_absurd_configuration(tmp_path, change, message):
    assert folder_config(_folder(tmp_path, CONFIG)).num_layers == 2
    with pytest.raises(ModelFileError, match=message) as raised:
        folder_config(_folder(tmp_path, CONFIG | change))
    assert "config.json" in str(raised.value)


def test_a_configuration_nested_without_end(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ModelFileError, match=r"config\.json: .*nested too deep"):
        folder_config(tmp_path)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{{" + "(" * 5000, "x" * 11])
def test_a_template_that_cannot_be_compiled(source, monkeypatch, tmp_path):
    monkeypatch.setattr(template_check, "MAX_BYTES", 10 if source == "x" * 11 else 10_000)
    assets = TextAssets.of(tokenizer_json=b"{}", chat_template=source)
    with pytest.raises(ModelFileError, match=f"^{tmp_path}: chat_template: "):
        template_check.check_template(assets, tmp_path)


def test_an_engine_checks_the_template_before_it_serves(monkeypatch, tmp_path):
    assets = TextAssets.of(tokenizer_json=b"{}", chat_template="{% if %}")
    monkeypatch.setattr(service, "load_text_assets", lambda _: assets)
    monkeypatch.setattr(service, "find_model", lambda _: SimpleNamespace(path=tmp_path))
    with pytest.raises(ConfigError, match="chat_template"):
        service._load_assets(FrontConfig(model="m"))


def test_a_model_without_a_template_is_served(tmp_path):
    template_check.check_template(TextAssets.of(tokenizer_json=b"{}"), tmp_path)


def _folder(path, config):
    (path / "config.json").write_text(json.dumps(config))
    return path
