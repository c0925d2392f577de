"""A rank's part of a dense model: whole heads and a slice of the feed-forward's middle.

The first product of each half of a layer (query, key and value; gate and up) is split by outputs,
the second (attention's output; down) by inputs, so a half needs one sum over ranks. Embedding,
norms and head are on every rank; the head is used on rank 0 alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kernels.interface import Kernels, Linear
from services.common.config.settings import ConfigError
from services.engine.compute.loader import ModelSource
from services.engine.compute.models.rows import DenseRows, Rows
from services.engine.compute.models.weights import StoredWeights
from services.engine.compute.ranks.groups import Group, LoneGroup
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelConfig

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj.weight", "down_proj.weight")


class Shard:
    """Which rank of how many; `group` is set once all have met."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group: Group = LoneGroup()

    def part_of(self, source: ModelSource) -> ModelSource:
        """The source of this rank's part.

        Raises:
            ConfigError: the model cannot be split into so many.
        """
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
        """Kernels whose spread products are summed over the ranks."""
        name = f"{whole.name}-tp{self.size}"
        return replace(whole, name=name, spread=lambda linear: _Summed(linear, self))


class _Slices(StoredWeights):
    """A rank's part of each tensor, cut when it is asked for."""

    def __init__(self, whole: Mapping[str, Tensor], rank: int, size: int) -> None:
        self._whole = whole
        self._rank = rank
        self._size = size

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._whole[name]
        if name.split(".")[-2] in _BY_OUTPUT:
            return tensor.chunk(self._size, 0)[self._rank]
        if name.endswith(_BY_INPUT):
            return tensor.chunk(self._size, 1)[self._rank].contiguous()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def rows(self, name: str, dtype: torch.dtype) -> Rows:
        if isinstance(self._whole, StoredWeights):
            return self._whole.rows(name, dtype)
        return DenseRows(self._whole[name].to(dtype))


class _Summed:
    """A product of which each rank has a part of the inputs."""

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
    """Refuse what does not go with several ranks, before any is started.

    Raises:
        ConfigError: naming the key.
    """
    if config.dtype == "int8":
        raise ConfigError("dtype=int8: a model split by tensor_parallel is not served in it")
    if config.expert_parallel > 1:
        raise ConfigError("tensor_parallel: does not go together with expert_parallel")
    if config.device == "cuda" and torch.cuda.device_count() < config.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}: there are {torch.cuda.device_count()} "
            "devices, and each rank needs one"
        )


def _check(config: ModelConfig, size: int) -> None:
    if config.moe is not None:
        raise ConfigError("tensor_parallel: a model with experts is split by expert_parallel")
    for what, count in (
        ("key and value heads", config.num_kv_heads),
        ("rows of the feed-forward", config.intermediate_size),
    ):
        if count % size:
            raise ConfigError(f"tensor_parallel={size}: the model's {count} {what} cannot be split")
