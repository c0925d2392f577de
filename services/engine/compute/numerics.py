"""Identity of an engine's arithmetic: engines with equal ids give bit-identical results."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from services.engine.contract.config import EngineConfig

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}
"""Number format of activations, keys and values, by the option `dtype`."""


def use_threads(config: EngineConfig) -> None:
    """Set the threads of this process: `threads` if set, else an equal share per rank."""
    if config.threads:
        torch.set_num_threads(config.threads)
        return
    ranks = max(config.expert_parallel, config.tensor_parallel)
    if ranks > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


@dataclass(frozen=True, slots=True)
class Numerics:
    """Everything that may change the last bit of a result."""

    revision: str
    dtype: str
    quantisation: str
    kernels: str
    torch: str
    hardware: str
    threads: int
    """0 if results do not depend on the number of threads."""

    @property
    def numerics_id(self) -> str:
        """dtype/kernels/digest of all fields."""
        text = "\0".join(f"{key}={value}" for key, value in asdict(self).items())
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{self.dtype}/{self.kernels}/{digest}"


def cpu_name() -> str:
    """The CPU's model with the instruction set that PyTorch uses."""
    return f"{_cpu_model()} {torch.backends.cpu.get_cpu_capability()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    keys = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    parts = dict(line.split(":", 1) for line in lines[:40] if ":" in line)
    found = {key.strip(): value.strip() for key, value in parts.items()}
    return " ".join(found[key] for key in keys if key in found) or "cpu"
