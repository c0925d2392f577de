"""The same with weights and inputs of products in int8."""

from dataclasses import replace

from kernels import jit

KERNELS = replace(jit.KERNELS, name="jit-int8")
