"""Torch operators in fixed shapes: a row's result does not depend on any other row.

Torch's products, reductions and exponentials change bits with the number of rows. Here every
product has ROWS rows, every exponential fills whole vectors, and attention adds tiles of KEYS
positions in order, whatever was batched, chunked or cached. Float32 on a CPU only.
"""

from kernels.interface import Kernels
from kernels.reference.layers import rope
from kernels.torch.attention import kv_write
from kernels.torch.moe import combine, route
from kernels.torch.sample import sample
from kernels.torch.tiled.attention import attention
from kernels.torch.tiled.layers import TiledLinear, rms_norm, silu_mul

KERNELS = Kernels(
    name="torch-tiled",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    silu_mul=silu_mul,
    sample=sample,
    pack=TiledLinear,
    route=route,
    combine=combine,
)
