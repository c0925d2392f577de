"""Rank 0: a ModelRunner whose every act the other ranks repeat on their parts."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.ranks.groups import join_group
from services.engine.compute.ranks.process import END_S, RankProcess
from services.engine.compute.tensor_parallel.commands import (
    Allocate,
    Command,
    CopyBlocks,
    Forward,
    Join,
    Scrub,
)
from services.engine.compute.tensor_parallel.shard import Shard, check_config
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import RunnerFailedError, RunnerInfo, SequenceMetadata

_MODULE = "services.engine.compute.tensor_parallel.rank_main"
_POLL_S = 0.01


class TensorParallelRunner(ModelRunner):
    """Serves `services.engine.contract.runner.Runner`; one thread calls all but `check`."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks and load this one's part; returns when all serve.

        Raises:
            ModelFileError: files that cannot be served.
            ConfigError: naming a key that does not fit the model or this machine.
            RunnerFailedError: another rank is gone.
        """
        check_config(config)
        self._ranks: list[RankProcess] = []
        self._shard = Shard(0, config.tensor_parallel)
        try:
            with tempfile.TemporaryDirectory(prefix="inferfleet-ranks-") as folder:
                store = str(Path(folder) / "store")
                for number in range(1, config.tensor_parallel):
                    join = Join(config, number, store)
                    self._ranks.append(RankProcess(f"tensor rank {number}", _MODULE, join))
                super().__init__(config, shard=self._shard)
                self._others_bytes = sum(rank.loaded() for rank in self._ranks)
                self._shard.group = join_group(store, 0, config.tensor_parallel, self._device)
                for rank in self._ranks:
                    rank.joined()
        except BaseException:
            self.close()
            raise

    def describe(self) -> RunnerInfo:
        """See Runner; memory is that of all ranks together."""
        own = super().describe()
        return replace(
            own,
            kv_bytes_per_block=own.kv_bytes_per_block * self._shard.size,
            weights_bytes=own.weights_bytes + self._others_bytes,
        )

    def allocate(self, num_blocks: int) -> None:
        """See Runner."""
        self._tell(Allocate(num_blocks))
        super().allocate(num_blocks)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner."""
        if pairs:
            self._tell(CopyBlocks(tuple(pairs)))
        super().copy_blocks(pairs)

    def forward(
        self, batch: Sequence[SequenceMetadata], drawn: Tensor | None
    ) -> tuple[Tensor, InputMetadata]:
        """See ModelRunner."""
        needed = drawn is not None and any(seq.prev_row is not None for seq in batch)
        ids = tuple(drawn.tolist()) if needed and drawn is not None else None
        self._tell(Forward(tuple(batch), ids))
        try:
            return super().forward(batch, drawn)
        except RunnerFailedError:
            self._blame()
            raise

    def check(self) -> None:
        """See Runner."""
        for rank in self._ranks:
            rank.check()

    def close(self) -> None:
        """See Runner."""
        self._shard.group.close()
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        super().close()

    def scrub(self) -> None:
        self._tell(Scrub())
        super().scrub()

    def _tell(self, command: Command) -> None:
        for rank in self._ranks:
            rank.send(command)

    def _blame(self) -> None:
        """A lost connection says less than the end of the process behind it, if that comes."""
        limit = time.monotonic() + END_S / 3
        while time.monotonic() < limit:
            self.check()
            time.sleep(_POLL_S)
