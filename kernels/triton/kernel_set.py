"""The kernel set `triton`, for CUDA devices.

Attention of a group other than plain decodes, dense products and the arg-max are PyTorch's (cuBLAS,
flash attention). The other operations, and attention of all sequences of a round in one call, are
Triton kernels in the files and folders beside this one.
"""

from dataclasses import replace

from kernels.interface import Kernels
from kernels.torch import KERNELS as TORCH
from kernels.triton.attention import attention
from kernels.triton.experts.combine import combine
from kernels.triton.experts.layer import EXPERTS
from kernels.triton.experts.routing import route
from kernels.triton.kv_write import kv_write
from kernels.triton.place_heads import place_heads
from kernels.triton.products.gates import gate_mul
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
    gate_mul=gate_mul,
    sample=sample,
    arg_max=TORCH.arg_max,
    pack=TORCH.pack,
    route=route,
    combine=combine,
    latent=replace(TORCH.latent, ragged=latent_attention) if TORCH.latent else None,
    ragged=ragged_attention,
    round_rows=round_rows,
    experts=EXPERTS,
    place_heads=place_heads,
)
