import os

# The interpreter runs the very kernels on a CPU; it must be chosen before triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
