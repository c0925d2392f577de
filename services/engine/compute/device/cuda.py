"""`CudaDevice`: a GPU by torch.cuda. The only module of the engine's rounds that names it.

Rounds are launched on one stream. Results are copied on a side stream, which waits for the round by
an event; the host waits for the copy by a second one. No device has run this file yet: see
docs/gpu.md.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WARM_UP = 2
"""Calls before a capture: libraries allocate their workspace, and kernels are compiled."""
_STREAM: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
_EVENT: Callable[[], torch.cuda.Event] = torch.cuda.Event


class CudaFetch:
    """See Fetch."""

    def __init__(self, copies: list[Tensor], done: "torch.cuda.Event") -> None:
        self._copies, self._done = copies, done

    def wait(self) -> list[Tensor]:
        """See Fetch; other threads run while this one waits."""
        self._done.synchronize()
        return self._copies


class CudaDevice:
    """See Device."""

    captures = True

    def __init__(self, index: int = 0) -> None:
        self.place = torch.device("cuda", index)
        self._side = _STREAM(self.place)
        self._graphs: torch.cuda.CUDAGraph | None = None
        """One of the graphs, whose memory the next ones share: only one runs at a time."""

    @property
    def name(self) -> str:
        """See Device."""
        return torch.cuda.get_device_name(self.place)

    def free_bytes(self) -> int:
        """See Device."""
        free, _total = torch.cuda.mem_get_info(self.place)
        return free

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device."""
        torch.cuda.synchronize(self.place)
        before = torch.cuda.memory_allocated(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        work()
        torch.cuda.synchronize(self.place)
        return torch.cuda.max_memory_allocated(self.place) - before

    def upload(self, words: NDArray[np.int32], target: Tensor | None = None) -> Tensor:
        """See Device; torch keeps the pinned buffer until the copy has ended, and reuses it."""
        pinned = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = words
        if target is None:
            target = torch.empty(len(words), dtype=torch.int32, device=self.place)
        return target.copy_(pinned, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> CudaFetch:
        """See Device."""
        ready, done = _EVENT(), _EVENT()
        ready.record(torch.cuda.current_stream(self.place))
        copies = []
        with torch.cuda.stream(self._side):
            self._side.wait_event(ready)
            for tensor in tensors:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(pinned.copy_(tensor, non_blocking=True))
                # The round's stream must not reuse the memory before this copy has read it.
                tensor.record_stream(self._side)
            done.record(self._side)
        return CudaFetch(copies, done)

    def capture(self, run: Callable[[], None]) -> "torch.cuda.CUDAGraph":
        """See Device."""
        current, warm = torch.cuda.current_stream(self.place), _STREAM(self.place)
        warm.wait_stream(current)
        with torch.cuda.stream(warm):
            for _ in range(WARM_UP):
                run()
        current.wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        shared = None if self._graphs is None else self._graphs.pool()
        with torch.cuda.graph(graph, pool=shared):
            run()
        self._graphs = graph
        return graph
