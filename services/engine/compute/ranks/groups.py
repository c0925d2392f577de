"""How ranks exchange tensors. Every call is a collective: all ranks make it, even without rows."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from services.engine.contract.runner import RunnerFailedError

_TIMEOUT = timedelta(seconds=60)
"""A rank that takes longer counts as failed. The end of a process is noticed at once."""


class Group(Protocol):
    """All ranks, as one of them sees them. Every call may raise RunnerFailedError."""

    rank: int
    size: int

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Exchange row counts.

        Args:
            counts: [slots] int64: rows that this rank sends to each slot of all ranks.

        Returns:
            [ranks, local slots] int64: rows that arrive from each rank for each local slot.
        """

    def exchange_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first send[0] rows to rank 0, the next send[1] to rank 1, and so on.

        Args:
            rows: [sum(send), columns].
            receive: rows that arrive from each rank.

        Returns:
            [sum(receive), columns], in the order of ranks.
        """

    def sum(self, part: Tensor) -> Tensor:
        """Sum of all ranks' parts, added in the order of ranks.

        The result is bit-identical on every rank, and does not depend on other rows.
        """

    def close(self) -> None:
        """Leave the group; idempotent."""


class LoneGroup:
    """The group of a single rank: rows stay where they are."""

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
    """Ranks on this machine, connected over loopback with gloo."""

    def __init__(self, store_path: str, rank: int, size: int) -> None:
        """Wait until all ranks have joined.

        Args:
            store_path: a file through which the ranks find one another; the first rank makes it.

        Raises:
            RunnerFailedError: the other ranks did not join in time.
        """
        self.rank = rank
        self.size = size
        # Not torch's default group: that belongs to the program that uses this engine as a library.
        dist: Any = torch.distributed
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        self._options = dist.AllToAllOptions()
        try:
            store = dist.FileStore(store_path, size)
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RunnerFailedError(
                f"rank {rank} could not connect to the others: {error}"
            ) from error

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """See Group."""
        each = len(counts) // self.size
        even = [each] * self.size
        return self._all_to_all(counts.cpu(), even, even).view(self.size, each)

    def exchange_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Group."""
        return self._all_to_all(rows.contiguous(), send, receive)

    def sum(self, part: Tensor) -> Tensor:
        """See Group. bfloat16 and float16 are added in float32.

        It is not an all-reduce: there the order of the sum depends on an element's place in the
        buffer, and so on the batch.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise RunnerFailedError(
                f"rank {self.rank} lost the connection to another rank: {error}"
            ) from error
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def close(self) -> None:
        """See Group. Its threads must end before the interpreter, which aborts otherwise."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        work = (out, rows, list(receive), list(send), self._options)
        try:
            self._group.alltoall_base(*work).wait()
        except RuntimeError as error:
            raise RunnerFailedError(
                f"rank {self.rank} lost the connection to another rank: {error}"
            ) from error
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
    """Join the other ranks, with NCCL between GPUs and gloo between CPUs.

    Raises:
        RunnerFailedError: the other ranks did not join in time.
    """
    if device.type == "cuda":
        return NcclGroup(store_path, rank, size, device)
    return GlooGroup(store_path, rank, size)
