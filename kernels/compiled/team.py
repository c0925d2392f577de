"""A team of threads that run compiled jobs. Between jobs helpers sleep, without the GIL."""

import ctypes
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.compiled import job as j
from kernels.compiled.step import run_thread

_LIBC = ctypes.CDLL(None)


class Team:
    """Runs one job at a time; used by one thread.

    Helpers end by `close`, or with the last reference to the team.
    """

    def __init__(self, threads: int) -> None:
        self.job = torch.zeros(j.SIZE, dtype=torch.int64)
        """The job table (see `job`). The team sets THREADS, SYNC and QUIT, its user all others."""
        self._sync = torch.zeros(0, dtype=torch.int64)
        self._semaphores = torch.zeros(max(1, threads - 1) * j.SEMAPHORE_BYTES, dtype=torch.uint8)
        self.job[j.THREADS] = threads
        helpers = [self._helper(thread) for thread in range(1, threads)]
        # Helpers wait on semaphores in this object's memory, so they must end before it is freed.
        self.close = weakref.finalize(self, _end_helpers, self.job, self._semaphores, helpers)
        for place, helper in enumerate(helpers):
            _LIBC.sem_init(_semaphore(self._semaphores, place), 0, 0)
            helper.start()

    def run(self, phases: int) -> None:
        """Run the job that the table describes.

        Args:
            phases: phases of the job, at most.
        """
        words = (1 + phases) * j.PHASE_BYTES // j.INT64_BYTES
        if self._sync.numel() < words:
            self._sync = torch.zeros(words, dtype=torch.int64)
        self._sync.zero_()
        self.job[j.SYNC] = self._sync.data_ptr()
        run_thread(self.job.data_ptr(), 0, self._semaphores.data_ptr())

    def _helper(self, thread: int) -> threading.Thread:
        return threading.Thread(
            target=run_thread,
            args=(self.job.data_ptr(), thread, self._semaphores.data_ptr()),
            name=f"kernel-{thread}",
            daemon=True,
        )


def _end_helpers(job: Tensor, semaphores: Tensor, helpers: Sequence[threading.Thread]) -> None:
    job[j.QUIT] = 1
    for place, helper in enumerate(helpers):
        _LIBC.sem_post(_semaphore(semaphores, place))
        helper.join()
    job[j.QUIT], job[j.THREADS] = 0, 1  # later jobs run on the calling thread


def _semaphore(semaphores: Tensor, place: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(semaphores.data_ptr() + j.SEMAPHORE_BYTES * place)


def address(tensor: Tensor | None) -> int:
    """Address of the tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
