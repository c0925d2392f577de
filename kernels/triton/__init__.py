"""Triton kernels for CUDA devices, one operation per file.

With TRITON_INTERPRET=1, set before Triton is imported, they run on any machine. This package is
`kernels.triton`; `import triton` in its files is the Triton library.
"""
