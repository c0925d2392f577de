"""The `text_config` of a shape, and the shape of one, in the keys of a published config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
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
    own = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(shape).items()
    }
    rope = {key: own.pop(name) for key, name in _ROPE.items()}
    return {
        "model_type": "deepseek_v41_text",
        **own,
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


def shape_of(text_config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json describes; every field of it must be there."""
    rope = {name: text_config["rope_scaling"][key] for key, name in _ROPE.items()}
    found = {
        field.name: text_config[field.name] for field in fields(Shape) if field.name not in rope
    }
    lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    return Shape(**found | lists | rope)
