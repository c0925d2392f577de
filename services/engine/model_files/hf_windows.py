"""Reads the keys of config.json that describe sliding windows, by architecture."""

from collections.abc import Mapping

from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.json_keys import Keys

_DEFAULT_WINDOWS: Mapping[str, int] = {"gpt_oss": 128}
_DEFAULT_WINDOW = 4096
"""Sliding window of a file without the key `sliding_window`."""
_DEFAULT_PATTERN = 6
"""Every sixth layer of a Gemma 3 attends to all positions."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_window(keys: Keys, kind: str, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Sliding window, and the layers that use it; the keys mean the same as in transformers.

    Raises:
        ModelFileError: a key is wrong.
    """
    if not _has_window(keys, kind):
        return 0, ()
    window = keys.count("sliding_window", _DEFAULT_WINDOWS.get(kind, _DEFAULT_WINDOW))
    if window < 1:
        raise ModelFileError(f"sliding_window must be at least 1, got {window}")
    layers = _layers(keys, kind, num_layers)
    return (window, layers) if layers else (0, ())


def _has_window(keys: Keys, kind: str) -> bool:
    absent = keys.get("sliding_window") is None
    match kind:
        case "llama" | "glm4_moe":
            return False
        case "mixtral" | "phi3":
            return not absent
        case "mistral" | "gpt_oss" | "gemma3":
            return not absent or "sliding_window" not in keys
    return keys.flag("use_sliding_window") and (not absent or "sliding_window" not in keys)


def _layers(keys: Keys, kind: str, num_layers: int) -> tuple[int, ...]:
    every = range(num_layers)
    if kind in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return tuple(every)
    if types := keys.items("layer_types"):
        unknown = [name for name in types if name not in (_SLIDING, _FULL)]
        if unknown or len(types) != num_layers:
            raise ModelFileError(
                f"layer_types must be {num_layers} times {_SLIDING!r} or {_FULL!r}, got "
                f"{len(types)} entries" + (f", among them {unknown[0]!r}" if unknown else "")
            )
        return tuple(index for index in every if types[index] == _SLIDING)
    match kind:
        case "gpt_oss":
            return tuple(every[::2])
        case "gemma3":
            pattern = keys.count("sliding_window_pattern", 0)
            pattern = pattern or keys.count("_sliding_window_pattern", _DEFAULT_PATTERN)
            if pattern < 1:
                raise ModelFileError(f"sliding_window_pattern must be at least 1, got {pattern}")
            return tuple(index for index in every if (index + 1) % pattern)
    return tuple(every[keys.count("max_window_layers", 28) :])
