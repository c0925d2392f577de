"""The kernel set `triton`, for CUDA devices.

Attention of a group other than plain decodes, dense products, gates other than SwiGLU, the arg-max
and expert routing are PyTorch's (cuBLAS, flash attention). The other operations, and attention of
all sequences of a round in one call, are Triton kernels in the files and folders beside this one.
"""

from dataclasses import replace

from kernels.interface import Kernels
from kernels.torch import KERNELS as TORCH
from kernels.triton.attention import attention
from kernels.triton.kv_write import kv_write
from kernels.triton.ragged.attention import attention as ragged_attention
from kernels.triton.ragged.latent_attention import latent_attention
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope import rope
from kernels.triton.round_rows import round_rows
from kernels.triton.sample import sample
from kernels.triton.silu_mul import silu_mul

KERNELS = Kernels(
    name="triton",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    sink_attention=TORCH.sink_attention,
    silu_mul=silu_mul,
    gate_mul=TORCH.gate_mul,
    sample=sample,
    arg_max=TORCH.arg_max,
    pack=TORCH.pack,
    route=TORCH.route,
    combine=TORCH.combine,
    latent=replace(TORCH.latent, ragged=latent_attention) if TORCH.latent else None,
    ragged=ragged_attention,
    round_rows=round_rows,
)
