"""How ranks exchange rows. Every call is a collective: all ranks make it, with rows or without."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from services.engine.contract.runner import RunnerFailedError

_TIMEOUT = timedelta(seconds=60)
"""A rank that says nothing for so long is taken for gone; one that dies is noticed at once."""


class Group(Protocol):
    """A rank's place among all."""

    rank: int
    size: int

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """[slots] rows for each slot of all ranks; gives [ranks, local slots] from each rank."""

    def exchange_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first send[0] rows to rank 0 and so on; gives rows in the order of ranks."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, added in the order of ranks: the same bits on each rank, and
        for each row whatever other rows there are."""

    def close(self) -> None:
        """Leave; idempotent."""


class LoneGroup:
    """One rank: all rows stay."""

    rank = 0
    size = 1

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """See Group."""
        return counts.unsqueeze(0)

    def exchange_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Group."""
        return rows

    def sum(self, part: Tensor) -> Tensor:
        """See Group."""
        return part

    def close(self) -> None:
        """See Group."""


class GlooGroup:
    """Ranks on this machine, over loopback; blocks until all ranks have joined."""

    def __init__(self, store_path: str, rank: int, size: int) -> None:
        """
        Args:
            store_path: a file for the ranks to find one another; the first one makes it.

        Raises:
            RunnerFailedError: the others did not come.
        """
        self.rank = rank
        self.size = size
        # A group of its own: torch's default one belongs to whoever uses this process as a library.
        dist: Any = torch.distributed
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        self._options = dist.AllToAllOptions()
        try:
            store = dist.FileStore(store_path, size)
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RunnerFailedError(f"rank {rank} found no others: {error}") from error

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """See Group."""
        each = len(counts) // self.size
        even = [each] * self.size
        return self._all_to_all(counts.cpu(), even, even).view(self.size, each)

    def exchange_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Group."""
        return self._all_to_all(rows.contiguous(), send, receive)

    def sum(self, part: Tensor) -> Tensor:
        """See Group. Halves are added in float32.

        Not an all-reduce: the order in which that adds depends on an element's place in the buffer,
        so on the batch.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise RunnerFailedError(f"rank {self.rank} lost another: {error}") from error
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def close(self) -> None:
        """See Group. The group's threads must end before the interpreter does, or it aborts."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        work = (out, rows, list(receive), list(send), self._options)
        try:
            self._group.alltoall_base(*work).wait()
        except RuntimeError as error:
            raise RunnerFailedError(f"rank {self.rank} lost another: {error}") from error
        return out


class NcclGroup(GlooGroup):
    """Ranks on this machine's cards. It has never run: no card could be had."""

    def __init__(self, store_path: str, rank: int, size: int, device: torch.device) -> None:
        """See GlooGroup."""
        self.rank = rank
        self.size = size
        dist: Any = torch.distributed
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        self._options = dist.AllToAllOptions()
        self._group = dist.ProcessGroupNCCL(dist.FileStore(store_path, size), rank, size, options)


def join_group(store_path: str, rank: int, size: int, device: torch.device) -> Group:
    """Meet the other ranks, over what their devices speak."""
    if device.type == "cuda":
        return NcclGroup(store_path, rank, size, device)
    return GlooGroup(store_path, rank, size)
