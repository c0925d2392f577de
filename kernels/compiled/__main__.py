"""`python -m kernels.compiled` compiles all kernels for this machine, unless they are cached."""

import importlib

from kernels.compiled.machine import usable

if __name__ == "__main__" and usable():
    importlib.import_module("kernels.compiled.step")
