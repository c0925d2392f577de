from kernels.compiled.machine import usable

_IMPORT_NUMBA = ["test_job.py", "test_rounds.py", "test_short_cache.py"]
collect_ignore = [] if usable() else _IMPORT_NUMBA
