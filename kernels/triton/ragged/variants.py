"""Kernels of ragged attention with the shapes of published models, for compiling ahead of time."""

from typing import Any

import triton

from kernels.triton.ahead_of_time import Variant
from kernels.triton.ragged.attention import JOINED
from kernels.triton.ragged.decode import decode_join_kernel, decode_split_kernel
from kernels.triton.ragged.extend import extend_kernel
from kernels.triton.ragged.latent import (
    latent_chosen_kernel,
    latent_decode_kernel,
    latent_extend_kernel,
)
from kernels.triton.ragged.latent_attention import LATENT_TILES
from kernels.triton.ragged.tiles import SPLIT, tiles_for
from kernels.triton.selected.best import best_kernel
from kernels.triton.selected.scores import index_scores_kernel

_I, _F, _INT = "i32", "*fp32", "*i32"
_STRIDES = {"q_stride": _I, "q_head_stride": _I, "table_stride": _I}
_SEARCH = {"first_sequence": _I, "num_sequences": _I}
_NUMBERS = {"scale": "fp32", "soft_cap": "fp32"}
_PARTS = {"peaks": _F, "totals": _F, "parts": _F}


def attention_variants(element: str) -> list[Variant]:
    """All kernels of this package and of `selected`; see ahead_of_time.variants."""
    return [
        *_grouped("qwen3-moe", element, 4, 8, 128),
        *_grouped("gpt-oss", element, 8, 8, 64, window=128, sinks=True),
        *_grouped("gemma3", element, 4, 2, 256, window=1024),
        *_latent("deepseek-v3", element, 128),
        *_selected(element),
    ]


def _grouped(
    model: str,
    element: str,
    kv_heads: int,
    group: int,
    dim: int,
    *,
    window: int = 0,
    sinks: bool = False,
) -> list[Variant]:
    x = f"*{element}"
    tiles, padded = tiles_for(dim, 4 if element == "fp32" else 2)
    both: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "WINDOW": window,
        "SCALED": False,
    }
    both |= {"SPLIT": SPLIT, "DIM_TILE": padded, "kv_scales": None}
    own = {"HEADS": min(group, tiles.rows), "BLOCK": 32, "CAPPED": False, "WIDEN": False}
    own |= {"ROWS": tiles.rows, "TILE": tiles.positions}
    cached = {"q": x, "cache": x, "tables": _INT, "lengths": _INT}
    ends: dict[str, Any] = {"HAS_SINKS": sinks} | ({} if sinks else {"sinks": None})
    own_sinks = {"sinks": x} if sinks else {}
    join = {"lengths": _INT, "out": x, "num_splits": _I}
    return [
        Variant(
            f"decode_split {model}", decode_split_kernel, cached | _PARTS | _NUMBERS | _STRIDES,
            both | own, tiles.warps, tiles.stages,
        ),
        Variant(
            f"decode_join {model}", decode_join_kernel, _PARTS | join | own_sinks,
            both | ends | {"ROWS": JOINED}, 2,
        ),
        Variant(
            f"extend {model}", extend_kernel,
            cached | _NUMBERS | _STRIDES | _SEARCH | own_sinks | {"starts": _INT, "out": x},
            both | own | ends, tiles.warps, tiles.stages,
        ),
    ]  # fmt: skip


def _latent(model: str, element: str, heads: int) -> list[Variant]:
    x = f"*{element}"
    tiles = LATENT_TILES[4 if element == "fp32" else 2]
    own = {"COUNT": heads, "RANK": 512, "WIDTH": 576, "BLOCK": 64, "WIDEN": False}
    own |= {"ROWS": tiles.rows, "RANK_TILE": 512, "REST_TILE": 64, "TILE": tiles.positions}
    cached = {"q": x, "cache": x, "tables": _INT, "scale": "fp32"} | _STRIDES
    many = {"starts": _INT, "out": x}
    sizes = (tiles.warps, tiles.stages)
    return [
        Variant(
            f"latent_decode {model}", latent_decode_kernel, cached | _PARTS | {"lengths": _INT},
            own | {"SPLIT": SPLIT}, *sizes,
        ),
        Variant(
            f"latent_extend {model}", latent_extend_kernel,
            cached | many | _SEARCH | {"lengths": _INT},
            own | {"SPLIT": SPLIT, "HEADS": min(heads, tiles.rows)}, *sizes,
        ),
        Variant(
            f"latent_chosen {model}", latent_chosen_kernel,
            cached | many | {"chosen": _INT, "num_sequences": _I}, own | {"CHOSEN": 2048}, *sizes,
        ),
    ]  # fmt: skip


def _selected(element: str) -> list[Variant]:
    x = f"*{element}"
    batch = {"starts": _INT, "lengths": _INT, "scores": _F, "row_first": _I, "score_stride": _I}
    batch |= {"num_sequences": _I}
    strides = dict.fromkeys(("query_stride", "head_stride", "weight_stride", "table_stride"), _I)
    scores = {"queries": x, "weights": _F, "cache": x, "tables": _INT, "row_stop": _I} | strides
    sizes = {"HEADS": 64, "DIM": 128, "BLOCK": 64, "PER_BLOCK": 64, "RATIO": 1, "QUERIES": 8}
    sizes |= {"HEAD_TILE": 64, "DIM_TILE": 128, "TILE": 64, "WIDEN": False}
    best = {"TOP_K": 2048, "RATIO": 1, "TILE": triton.next_power_of_2(1024)}
    return [
        Variant("index_scores", index_scores_kernel, batch | scores, sizes, 4, 1),
        Variant("best", best_kernel, batch | {"chosen": _INT}, best),
    ]
