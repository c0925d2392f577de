"""Reads the rotary embedding keys of config.json: base, scaling, number of positions.

Meanings and defaults are those of transformers' modeling_rope_utils. Both its forms are read:
`rope_scaling` beside `rope_theta`, and `rope_parameters` with both in one object.
"""

import math

from services.engine.contract.model_config import (
    LinearRope,
    Llama3Rope,
    ModelFileError,
    RopeScaling,
    YarnRope,
)
from services.engine.model_files.json_keys import Keys

_DEFAULT_POSITIONS = 2048
_DEFAULT_THETA = 10000.0
_WHY_NOT = {
    "dynamic": "its angles depend on the length of the sequence, so cached keys would be wrong",
    "longrope": "its angles depend on the length of the sequence, so cached keys would be wrong",
}


def rope_theta(keys: Keys) -> float:
    """The base of the frequencies.

    Raises:
        ModelFileError: it is not above 1.
    """
    rope = _rope(keys)
    theta = rope.number("rope_theta", 0.0) or keys.number("rope_theta", _DEFAULT_THETA)
    if theta <= 1:
        raise ModelFileError(f"{keys.where}: rope_theta must be above 1, got {theta}")
    return theta


def rope_scaling(keys: Keys) -> RopeScaling | None:
    """The scaling of the frequencies; None for the plain ones.

    Raises:
        ModelFileError: the kind is not supported, or one of its keys is missing or wrong.
    """
    rope = _rope(keys)
    match kind := _kind(rope):
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
    why = _WHY_NOT.get(kind, "only 'default', 'linear', 'llama3' and 'yarn' are")
    raise ModelFileError(f"{rope.where}: rope_type {kind!r} is not supported: {why}")


def max_position(keys: Keys) -> int:
    """Positions that a sequence may reach: the file's number, or the scaled one if it is larger."""
    own = keys.count("max_position_embeddings", _DEFAULT_POSITIONS)
    rope = _rope(keys)
    match _kind(rope):
        case "linear":
            return int(own * _factor(rope))
        case "yarn":
            return max(own, int(_original(keys, rope) * _factor(rope)))
    return own


def _rope(keys: Keys) -> Keys:
    rope = keys.part("rope_scaling", "rope_parameters")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ModelFileError(f"{rope.where}: partial_rotary_factor is not supported, only 1")
    for name in ("full_attention", "sliding_attention"):
        if name in rope:
            raise ModelFileError(
                f"{rope.where}: {name}: one rotary embedding per layer type is not "
                "supported, only one for all layers"
            )
    return rope


def _kind(rope: Keys) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _factor(rope: Keys) -> float:
    factor = rope.number("factor")
    if not 1 <= factor < math.inf:
        raise ModelFileError(f"{rope.where}: factor must be at least 1, got {factor}")
    return factor


def _original(keys: Keys, rope: Keys) -> int:
    own = keys.count("max_position_embeddings", _DEFAULT_POSITIONS)
    return rope.count("original_max_position_embeddings", own) or own


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
