"""Kept rows beside the blocks they are copied from: random rounds of decodes that come and go."""

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from services.engine.compute.models import decode_rows
from services.engine.compute.models.decode_rows import DecodeRows
from services.engine.compute.models.input_metadata import build_input
from services.engine.contract.runner import SequenceMetadata

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK, LAYERS, LONGEST = 4, 2, 8, 4, 2, 40
KERNELS, REFERENCE = dispatch.load("torch"), dispatch.load("reference")


class Rounds:
    """Sequences with blocks of their own; every round is checked against the reference."""

    def __init__(self, num_seqs: int) -> None:
        blocks = LONGEST // BLOCK
        count = num_seqs * blocks + 1
        self.caches = [torch.randn(count, BLOCK, 2 * KV_HEADS, DIM) for _ in range(LAYERS)]
        self.rows = DecodeRows(self.caches)
        self.tables = [tuple(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(num_seqs)]
        self.lengths = [0] * num_seqs
        self.ids = list(range(num_seqs))
        self.joined = 0

    def prefill(self, index: int, length: int) -> None:
        """Another sequence takes the index's blocks and brings a history with it."""
        self.ids[index] += len(self.ids)
        self.lengths[index] = length
        for cache in self.caches:
            cache[list(self.tables[index])] = torch.randn(len(self.tables[index]), *cache.shape[1:])

    def decode(self, indices: list[int], window: int) -> None:
        indices = [index for index in indices if self.lengths[index] < LONGEST]
        if not indices:
            return
        batch = [
            SequenceMetadata(self.ids[s], self.lengths[s], (1,), None, self.tables[s], sample=True)
            for s in indices
        ]
        data = build_input(batch, None, BLOCK, torch.float32, CPU, window, self.rows)
        kept = data.groups[0].kept
        assert (kept is None) == (self.rows.positions < 128)
        self.joined += len(kept.joined) if kept else 0
        for cache, groups in zip(self.caches, (data.groups, data.window_groups), strict=True):
            q = torch.randn(len(indices), HEADS, DIM)
            kv = torch.randn(len(indices), 2 * KV_HEADS, DIM)
            KERNELS.kv_write(cache, kv, data.slots)
            for group in groups:
                own = (q[group.rows], kv[group.rows], cache, group)
                torch.testing.assert_close(KERNELS.attention(*own), REFERENCE.attention(*own))
        for index in indices:
            self.lengths[index] += 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["decode", "decode", "decode", "prefill", "forget"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
        st.integers(0, LONGEST - 1),
    ),
    min_size=3,
    max_size=16,
)


@settings(max_examples=25, deadline=None)
@given(
    actions=ACTIONS, window=st.sampled_from([0, 0, 7]), kept=st.sampled_from([8192, 3 * 128, 100])
)
def test_decodes_read_what_their_blocks_hold(
    actions: list[tuple[str, list[int], int]], window: int, kept: int
) -> None:
    with mock.patch.object(decode_rows, "POSITIONS", kept):
        rounds = Rounds(6)
        for name, indices, length in actions:
            if name == "prefill":
                rounds.prefill(indices[0], length)
            elif name == "forget":
                rounds.rows.drop()
            else:
                rounds.decode(indices, window)


def test_who_stays_is_never_copied_again() -> None:
    rounds = Rounds(4)
    for index in range(4):
        rounds.prefill(index, 10 + index)
    rounds.decode([0, 1, 2, 3], 0)
    assert rounds.joined == 4
    for indices in ([3, 2, 1, 0], [0, 1, 2, 3], [0, 1, 3, 2]):
        rounds.decode(indices, 0)
    assert rounds.joined == 4
    rounds.prefill(1, 20)
    rounds.decode([0, 1, 2, 3], 0)
    assert rounds.joined == 5


def test_rows_grow_with_what_they_hold_and_stay_within_their_bound() -> None:
    cache = torch.zeros(2000, 32, 2 * KV_HEADS, DIM)
    rows = DecodeRows([cache])
    table = tuple(range(1, 300))
    assert not rows.fits(65, 5)
    assert not rows.fits(33, 240)
    for count, start in ((1, 5), (3, 255), (3, 256), (32, 240), (64, 5), (1, 8000)):
        assert rows.fits(count, start + 1)
        batch = [SequenceMetadata(i, start, (1,), None, table, sample=True) for i in range(count)]
        _, kept = rows.assign(batch)
        (store,) = kept.stores.values()
        assert store.shape[1] >= count
        assert store.shape[3] > start
        per_position = 2 * KV_HEADS * DIM * 4
        assert store.nbytes <= DecodeRows.nbytes(per_position)
        assert len(set(kept.slots.tolist())) == count * 2 * KV_HEADS


def test_a_large_model_keeps_fewer_positions() -> None:
    cache = torch.zeros(2, 1, 2 * 8, 128)
    layers = [cache] * 64
    rows = DecodeRows(layers)
    per_position = 64 * 16 * 128 * 4
    assert DecodeRows.nbytes(per_position) == decode_rows.BYTES
    assert rows.positions == decode_rows.BYTES // (2 * per_position) < decode_rows.POSITIONS
    small = DecodeRows([torch.zeros(2, 1, 2, 8)])
    assert small.positions == decode_rows.POSITIONS
