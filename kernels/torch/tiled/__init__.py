"""The kernel set `torch-tiled`: a row's result is bit-identical whatever else is in the batch.

The results of PyTorch's products, reductions and exponentials depend, in their last bits, on the
number of rows. Here every product has ROWS rows, every exponential fills whole vectors, and
attention adds tiles of KEYS positions in a fixed order, regardless of batching, chunking and
caching. Float32 on a CPU only.
"""

from kernels.interface import Kernels
from kernels.reference.layers import rope
from kernels.torch.attention import kv_write
from kernels.torch.gates import gate_mul
from kernels.torch.moe import combine, route
from kernels.torch.sample import arg_max, sample
from kernels.torch.tiled.attention import attention, sink_attention
from kernels.torch.tiled.latent import LATENT
from kernels.torch.tiled.layers import TiledLinear, rms_norm, silu_mul

KERNELS = Kernels(
    name="torch-tiled",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    sink_attention=sink_attention,
    silu_mul=silu_mul,
    gate_mul=gate_mul,
    sample=sample,
    arg_max=arg_max,
    pack=TiledLinear,
    route=route,
    combine=combine,
    latent=LATENT,
)
