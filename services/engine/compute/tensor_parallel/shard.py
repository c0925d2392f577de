"""A rank's part of a dense model: whole heads, and a slice of the feed-forward network.

The first product of each half of a layer (query, key and value; gate and up) is split by outputs,
the second (attention output; down) by inputs. So each half needs one sum over the ranks. Embedding,
norms and head are on every rank; only rank 0 uses the head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.interface import Kernels, Linear
from services.common.config.settings import ConfigError
from services.engine.compute.loader import ModelSource
from services.engine.compute.models.rows import DenseRows, Rows
from services.engine.compute.models.weights import StoredWeights, first_part, stored_shape
from services.engine.compute.ranks.groups import Group, LoneGroup
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelConfig

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj.weight", "down_proj.weight")


class Shard:
    """See ranks.partition.Partition; one of `size` equal parts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group: Group = LoneGroup()
        """The ranks whose products are summed; set once all ranks have joined."""

    def part_of(self, source: ModelSource) -> ModelSource:
        """See Partition."""
        config = source.config
        _check(config, self.size)
        return replace(
            source,
            config=replace(
                config,
                num_heads=config.num_heads // self.size,
                num_kv_heads=config.num_kv_heads // self.size,
                intermediate_size=config.intermediate_size // self.size,
            ),
            weights=_Slices(source.weights, self.rank, self.size),
        )

    def kernels(self, whole: Kernels) -> Kernels:
        """See Partition; row-parallel products are summed over the ranks."""
        name = f"{whole.name}-tp{self.size}"
        return replace(whole, name=name, row_parallel=lambda linear: _Summed(linear, self))


class _Slices(StoredWeights):
    """A rank's part of each tensor; cut at every access."""

    def __init__(self, whole: Mapping[str, Tensor], rank: int, size: int) -> None:
        self._whole = whole
        self._rank = rank
        self._size = size

    def __getitem__(self, name: str) -> Tensor:
        if _is_by_output(name):
            return first_part(self._whole, name, self._rank, self._size)
        tensor = self._whole[name]
        if name.endswith(_BY_INPUT):
            return tensor.chunk(self._size, 1)[self._rank].contiguous()
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._whole  # Mapping's own would decode the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = stored_shape(self._whole, name)
        if _is_by_output(name):
            return shape[0] // self._size, *shape[1:]
        if name.endswith(_BY_INPUT):
            return shape[0], shape[1] // self._size
        return shape

    def where(self, name: str) -> Path | None:
        return self._whole.where(name) if isinstance(self._whole, StoredWeights) else None

    def is_packers_bias(self, name: str) -> bool:
        return isinstance(self._whole, StoredWeights) and self._whole.is_packers_bias(name)

    def rows(self, name: str, dtype: torch.dtype) -> Rows:
        if isinstance(self._whole, StoredWeights):
            return self._whole.rows(name, dtype)
        return DenseRows(self._whole[name].to(dtype))


def _is_by_output(name: str) -> bool:
    return name.split(".")[-2] in _BY_OUTPUT


class _Summed:
    """A product whose inputs are split over the ranks; the result is their sum."""

    def __init__(self, part: Linear, shard: Shard) -> None:
        self._part = part
        self._shard = shard

    def __call__(self, x: Tensor) -> Tensor:
        return self._shard.group.sum(self._part(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))

    @property
    def nbytes(self) -> int:
        return self._part.nbytes


def check_config(config: EngineConfig) -> None:
    """Check the options before any rank is started.

    Raises:
        ConfigError: an option does not work with tensor parallelism; the message names it.
    """
    if config.dtype == "int8":
        raise ConfigError("dtype=int8: not supported with tensor_parallel; use float32 or bfloat16")
    if config.expert_parallel > 1:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}: cannot be combined with expert_parallel; "
            "set one of the two to 1"
        )
    if config.device == "cuda" and torch.cuda.device_count() < config.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}: each rank needs a GPU, but this machine "
            f"has {torch.cuda.device_count()}"
        )


_SERVED = ("llama", "mistral", "qwen2", "qwen3")


def _check(config: ModelConfig, size: int) -> None:
    if config.mla is not None:
        raise ConfigError(
            f"tensor_parallel={size}: not supported for {config.architecture} (latent attention); "
            "its experts are split by expert_parallel instead"
        )
    if config.moe is not None:
        raise ConfigError(
            f"tensor_parallel={size}: a model with experts is split by expert_parallel instead"
        )
    if config.architecture not in _SERVED:
        raise ConfigError(
            f"tensor_parallel={size}: {config.architecture} is served on one rank only; more than "
            f"one serve {', '.join(_SERVED)}"
        )
    for what, count in (
        ("key and value heads", config.num_kv_heads),
        ("rows of the feed-forward", config.intermediate_size),
    ):
        if count % size:
            raise ConfigError(
                f"tensor_parallel={size}: the model's {count} {what} are not a multiple of {size}"
            )
