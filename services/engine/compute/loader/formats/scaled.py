"""Weights of 8-bit or 4-bit numbers with a scale per tensor, row, group or block.

FP8 (e4m3) of DeepSeek V3 and compressed-tensors, INT8, and 4-bit floats of DeepSeek V4's experts.
A decoded value is the stored number times its scale, computed in float32.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.engine.compute.loader.tensor_files import TensorFiles

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1 without its sign, by its lower 3 bits (OCP Microscaling 1.0, table 5)."""
MX_SIZE = 32
"""Numbers that share a scale in the microscaling formats (MXFP4, MXFP8)."""
Codes = Literal["float8", "int8", "float4"]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A weight [..., R, C] with scales [..., ceil(R / rows), ceil(C / columns)]."""

    weight: str
    scale: str
    zero: str | None
    """Whole numbers of the scale's shape that are subtracted before the scale is applied."""
    codes: Codes
    shape: tuple[int, ...]
    """Of the decoded weight."""
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that the weight is made of."""
        return (self.weight, self.scale, *((self.zero,) if self.zero else ()))

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        """Entries `begin` to `end` of the first dimension, float32.

        Raises:
            ModelFileError: a scale is 0 or not finite.
        """
        codes = files.read(self.weight)[begin:end]
        if self.codes == "float8":
            self._check_numbers(files, codes, begin)
        columns = math.ceil(self.shape[-1] / self.block[1])
        if len(self.shape) == 3:
            scales = read_scales(files, self.scale, begin, end)
            return self._stack(codes, scales.reshape(len(codes), -1, columns))
        scales, zeros = read_scales(files, self.scale).reshape(-1, columns), None
        if self.zero:
            zeros = files.read(self.zero).float().reshape(scales.shape)
        return self._rows(codes, scales, zeros, begin)

    def _stack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Decode matrices [E, ...] with scales [E, ...]; stacks have no zero points."""
        out = torch.empty(len(codes), *self.shape[1:])
        for at in range(len(codes)):
            out[at] = self._rows(codes[at], scales[at], None, 0)
        return out

    def _check_numbers(self, files: TensorFiles, codes: Tensor, begin: int) -> None:
        """Check that no number is e4m3's NaN.

        Raises:
            ModelFileError: one is.
        """
        wrong = (codes.view(torch.uint8) & 0x7F) == 0x7F
        if wrong.any():
            row, *rest = wrong.nonzero()[0].tolist()
            raise files.error(
                self.weight, f"number {[row + begin, *rest]} is NaN: download the file again"
            )

    def _rows(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, first: int) -> Tensor:
        """Decode rows of a matrix, of which `codes` has those from `first` on."""
        values = decode_float4(codes) if self.codes == "float4" else codes.float()
        last, height = first + len(values), self.block[0]
        if height == 1:  # one product for all rows, not one for each
            own = slice(first, last)
            _apply(values, scales[own], None if zeros is None else zeros[own], self.block[1])
            return values
        for row in range(first // height, math.ceil(last / height)):
            band = values[max(0, row * height - first) : (row + 1) * height - first]
            own = slice(row, row + 1)
            _apply(band, scales[own], None if zeros is None else zeros[own], self.block[1])
        return values


def _apply(values: Tensor, scales: Tensor, zeros: Tensor | None, columns: int) -> None:
    """values = (values - zeros) * scales in place; `columns` values of a row share a scale."""
    if zeros is not None:
        values.sub_(_spread(zeros, columns, values.shape[1]))
    values.mul_(_spread(scales, columns, values.shape[1]))


def _spread(values: Tensor, columns: int, width: int) -> Tensor:
    """Repeat each column `columns` times, up to `width` columns."""
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(columns, dim=1)[:, :width]


def decode_float4(packed: Tensor) -> Tensor:
    """Pairs of e2m1 in bytes, the even one in the lower 4 bits: [..., N] to [..., 2 N] float32."""
    raw = packed.contiguous().view(torch.uint8)
    positive = torch.tensor(FLOAT4)
    table = torch.cat((positive, -positive))
    low = table.index_select(0, (raw & 15).view(-1).int())
    high = table.index_select(0, (raw >> 4).view(-1).int())
    return torch.stack((low, high), dim=-1).view(*raw.shape[:-1], 2 * raw.shape[-1])


def read_scales(files: TensorFiles, name: str, begin: int = 0, end: int | None = None) -> Tensor:
    """Scales as float32; bytes are exponents of 2 with a bias of 127 (ue8m0).

    Args:
        begin, end: range of the first dimension that is read; without an end, everything is.

    Raises:
        ModelFileError: a scale is 0 or not finite.
    """
    stored = files.read(name)
    if end is not None:
        stored = stored[begin:end]
    if stored.dtype == torch.uint8:
        stored = stored.contiguous().view(torch.float8_e8m0fnu)
    scales = stored.float()
    wrong = ~torch.isfinite(scales) | (scales == 0)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        place = [at[0] + begin, *at[1:]] if at else []
        raise files.error(
            name,
            f"scale {place} is {scales[at].item()}, it must be finite and not 0: download the "
            "file again, or quantise the model again",
        )
    return scales
