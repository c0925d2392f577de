"""config.json of DeepSeek V4.1: the published keys, what follows from them, and what is refused."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.engine.contract.deepseek_v41 import DeepseekV41Config, V41Layer
from services.engine.contract.model_config import ModelFileError, YarnRope
from services.engine.model_files.deepseek_v41 import deepseek_v41_config, v41_model_config
from services.engine.model_files.engram_ids import compressed_ids
from services.engine.model_files.json_keys import Keys
from tests.doubles.tiny_v41 import keys, tiny_tokenizer
from tests.engine.compute.models.v41_oracle import engram, golden

FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "gate_temp": 1,
    "rms_norm_eps": 1e-20,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 3,
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16_000_000,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
"""The published text model of V4.1-Flash, in part."""


def read(**changes: Any) -> DeepseekV41Config:
    return deepseek_v41_config(Keys(FLASH | changes, "config.json"))


def test_the_published_keys() -> None:
    config = read()
    assert config.layers[1] == V41Layer()
    assert config.layers[2] == V41Layer(2, 2, chooses=True)
    assert config.layers[7] == V41Layer(2, 2)
    assert config.layers[19] == V41Layer(2, 14)
    assert config.layers[24] == V41Layer(1, 20, chooses=True)
    assert (len(config.layers), config.mtp_layers) == (40, 3)
    assert config.compress_rope == YarnRope(16, 65536, 32, 1, attention_factor=1)
    assert [table.layer for table in config.engram.tables] == [1, 14]
    assert [table.lookups for table in config.engram.tables] == [24, 24]
    assert config.engram.tables[0].primes[0][0] == 16_000_057


def test_the_tiny_file_says_what_the_oracle_computes_with() -> None:
    model = v41_model_config(Keys(keys(), "config.json"))
    assert isinstance(model.v4, DeepseekV41Config)
    shape, tables = golden.SHAPE, {table.layer: table for table in model.v4.engram.tables}
    assert set(tables) == set(shape.engram_layer_ids)
    for layer, table in tables.items():
        assert [list(heads) for heads in table.primes] == engram.primes(shape)[layer]
        assert list(table.factors) == engram.multipliers(shape, layer, 69)
    assert [layer.source for layer in model.v4.layers] == [shape.source_of(n) for n in range(9)]
    assert v41_model_config(Keys(keys()["text_config"], "config.json")) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported for deepseek_v41"),
        ({"hc_shifted": False}, "hc_shifted False is not supported"),
        ({"compress_ratios": [0, 0, 4]}, "compress_ratios has 3 entries, but num_hidden_layers is"),
        ({"compress_ratios": [0, 0, 4] * 20}, r"compress_ratios\[2\] is 4, .* only 0, 1, 2"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 reads compressed entries, but"),
        ({"kv_source_layer_ids": [2, 14, 8]}, "must be in ascending order"),
        ({"kv_source_layer_ids": [2, 41]}, "kv_source_layer_ids has 41, it must have layers 0 to"),
        ({"kv_source_layer_ids": [2, 14]}, "layer 20 has ratio 1, but reads .* 14 with ratio 2"),
        ({"index_source_layer_ids": [2, 8, 20]}, "layer 14 reads the entries of layer 14, but no"),
        ({"index_source_layer_ids": [0, 2, 8]}, "layer 0 has an index, but no entries"),
        ({"candidate_source_layer_id": 21}, "candidates come from layer 21, which has no index"),
        ({"candidate_source_layer_id": 14}, "layer 20 chooses among candidates of layer 14, but"),
        (
            {"compress_ratios": [0] * 40, "index_source_layer_ids": []},
            "candidates come from layer 20, which has no index",
        ),
        ({"candidate_topk_blocks": 0}, "candidate_blocks is 0"),
        ({"index_k_source_layer_ids": [2]}, "index_k_source_layer_ids is not supported unless"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size is 1, .* at least 2"),
        ({"engram_num_embeddings": [384006168]}, r"is \[384006168\], but \[384006168, 384016682\]"),
        ({"engram_layer_ids": [1, 40]}, "engram_layer_ids has 40, it must have layers 0 to 39"),
        ({"engram_compressed_vocab_size": 1 << 30}, "engram_compressed_vocab_size must be at most"),
        ({"engram_head_dim": None}, "'engram_head_dim' is missing"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read(**changes)


def test_ids_of_equal_texts() -> None:
    """Case, accents, forms of a character and whitespace do not count; parts of characters do."""
    assert compressed_ids(tiny_tokenizer()) == golden.COMPRESSED
    byte = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), range(256), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=byte, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["The", " the", "\u4f60\u597d", "\ufb01", "fi", "\n\n", " \t", "A\u0301"])
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(size)]
    raw = [tokenizer.id_to_token(token) for token in range(size)]
    ids = compressed_ids(tokenizer)
    assert ids == engram.compressed_ids(texts, raw)
    assert ids[byte["A"]] == ids[byte["a"]]
    assert len(set(ids)) < size - 26
    assert sum("\ufffd" in text for text in texts) >= 128
