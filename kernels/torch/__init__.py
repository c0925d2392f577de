"""The fast path made of torch operators: few calls a layer, no compiler at run time.

Written for CPUs; the same calls serve a GPU until kernels of its own are chosen.
"""

from kernels.interface import Kernels
from kernels.torch.attention import attention, kv_write
from kernels.torch.layers import rms_norm, rope, silu_mul
from kernels.torch.linear import pack_linear
from kernels.torch.moe import combine, route
from kernels.torch.sample import sample

KERNELS = Kernels(
    name="torch",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    silu_mul=silu_mul,
    sample=sample,
    pack=pack_linear,
    route=route,
    combine=combine,
    keeps_rows=True,
)
