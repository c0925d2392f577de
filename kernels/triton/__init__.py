"""Triton kernels for CUDA devices, one operation a file; in the interpreter they run anywhere."""
