"""Rank 0 of tensor parallelism: a ModelRunner whose calls the other ranks repeat on their parts."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.ranks.groups import join_group
from services.engine.compute.ranks.process import OtherRanks
from services.engine.compute.tensor_parallel.commands import (
    Allocate,
    CopyBlocks,
    Forward,
    Join,
    Scrub,
)
from services.engine.compute.tensor_parallel.shard import Shard, check_config
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import RunnerInfo, SequenceMetadata

_MODULE = "services.engine.compute.tensor_parallel.rank_main"


class TensorParallelRunner(ModelRunner):
    """A `contract.runner.Runner`; one thread calls all methods but `check`."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks and load this rank's part; returns when all ranks are ready.

        Raises:
            ModelFileError: files that cannot be served.
            ConfigError: an option does not fit the model or this machine; the message names it.
            RunnerFailedError: another rank ended.
        """
        check_config(config)
        self._ranks = OtherRanks()
        self._shard = Shard(0, config.tensor_parallel)
        try:
            with tempfile.TemporaryDirectory(prefix="inferfleet-ranks-") as folder:
                store = str(Path(folder) / "store")
                for number in range(1, config.tensor_parallel):
                    join = Join(config, number, store)
                    self._ranks.start(f"tensor rank {number}", _MODULE, join)
                super().__init__(config, partition=self._shard)
                self._others_bytes = self._ranks.wait_loaded()
                self._shard.group = join_group(store, 0, config.tensor_parallel, self._device)
                self._ranks.wait_joined()
        except BaseException:
            self.close()
            raise

    def describe(self) -> RunnerInfo:
        """See Runner; bytes are those of all ranks together."""
        own = super().describe()
        return replace(
            own,
            kv_bytes_per_block=own.kv_bytes_per_block * self._shard.size,
            weights_bytes=own.weights_bytes + self._others_bytes,
        )

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See Runner; no model that is split over ranks has state."""
        self._ranks.send(Allocate(num_blocks))
        super().allocate(num_blocks, num_states)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner."""
        if pairs:
            self._ranks.send(CopyBlocks(tuple(pairs)))
        super().copy_blocks(pairs)

    def forward(
        self, batch: Sequence[SequenceMetadata], previous_tokens: Tensor | None
    ) -> tuple[Tensor, InputMetadata]:
        """See ModelRunner."""
        ids = None
        if previous_tokens is not None and any(seq.prev_row is not None for seq in batch):
            ids = tuple(previous_tokens.tolist())
        self._ranks.send(Forward(tuple(batch), ids))
        with self._ranks.naming_cause():
            return super().forward(batch, previous_tokens)

    def check(self) -> None:
        """See Runner."""
        self._ranks.check()

    def close(self) -> None:
        """See Runner."""
        self._shard.group.close()
        self._ranks.close()
        super().close()

    def scrub(self) -> tuple[int, ...]:
        """See ModelRunner; a row that is not finite on one rank is so on all, a layer later."""
        self._ranks.send(Scrub())
        return super().scrub()
