"""The same with weights and inputs of products in int8."""

from dataclasses import replace

from kernels.compiled import KERNELS as FLOAT32

KERNELS = replace(FLOAT32, name="jit-int8")
