"""Rank 0's side: it starts the other ranks, tells them what to do and sees when one is gone."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kernels.interface import Kernels
from services.common.config.settings import ConfigError
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.commands import (
    ApplyNext,
    BeginPlacement,
    Command,
    Join,
    PrepareNext,
    RunRound,
)
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.ranks.groups import GlooGroup, Group, LoneGroup
from services.engine.compute.ranks.process import END_S, RankProcess
from services.engine.contract.config import EngineConfig
from services.engine.contract.expert_placement import (
    check_placement,
    first_placement,
    missing_experts,
)
from services.engine.contract.model_config import MoeConfig
from services.engine.contract.runner import (
    ExpertPlacement,
    ExpertShape,
    PlacementRefusedError,
    RunnerFailedError,
)

_MODULE = "services.engine.compute.expert_parallel.rank_main"
_POLL_S = 0.01


def expert_shape(config: EngineConfig, moe: MoeConfig) -> ExpertShape:
    """Slots and ranks as configured.

    Raises:
        ConfigError: naming the key that does not fit the model.
    """
    slots = moe.num_experts + config.redundant_experts
    ranks = config.expert_parallel
    if slots % ranks:
        raise ConfigError(
            f"redundant_experts={config.redundant_experts}: {moe.num_experts} experts and these "
            f"are {slots} slots, which {ranks} ranks (expert_parallel) cannot share evenly"
        )
    return ExpertShape(len(moe.layers), moe.num_experts, slots, ranks)


class ExpertLeader:
    """The experts of an engine, whatever ranks hold them. One thread calls all but `check`."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ExpertShape,
        weights: ExpertWeights,
        kernels: Kernels,
        model_revision: str,
    ) -> None:
        """Start the other ranks and load this one's experts; returns when all serve.

        Raises:
            ModelFileError: another rank cannot read the model.
            RunnerFailedError: another rank is gone.
        """
        self._shape = shape
        self._revision = model_revision
        self._ranks: list[RankProcess] = []
        self._group: Group = LoneGroup()
        self._next: ExpertPlacement | None = None
        self._steps_left = 0
        placement = first_placement(shape, model_revision)
        try:
            with tempfile.TemporaryDirectory(prefix="inferfleet-experts-") as folder:
                store = str(Path(folder) / "store")
                for number in range(1, shape.num_ranks):
                    join = Join(config, shape, placement, number, store)
                    self._ranks.append(RankProcess(f"expert rank {number}", _MODULE, join))
                bank = ExpertBank(weights, kernels, shape, 0, placement)
                self._bytes = bank.nbytes + sum(rank.loaded() for rank in self._ranks)
                if self._ranks:
                    self._group = GlooGroup(store, 0, shape.num_ranks)
                for rank in self._ranks:
                    rank.joined()
                self.run = Experts(bank, shape, self._group, config.expert_load_window)
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> ExpertShape:
        """What a placement must fit."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """Memory of the experts on all ranks, as loaded at the start."""
        return self._bytes

    @property
    def placement(self) -> ExpertPlacement:
        """The map in use."""
        return self.run.placement

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """The other ranks serve while the layers of one round run.

        Raises:
            RunnerFailedError: a rank is gone, or says nothing any more.
        """
        self._tell(RunRound())
        try:
            yield
        except RunnerFailedError:
            self._blame()
            raise
        self.run.end_round()

    def prepare(self, placement: ExpertPlacement) -> bool:
        """One more expert on every rank that lacks one; see Runner.prepare_placement."""
        if placement != self._next:
            check_placement(placement, self._shape, self._revision)
            self._begin(placement)
        if self._steps_left:
            self._tell(PrepareNext())
            self.run.bank.prepare()
            self._steps_left -= 1
        return self._steps_left == 0

    def apply(self, version: int) -> None:
        """See Runner.apply_placement."""
        if self._next is None or self._next.version != version or self._steps_left:
            raise PlacementRefusedError(f"version {version} is not prepared")
        self._next = None
        self._tell(ApplyNext())
        self.run.apply()

    def check(self) -> None:
        """Raise RunnerFailedError if a rank is gone."""
        for rank in self._ranks:
            rank.check()

    def close(self) -> None:
        """End the other ranks; idempotent."""
        self._group.close()
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def _blame(self) -> None:
        """A lost connection says less than the end of the process behind it, if that comes."""
        limit = time.monotonic() + END_S / 3
        while time.monotonic() < limit:
            self.check()
            time.sleep(_POLL_S)

    def _begin(self, placement: ExpertPlacement) -> None:
        ranks = range(self._shape.num_ranks)
        self._steps_left = max(
            len(missing_experts(self.placement, placement, self._shape, rank)) for rank in ranks
        )
        self._tell(BeginPlacement(placement))
        self.run.bank.begin(placement)
        self._next = placement

    def _tell(self, command: Command) -> None:
        for rank in self._ranks:
            rank.send(command)
