"""Whether Triton's interpreter runs the kernels, on a CPU, in place of its compiler."""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""The interpreter multiplies bfloat16 as whole numbers: there, kernels widen to float32 first.

A product of two bfloat16 numbers is exact in float32, and tensor cores add in float32 too: only
the order of sums differs.
"""
