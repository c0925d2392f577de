"""The kernel set `triton-tiled`: `triton` with products whose rows do not depend on one another.

Dense products and those of experts use one tile for every number of rows. No option chooses this
set yet: whole rounds on it were never compared alone, batched and cut.
"""

from dataclasses import replace

from kernels.triton.experts.layer import INVARIANT_EXPERTS
from kernels.triton.kernel_set import KERNELS as TRITON
from kernels.triton.products.linear import pack_invariant

KERNELS = replace(TRITON, name="triton-tiled", pack=pack_invariant, experts=INVARIANT_EXPERTS)
