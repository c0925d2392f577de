"""Random weights in 8 and 4 bits, with several groups along every row."""

import torch

from kernels.triton.products.codes import CodedWeight, CodeFormat, float8_weight

GROUPS: dict[CodeFormat, int] = {"float8": 16, "float4": 32, "int8": 16, "int4": 16}


def random_codes(form: CodeFormat, *shape: int, seed: int = 0) -> CodedWeight:
    """A weight or a stack of them [..., R, C]; every code occurs, scales differ between groups."""
    draw = torch.Generator().manual_seed(seed)
    group = GROUPS[form]
    *rows, columns = shape
    groups = -(-columns // group)
    if form == "float8":
        numbers = torch.randn(shape, generator=draw).to(torch.float8_e4m3fn)
        grid = torch.rand(*rows[:-1], -(-rows[-1] // 8), groups, generator=draw) + 0.01
        return float8_weight(numbers, grid, (8, group))
    width = columns // 2 if form in ("float4", "int4") else columns
    codes = torch.randint(0, 256, (*rows, width), generator=draw, dtype=torch.uint8)
    if form == "float4":
        scales = torch.randint(120, 130, (*rows, groups), generator=draw, dtype=torch.uint8)
        return CodedWeight(format=form, codes=codes, scales=scales, group=group)
    highest = 256 if form == "int8" else 16
    zeros = torch.randint(0, highest, (*rows, groups), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(*rows, groups, generator=draw) + 0.01) / highest
    return CodedWeight(format=form, codes=codes, scales=scales, zeros=zeros, group=group)
