"""The model: rows of a sequence in, logits out; whole, in chunks, replayed, with a cut decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle import (
    attention,
    compressor,
    engram,
    experts,
    formats,
    selection,
    streams,
)
from tests.engine.compute.models.v41_oracle.attention import Seen
from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


@dataclass
class Source:
    """What one source layer has compressed so far."""

    entries: Tensor
    keys: Tensor
    open_rows: Tensor
    """[0 .. ratio-1, D]: inputs of the group that is not whole yet."""


@dataclass
class State:
    """What is kept of a sequence between two calls; nothing is ever forgotten."""

    tokens: list[int] = field(default_factory=list)
    window: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer: positions and window keys."""
    sources: dict[int, Source] = field(default_factory=dict)
    history_until: int = 0
    """Rows before this position write no history: it exists already (a replay)."""


@dataclass
class _Pass:
    """What layers of one call hand to later ones."""

    positions: Tensor
    collapse: Tensor
    chosen: Tensor | None = None
    """[T, G] of the latest index source."""
    candidates: Tensor | None = None


class Oracle:
    """A V4.1 text model with its weights.

    Args:
        compressed: compressed id of each token of the vocabulary (`engram.compressed_ids`).
    """

    def __init__(self, shape: Shape, weights: Weights, compressed: Sequence[int]) -> None:
        self.shape = shape
        self.weights = weights
        self.compressed = list(compressed)

    def forward(
        self, tokens: Sequence[int], state: State | None = None, *, decoder_from: int = 0
    ) -> tuple[Tensor, State]:
        """Logits [rows, vocabulary] of the rows that follow those of `state`.

        Args:
            state: of the call before; changed in place. None: the sequence begins here.
            decoder_from: rows before this position end at the last source of compressed entries
                (decoder truncation) and have no logits.

        Raises:
            ValueError: no tokens.
        """
        if not tokens:
            raise ValueError("tokens is empty: a call computes one row at least")
        state = state or State()
        positions = torch.arange(len(state.tokens), len(state.tokens) + len(tokens))
        state.tokens.extend(tokens)
        embedded = self.weights["embed.weight"][torch.tensor(list(tokens))]
        rows = embedded[:, None].repeat(1, self.shape.hc_mult, 1)
        first = streams.first_collapse(self.shape, len(rows), rows.dtype)
        flow = _Pass(positions, first)
        for layer in range(self.shape.num_hidden_layers):
            rows = self._layer(layer, rows, flow, state, decoder_from)
        hidden = streams.collapsed(rows, flow.collapse)
        last = formats.normed(hidden, self.shape.rms_norm_eps, self.weights["norm.weight"])
        return last @ self.weights["head.weight"].T, state

    def _layer(
        self, layer: int, rows: Tensor, flow: _Pass, state: State, decoder_from: int
    ) -> Tensor:
        shape, weights, at = self.shape, self.weights, f"layers.{layer}"
        if layer in shape.engram_layer_ids:
            found = self._engram_rows(layer, flow.positions, state.tokens)
            rows = engram.applied(shape, weights, layer, rows, found)
        site = streams.mix(shape, weights, f"{at}.hc_attn", rows)
        x = self._site_input(rows, flow.collapse, site, f"{at}.attn_norm.weight")
        if layer in shape.kv_source_layer_ids:
            self._compress(layer, x, flow.positions, state)
        if layer == shape.last_source:
            kept = flow.positions >= decoder_from
            rows, x, flow.positions = rows[kept], x[kept], flow.positions[kept]
            site = streams.Mix(*(part[kept] for part in site))
        rows = streams.expanded(rows, self._attend(layer, x, flow, state), site)
        flow.collapse = site.collapse
        site = streams.mix(shape, weights, f"{at}.hc_ffn", rows)
        x = self._site_input(rows, flow.collapse, site, f"{at}.ffn_norm.weight")
        rows = streams.expanded(rows, experts.feed_forward(shape, weights, layer, x), site)
        flow.collapse = site.collapse
        return rows

    def _site_input(self, rows: Tensor, before: Tensor, site: streams.Mix, norm: str) -> Tensor:
        """[T, D], normed."""
        joined = streams.collapsed(rows, streams.collapse_of(before, site))
        return formats.normed(joined, self.shape.rms_norm_eps, self.weights[norm])

    def _engram_rows(self, layer: int, positions: Tensor, tokens: Sequence[int]) -> Tensor:
        shape = self.shape
        ids = [self.compressed[token] for token in tokens]
        pad = self.compressed[shape.engram_pad_token_id]
        longest = shape.engram_max_ngram_size
        return torch.tensor(
            [
                engram.rows_of(
                    shape, layer, self.compressed, engram.look_back(ids, place, longest, pad)
                )
                for place in positions.tolist()
            ]
        )

    def _compress(self, layer: int, x: Tensor, positions: Tensor, state: State) -> None:
        """Add what is whole of the new rows to the layer's history."""
        shape, ratio = self.shape, self.shape.compress_ratios[layer]
        old = state.sources.get(layer) or _no_history(shape, x)
        rows = torch.cat([old.open_rows, x[positions >= state.history_until]])
        whole = len(rows) // ratio
        groups = rows[: whole * ratio].unflatten(0, (whole, ratio))
        starts = torch.arange(len(old.entries), len(old.entries) + whole) * ratio
        latent = compressor.latents(shape, self.weights, layer, groups)
        keys = compressor.index_keys(shape, self.weights, layer, latent, starts)
        state.sources[layer] = Source(
            torch.cat([old.entries, compressor.entries(shape, latent, starts)]),
            torch.cat([old.keys, keys]),
            rows[whole * ratio :],
        )

    def _attend(self, layer: int, x: Tensor, flow: _Pass, state: State) -> Tensor:
        shape, weights, positions = self.shape, self.weights, flow.positions
        latent = attention.query_latent(shape, weights, layer, x)
        keys = attention.window_keys(shape, weights, layer, x, positions)
        if layer in state.window:
            places, old = state.window[layer]
            state.window[layer] = (torch.cat([places, positions]), torch.cat([old, keys]))
        else:
            state.window[layer] = (positions, keys)
        source = shape.source_of(layer)
        seen = None
        if source is not None:
            if layer in shape.index_source_layer_ids:
                self._select(layer, source, latent, x, flow, state)
            assert flow.chosen is not None
            seen = Seen(state.sources[source].entries, flow.chosen)
        query = attention.queries(shape, weights, layer, latent, positions)
        return attention.attended(
            shape, weights, layer, query, positions, state.window[layer], seen
        )

    def _select(
        self, layer: int, source: int, latent: Tensor, x: Tensor, flow: _Pass, state: State
    ) -> None:
        """Choose entries of `source` for this layer and those after it."""
        shape, weights = self.shape, self.weights
        keys = state.sources[source].keys
        queries = selection.index_queries(shape, weights, layer, latent, flow.positions)
        per_head = x @ weights[f"layers.{layer}.attn.indexer.weights_proj.weight"].T
        score = selection.scores(queries, keys, per_head)
        seen = compressor.visible(flow.positions, shape.compress_ratios[layer], len(keys))
        if flow.candidates is not None:
            seen = seen & flow.candidates
        if layer == shape.candidate_source_layer_id:
            flow.candidates = selection.candidates(
                score, seen, shape.candidate_topk_blocks, shape.candidate_block_size
            )
        flow.chosen = selection.best(score, seen, shape.index_topk)


def replayed(shape: Shape, cold: State, hit: int) -> State:
    """The state of a request that finds the history of `cold` up to position `hit`.

    Window keys are not kept: the last `sliding_window` tokens before the hit are computed again,
    see no window before themselves, and write no history. The next call takes the tokens from
    `len(state.tokens)` on.

    Raises:
        ValueError: the hit is inside a group, or beyond what `cold` holds.
    """
    widest = max(shape.compress_ratios)
    if hit % widest or not 0 < hit <= len(cold.tokens):
        raise ValueError(
            f"hit {hit} is not a multiple of {widest} within 1 and {len(cold.tokens)} tokens"
        )
    sources = {
        layer: Source(
            own.entries[: hit // shape.compress_ratios[layer]],
            own.keys[: hit // shape.compress_ratios[layer]],
            own.open_rows[:0],
        )
        for layer, own in cold.sources.items()
    }
    start = hit - min(shape.sliding_window, hit)
    return State(cold.tokens[:start], {}, sources, hit)


def _no_history(shape: Shape, x: Tensor) -> Source:
    return Source(
        x.new_zeros(0, shape.head_dim),
        x.new_zeros(0, shape.index_head_dim),
        x.new_zeros(0, shape.hidden_size),
    )


def engram_rows(shape: Shape) -> Mapping[int, int]:
    """Rows of the Engram tables by layer."""
    return dict(zip(shape.engram_layer_ids, engram.table_rows(shape), strict=True))
