"""The experts of all layers, on all ranks: dispatch, compute, combine.

A call is a collective. Each rank passes its rows, or none, and gets their outputs back. They are
bit-identical to those of a rank that holds all experts itself.
"""

import numpy as np
import torch
from torch import Tensor

from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.expert_load import ExpertLoads
from services.engine.compute.expert_parallel.slot_map import SlotMap
from services.engine.compute.ranks.groups import Group
from services.engine.contract.runner import ExpertPlacement, ExpertShape


class Experts:
    """`services.engine.compute.models.moe.RunExperts` on one rank."""

    def __init__(self, bank: ExpertBank, shape: ExpertShape, group: Group, window: int) -> None:
        """
        Args:
            window: number of rounds over which this rank's rows are counted.
        """
        self.bank = bank
        self.loads = ExpertLoads(shape, window)
        self._kernels = bank.kernels
        self._shape = shape
        self._group = group
        self._device, self._dtype = bank.weights.device, bank.weights.dtype
        self._rounds = group.rank
        self._use_maps()

    @property
    def placement(self) -> ExpertPlacement:
        """The placement in use."""
        return self.bank.placement

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See RunExperts."""
        chosen = self._maps[layer].dispatch(ids, first_replica=self._rounds)
        per_slot = chosen.per_slot
        self.loads.count(layer, per_slot.numpy(force=True))
        arriving = self._group.exchange_counts(per_slot)
        send = per_slot.view(self._group.size, -1).sum(1).tolist()
        receive = arriving.sum(1).tolist()
        top_k = ids.shape[1]
        rows = x.index_select(0, chosen.order // top_k)
        arrived = self._group.exchange_rows(rows, send, receive)
        done = self.bank.compute(layer, arrived, arriving.tolist())
        back = self._group.exchange_rows(done, receive, send)
        outputs = x.new_zeros(ids.numel(), x.shape[1])
        outputs.index_copy_(0, chosen.order, back)
        return self._kernels.combine(outputs.view(*ids.shape, x.shape[1]), weights)

    def serve_round(self) -> None:
        """Run a round on a rank that has no rows of its own."""
        x = torch.empty(0, self.bank.weights.hidden_size, dtype=self._dtype, device=self._device)
        ids = torch.empty(0, 1, dtype=torch.long, device=self._device)
        weights = torch.empty(0, 1, device=self._device)
        for layer in range(self._shape.num_layers):
            self(layer, x, ids, weights)
        self.end_round()

    def end_round(self) -> None:
        """End the round after its last layer."""
        self.loads.end_round(self._phy2log)
        self._rounds += 1

    def apply(self) -> None:
        """Use the placement that the bank has prepared, from the next round on."""
        self.bank.apply()
        self._use_maps()

    def _use_maps(self) -> None:
        rows = self.bank.placement.phy2log
        self._phy2log = np.array(rows, np.int64)
        count = self._shape.num_experts
        self._maps = [SlotMap(row, count, self._device) for row in rows]
