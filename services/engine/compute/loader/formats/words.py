"""Whole numbers of 4 or 8 bits packed into int32 words: GPTQ, AWQ and compressed-tensors.

A decoded value is (number - zero point) x scale. With scales in float16 or bfloat16 the product is
exact in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.loader.formats.scaled import read_scales
from services.engine.compute.loader.tensor_files import TensorFiles

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which 4 bits of a word hold the column 0, 1, ... of its 8 columns."""


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Numbers of `bits` bits in int32 words along `dim` (0 or 1), the lowest bits first; int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shifts = shifts.view(1, -1, 1) if dim == 0 else shifts.view(1, 1, -1)
    numbers = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    rows, columns = words.shape
    count = 32 // bits
    return numbers.view((rows * count, columns) if dim == 0 else (rows, columns * count))


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """qweight [in / P, out], qzeros [G, out / P], scales [G, out]; P numbers per word."""

    at: str
    """Name of the module."""
    bits: int
    zero_offset: int
    shape: tuple[int, ...]
    """[out, in]"""
    group_size: int
    ordered: bool
    """Whether g_idx [in] names the group of each input (act order)."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that the weight is made of."""
        names = ("qweight", "qzeros", "scales", *(("g_idx",) if self.ordered else ()))
        return tuple(f"{self.at}.{name}" for name in names)

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        """Outputs `begin` to `end`, float32.

        Raises:
            ModelFileError: a scale is 0 or not finite, or a group does not exist.
        """
        numbers = unpack(files.read(f"{self.at}.qweight")[:, begin:end], self.bits, 0)
        scales = read_scales(files, f"{self.at}.scales")[:, begin:end]
        zeros = unpack(files.read(f"{self.at}.qzeros"), self.bits, 1)[:, begin:end]
        # Version 1 stores the zero point minus 1, and 0 as the largest number.
        zeros = (zeros + self.zero_offset) & ((1 << self.bits) - 1)
        groups = torch.arange(self.shape[1]) // self.group_size
        if self.ordered:
            groups = read_groups(files, f"{self.at}.g_idx", len(scales))
        values = (numbers - zeros.index_select(0, groups)).float()
        return values.mul_(scales.index_select(0, groups)).t().contiguous()


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """qweight [in, out / 8], qzeros [G, out / 8], scales [G, out]."""

    at: str
    shape: tuple[int, ...]
    """[out, in]"""
    group_size: int

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that the weight is made of."""
        return tuple(f"{self.at}.{name}" for name in ("qweight", "qzeros", "scales"))

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        """Outputs `begin` to `end`, float32.

        Raises:
            ModelFileError: a scale is 0 or not finite.
        """
        words = slice(begin // 8, -(-end // 8))
        own = slice(begin - 8 * words.start, end - 8 * words.start)
        numbers = self._unpack(files, "qweight", words)[:, own]
        zeros = self._unpack(files, "qzeros", words)[:, own]
        scales = read_scales(files, f"{self.at}.scales")[:, begin:end]
        groups = torch.arange(self.shape[1]) // self.group_size
        values = (numbers - zeros.index_select(0, groups)).float()
        return values.mul_(scales.index_select(0, groups)).t().contiguous()

    def _unpack(self, files: TensorFiles, name: str, words: slice) -> Tensor:
        numbers = unpack(files.read(f"{self.at}.{name}")[:, words], 4, 1)
        return numbers.view(len(numbers), -1, 8)[..., list(AWQ_PLACES)].flatten(1)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """compressed-tensors: weight_packed [out, ceil(in / P)], weight_scale [out, G].

    Numbers are stored plus 2^(bits - 1). Zero points are packed along the outputs.
    """

    at: str
    bits: int
    shape: tuple[int, ...]
    group_size: int
    zeros: bool
    ordered: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that the weight is made of."""
        names = ["weight_packed", "weight_scale", "weight_shape"]
        names += ["weight_zero_point"] if self.zeros else []
        names += ["weight_g_idx"] if self.ordered else []
        return tuple(f"{self.at}.{name}" for name in names)

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        """Outputs `begin` to `end`, float32.

        Raises:
            ModelFileError: a scale is 0 or not finite, or a group does not exist.
        """
        rows, columns = self.shape
        packed = files.read(f"{self.at}.weight_packed")[begin:end]
        numbers = unpack(packed, self.bits, 1)[:, :columns]
        scales = read_scales(files, f"{self.at}.weight_scale").reshape(-1, self._groups)
        scales = scales.expand(rows, -1)[begin:end]
        groups = torch.arange(columns) // self.group_size
        if self.ordered:
            groups = read_groups(files, f"{self.at}.weight_g_idx", self._groups)
        if self.zeros:
            zeros = unpack(files.read(f"{self.at}.weight_zero_point"), self.bits, 0)[begin:end]
            values = (numbers - zeros.index_select(1, groups)).float()
        else:
            values = (numbers - (1 << (self.bits - 1))).float()
        return values.mul_(scales.index_select(1, groups))

    @property
    def _groups(self) -> int:
        return -(-self.shape[1] // self.group_size)


def read_groups(files: TensorFiles, name: str, count: int) -> Tensor:
    """The group of each input, int64.

    Raises:
        ModelFileError: a group is not within 0 and `count` - 1.
    """
    groups = files.read(name).long()
    wrong = (groups < 0) | (groups >= count)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise files.error(
            name, f"input {at} is of group {int(groups[at])}, but there are {count} groups"
        )
    return groups
