"""Kernels of DeepSeek V4 with the sizes of V4-Flash, for compiling ahead of time."""

from typing import Any

from kernels.triton.ahead_of_time import Variant
from kernels.triton.v4 import attention, compressor, streams

_I, _F, _INT = "i32", "*fp32", "*i32"
_PLACES = {"starts": _INT, "lengths": _INT, "slots": _INT, "num_sequences": _I}
_TABLES = {"tables": _INT, "table_stride": _I}


def v4_variants(element: str) -> list[Variant]:
    """All kernels of this package; see ahead_of_time.variants."""
    return [
        _attention("v4_window", element, 0, 0),
        _attention("v4_chosen", element, 4, 512),
        _attention("v4_dense", element, 128, 0),
        _compress("v4_compress_main", element, 512, 4, 1024, 8),
        _compress("v4_compress_index", element, 128, 4, 256, 8),
        _compress("v4_compress_dense", element, 512, 128, 512, 128),
        Variant(
            "v4_keep", compressor.keep_kernel, {"rows": _F, "ring": _F} | _PLACES,
            {"WIDTH": 2048, "RING": 8, "TILE": 1024},
        ),
        *_streams(element),
    ]  # fmt: skip


def _attention(name: str, element: str, ratio: int, chosen: int) -> Variant:
    x = f"*{element}"
    tiles = attention.TILES[4 if element == "fp32" else 2]
    types = {"q": x, "keys": x, "ring": x, "out": x, "cos_sin": _F, "sinks": _F, "scale": "fp32"}
    sizes = {"HEADS": 64, "DIM": 512, "TURNED": 64, "WINDOW": 128, "RING": 128, "WIDEN": False}
    sizes |= {"RATIO": ratio, "BLOCK": 128, "PER_BLOCK": 128 // ratio if ratio else 1}
    sizes |= {"CHOSEN": chosen, "ROWS": tiles.rows, "DIM_TILE": 512, "TILE": tiles.positions}
    read = {"cache": x} if ratio else {}
    read |= {"chosen": _INT} if chosen else {}
    absent: dict[str, Any] = dict.fromkeys({"cache", "chosen"} - read.keys())
    return Variant(
        name, attention.v4_attention_kernel, types | _PLACES | _TABLES | read, sizes | absent,
        tiles.warps, tiles.stages,
    )  # fmt: skip


def _compress(name: str, element: str, dim: int, ratio: int, width: int, ring: int) -> Variant:
    types = {"rows": _F, "ring": _F, "cos_sin": _F, "norm": _F, "cache": f"*{element}"}
    sizes = {"DIM": dim, "WIDTH": width, "TURNED": 64, "RING": ring, "RATIO": ratio, "BLOCK": 128}
    sizes |= {"PER_BLOCK": 128 // ratio, "DIM_TILE": dim, "TILE": compressor.TILE}
    return Variant(
        name, compressor.compress_kernel, types | {"eps": "fp32"} | _PLACES | _TABLES, sizes
    )


def _streams(element: str) -> list[Variant]:
    x = f"*{element}"
    count, size = 4, 4096
    width, outputs = count * size, count * (2 + count)
    splits = -(-width // streams.SPLIT)
    made = {"pre": _F, "post": _F, "mix": _F}
    row = {"COUNT": count, "SIZE": size, "TILE": streams.READ}
    return [
        Variant(
            "v4_stream_scores", streams.stream_scores_kernel,
            {"streams": x, "weight": _F, "parts": _F, "squares": _F, "rows": _I},
            {"OUTPUTS": outputs, "WIDTH": width, "SPLIT": streams.SPLIT, "ROWS": streams.ROWS}
            | {"OUT_TILE": 32, "TILE": streams.TILE},
        ),
        Variant(
            "v4_stream_weights", streams.stream_weights_kernel,
            {"parts": _F, "squares": _F, "base": _F, "scale": _F, "rows": _I}
            | made | {"norm_eps": "fp32", "eps": "fp32"},
            {"COUNT": count, "WIDTH": width, "SPLITS": splits, "STEPS": 20}, 1,
        ),
        Variant(
            "v4_stream_read", streams.stream_read_kernel, {"streams": x, "pre": _F, "out": x}, row
        ),
        Variant(
            "v4_stream_spread", streams.stream_spread_kernel,
            {"streams": x, "output": x, "post": _F, "mix": _F, "out": x}, row,
        ),
    ]  # fmt: skip
