"""`Device`: everything that a runner does with a machine beside calling operators.

Code that runs rounds calls no function of `torch.cuda`, and copies nothing between host and device
by itself. So the same code runs on a GPU, on the host, and in a rehearsal.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Fetch(Protocol):
    """A copy to the host that is on its way."""

    def wait(self) -> list[Tensor]:
        """The copies, on the host. It waits for this copy only, and may run on any thread."""


class Graph(Protocol):
    """Work of fixed shapes on fixed tensors, launched as one."""

    def replay(self) -> None:
        """Do the work again with what the tensors hold now; does not wait."""


class Device(Protocol):
    """One machine that computes. One thread calls all methods."""

    @property
    def place(self) -> torch.device:
        """Where tensors are."""

    @property
    def name(self) -> str:
        """Of the hardware; a part of the identity of results."""

    @property
    def captures(self) -> bool:
        """Whether graphs save time here."""

    def free_bytes(self) -> int:
        """Memory that is free, in bytes."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Memory in bytes that `work` uses at its peak, beyond what was in use before."""

    def upload(self, words: NDArray[np.int32], target: Tensor | None = None) -> Tensor:
        """Copy words to the device, after all work that was launched before; does not wait.

        Args:
            words: [N]; may be changed as soon as the call returns.
            target: [N] int32 on the device, to be filled; None: a new tensor.
        """

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Start to copy tensors to the host, beside the work that is launched later."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Make a graph of what `run` launches. `run` is called, once or more; it must neither copy
        nor wait, and its results must be in tensors that existed before."""


def without_gradients(method: F) -> F:
    """Decorator: computes without autograd, by `torch.inference_mode`.

    In a rehearsal by `torch.no_grad`: operators must reach the rehearsal in parts, and inference
    mode passes them whole.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        key = torch._C._TorchDispatchModeKey.FAKE
        fake = torch._C._get_dispatch_mode(key) is not None
        with torch.no_grad() if fake else torch.inference_mode():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]
