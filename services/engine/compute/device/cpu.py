"""`CpuDevice`: the host computes; nothing has to be copied and nothing is on its way."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.compute import memory
from services.engine.compute.numerics import cpu_name


class HostFetch:
    """See Fetch; the tensors are on the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[Tensor]:
        """See Fetch."""
        return self._tensors


class CalledAgain:
    """See Graph: the function runs again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        """See Graph."""
        self._run()


class CpuDevice:
    """See Device."""

    place = torch.device("cpu")

    def __init__(self, *, captures: bool = False) -> None:
        """
        Args:
            captures: report that graphs save time, so that their rounds can be tested here.
        """
        self.captures = captures

    @property
    def name(self) -> str:
        """See Device."""
        return cpu_name()

    def free_bytes(self) -> int:
        """See Device; the smaller of the machine's and its control group's."""
        return memory.host_free_bytes()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device."""
        return memory.host_peak_bytes(work)

    def upload(self, words: NDArray[np.int32], target: Tensor | None = None) -> Tensor:
        """See Device."""
        source = torch.from_numpy(words)
        return source.clone() if target is None else target.copy_(source)

    def fetch(self, tensors: Sequence[Tensor]) -> HostFetch:
        """See Device."""
        return HostFetch(tensors)

    def capture(self, run: Callable[[], None]) -> CalledAgain:
        """See Device."""
        run()
        return CalledAgain(run)
