from kernels.compiled.machine import usable

collect_ignore = [] if usable() else ["test_job.py", "test_rounds.py"]  # they import numba
