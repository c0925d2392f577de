"""Measures the host's free memory, and what the largest round uses at its peak."""

import resource
from collections.abc import Callable
from pathlib import Path

from services.engine.contract.runner import SequenceMetadata

_KIB = 1024


def host_free_bytes() -> int:
    """Free memory in bytes: the smaller of the machine's and its control group's."""
    in_cgroup = _cgroup_free()
    available = _proc_value("/proc/meminfo", "MemAvailable")
    return available if in_cgroup is None else min(available, in_cgroup)


def host_peak_bytes(work: Callable[[], object]) -> int:
    """Memory in bytes that `work` uses at its peak, beyond what was in use before."""
    before = _proc_value("/proc/self/status", "VmRSS")
    _reset_high_water()
    work()
    return max(0, _high_water() - before)


def largest_round(
    tokens: int, max_seqs: int, length: int, block_size: int
) -> tuple[list[SequenceMetadata], int]:
    """A round as large as any: one long prefill, all other sequences decodes.

    Args:
        tokens: positions of the round.
        max_seqs: sequences of the round, at most.
        length: positions of a sequence, at most.

    Returns:
        The batch, and the number of blocks it needs, block 0 included.
    """
    decodes = max(0, min(max_seqs, tokens) - 1)
    lengths = [max(1, min(length, tokens - decodes))] + [1] * decodes
    batch, block = [], 1
    for seq_id, count in enumerate(lengths):
        blocks = -(-count // block_size)
        table = tuple(range(block, block + blocks))
        block += blocks
        batch.append(
            SequenceMetadata(
                seq_id, 0, (0,) * count, None, table, sample=True, state_slot=seq_id + 1
            )
        )
    return batch, block


def _high_water() -> int:
    try:
        return _proc_value("/proc/self/status", "VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _reset_high_water() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # Without a reset the peak since the start counts, which is an upper bound.
        return


def _proc_value(path: str, key: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * _KIB
    raise OSError(f"{path} has no line {key}")


def _cgroup_free() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
