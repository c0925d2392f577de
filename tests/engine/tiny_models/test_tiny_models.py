"""The folders that `inferfleet tiny-model` writes, against references and torch's formats."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.sampling_params import SamplingParams
from services.engine.model_files import load_text_assets
from services.engine.offline.llm import LLM
from services.engine.tiny_models import DECLARATIONS, TinyModelError, write_tiny_model
from services.engine.tiny_models.float8 import bfloat16_bits, e4m3_codes
from services.engine.tiny_models.formats import Stored
from services.engine.tiny_models.safetensors_file import write_safetensors
from services.engine.tiny_models.values import uniform
from tests.engine.tiny_models import golden

pytestmark = pytest.mark.timeout(240)  # the first may compile the rounds of its model

GOLDEN = json.loads(golden.FILE.read_text(encoding="utf-8"))
SHALLOW = {
    "deepseek_v41": {
        "compress_ratios": [0, 1],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [0],
        "engram_vocab_size": 200,
    }
}
"""What else a model of two layers has changed: keys that name layers."""


def test_every_architecture_has_expected_tokens() -> None:
    assert set(GOLDEN) == set(DECLARATIONS)
    assert all(len(tokens) >= 8 for entry in GOLDEN.values() for tokens in entry["outputs"])


@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_folder_gives_the_tokens_of_its_reference(name: str, tmp_path: Path) -> None:
    """The same bytes as when the expected tokens were made, the ids of a text, then the tokens."""
    entry = GOLDEN[name]
    folder = write_tiny_model(tmp_path / "model", name)
    assert golden.digest(folder) == entry["digest"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert max(token["id"] for token in tokenizer["added_tokens"]) < 520
    with LLM(str(folder), threads=1, num_blocks=64, block_size=16) as llm:
        limits = [
            SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)
            for tokens in entry["outputs"]
        ]
        (text,) = llm.generate(golden.TEXT, limits[1])
        assert list(text.prompt_token_ids) == entry["prompts"][1]
        found = llm.generate(entry["prompts"], limits)
    assert [list(output.choices[0].token_ids) for output in found] == entry["outputs"]


@pytest.mark.parametrize("name", DECLARATIONS)
def test_engines_read_its_smallest_format(name: str, tmp_path: Path) -> None:
    """FP8 where the architecture has it; the shapes of two layers follow from config.json."""
    number_format = DECLARATIONS[name].formats[-1]
    changes = {"num_hidden_layers": 2, "hidden_size": 192, **SHALLOW.get(name, {})}
    folder = write_tiny_model(tmp_path / "m", name, number_format=number_format, changes=changes)
    stored = {value.dtype for value in load_file(folder / "model.safetensors").values()}
    assert (torch.float8_e4m3fn in stored) == (number_format == "fp8")
    ModelRunner(EngineConfig(model=str(folder), num_blocks=4)).close()


def test_correction_biases_are_float32_in_every_format(tmp_path: Path) -> None:
    """As published: bfloat16 would move the choice of experts."""
    folder = write_tiny_model(tmp_path / "m", "deepseek-v3", number_format="fp8")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert weights[name].dtype == torch.float32
    assert weights["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert weights["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"].shape == (1, 1)


def test_a_table_names_different_experts_and_scales_have_published_names(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "deepseek-v4", number_format="fp8")
    weights = load_file(folder / "model.safetensors")
    table = weights["layers.0.ffn.gate.tid2eid"]
    assert (table.dtype, table.shape) == (torch.int64, (516, 2))
    assert table.unique().tolist() == list(range(8))
    assert bool((table[:, 0] != table[:, 1]).all())
    assert weights["layers.1.ffn.gate.bias"].dtype == torch.float32
    assert weights["layers.1.attn.indexer.wq_b.weight"].dtype == torch.float8_e4m3fn
    assert weights["layers.1.attn.indexer.wq_b.scale"].shape == (2, 1)
    assert weights["layers.1.attn.compressor.wkv.weight"].dtype == torch.bfloat16
    assert weights["layers.2.attn.compressor.ape"].shape == (128, 32)
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())


def test_sizes_that_follow_from_others_are_in_the_published_text_part(tmp_path: Path) -> None:
    """A larger vocabulary has no more texts; the tables follow from the primes."""
    changes = {"vocab_size": 600, "engram_vocab_size": 10}
    folder = write_tiny_model(tmp_path / "m", "deepseek-v4.1", number_format="fp8", changes=changes)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    assert set(config) == {
        "_name_or_path",
        "architectures",
        "model_type",
        "torch_dtype",
        "quantization_config",
    }
    assert text["engram_num_embeddings"] == [
        11 + 13 + 17 + 19 + 23 + 29,
        31 + 37 + 41 + 43 + 47 + 53,
    ]
    assert (text["vocab_size"], text["engram_compressed_vocab_size"]) == (600, 451)
    weights = load_file(folder / "model.safetensors")
    assert weights["layers.4.engram.embed.weight"].shape == (252, 8)
    assert weights["layers.1.engram.wkv.weight"].dtype == torch.float8_e4m3fn
    assert weights["layers.1.engram.wkv.scale"].shape == (3, 1)
    assert weights["layers.0.ffn.gate.bias_vl"].dtype == torch.float32
    assert "layers.3.attn.compressor.wgate.weight" not in weights
    assert "layers.2.attn.indexer.wq_b.weight" not in weights


def test_names_sizes_and_ends_of_a_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "qwen3-moe", changes={"mlp_only_layers": [2]})
    weights = load_file(folder / "model.safetensors")
    assert weights["model.layers.3.mlp.experts.7.down_proj.weight"].shape == (64, 32)
    assert weights["model.layers.2.mlp.down_proj.weight"].shape == (64, 160)
    assert "model.layers.2.mlp.gate.weight" not in weights
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [509, 510]
    text = load_text_assets(str(folder))
    assert "<|im_start|>assistant" in text.chat_template


def test_layers_have_experts_by_the_rule_of_the_engine(tmp_path: Path) -> None:
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    folder = write_tiny_model(tmp_path / "m", "qwen3_moe", changes=changes)
    weights = load_file(folder / "model.safetensors")
    routed = [index for index in range(4) if f"model.layers.{index}.mlp.gate.weight" in weights]
    assert routed == [1]
    LLM(str(folder), threads=1, num_blocks=8, block_size=16).close()


def test_the_current_folder_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for kind in ("llama", "qwen3"):
        write_tiny_model(Path(), kind)
        assert json.loads(Path("config.json").read_text())["model_type"] == kind
        assert Path("model.safetensors").stat().st_size > 1000
    assert list(tmp_path.iterdir()) == [here]


def test_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    found = [
        load_file(write_tiny_model(tmp_path / "m", kind, seed=seed) / "model.safetensors")[name]
        for kind, seed in (("llama", 1), ("qwen3", 1), ("llama", 2))
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert 0.2 < float(found[0].std()) < 0.24, "U(-3/8, 3/8)"


def test_values_are_equal_however_they_are_drawn() -> None:
    values = uniform((1 << 20) + 5, 7 << 32)
    assert np.array_equal(values[-5:], uniform((1 << 20) + 9, 7 << 32)[-9:-4])
    assert len(np.unique(values[:1000])) > 990
    assert -1 <= values.min() < -0.999 < 0.999 < values.max() < 1


def test_bfloat16_and_fp8_hold_the_values_of_float32(tmp_path: Path) -> None:
    """Against torch's own rounding; the last block of a matrix is narrower than the others."""
    files = {
        kind: load_file(
            write_tiny_model(tmp_path / kind, "qwen3_moe", number_format=kind) / "model.safetensors"
        )
        for kind in ("float32", "bfloat16", "fp8")
    }
    exact = files["float32"]
    for name, values in files["bfloat16"].items():
        assert torch.equal(values, exact[name].to(torch.bfloat16))
    plain = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    for name, values in exact.items():
        stored = files["fp8"][name]
        if name.endswith(plain):
            assert torch.equal(stored, values.to(torch.bfloat16))
            continue
        scale = files["fp8"][f"{name}_scale_inv"]
        assert scale.shape == (-(-values.shape[0] // 128), -(-values.shape[1] // 128))
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: values.shape[0], : values.shape[1]]
        assert torch.equal(stored.float(), (values / wide).to(torch.float8_e4m3fn).float())
        assert float((stored.float() * wide - values).abs().max()) <= float(wide.max()) * 16.001


def test_rounding_of_every_code_and_every_middle() -> None:
    codes = torch.arange(0, 127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    every = torch.cat([values, middles, middles * 1.001, middles * 0.999])
    both = torch.cat([every, -every])
    expected = both.to(torch.float8_e4m3fn).view(torch.uint8)
    assert np.array_equal(e4m3_codes(both.numpy()), expected.numpy())
    assert e4m3_codes(np.float32([1e9, -1e9])).tolist() == [126, 254]
    halves = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159, 65000.0, 1e-30])
    bits = torch.from_numpy(bfloat16_bits(halves.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(bits, halves.to(torch.bfloat16))


def _of(architecture: str, number_format: str = "float32", **changes: object) -> dict:
    """Arguments of `write_tiny_model`."""
    return {"architecture": architecture, "number_format": number_format, "changes": changes}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"architecture": "bert"}, "architecture 'bert' is none of deepseek_v3, .*, qwen3_moe$"),
        ({"number_format": "int3"}, "format 'int3' is none of float32, bfloat16, fp8, those of q"),
        (_of("gpt-oss", number_format="fp8"), "'fp8' is none of float32, bfloat16, those of gpt_"),
        ({"changes": {"hiden_size": 1}}, "no key 'hiden_size' to change, only .*hidden_size"),
        ({"changes": {"vocab_size": 100}}, "vocab_size 100 is less than the tokenizer's 512"),
        ({"changes": {"hidden_size": "a"}}, "hidden_size must be a positive integer, got 'a'"),
        ({"changes": {"num_attention_heads": 3}}, "num_attention_heads 3 is no multiple of .* 2"),
        ({"changes": {"head_dim": 7}}, "head_dim 7 is odd"),
        ({"changes": {"decoder_sparse_step": 0}}, "decoder_sparse_step must be a positive integer"),
        ({"changes": {"num_experts_per_tok": 9}}, "num_experts_per_tok 9 is above num_experts 8"),
        (_of("mixtral", num_experts_per_tok=9), "_per_tok 9 is above num_local_experts 8"),
        (_of("gemma3", sliding_window=0), "sliding_window must be a positive integer, got 0"),
        (_of("glm4-moe", n_group=3), "n_group 3 does not make groups of 2 of 8 experts"),
        (_of("glm4-moe", n_group=8), "n_group 8 does not make groups of 2 of 8 experts"),
        (_of("glm4-moe", topk_group=5), "topk_group 5 is above n_group 4"),
        (_of("deepseek-v3", num_experts_per_tok=5), "5 is above the 4 experts of topk_group 2"),
        (_of("deepseek-v3", first_k_dense_replace=-1), "first_k_dense_replace must be 0 to 4, got"),
        (_of("deepseek-v3", num_key_value_heads=2), "heads 2 must be num_attention_heads 4"),
        (_of("deepseek-v3", qk_rope_head_dim=7), "qk_rope_head_dim 7 is odd"),
        (_of("deepseek-v3", index_topk=8), "no key 'index_topk' to change"),
        (_of("deepseek-v32", index_head_dim=4), "index_head_dim 4 is below qk_rope_head_dim 8"),
        (_of("deepseek-v32", index_topk=0), "index_topk must be a positive integer, got 0"),
        (
            _of("deepseek-v4", num_hidden_layers=5),
            "compress_ratios must list a ratio for each of 5",
        ),
        (_of("deepseek-v4", compress_ratios=[0, 4, 8, 0]), "has 8, it may have only 0, 4"),
        (_of("deepseek-v4", num_hidden_layers=1), "compress_ratios is 0 in each of 1 layers"),
        (
            _of("deepseek-v4", qk_rope_head_dim=32),
            "qk_rope_head_dim 32 must be even and at most 16",
        ),
        (_of("deepseek-v4", o_groups=3), "num_attention_heads 4 is no multiple of o_groups 3"),
        (_of("deepseek-v4", num_hash_layers=-1), "num_hash_layers must be 0 or more, got -1"),
        (_of("deepseek-v4.1", num_hidden_layers=2), "kv_source_layer_ids has 3, it must have"),
        (_of("deepseek-v4.1", compress_ratios=[0, 4, 2, 1, 1, 1]), r"ratios\[1\] is 4, which is"),
        (_of("deepseek-v4.1", engram_vocab_size="a"), "engram_vocab_size must be a positive .*'a'"),
        (_of("deepseek-v4.1", engram_layer_ids=[1.5]), r"engram_layer_ids must list .*\[1.5\]"),
        (_of("deepseek-v4.1", engram_head_dim=0), "engram_head_dim must be a positive integer"),
        (_of("deepseek-v4.1", engram_num_embeddings=[1]), "no key 'engram_num_embeddings' to"),
    ],
    ids=str,
)
def test_what_is_invalid_writes_nothing(given: dict, message: str, tmp_path: Path) -> None:
    arguments = {"architecture": "qwen3_moe", **given}
    with pytest.raises(TinyModelError, match=message):
        write_tiny_model(tmp_path / "m", arguments.pop("architecture"), **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [None, "{}", '{"_name_or_path": "meta-llama"}', "["])
def test_a_folder_of_others_is_not_replaced(config: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    if config is not None:
        (folder / "config.json").write_text(config)
    before = sorted(folder.iterdir())
    with pytest.raises(TinyModelError, match="was not written by this command"):
        write_tiny_model(folder, "llama")
    assert sorted(folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_its_own_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama")
    (folder / "left.safetensors").touch()
    write_tiny_model(folder, "llama", number_format="bfloat16")
    assert not (folder / "left.safetensors").exists()
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert list(tmp_path.iterdir()) == [folder]


def test_data_of_another_size_than_its_entry_is_refused(tmp_path: Path) -> None:
    entry = Stored("w", "F32", (2, 2))
    with pytest.raises(ValueError, match="w: 12 bytes of data for 16 in the head"):
        write_safetensors(tmp_path / "m", [entry], iter([np.zeros(3, np.float32)]))
