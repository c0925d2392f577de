"""Runs rounds of a DeepSeek V4 model for tests: requests with blocks and slots of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import dispatch
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.v4_modules.memory import (
    LayerMemory,
    cache_tensors,
    layer_memories,
    state_bytes,
)
from services.engine.compute.models.v4_modules.model import V4Model
from services.engine.compute.models.v4_modules.round_plan import plan_round
from services.engine.compute.ranks.groups import LoneGroup
from services.engine.compute.state_cache import StateCache
from services.engine.contract.deepseek_v4 import DeepseekV4Config
from services.engine.contract.expert_placement import first_placement
from services.engine.contract.runner import ExpertShape, SequenceMetadata, StateBlock
from tests.doubles.tiny_v4 import tiny_model_config

CPU = torch.device("cpu")


def make_v4(weights: Mapping[str, Tensor], kernels: str, *, block_size: int = 16) -> V4Model:
    """The tiny model on one rank."""
    config = tiny_model_config()
    assert config.v4 is not None
    found = ExpertWeights.find(config, weights, torch.float32, CPU)
    loaded = dispatch.load(kernels)
    shape = ExpertShape(config.num_layers, config.v4.num_experts, config.v4.num_experts, 1)
    bank = ExpertBank(found, loaded, shape, 0, first_placement(shape, ""))
    experts = Experts(bank, shape, LoneGroup(), 1)
    return V4Model(config.v4, weights, loaded, experts, block_size=block_size, max_positions=128)


class V4Memory:
    """What an engine allocates: slots, and blocks."""

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        drafts: int = 0,
    ) -> None:
        self.states = StateCache(StateBlock(state_bytes(config, drafts=drafts), 1), num_slots, CPU)
        self.tensors: tuple[CacheTensor, ...] = cache_tensors(config)
        self.caches = [torch.zeros(t.shape(num_blocks, block_size)) for t in self.tensors]
        self.layers: tuple[LayerMemory, ...] = layer_memories(
            config, self.states.slots, self.caches, drafts=drafts
        )


@dataclass
class Request:
    """What the driver keeps of a request."""

    slot: int
    blocks: tuple[int, ...]
    start: int = 0
    written: int = 0
    """Positions that any round has written, rejected ones included."""


@dataclass
class V4Driver:
    """Hands out slots and shuffled blocks, never twice."""

    model: V4Model
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
        for layer in self.memory.layers:
            # What no request wrote must never count. Block 0 is padding and stays finite.
            for tensor in layer.states:
                tensor.fill_(float("nan"))
            for tensor in layer.histories:
                tensor[1:] = float("nan")
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
            )
            for number, (request, tokens) in enumerate(parts)
        ]
        ids = torch.tensor([token for _, tokens in parts for token in tokens])
        plan = plan_round(
            self.model.config, rows, ids, block_size=self.block_size, drafts=self.drafts
        )
        logits = self.model.logits(self.model.compute(plan, self.memory.layers))
        for request, tokens in parts:
            request.start += len(tokens)
            request.written = max(request.written, request.start)
        return list(logits.split([len(tokens) for _, tokens in parts]))

    def in_chunks(self, request: Request, tokens: list[int], size: int) -> Tensor:
        """Logits of all tokens, computed in rounds of `size`."""
        parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        return torch.cat([self.run((request, part))[0] for part in parts])
