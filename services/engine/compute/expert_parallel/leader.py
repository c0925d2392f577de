"""Rank 0 of expert parallelism: starts the other ranks, sends commands, detects their failure."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernels.interface import Kernels
from services.common.config.settings import ConfigError
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.commands import (
    ApplyNext,
    BeginPlacement,
    Join,
    PrepareNext,
    RunRound,
)
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.moe import RunExperts
from services.engine.compute.ranks.groups import GlooGroup, Group, LoneGroup
from services.engine.compute.ranks.process import OtherRanks
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
)

_MODULE = "services.engine.compute.expert_parallel.rank_main"


def expert_shape(config: EngineConfig, moe: MoeConfig) -> ExpertShape:
    """Number of slots and ranks, from the options and the model.

    Raises:
        ConfigError: the ranks cannot hold equally many slots.
    """
    slots = moe.num_experts + config.redundant_experts
    ranks = config.expert_parallel
    if slots % ranks:
        raise ConfigError(
            f"redundant_experts={config.redundant_experts}: with {moe.num_experts} experts this "
            f"makes {slots} slots, which {ranks} ranks (expert_parallel) cannot share evenly; "
            f"choose a number that makes a multiple of {ranks}"
        )
    return ExpertShape(len(moe.layers), moe.num_experts, slots, ranks)


class ExpertLeader:
    """The experts of an engine on all its ranks. One thread calls all methods but `check`."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ExpertShape,
        weights: ExpertWeights,
        kernels: Kernels,
        model_revision: str,
    ) -> None:
        """Start the other ranks and load this rank's experts; returns when all ranks are ready.

        Raises:
            ModelFileError: another rank cannot read the model.
            RunnerFailedError: another rank ended.
        """
        self._shape = shape
        self._revision = model_revision
        self._ranks = OtherRanks()
        self._group: Group = LoneGroup()
        self._next: ExpertPlacement | None = None
        self._steps_left = 0
        placement = first_placement(shape, model_revision)
        try:
            with tempfile.TemporaryDirectory(prefix="inferfleet-experts-") as folder:
                store = str(Path(folder) / "store")
                for number in range(1, shape.num_ranks):
                    join = Join(config, shape, placement, number, store)
                    self._ranks.start(f"expert rank {number}", _MODULE, join)
                bank = ExpertBank(weights, kernels, shape, 0, placement)
                self._bytes = bank.nbytes + self._ranks.wait_loaded()
                if len(self._ranks):
                    self._group = GlooGroup(store, 0, shape.num_ranks)
                self._ranks.wait_joined()
                self._experts = Experts(bank, shape, self._group, config.expert_load_window)
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> ExpertShape:
        """Sizes that a placement must match."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """Memory of the experts on all ranks in bytes, as loaded at the start."""
        return self._bytes

    @property
    def placement(self) -> ExpertPlacement:
        """The placement in use."""
        return self._experts.placement

    @property
    def run_experts(self) -> RunExperts:
        """What a layer calls."""
        return self._experts

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """See Runner.expert_loads."""
        return self._experts.loads.total()

    def clear_loads(self) -> None:
        """Discard the counts of all rounds so far."""
        self._experts.loads.clear()

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Let the other ranks run a round while the body runs the layers.

        Raises:
            RunnerFailedError: a rank ended, or did not respond in time.
        """
        self._ranks.send(RunRound())
        with self._ranks.naming_cause():
            yield
        self._experts.end_round()

    def prepare(self, placement: ExpertPlacement) -> bool:
        """Load one expert on every rank that misses one; see Runner.prepare_placement."""
        if placement != self._next:
            check_placement(placement, self._shape, self._revision)
            self._start_placement(placement)
        if self._steps_left:
            self._ranks.send(PrepareNext())
            self._experts.bank.prepare()
            self._steps_left -= 1
        return self._steps_left == 0

    def apply(self, version: int) -> None:
        """See Runner.apply_placement."""
        if self._next is None or self._next.version != version or self._steps_left:
            raise PlacementRefusedError(
                f"version {version} is not prepared: call prepare_placement until it returns True"
            )
        self._next = None
        self._ranks.send(ApplyNext())
        self._experts.apply()

    def check(self) -> None:
        """See Runner.check."""
        self._ranks.check()

    def close(self) -> None:
        """End the other ranks; idempotent."""
        self._group.close()
        self._ranks.close()

    def _start_placement(self, placement: ExpertPlacement) -> None:
        ranks = range(self._shape.num_ranks)
        self._steps_left = max(
            len(missing_experts(self.placement, placement, self._shape, rank)) for rank in ranks
        )
        self._ranks.send(BeginPlacement(placement))
        self._experts.bank.start_placement(placement)
        self._next = placement
