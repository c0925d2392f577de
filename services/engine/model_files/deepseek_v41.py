"""Reads config.json of a DeepSeek V4.1 model: the published keys of its text model.

A published file has them under `text_config`; what it says of images is not read, and images are
not served.
"""

from collections.abc import Mapping
from typing import Any

from services.engine.contract.deepseek_v41 import (
    MOST_IDS,
    DeepseekV41Config,
    EngramConfig,
    V41Layer,
)
from services.engine.contract.model_config import ModelConfig, ModelFileError
from services.engine.model_files.deepseek_v4 import (
    FIXED,
    check_fixed,
    common_config,
    read_sizes,
)
from services.engine.model_files.engram import engram_tables
from services.engine.model_files.json_keys import MAX_LAYERS, Keys

NAME = "deepseek_v41"
_FIXED: Mapping[str, Any] = {**FIXED, "gate_temp": 1, "hc_shifted": True, "use_fp4_sparse_kv": True}
_MOST_HEADS = 64
_MOST_TOKENS = 16
"""Of an n-gram."""


def v41_model_config(keys: Keys) -> ModelConfig:
    """What every model has of a model with `model_type` "deepseek_v41", and its own configuration.

    Raises:
        ModelFileError: see `deepseek_v41_config`.
    """
    text = keys.part("text_config") if "text_config" in keys else keys
    return common_config(deepseek_v41_config(text), NAME)


def deepseek_v41_config(keys: Keys) -> DeepseekV41Config:
    """The configuration of a text model; `engram.ids` is still empty.

    Raises:
        ModelFileError: a key is missing, wrong or has a value that is not supported; the message
            names file and key.
    """
    check_fixed(keys, NAME, _FIXED)
    return DeepseekV41Config(
        layers=_layers(keys),
        candidates_from=keys.count("candidate_source_layer_id"),
        candidate_blocks=keys.count("candidate_topk_blocks"),
        candidate_size=keys.count("candidate_block_size"),
        engram=_engram(keys),
        **read_sizes(keys, NAME, eps=1e-20),
    )


def _layers(keys: Keys) -> tuple[V41Layer, ...]:
    count = keys.count("num_hidden_layers", most=MAX_LAYERS)
    ratios = keys.items("compress_ratios")
    if len(ratios) < count:
        raise ModelFileError(
            f"{keys.where}: compress_ratios has {len(ratios)} entries, but num_hidden_layers is "
            f"{count}"
        )
    for index, ratio in enumerate(ratios[:count]):
        if isinstance(ratio, bool) or ratio not in (0, 1, 2):
            raise ModelFileError(
                f"{keys.where}: compress_ratios[{index}] is {ratio!r}, which is not supported, "
                "only 0, 1, 2"
            )
    sources = _indices(keys, "kv_source_layer_ids", count)
    chooses = _indices(keys, "index_source_layer_ids", count)
    if (
        "index_k_source_layer_ids" in keys
        and _indices(keys, "index_k_source_layer_ids", count) != sources
    ):
        raise ModelFileError(
            f"{keys.where}: index_k_source_layer_ids is not supported unless it equals "
            "kv_source_layer_ids"
        )
    layers = []
    for index, ratio in enumerate(ratios[:count]):
        before = [source for source in sources if source <= index]
        if ratio and not before:
            raise ModelFileError(
                f"{keys.where}: layer {index} reads compressed entries, but kv_source_layer_ids "
                f"{sources} has no layer up to it"
            )
        source = before[-1] if ratio else None
        layers.append(V41Layer(ratio, source, index in chooses))
    return tuple(layers)


def _indices(keys: Keys, name: str, count: int) -> list[int]:
    """Layers in ascending order."""
    values = keys.items(name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise ModelFileError(
                f"{keys.where}: {name} has {value!r}, it must have layers 0 to {count - 1}"
            )
    if values != sorted(set(values)):
        raise ModelFileError(f"{keys.where}: {name} {values} must be in ascending order")
    return list(values)


def _engram(keys: Keys) -> EngramConfig:
    layers = _indices(keys, "engram_layer_ids", keys.count("num_hidden_layers", most=MAX_LAYERS))
    longest = keys.count("engram_max_ngram_size", most=_MOST_TOKENS)
    heads = keys.count("engram_n_heads", most=_MOST_HEADS)
    num_ids = keys.count("engram_compressed_vocab_size", most=MOST_IDS)
    start = keys.count("engram_vocab_size")
    if longest < 2 or not heads or not num_ids or not start:
        raise ModelFileError(
            f"{keys.where}: engram_max_ngram_size is {longest}, engram_n_heads {heads}, "
            f"engram_compressed_vocab_size {num_ids}, engram_vocab_size {start}: the first must "
            "be at least 2, the others at least 1"
        )
    tables = engram_tables(layers, start=start, longest=longest, heads=heads, num_ids=num_ids)
    rows, wanted = [table.num_rows for table in tables], keys.items("engram_num_embeddings")
    if rows != wanted:
        raise ModelFileError(
            f"{keys.where}: engram_num_embeddings is {wanted}, but {rows} follow from "
            "engram_vocab_size, engram_max_ngram_size and engram_n_heads"
        )
    pad = "engram_pad_token_id" if "engram_pad_token_id" in keys else "engram_pad_id"
    return EngramConfig(tables, keys.count("engram_head_dim"), longest, keys.count(pad, 2), num_ids)
