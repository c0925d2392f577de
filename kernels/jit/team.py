"""Threads that run compiled jobs together, asleep in between without Python's lock."""

import ctypes
import threading

import torch
from torch import Tensor

from kernels.jit import job as j
from kernels.jit.step import take_part

_SEMAPHORE = 64
"""Bytes between semaphores: a cache line, and more than one takes."""


class Team:
    """One job at a time, called from one thread."""

    def __init__(self, threads: int) -> None:
        self.job = torch.zeros(j.SIZE, dtype=torch.int64)
        """The table of `kernels.jit.job`; THREADS and SYNC are the team's."""
        self._sync = torch.zeros(0, dtype=torch.int64)
        self._semaphores = torch.zeros(max(1, threads - 1) * _SEMAPHORE, dtype=torch.uint8)
        self._libc = ctypes.CDLL(None)
        self.job[j.THREADS] = threads
        self._helpers = [
            threading.Thread(
                target=take_part,
                args=(self.job.data_ptr(), thread, self._semaphores.data_ptr()),
                name=f"kernel-{thread}",
                daemon=True,
            )
            for thread in range(1, threads)
        ]
        for place, helper in enumerate(self._helpers):
            self._libc.sem_init(self._address(place), 0, 0)
            helper.start()

    def run(self, phases: int) -> None:
        """What the job says, which has so many phases at most."""
        words = (1 + phases) * j.PHASE_BYTES // 8
        if self._sync.numel() < words:
            self._sync = torch.zeros(words, dtype=torch.int64)
        self._sync.zero_()
        self.job[j.SYNC] = self._sync.data_ptr()
        take_part(self.job.data_ptr(), 0, self._semaphores.data_ptr())

    def close(self) -> None:
        """End the helpers."""
        self.job[j.QUIT] = 1
        for place, helper in enumerate(self._helpers):
            self._libc.sem_post(self._address(place))
            helper.join()
        self._helpers = []

    def _address(self, place: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._semaphores.data_ptr() + _SEMAPHORE * place)


def address(tensor: Tensor | None) -> int:
    """Of its first element; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
