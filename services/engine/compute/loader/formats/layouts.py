"""Finds which stored tensors make up each quantised weight, and checks their shapes; reads none."""

import math
from typing import Protocol

from torch import Tensor

from services.engine.compute.loader.formats.mxfp4 import Mxfp4Stack
from services.engine.compute.loader.formats.scaled import MX_SIZE, Codes, Scaled
from services.engine.compute.loader.formats.words import AwqWeight, GptqWeight, PackedWeight
from services.engine.compute.loader.tensor_files import TensorFiles
from services.engine.model_files.compressed_tensors import CompressedTensors, WeightGroup
from services.engine.model_files.quantisation import Awq, Float8, Gptq, Mxfp4, Quantisation


class Coded(Protocol):
    """A weight that is decoded from stored tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoded weight."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that the weight is made of."""

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        """Entries `begin` to `end` of the first dimension, float32.

        Raises:
            ModelFileError: the stored values are wrong.
        """


Found = dict[str, Coded]
_WEIGHT = ".weight"
_PACKED4 = ("I8", "U8", "F4")
_ROW_BLOCKS = (1, MX_SIZE)
"""Blocks of the microscaling formats along a row, whichever block the other weights have."""
_FLOAT_SCALES = ("F32", "F16", "BF16")
_BYTE_SCALES = ("F8_E8M0", "U8")
NOT_USED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale")
"""Endings of the scales of activations, keys and values, which are not quantised here."""


def find_coded(files: TensorFiles, quantisation: Quantisation) -> Found:
    """The quantised weights by the names that they have in an unquantised checkpoint.

    Raises:
        ModelFileError: a part is missing or does not fit; the message names file and tensor.
    """
    match quantisation:
        case Float8(block=block):
            return _float8(files, block)
        case Mxfp4():
            return _mxfp4(files)
        case Gptq():
            return _gptq(files, quantisation)
        case Awq(group_size=size):
            return _awq(files, size)
        case CompressedTensors():
            return _compressed(files, quantisation)


def _float8(files: TensorFiles, block: tuple[int, int] | None) -> Found:
    found: Found = {}
    for name, entry in files.entries.items():
        scale = _scale_of(files, name)
        if entry.dtype == "F8_E4M3":
            if scale is None:
                raise files.error(name, f"is {entry.dtype}, but its scale is missing")
            found[name] = _scaled(files, name, scale, "float8", block)
        elif entry.dtype in _PACKED4 and scale is not None:
            found[name] = _scaled(files, name, scale, "float4", _ROW_BLOCKS)
    return found


def _scale_of(files: TensorFiles, name: str) -> str | None:
    names = [f"{name}_scale_inv", f"{name}_scale"]
    if name.endswith(_WEIGHT):
        names.append(f"{name.removesuffix(_WEIGHT)}.scale")
    return next((scale for scale in names if scale in files), None)


def _decoded_shape(files: TensorFiles, name: str, codes: Codes) -> tuple[int, ...]:
    entry = files.entries[name]
    if codes == "float4" and entry.dtype != "F4":  # F4 counts numbers, the others count bytes
        return (*entry.shape[:-1], 2 * entry.shape[-1])
    return entry.shape


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    rows, columns = shape[-2:]
    return (*shape[:-2], math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def _scaled(
    files: TensorFiles,
    name: str,
    scale: str,
    codes: Codes,
    block: tuple[int, int] | None,
    zero: str | None = None,
) -> Scaled:
    shape = _decoded_shape(files, name, codes)
    if len(shape) not in (2, 3):
        raise files.error(name, f"has shape {shape}, expected 2 or 3 dimensions")
    files.check_dtype(scale, *_FLOAT_SCALES, *_BYTE_SCALES)
    found = files.entries[scale].shape
    sizes = (block, _ROW_BLOCKS) if block else (_whole_block(shape, found),)
    for size in sizes:
        if found in _grid_forms(shape, size):
            return Scaled(name, scale, zero, codes, shape, size)
    needed = f"blocks of {block[0]} x {block[1]}" if block else "the whole tensor, or for its rows"
    raise files.error(
        scale, f"has shape {found}, but the weight of shape {shape} needs scales for {needed}"
    )


def _whole_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """The block of one scale per matrix or per row, by which of them fits."""
    per_row = (1, shape[-1])
    return per_row if scales in _grid_forms(shape, per_row) else (shape[-2], shape[-1])


def _grid_forms(shape: tuple[int, ...], block: tuple[int, int]) -> set[tuple[int, ...]]:
    """Shapes in which the scales of a weight are stored: the grid, and what tools make of it.

    One column may be left out, and with it one row: [R, 1] is [R], and [1, 1] is [1] or a number.
    Grids of blocks may have an axis of size 1 after each of their two (ModelOpt).
    """
    grid = _grid(shape, block)
    stack, (rows, columns) = grid[:-2], grid[-2:]
    forms = {grid, (*stack, rows, 1, columns, 1)}
    if columns == 1:
        forms.add((*stack, rows))
        if rows == 1:
            forms.add(stack)
    return forms


def _mxfp4(files: TensorFiles) -> Found:
    found: Found = {}
    for blocks, entry in files.entries.items():
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        if len(entry.shape) != 4 or entry.shape[3] * 2 != MX_SIZE:
            raise files.error(blocks, f"has shape {entry.shape}, expected [E, N, G, 16]")
        files.check_dtype(blocks, "U8")
        files.check_shape(f"{name}_scales", *entry.shape[:3])
        files.check_dtype(f"{name}_scales", *_BYTE_SCALES)
        experts, outputs, groups, _ = entry.shape
        found[name] = Mxfp4Stack(blocks, f"{name}_scales", (experts, groups * MX_SIZE, outputs))
    return found


def _gptq(files: TensorFiles, quantisation: Gptq) -> Found:
    found: Found = {}
    bits, count = quantisation.bits, 32 // quantisation.bits
    for at, shape in _modules(files, ".qweight"):
        outputs, inputs = shape[1], shape[0] * count
        size, groups = _groups(inputs, quantisation.group_size)
        _check_words(files, f"{at}.qzeros", groups, -(-outputs // count))
        _check_floats(files, f"{at}.scales", groups, outputs)
        ordered = f"{at}.g_idx" in files
        if ordered or (quantisation.ordered and groups > 1):
            files.check_shape(f"{at}.g_idx", inputs)
        found[at + _WEIGHT] = GptqWeight(
            at, bits, quantisation.zero_offset, (outputs, inputs), size, ordered
        )
    return found


def _awq(files: TensorFiles, group_size: int | None) -> Found:
    found: Found = {}
    for at, (inputs, words) in _modules(files, ".qweight"):
        size, groups = _groups(inputs, group_size)
        _check_words(files, f"{at}.qzeros", groups, words)
        _check_floats(files, f"{at}.scales", groups, 8 * words)
        found[at + _WEIGHT] = AwqWeight(at, (8 * words, inputs), size)
    return found


def _modules(files: TensorFiles, ending: str) -> list[tuple[str, tuple[int, ...]]]:
    """Modules with a matrix of int32 words of this ending, and its shape."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, entry in files.entries.items():
        if name.endswith(ending):
            files.check_dtype(name, "I32")
            if len(entry.shape) != 2 or not all(entry.shape):
                raise files.error(name, f"has shape {entry.shape}, expected 2 dimensions")
            found.append((name.removesuffix(ending), entry.shape))
    return found


def _groups(inputs: int, group_size: int | None) -> tuple[int, int]:
    """Inputs of a group, and the number of groups."""
    size = group_size or inputs
    return size, math.ceil(inputs / size)


def _check_words(files: TensorFiles, name: str, *shape: int) -> None:
    files.check_shape(name, *shape)
    files.check_dtype(name, "I32")


def _check_floats(files: TensorFiles, name: str, *shape: int) -> None:
    files.check_shape(name, *shape)
    files.check_dtype(name, *_FLOAT_SCALES)


def _compressed(files: TensorFiles, quantisation: CompressedTensors) -> Found:
    found: Found = {}
    for at, shape in _modules(files, ".weight_packed"):
        group = _group_of(files, quantisation, at, f"{at}.weight_packed")
        if group.format != "pack-quantized":
            raise files.error(f"{at}.weight_packed", f"is packed, but its format is {group.format}")
        found[at + _WEIGHT] = _packed(files, at, shape[0], shape[1], group)
    for name, entry in files.entries.items():
        if name.endswith(_WEIGHT) and entry.dtype in ("F8_E4M3", "I8"):
            at = name.removesuffix(_WEIGHT)
            group = _group_of(files, quantisation, at, name)
            codes: Codes = "float8" if entry.dtype == "F8_E4M3" else "int8"
            if (group.kind, codes) not in (("float", "float8"), ("int", "int8")):
                raise files.error(name, f"is {entry.dtype}, but its group is {group.label}")
            if f"{name}_scale" not in files:
                raise files.error(name, f"is {entry.dtype}, but {name}_scale is missing")
            zero = f"{name}_zero_point" if f"{name}_zero_point" in files else None
            found[name] = _with_zero(files, name, codes, group, zero)
    return found


def _with_zero(
    files: TensorFiles, name: str, codes: Codes, group: WeightGroup, zero: str | None
) -> Scaled:
    scaled = _scaled(files, name, f"{name}_scale", codes, group.block, zero)
    if zero is not None:
        if len(scaled.shape) != 2:
            raise files.error(zero, "zero points of a stack of experts are not supported")
        files.check_shape(zero, *files.entries[scaled.scale].shape)
    return scaled


def _group_of(
    files: TensorFiles, quantisation: CompressedTensors, at: str, name: str
) -> WeightGroup:
    group = quantisation.group_of(at)
    if group is None:
        raise files.error(name, "is quantised, but no group of quantization_config names it")
    return group


def _packed(files: TensorFiles, at: str, rows: int, words: int, group: WeightGroup) -> PackedWeight:
    name = f"{at}.weight_shape"
    files.check_shape(name, 2)
    shape = tuple(files.read(name).tolist())
    if shape[0] != rows or math.ceil(shape[1] * group.bits / 32) != words:
        raise files.error(
            f"{at}.weight_packed", f"has {rows} rows of {words} words, but {name} is {shape}"
        )
    size, groups = _groups(shape[1], group.block[1] if group.block else None)
    scale, zero = f"{at}.weight_scale", f"{at}.weight_zero_point"
    one_scale = scale in files and files.entries[scale].shape == (1,)
    if one_scale and not group.symmetric:
        raise files.error(scale, "one scale with a zero point for a whole tensor is not supported")
    _check_floats(files, scale, *((1,) if one_scale else (rows, groups)))
    if not group.symmetric:
        _check_words(files, zero, math.ceil(rows * group.bits / 32), groups)
    ordered = f"{at}.weight_g_idx" in files
    if ordered or (group.ordered and groups > 1):
        files.check_shape(f"{at}.weight_g_idx", shape[1])
    return PackedWeight(at, group.bits, shape, size, not group.symmetric, ordered)
