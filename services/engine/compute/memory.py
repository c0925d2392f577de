"""What memory is free, and what a round took at its peak."""

import resource
from collections.abc import Callable
from pathlib import Path

import torch

_KIB = 1024


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken: of the card, or of this machine or its control group."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    left = _group_left()
    available = _proc_value("/proc/meminfo", "MemAvailable")
    return available if left is None else min(available, left)


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that `work` took beyond what was in use before, at its worst moment."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = _proc_value("/proc/self/status", "VmRSS")
    _reset_high_water()
    work()
    return max(0, _high_water() - before)


def _high_water() -> int:
    try:
        return _proc_value("/proc/self/status", "VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _reset_high_water() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # Without it the peak since the start counts, which is only ever too careful.
        return


def _proc_value(path: str, key: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * _KIB
    raise OSError(f"{path} has no {key}")


def _group_left() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
