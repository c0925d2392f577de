"""Stacks of experts in MXFP4 as gpt_oss publishes them: `NAME_blocks` and `NAME_scales`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.loader.formats.scaled import decode_float4, read_scales
from services.engine.compute.loader.tensor_files import TensorFiles


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """Blocks [E, N, G, 16] of bytes and scales [E, N, G]; decoded [E, 32 G, N].

    The decoded stack has inputs before outputs, as the unquantised checkpoint of the model does.
    """

    blocks: str
    scales: str
    shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that the stack is made of."""
        return self.blocks, self.scales

    def decode(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        """Experts `begin` to `end`, float32.

        Raises:
            ModelFileError: a scale is not a number.
        """
        blocks = files.read(self.blocks)[begin:end]
        scales = read_scales(files, self.scales, begin, end)
        out = torch.empty(end - begin, *self.shape[1:])
        for at in range(end - begin):
            values = decode_float4(blocks[at]).mul_(scales[at].unsqueeze(-1))
            out[at] = values.view(self.shape[2], self.shape[1]).t()
        return out
