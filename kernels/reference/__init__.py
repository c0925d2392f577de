"""Plain oracles: the formula and nothing else, one sequence and one head at a time."""

from kernels.interface import Kernels
from kernels.reference.attention import attention, kv_write
from kernels.reference.layers import PlainLinear, rms_norm, rope, silu_mul
from kernels.reference.moe import combine, route
from kernels.reference.sample import sample

KERNELS = Kernels(
    name="reference",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    silu_mul=silu_mul,
    sample=sample,
    pack=PlainLinear,
    route=route,
    combine=combine,
)
