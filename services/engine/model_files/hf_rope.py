"""Reads the rotary embedding keys of config.json: base, scaling, number of positions.

Meanings and defaults are those of transformers' modeling_rope_utils. Both its forms are read:
`rope_scaling` beside `rope_theta`, and `rope_parameters` with both in one object.
"""

import math
from collections.abc import Mapping

from services.engine.contract.model_config import (
    FactorsRope,
    LinearRope,
    Llama3Rope,
    ModelFileError,
    RopeScaling,
    YarnRope,
)
from services.engine.model_files.json_keys import Keys

_DEFAULT_POSITIONS = 2048
_DEFAULT_THETA = 10000.0
_THETAS: Mapping[str, float] = {"mixtral": 1e6, "gpt_oss": 150000.0, "gemma3": 1e6}
"""Bases of architectures with another default."""
_ROTARY_SHARES: Mapping[str, float] = {"phi3": 1.0, "glm4_moe": 0.5}
"""Architectures whose heads may be rotated in part, with the default."""
_WHY_NOT = {
    "dynamic": "its angles depend on the length of the sequence, so cached keys would be wrong",
    "longrope": "it is served for phi3 only",
}


def rope_theta(keys: Keys, kind: str) -> float:
    """The base of the frequencies.

    Args:
        kind: the architecture.

    Raises:
        ModelFileError: it is not above 1.
    """
    rope = _rope(keys, kind)
    default = _THETAS.get(kind, _DEFAULT_THETA)
    theta = rope.number("rope_theta", 0.0) or keys.number("rope_theta", default)
    if theta <= 1:
        raise ModelFileError(f"{keys.where}: rope_theta must be above 1, got {theta}")
    return theta


def sliding_theta(keys: Keys, kind: str) -> float | None:
    """The base of the frequencies in layers with the window; None: as in the others.

    Raises:
        ModelFileError: it is not above 1, or these layers' frequencies are scaled.
    """
    if kind != "gemma3":
        return None
    own = keys.part("rope_parameters").part("sliding_attention")
    theta = own.number("rope_theta", 0.0) or keys.number("rope_local_base_freq", _DEFAULT_THETA)
    if theta <= 1:
        raise ModelFileError(f"{own.where}: rope_theta must be above 1, got {theta}")
    if _kind(own, kind) != "default":
        raise ModelFileError(
            f"{own.where}: rope_type {_kind(own, kind)!r} is not supported, only 'default'"
        )
    return theta


def rotary_dim(keys: Keys, kind: str, head_dim: int) -> int:
    """Elements of a head that are rotated; 0: all.

    Raises:
        ModelFileError: the architecture has no heads that are rotated in part.
    """
    where, share = keys, keys.get("partial_rotary_factor")
    if share is None:
        where, share = _rope(keys, kind), _rope(keys, kind).get("partial_rotary_factor")
    if kind not in _ROTARY_SHARES:
        if share not in (None, 1):
            raise ModelFileError(
                f"{where.where}: partial_rotary_factor {share} is not supported for {kind}, only 1"
            )
        return 0
    share = where.number("partial_rotary_factor", _ROTARY_SHARES[kind])
    if not 0 < share <= 1:
        raise ModelFileError(
            f"{where.where}: partial_rotary_factor must be above 0 and at most 1, got {share}"
        )
    rotated = int(head_dim * share)
    return 0 if rotated == head_dim else rotated


def rope_scaling(keys: Keys, kind: str, rotated: int) -> RopeScaling | None:
    """The scaling of the frequencies; None for the plain ones.

    Args:
        kind: the architecture.
        rotated: elements of a head that are rotated.

    Raises:
        ModelFileError: the kind is not supported, or one of its keys is missing or wrong.
    """
    rope = _rope(keys, kind)
    match type_ := _kind(rope, kind):
        case "default":
            return None
        case "linear":
            return LinearRope(_factor(rope))
        case "llama3":
            return Llama3Rope(
                factor=_factor(rope),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=_original(keys, rope),
            )
        case "yarn":
            return _yarn(keys, rope)
        case "longrope" if kind == "phi3":
            return _long(keys, rope, rotated)
    why = _WHY_NOT.get(type_, "only 'default', 'linear', 'llama3' and 'yarn' are")
    raise ModelFileError(f"{rope.where}: rope_type {type_!r} is not supported: {why}")


def score_scale(keys: Keys, kind: str) -> float:
    """What latent attention multiplies its scores by beside 1 / sqrt(head size).

    The square of `0.1 mscale_all_dim ln(factor) + 1`; 1 without scaling or without the key. As in
    DeepSeek's published code.

    Args:
        kind: the architecture.
    """
    rope = _rope(keys, kind)
    weight = rope.number("mscale_all_dim", 0.0)
    if _kind(rope, kind) == "default" or not weight:
        return 1.0
    return _log_scale(_factor(rope), weight) ** 2


def max_position(keys: Keys, kind: str) -> int:
    """Positions that a sequence may reach: the file's number, or the scaled one if it is larger.

    With LongRoPE the original length: a longer sequence has other angles from its first position
    on, so keys that were cached before it became longer would be wrong.
    """
    own = keys.count("max_position_embeddings", _DEFAULT_POSITIONS)
    rope = _rope(keys, kind)
    match _kind(rope, kind):
        case "linear" if kind != "gemma3":
            return int(own * _factor(rope))
        case "yarn":
            return max(own, int(_original(keys, rope) * _factor(rope)))
        case "longrope":
            return min(own, _original(keys, rope))
    return own


def _rope(keys: Keys, kind: str) -> Keys:
    rope = keys.part("rope_scaling", "rope_parameters")
    for name in ("full_attention", "sliding_attention"):
        if name in rope and kind != "gemma3":
            raise ModelFileError(
                f"{rope.where}: {name}: one rotary embedding per layer type is not "
                "supported, only one for all layers"
            )
    return rope.part("full_attention") if "full_attention" in rope else rope


def _kind(rope: Keys, kind: str) -> str:
    name = str(rope.get("rope_type") or rope.get("type") or "default")
    # Phi3's first files have other names for it.
    return "longrope" if kind == "phi3" and name in ("su", "yarn") else name


def _factor(rope: Keys) -> float:
    factor = rope.number("factor")
    if not 1 <= factor < math.inf:
        raise ModelFileError(f"{rope.where}: factor must be at least 1, got {factor}")
    return factor


def _original(keys: Keys, rope: Keys) -> int:
    own = keys.count("max_position_embeddings", _DEFAULT_POSITIONS)
    own = keys.count("original_max_position_embeddings", own) or own
    return rope.count("original_max_position_embeddings", own) or own


def _long(keys: Keys, rope: Keys, rotated: int) -> FactorsRope:
    """LongRoPE (Ding et al. 2024) within the original length: the short factors."""
    factors = rope.items("short_factor")
    if len(factors) != rotated // 2 or not all(_is_factor(value) for value in factors):
        raise ModelFileError(
            f"{rope.where}: short_factor must be {rotated // 2} numbers above 0, one per rotated "
            f"pair, got {len(factors)} values"
        )
    original = _original(keys, rope)
    factor = rope.number("factor", 0.0)
    factor = factor or keys.count("max_position_embeddings", _DEFAULT_POSITIONS) / original
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return FactorsRope(tuple(map(float, factors)), rope.number("attention_factor", attention))


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _yarn(keys: Keys, rope: Keys) -> YarnRope:
    factor = _factor(rope)
    return YarnRope(
        factor=factor,
        original_max_position=_original(keys, rope),
        beta_fast=rope.number("beta_fast", 0.0) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0) or 1.0,
        attention_factor=_attention_factor(rope, factor),
        truncate=rope.flag("truncate", default=True),
    )


def _attention_factor(rope: Keys, factor: float) -> float:
    """The file's value, else 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22)."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    above, below = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if above and below:
        return _log_scale(factor, above) / _log_scale(factor, below)
    return _log_scale(factor, 1.0)


def _log_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
