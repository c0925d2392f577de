"""The kernel set `torch`: PyTorch operators, few calls per layer, nothing compiled at run time.

It is tuned for CPUs; its operators run on GPUs as well, and the Triton set uses some of them. This
package is `kernels.torch`; `import torch` in its files is the PyTorch library.
"""

from kernels.interface import Kernels
from kernels.torch.attention import attention, kv_write
from kernels.torch.gates import gate_mul
from kernels.torch.latent import LATENT
from kernels.torch.layers import rms_norm, rope, silu_mul
from kernels.torch.linear import pack_linear
from kernels.torch.moe import combine, route
from kernels.torch.sample import arg_max, sample
from kernels.torch.sinks import sink_attention

KERNELS = Kernels(
    name="torch",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    sink_attention=sink_attention,
    silu_mul=silu_mul,
    gate_mul=gate_mul,
    sample=sample,
    arg_max=arg_max,
    pack=pack_linear,
    route=route,
    combine=combine,
    latent=LATENT,
    uses_kept_rows=True,
)
