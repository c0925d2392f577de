"""Runs rounds of a DeepSeek V4 model for tests: requests with blocks and slots of their own."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.compute.models.v4_modules.memory import V4Memory, allocate
from services.engine.compute.models.v4_modules.model import V4Model
from services.engine.compute.models.v4_modules.round_plan import RequestRows, plan_round


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
        self.memory = allocate(
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
        self.memory.copy_states([(source.slot, target.slot)])
        return target

    def run(self, *parts: tuple[Request, list[int]]) -> list[Tensor]:
        """One round: logits [tokens, vocabulary] of each request."""
        rows = [
            RequestRows(request.start, tuple(tokens), request.slot, request.blocks)
            for request, tokens in parts
        ]
        plan = plan_round(self.model.config, rows, block_size=self.block_size, drafts=self.drafts)
        logits = self.model.logits(self.model.forward(plan, self.memory))
        for request, tokens in parts:
            request.start += len(tokens)
            request.written = max(request.written, request.start)
        return list(logits.split([len(tokens) for _, tokens in parts]))

    def in_chunks(self, request: Request, tokens: list[int], size: int) -> Tensor:
        """Logits of all tokens, computed in rounds of `size`."""
        parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        return torch.cat([self.run((request, part))[0] for part in parts])
