"""`python -m kernels.jit` compiles all kernels for this machine, unless that has been done."""

import importlib

from kernels.jit.machine import usable

if __name__ == "__main__" and usable():
    importlib.import_module("kernels.jit.step")
