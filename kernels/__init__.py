"""Tensor kernels of the engine: several sets that implement the same operations.

interface.py     what a set offers: the operations, with shapes
expert_products.py  what a set offers for all experts of a layer in one call
latent.py        what a set offers for attention over latent vectors (MLA)
ragged.py        attention over all sequences of a round in one call
round_rows.py    token ids, positions and slots of a round, made on the device
v4.py            what DeepSeek V4's layers need beside experts
whole_rounds.py  what a set offers that runs a whole round as one job
kept_files.py    folders for what one process leaves to the next
dispatch.py      chooses a set for a device and a number format, and loads it
reference/       the formulas, written plainly; the oracle of the tests
torch/           PyTorch operators; int8/ and tiled/ (deterministic) are variants
compiled/        x86-64 machine code, compiled with numba; set names `jit` and `jit-int8`
triton/          Triton kernels for CUDA

The packages `kernels.torch` and `kernels.triton` are sets of this repository, named after the
library that they use. Imports are absolute: `import torch` is always the PyTorch library.
"""
