"""Reads and checks how the weights of a Hugging Face folder are quantised. Imports no torch.

The keys are those that the packing tools write: `quantization_config` of config.json, or
hf_quant_config.json (ModelOpt), or quantize_config.json (older GPTQ tools). Activations are never
quantised here, so keys about them are not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.compressed_tensors import CompressedTensors, compressed_tensors
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.json_keys import Keys, read_json


@dataclass(frozen=True, slots=True)
class Float8:
    """float8 e4m3 with scales; packed 4-bit floats (e2m1) may stand beside it (DeepSeek V4)."""

    block: tuple[int, int] | None
    """Rows and columns of a weight that share a scale; None: one scale per tensor or row."""

    @property
    def label(self) -> str:
        """What changes the decoded values, in words for `ModelSource.quantisation`."""
        return f"fp8-{self.block[0]}x{self.block[1]}" if self.block else "fp8"


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Stacks of experts in 4-bit floats (e2m1), 32 of which share a power of two (gpt_oss)."""

    label: str = "mxfp4"


@dataclass(frozen=True, slots=True)
class Gptq:
    """Whole numbers of `bits` in int32 words, along the inputs."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of them."""
    zero_offset: int
    """Added to a stored zero point: 1 in checkpoints of version 1, 0 in version 2."""
    ordered: bool = False
    """The groups of inputs are shuffled (act order): weights without `g_idx` would be wrong."""

    @property
    def label(self) -> str:
        """See Float8."""
        return f"gptq-v{2 - self.zero_offset}-{self.bits}bit-g{self.group_size or 'all'}"


@dataclass(frozen=True, slots=True)
class Awq:
    """4-bit whole numbers in int32 words, along the outputs, in the order of AWQ's "gemm"."""

    group_size: int | None
    """Inputs that share a scale; None: all of them."""

    @property
    def label(self) -> str:
        """See Float8."""
        return f"awq-4bit-g{self.group_size or 'all'}"


Quantisation = Float8 | Mxfp4 | Gptq | Awq | CompressedTensors


def folder_quantisation(folder: Path) -> Quantisation | None:
    """How the weights of a folder are quantised; None if its files do not say that they are.

    Raises:
        ModelFileError: a method that is not served, or a key that is missing or wrong.
    """
    for file, read in _FILES:
        path = folder / file
        if not path.exists():
            continue
        raw = read_json(path)
        found = read(raw) if isinstance(raw, dict) else None
        if found:
            with naming_file(path):
                return _quantisation(found, path)
    return None


def _of_config(raw: Mapping[str, Any]) -> Any:
    inner = raw.get("text_config")
    own = raw.get("quantization_config")
    return own or (inner.get("quantization_config") if isinstance(inner, dict) else None)


def _of_modelopt(raw: Mapping[str, Any]) -> Any:
    found = raw.get("quantization")
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else None


def _of_old_gptq(raw: Mapping[str, Any]) -> Any:
    return {"quant_method": "gptq", **raw}


_FILES: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (
    ("config.json", _of_config),
    ("hf_quant_config.json", _of_modelopt),
    ("quantize_config.json", _of_old_gptq),
)


def _quantisation(raw: Any, path: Path) -> Quantisation:
    if not isinstance(raw, dict):
        raise ModelFileError(f"quantization_config must be an object, got {raw!r}")
    method = raw.get("quant_method")
    read = _METHODS.get(str(method))
    if read is None:
        raise ModelFileError(
            f"quantization_config: quant_method {method!r} is not supported, only "
            f"{', '.join(repr(name) for name in _METHODS)}: use the original folder (dtype=int8 "
            "quantises it at load) or a GGUF file"
        )
    return read(Keys(raw, f"{path}: quantization_config"))


def _float8(keys: Keys) -> Float8:
    _check_one_of(keys, "fmt", "e4m3", (None, "e4m3", "float8_e4m3fn"))
    block = keys.get("weight_block_size")
    if block is None:
        return Float8(None)
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise ModelFileError(
            f"{keys.where}: weight_block_size must be two numbers above 0, got {block!r}"
        )
    return Float8((block[0], block[1]))


def _modelopt(keys: Keys) -> Float8:
    """ModelOpt's FP8: one scale per tensor (FP8), or per block of 128 x 128 (FP8_PB_WO)."""
    blocks = {"FP8": None, "FP8_PB_WO": (128, 128)}
    name = keys.get("quant_algo")
    if name not in blocks:
        raise ModelFileError(f"{keys.where}: quant_algo {name!r} is not supported, only 'FP8'")
    return Float8(blocks[name])


def _gptq(keys: Keys) -> Gptq:
    bits = keys.count("bits")
    if bits not in (4, 8):
        raise ModelFileError(f"{keys.where}: bits {bits} is not supported, only 4 and 8")
    kind = keys.get("checkpoint_format") or keys.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise ModelFileError(
            f"{keys.where}: checkpoint_format {kind!r} is not supported, only 'gptq' and 'gptq_v2'"
        )
    return Gptq(bits, _group_size(keys), 1 if kind == "gptq" else 0, keys.flag("desc_act"))


def _awq(keys: Keys) -> Awq:
    bits = keys.count("bits" if "bits" in keys else "w_bit")
    if bits != 4:
        raise ModelFileError(f"{keys.where}: bits {bits} is not supported, only 4")
    version = str(keys.get("version") or "gemm").lower()
    if version != "gemm":
        raise ModelFileError(f"{keys.where}: version {version!r} is not supported, only 'gemm'")
    return Awq(_group_size(keys, "group_size" if "group_size" in keys else "q_group_size"))


def _mxfp4(keys: Keys) -> Mxfp4:
    return Mxfp4()


_METHODS: Mapping[str, Callable[[Keys], Quantisation]] = {
    "fp8": _float8,
    "mxfp4": _mxfp4,
    "compressed-tensors": compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
}


def _group_size(keys: Keys, name: str = "group_size") -> int | None:
    size = keys.get(name)
    if size == -1:
        return None
    if not _is_size(size):
        raise ModelFileError(f"{keys.where}: {name} must be -1 or above 0, got {size!r}")
    return int(size)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_one_of(keys: Keys, key: str, served: str, values: tuple[str | None, ...]) -> None:
    if keys.get(key) not in values:
        raise ModelFileError(
            f"{keys.where}: {key} {keys.get(key)!r} is not supported, only {served!r}"
        )
