"""Runs rounds of a DeepSeek V4 or V4.1 for tests: requests with blocks and slots of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.registry import make_model
from services.engine.compute.models.v4_modules import memory as v4
from services.engine.compute.models.v4_modules.model import V4Model, plan_v4
from services.engine.compute.models.v41_modules import memory as v41
from services.engine.compute.models.v41_modules.model import V41Model
from services.engine.compute.models.v41_modules.round_plan import plan_v41
from services.engine.compute.ranks.groups import LoneGroup
from services.engine.compute.state_cache import StateCache
from services.engine.contract.deepseek_v4 import DeepseekV4Config
from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.expert_placement import first_placement
from services.engine.contract.model_config import ModelConfig
from services.engine.contract.runner import ExpertShape, SequenceMetadata, StateBlock
from tests.doubles.tiny_v4 import tiny_model_config

CPU = torch.device("cpu")


def make_v4(weights: Mapping[str, Tensor], kernels: str, *, block_size: int = 16) -> V4Model:
    """The tiny V4 on one rank."""
    return make_tiny(tiny_model_config(), weights, kernels, block_size=block_size)


def make_tiny(
    config: ModelConfig, weights: Mapping[str, Tensor], kernels: str, *, block_size: int = 16
) -> Any:
    """A model on one rank."""
    assert config.moe is not None
    found = ExpertWeights.find(config, weights, torch.float32, CPU)
    loaded = dispatch.load(kernels)
    shape = ExpertShape(config.num_layers, config.moe.num_experts, config.moe.num_experts, 1)
    bank = ExpertBank(found, loaded, shape, 0, first_placement(shape, ""))
    return make_model(
        config,
        weights,
        loaded,
        dtype=torch.float32,
        device=CPU,
        block_size=block_size,
        max_positions=128,
        experts=Experts(bank, shape, LoneGroup(), 1),
    )


class V4Memory:
    """What an engine allocates: slots, and blocks."""

    def __init__(
        self,
        config: DeepseekV4Config | DeepseekV41Config,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        drafts: int = 0,
    ) -> None:
        ours = v41 if isinstance(config, DeepseekV41Config) else v4
        nbytes = ours.state_bytes(config, drafts=drafts)
        self.states = StateCache(StateBlock(nbytes, 1), num_slots, CPU)
        self.tensors: tuple[CacheTensor, ...] = ours.cache_tensors(config)
        self.caches = [torch.zeros(t.shape(num_blocks, block_size)) for t in self.tensors]
        make = v41.make_memory if isinstance(config, DeepseekV41Config) else v4.layer_memories
        self.views: Any = make(config, self.states.slots, self.caches, drafts=drafts)
        """What the model takes."""


@dataclass
class Request:
    """What the driver keeps of a request."""

    slot: int
    blocks: tuple[int, ...]
    start: int = 0
    written: int = 0
    """Positions that any round has written, rejected ones included."""
    replay: dict[str, Any] = field(default_factory=dict)
    """Fields of SequenceMetadata, after a replay."""
    earlier: tuple[int, ...] = ()
    """Tokens before replayed positions, for the next round."""


@dataclass
class V4Driver:
    """Hands out slots and shuffled blocks, never twice."""

    model: V4Model | V41Model
    block_size: int = 16
    drafts: int = 0
    num_blocks: int = 120
    num_slots: int = 12
    memory: V4Memory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = V4Memory(
            self.model.config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
            drafts=self.drafts,
        )
        # What no request wrote must never count. Block 0 is padding and stays finite.
        self.memory.states.slots.view(torch.float32).fill_(float("nan"))
        for cache in self.memory.caches:
            cache[1:] = float("nan")
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(3))
        self._free_blocks = (order + 1).tolist()
        self._free_slots = list(range(self.num_slots - 1, 0, -1))

    def open(self, positions: int = 96) -> Request:
        """A request that may reach so many positions."""
        count = -(-positions // self.block_size)
        blocks = tuple(self._free_blocks.pop() for _ in range(count))
        return Request(self._free_slots.pop(), blocks)

    def restart(self, source: Request, blocks: int) -> Request:
        """A request on a prefix hit: it shares blocks, and continues from the source's state."""
        target = self.open()
        target.blocks = source.blocks[:blocks] + target.blocks[blocks:]
        target.start = target.written = blocks * self.block_size
        self.memory.states.copy([(source.slot, target.slot)])
        return target

    def restart_by_replay(self, source: Request, tokens: list[int], hit: int) -> Request:
        """A request on a prefix hit of `hit` positions that has no snapshot: V4.1 only.

        Args:
            tokens: the source's.
        """
        target = self.open()
        blocks = hit // self.block_size
        target.blocks = source.blocks[:blocks] + target.blocks[blocks:]
        target.start = start = hit - min(self.model.config.window, hit)
        target.replay = {"state_from": start, "history_from": hit}
        target.earlier = tuple(tokens[max(0, start - 3) : start])
        return target

    def run(self, *parts: tuple[Request, list[int]]) -> list[Tensor]:
        """One round: logits [tokens, vocabulary] of each request."""
        rows = [
            SequenceMetadata(
                number,
                request.start,
                tuple(tokens),
                None,
                request.blocks,
                sample=True,
                state_slot=request.slot,
                earlier_tokens=request.earlier,
                **request.replay,
            )
            for number, (request, tokens) in enumerate(parts)
        ]
        ids = torch.tensor([token for _, tokens in parts for token in tokens])
        logits = self.model.logits(self._compute(rows, ids))
        for request, tokens in parts:
            request.earlier = ()
            request.start += len(tokens)
            request.written = max(request.written, request.start)
        return list(logits.split([len(tokens) for _, tokens in parts]))

    def _compute(self, rows: list[SequenceMetadata], ids: Tensor) -> Tensor:
        sizes = {"block_size": self.block_size, "drafts": self.drafts}
        if isinstance(self.model, V41Model):
            plan = plan_v41(self.model.config, rows, ids, **sizes)
            return self.model.compute(plan, self.memory.views)
        return self.model.compute(plan_v4(self.model.config, rows, ids, **sizes), self.memory.views)

    def in_chunks(self, request: Request, tokens: list[int], size: int) -> Tensor:
        """Logits of all tokens, computed in rounds of `size`."""
        parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        return torch.cat([self.run((request, part))[0] for part in parts])
