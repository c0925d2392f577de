"""The set for CUDA devices.

Prefill attention, dense products and the routing of experts are torch's own (cuBLAS, flash
attention); what a decode round does around them is in the files beside this one.
"""

from kernels import cpu
from kernels.dispatch import Kernels
from kernels.gpu.attention import attention
from kernels.gpu.kv_write import kv_write
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.rope import rope
from kernels.gpu.sample import sample
from kernels.gpu.silu_mul import silu_mul

KERNELS = Kernels(
    name="triton",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    silu_mul=silu_mul,
    sample=sample,
    pack=cpu.KERNELS.pack,
    route=cpu.KERNELS.route,
    combine=cpu.KERNELS.combine,
)
