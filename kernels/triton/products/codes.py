"""Weights in 8 or 4 bits with scales, in the layout that the products read."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CodeFormat = Literal["float8", "float4", "int8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedWeight:
    """A matrix [R, C], or a stack of them [E, R, C]: codes, and scales of groups along a row.

    Raises:
        ValueError: a shape or format does not fit; the message names the part.
    """

    format: CodeFormat
    """float8: e4m3 (DeepSeek-AI 2024, DeepSeek-V3, section 3.3). float4: e2m1 with scales e8m0 per
    32 (OCP Microscaling 1.0). int8, int4: (code - zero) * scale."""
    codes: Tensor
    """uint8 [..., R, C], or [..., R, C / 2] with two codes in a byte, the even one in the lower 4
    bits."""
    scales: Tensor
    """[..., R, ceil(C / group)]: float32; for float4 uint8, exponents with a bias of 127."""
    zeros: Tensor | None = None
    """uint8, of the shape of `scales`: for int8 and int4. A signed code is stored plus its zero."""
    group: int
    """Columns that share a scale: a power of two from 16, or all columns."""

    def __post_init__(self) -> None:
        if (self.zeros is not None) != (self.format in ("int8", "int4")):
            raise ValueError(f"zeros: {self.format} has {'no' if self.zeros is not None else 'a'} "
                             "zero point per group")  # fmt: skip
        columns = self.shape[-1]
        if self.group != columns and (self.group < 16 or self.group & (self.group - 1)):
            raise ValueError(f"group is {self.group}, it must be a power of two from 16, or "
                             f"{columns}, the number of columns")  # fmt: skip
        if self.format == "float4" and self.group != 32:
            raise ValueError(f"group is {self.group}, float4 has 32")
        wanted = (*self.codes.shape[:-1], -(-columns // self.group))
        for name, part in (("scales", self.scales), ("zeros", self.zeros)):
            if part is not None and tuple(part.shape) != wanted:
                raise ValueError(f"{name} are {tuple(part.shape)}, they must be {wanted}")
        scale_format = torch.uint8 if self.format == "float4" else torch.float32
        for name, part, dtype in (
            ("codes", self.codes, torch.uint8),
            ("scales", self.scales, scale_format),
            ("zeros", self.zeros, torch.uint8),
        ):
            if part is None:
                continue
            if part.dtype != dtype or not part.is_contiguous() or part.device != self.codes.device:
                raise ValueError(
                    f"{name} are {part.dtype} on {part.device}, they must be contiguous {dtype} on "
                    f"{self.codes.device}"
                )

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.format in ("float4", "int4")

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., R, C] of the decoded weight."""
        columns = self.codes.shape[-1] * (2 if self.packed else 1)
        return (*self.codes.shape[:-1], columns)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def alternate(self) -> "CodedWeight":
        """Gate over up [..., 2 F, C] as rows that alternate."""
        zeros = None if self.zeros is None else alternate(self.zeros)
        return CodedWeight(
            format=self.format, codes=alternate(self.codes), scales=alternate(self.scales),
            zeros=zeros, group=self.group,
        )  # fmt: skip


def alternate(rows: Tensor) -> Tensor:
    """Gate over up [..., 2 F, C] as rows that alternate."""
    return torch.stack(rows.chunk(2, dim=-2), dim=-2).flatten(-3, -2)


def float8_weight(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> CodedWeight:
    """e4m3 numbers [..., R, C] with scales [..., ceil(R / block), ceil(C / block)].

    Every row gets scales of its own, so that rows may change their order; for blocks of 128 x 128
    they take 3 % of the memory.

    Raises:
        ValueError: a shape does not fit.
    """
    rows = numbers.shape[-2]
    spread = scales.float().repeat_interleave(block[0], dim=-2)[..., :rows, :].contiguous()
    codes = numbers.contiguous().view(torch.uint8)
    return CodedWeight(format="float8", codes=codes, scales=spread, group=block[1])


def decode(weight: CodedWeight) -> Tensor:
    """The numbers times their scales, float32; for tests and for products of many rows."""
    codes = weight.codes
    if weight.packed:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    if weight.format == "float8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif weight.format == "float4":
        positive = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=codes.device)
        numbers = torch.cat((positive, -positive))[codes.long()]
    else:
        assert weight.zeros is not None
        numbers = codes.float() - _spread(weight.zeros.float(), weight)
    scales = weight.scales
    if weight.format == "float4":
        scales = scales.view(torch.float8_e8m0fnu)
    return numbers * _spread(scales.float(), weight)


def _spread(values: Tensor, weight: CodedWeight) -> Tensor:
    return values.repeat_interleave(weight.group, dim=-1)[..., : weight.shape[-1]]
