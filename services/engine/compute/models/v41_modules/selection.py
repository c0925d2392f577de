"""Chooses the compressed entries that rows attend to, for one layer and those after it.

An entry's score is the sum over index heads of a row's head weight times ReLU(query · key). The
best entries that are visible to the row are chosen; of equal ones, the older. One layer also
chooses the best blocks of entries: later choices are made among these only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.rotary import rotate
from services.engine.compute.models.v4_modules.round_plan import RoundPlan
from services.engine.compute.models.v4_modules.shared_attention import row_parts
from services.engine.compute.models.v41_modules.quantisers import round_index
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v41 import DeepseekV41Config


@dataclass(frozen=True, slots=True)
class Places:
    """Some of the entries of each row's request, in their own order."""

    places: Tensor
    """[T, N] int64: numbers of entries, or of blocks of entries."""
    counts: tuple[int, ...]
    """Per row: how many of its line count, the first ones."""


@dataclass(slots=True)
class Choice:
    """What later layers of a round take over; the model makes one for each round."""

    entries: Places | None = None
    """The entries that rows attend to, by slots counted over all blocks."""
    candidates: Places | None = None
    """Blocks of entries; None: all entries are candidates."""


class Selection:
    """Index queries and head weights of one layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        index: int,
    ) -> None:
        """Pack the weights of the indexer whose tensors begin with `at`.

        Args:
            index: of the layer.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        heads, dim = config.index_heads, config.index_dim
        self._config, self._kernels = config, kernels
        self._ratio = config.layers[index].ratio
        self._makes_candidates = index == config.candidates_from
        self._query = kernels.pack(reader(f"{at}.wq_b.weight", heads * dim, config.query_rank))
        weigh = reader(f"{at}.weights_proj.weight", heads, config.hidden_size)
        self._weigh = kernels.pack(weigh)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        return self._query.nbytes + self._weigh.nbytes

    def choose(
        self,
        x: Tensor,
        low_rank: Tensor,
        turned: Tensor,
        plan: RoundPlan,
        keys: Tensor,
        choice: Choice,
    ) -> None:
        """Choose for all rows; the result replaces that of earlier layers in `choice`.

        Args:
            x: [T, hidden] normed rows.
            low_rank: [T, query_rank] normed low-rank queries.
            turned: [T, rope_dim / 2, 2].
            keys: [blocks, entries per block, D]: index keys of the entries.
        """
        config, entries = self._config, plan.entries[self._ratio]
        most = max(entries.visible)
        capacity = config.candidate_blocks * config.candidate_size
        if most <= min(config.index_top_k, capacity):  # all are chosen, and all are candidates
            choice.entries = Places(entries.tables[plan.requests, :most], entries.visible)
            return
        queries = self._query(low_rank).view(len(x), config.index_heads, config.index_dim)
        rotate(queries, turned)
        queries = round_index(queries)
        # Both constants are factored out of the sum over heads: ReLU keeps positive factors.
        weights = self._weigh(x).mul_((config.index_heads * config.index_dim) ** -0.5)
        chosen, blocks, flat = [], [], keys.flatten(0, 1)
        for part in row_parts(len(x), most * config.index_dim, self._kernels):
            visible = entries.visible[part]
            tables = entries.tables[plan.requests[part], : max(1, *visible)]
            own = choice.candidates
            if own is not None:
                places, visible = self._entries_of(own, part, visible)
                tables = tables.gather(1, places)
            scores = _scores(queries[part].clone(), weights[part].clone(), flat[tables], visible)
            if self._makes_candidates and most > capacity:
                blocks.append(self._best_blocks(scores, visible))
            best = _best(scores, config.index_top_k)
            counts = tuple(min(best.shape[1], number) for number in visible)
            chosen.append(Places(tables.gather(1, best), counts))
        choice.entries = _joined(chosen)
        if blocks:
            choice.candidates = _joined(blocks)

    def _best_blocks(self, scores: Tensor, visible: tuple[int, ...]) -> Places:
        """The candidate blocks of some rows: the best ones, and the one with the newest entry.

        A block is as good as its best entry.
        """
        size, most = self._config.candidate_size, self._config.candidate_blocks
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=float("-inf"))
        worth = padded.view(len(padded), -1, size).amax(-1)
        newest = torch.tensor([max(0, number - 1) // size for number in visible])
        worth.scatter_(1, newest.unsqueeze(1), float("inf"))
        best = _best(worth, most)
        return Places(best, tuple(min(best.shape[1], -(-number // size)) for number in visible))

    def _entries_of(
        self, candidates: Places, part: slice, visible: tuple[int, ...]
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Numbers [R, N] of the entries in the candidate blocks of some rows, and how many count.

        The last block of a row is the one with its newest entry, which may be cut.
        """
        size, counts = self._config.candidate_size, candidates.counts[part]
        blocks = candidates.places[part, : max(1, *counts)]
        places = (blocks.unsqueeze(2) * size + torch.arange(size)).flatten(1)
        cut = tuple(
            number - (-(-number // size) - count) * size if number else 0
            for number, count in zip(visible, counts, strict=True)
        )
        return places[:, : max(1, *cut)].clamp_(max=max(1, *visible) - 1), cut


def _scores(queries: Tensor, weights: Tensor, keys: Tensor, visible: tuple[int, ...]) -> Tensor:
    """[R, N]: minus infinity where an entry is not visible.

    Args:
        queries: [R, heads, D].
        weights: [R, heads].
        keys: [R, N, D].
        visible: entries per row that are visible, the first ones.
    """
    scores = torch.bmm(queries, keys.float().transpose(1, 2)).relu_()
    scores = torch.bmm(weights.unsqueeze(1), scores).squeeze(1)
    hidden = torch.arange(keys.shape[1]) >= torch.tensor(visible).unsqueeze(1)
    return scores.masked_fill_(hidden, float("-inf"))


def _best(scores: Tensor, count: int) -> Tensor:
    """[R, count at most] int64: places of the best scores in ascending order; of equal ones, the
    first. Invisible ones are last: they have the highest places."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _joined(parts: list[Places]) -> Places:
    """Of all rows, padded to one width."""
    width = max(part.places.shape[1] for part in parts)
    padded = [
        torch.nn.functional.pad(part.places, (0, width - part.places.shape[1])) for part in parts
    ]
    return Places(torch.cat(padded), tuple(count for part in parts for count in part.counts))
