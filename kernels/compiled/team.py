"""Threads that run compiled jobs together, asleep in between without Python's lock."""

import ctypes
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.compiled import job as j
from kernels.compiled.step import take_part

_SEMAPHORE = 64
"""Bytes between semaphores: a cache line, and more than one takes."""
_LIBC = ctypes.CDLL(None)


class Team:
    """One job at a time, called from one thread; ends with its last reference or by `close`."""

    def __init__(self, threads: int) -> None:
        self.job = torch.zeros(j.SIZE, dtype=torch.int64)
        """The table of `kernels.compiled.job`; THREADS and SYNC are the team's."""
        self._sync = torch.zeros(0, dtype=torch.int64)
        self._semaphores = torch.zeros(max(1, threads - 1) * _SEMAPHORE, dtype=torch.uint8)
        self.job[j.THREADS] = threads
        helpers = [self._helper(thread) for thread in range(1, threads)]
        # Helpers wait on memory of this object: it must not go before they have.
        self.close = weakref.finalize(self, _dismiss, self.job, self._semaphores, helpers)
        for place, helper in enumerate(helpers):
            _LIBC.sem_init(_semaphore(self._semaphores, place), 0, 0)
            helper.start()

    def run(self, phases: int) -> None:
        """What the job says, which has so many phases at most."""
        words = (1 + phases) * j.PHASE_BYTES // 8
        if self._sync.numel() < words:
            self._sync = torch.zeros(words, dtype=torch.int64)
        self._sync.zero_()
        self.job[j.SYNC] = self._sync.data_ptr()
        take_part(self.job.data_ptr(), 0, self._semaphores.data_ptr())

    def _helper(self, thread: int) -> threading.Thread:
        return threading.Thread(
            target=take_part,
            args=(self.job.data_ptr(), thread, self._semaphores.data_ptr()),
            name=f"kernel-{thread}",
            daemon=True,
        )


def _dismiss(job: Tensor, semaphores: Tensor, helpers: Sequence[threading.Thread]) -> None:
    job[j.QUIT] = 1
    for place, helper in enumerate(helpers):
        _LIBC.sem_post(_semaphore(semaphores, place))
        helper.join()
    job[j.QUIT], job[j.THREADS] = 0, 1  # a late call still gets its answer, from one thread


def _semaphore(semaphores: Tensor, place: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(semaphores.data_ptr() + _SEMAPHORE * place)


def address(tensor: Tensor | None) -> int:
    """Of its first element; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
