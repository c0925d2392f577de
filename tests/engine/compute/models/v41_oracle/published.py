"""The `text_config` of a shape, in the keys of a published config.json."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.engine.compute.models.v41_oracle import engram
from tests.engine.compute.models.v41_oracle.shape import Shape

_ROPE = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_positions",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
}


def text_config(shape: Shape, compressed: Sequence[int]) -> dict[str, Any]:
    """Keys and spellings as published; `compressed` has one id for each token."""
    fields = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(shape).items()
    }
    rope = {key: fields.pop(name) for key, name in _ROPE.items()}
    return {
        "model_type": "deepseek_v41_text",
        **fields,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "gate_temp": 1,
        "rope_scaling": {"type": "yarn", **rope},
        "tie_word_embeddings": False,
        "engram_num_embeddings": engram.table_rows(shape),
        "engram_compressed_vocab_size": max(compressed) + 1,
    }
