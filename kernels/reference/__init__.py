"""The kernel set `reference`: each formula written plainly, one sequence and one head at a time.

It is the oracle of the tests; no engine uses it.
"""

from dataclasses import replace

from kernels.interface import Kernels
from kernels.reference.attention import attention, kv_write, sink_attention
from kernels.reference.experts import EXPERTS
from kernels.reference.heads import place_heads
from kernels.reference.latent import LATENT
from kernels.reference.layers import PlainLinear, gate_mul, rms_norm, rope, silu_mul
from kernels.reference.moe import combine, route
from kernels.reference.ragged import attention as ragged_attention
from kernels.reference.ragged import latent_attention
from kernels.reference.round_rows import round_rows
from kernels.reference.sample import arg_max, sample

KERNELS = Kernels(
    name="reference",
    rms_norm=rms_norm,
    rope=rope,
    kv_write=kv_write,
    attention=attention,
    sink_attention=sink_attention,
    silu_mul=silu_mul,
    gate_mul=gate_mul,
    sample=sample,
    arg_max=arg_max,
    pack=PlainLinear,
    route=route,
    combine=combine,
    latent=replace(LATENT, ragged=latent_attention),
    ragged=ragged_attention,
    round_rows=round_rows,
    experts=EXPERTS,
    place_heads=place_heads,
)
