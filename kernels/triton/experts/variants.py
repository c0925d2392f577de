"""Expert kernels and products as served models call them, to be compiled ahead of time.

Sizes are those of Qwen3-30B-A3B (128 experts, 8 a row, hidden 2048, 768 a gate) and of DeepSeek-V3
(256 experts in 8 groups, hidden 7168, 2048 a gate, weights in FP8 by blocks of 128).
"""

from kernels.triton import place_heads
from kernels.triton.ahead_of_time import Variant
from kernels.triton.experts import align, combine, grouped, routing, tiles
from kernels.triton.products import gates, linear

_FORMATS = ("plain", "float8", "float4", "int8", "int4")
_GROUPS = {"float8": 128, "float4": 32, "int8": 128, "int4": 128}


def expert_variants(element: str) -> list[Variant]:
    """All kernels for one element type: "fp32", "bf16" or "fp16"."""
    decode, few, many = tiles._DECODE, tiles._FEW, tiles._MANY
    return [
        _route("route_softmax", element, 1, 128, 0),
        _route("route_groups", element, 8, 32, 1),
        *_align(),
        Variant(
            "combine",
            combine.combine_kernel,
            {"outputs": f"*{element}", "weights": "*fp32", "ids": "*i64", "out": f"*{element}"},
            {"HAS_IDS": 1, "TOP_K": 8, "SIZE": 2048, "TILE": 1024},
        ),
        _grouped("gate_up_decode", element, "plain", decode, 1536, 2048, gated=True),
        _grouped("gate_up_few", element, "plain", few, 1536, 2048, gated=True),
        _grouped("gate_up_many", element, "plain", many, 1536, 2048, gated=True),
        _grouped("down_decode", element, "plain", decode, 2048, 768, gated=False),
        _grouped("down_many", element, "plain", many, 2048, 768, gated=False),
        *(
            _grouped(f"gate_up_{form}_{name}", element, form, tile, 4096, 7168, gated=True)
            for form in _FORMATS[1:]
            for name, tile in (("decode", decode), ("few", few))
        ),
        *(_linear(f"linear_{form}", element, form) for form in _FORMATS),
        Variant(
            "place_heads",
            place_heads.place_heads_kernel,
            dict.fromkeys(("qkv", "query_norm", "key_norm"), f"*{element}")
            | {"cos_sin": "*fp32", "cache": f"*{element}", "slots": "*i64", "eps": "fp32"}
            | {"row_stride": "i32"},
            {"HEADS": 32, "KV_HEADS": 4, "DIM": 128, "TILE": 128, "NORMED": 1}
            | {"HEAD_TILE": place_heads.HEAD_TILE},
            warps=1,
        ),
        Variant(
            "gate_mul",
            gates.gate_mul_kernel,
            {"gate_up": f"*{element}", "out": f"*{element}"}
            | dict.fromkeys(("limit", "alpha", "offset"), "fp32"),
            {"SIZE": 1536, "FUNCTION": 0, "HAS_LIMIT": 1, "TILE": 1024},
        ),
    ]


def _route(name: str, element: str, groups: int, size: int, scoring: int) -> Variant:
    types = {"scores": f"*{element}", "bias": "*fp32", "chosen": "*i64", "weights": "*fp32"}
    return Variant(
        name,
        routing.route_kernel,
        types | {"ids": "*i64", "row_stride": "i32", "scale": "fp32"},
        {"SCORING": scoring, "HAS_BIAS": int(groups > 1), "HAS_CHOSEN": 0, "TOP_K": 8}
        | {"RENORMALISE": 1, "GROUPS": groups, "TOP_GROUPS": (groups + 1) // 2, "SIZE": size}
        | {"GROUP_TILE": groups, "SIZE_TILE": size, "K_TILE": 8},
        warps=1,
    )


def _align() -> list[Variant]:
    bins = align.num_bins(256)
    sizes = {"EXPERTS": 256, "BINS": bins}
    numbers, chunk = "*i32", {"CHUNK": align.CHUNK}
    ids = {"ids": "*i64", "chunk_counts": numbers}
    return [
        Variant("align_count", align.count_kernel, ids | {"pairs": "i32"}, sizes | chunk, warps=1),
        Variant(
            "align_scan",
            align.scan_kernel,
            dict.fromkeys(("chunk_counts", "begins", "counts", "tile_ends"), numbers)
            | {"loads": "*i64", "chunks": "i32"},
            {"HAS_LOADS": 1} | sizes | {"STEP": align._STEP, "ROWS": 64},
            warps=8,
        ),
        Variant(
            "align_place",
            align.place_kernel,
            ids
            | dict.fromkeys(("begins", "tile_ends", "order"), numbers)
            | dict.fromkeys(("tile_experts", "tile_begins"), numbers)
            | dict.fromkeys(("pairs", "chunks", "tiles"), "i32"),
            sizes | {"LEVELS": bins.bit_length() - 1} | chunk | {"ROWS": 64},
            warps=2,
        ),
        Variant(
            "align_slots",
            align.slot_kernel,
            ids
            | dict.fromkeys(("slots", "copies", "assigned"), "*i64")
            | dict.fromkeys(("pairs", "first", "tile"), "i32"),
            {"WIDTH": 2} | sizes | chunk,
            warps=2,
        ),
    ]


def _weight_types(element: str, form: str) -> dict[str, str]:
    numbers = f"*{element}" if form == "plain" else "*u8"
    scales = {"plain": f"*{element}", "float4": "*u8"}.get(form, "*fp32")
    return {"x": f"*{element}", "weight": numbers, "scales": scales, "zeros": numbers}


def _weight_sizes(form: str, columns: int, depth: int, tile: tiles.Tiles) -> dict[str, int]:
    group = _GROUPS.get(form, depth)
    return {
        "COLUMNS": columns, "DEPTH": depth, "FORMAT": _FORMATS.index(form), "SCALED": group,
        "ROW_TILE": tile.rows, "COLUMN_TILE": tile.columns,
        "DEPTH_TILE": tile.depth if form in ("plain", "float4") else min(tile.depth, group),
        "WIDE": 0,
    }  # fmt: skip


def _grouped(
    name: str, element: str, form: str, tile: tiles.Tiles, columns: int, depth: int, *, gated: bool
) -> Variant:
    numbers = ("order", "begins", "counts", "tile_experts", "tile_begins")
    types = _weight_types(element, form) | {"bias": f"*{element}", "out": f"*{element}"}
    return Variant(
        name,
        grouped.grouped_kernel,
        types
        | dict.fromkeys(numbers, "*i32")
        | dict.fromkeys(("limit", "alpha", "offset"), "fp32"),
        {"TOP_K": 8, "HAS_BIAS": 0, "GATED": int(gated), "FUNCTION": 0, "HAS_LIMIT": 0}
        | {"GROUP": align.GROUP_TILES}
        | _weight_sizes(form, columns, depth, tile),
        warps=tile.warps,
        stages=tile.stages,
    )


def _linear(name: str, element: str, form: str) -> Variant:
    tile = tiles.INVARIANT
    return Variant(
        name,
        linear.linear_kernel,
        _weight_types(element, form) | {"out": f"*{element}", "rows": "i32", "x_stride": "i32"},
        {"ADD": 0, "GROUP": linear._GROUP} | _weight_sizes(form, 4096, 7168, tile),
        warps=tile.warps,
        stages=tile.stages,
    )
