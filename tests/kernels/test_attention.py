"""Paged attention against its definition, on scattered blocks with rubbish in unused slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.interface import AttentionGroup, Kernels
from kernels.torch import sinks as torch_sinks
from kernels.torch.whole_vectors import by_row
from services.engine.compute.models.input_metadata import build_input
from services.engine.contract.runner import SequenceMetadata

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 6, 2, 16


def _run(
    kernels: Kernels,
    batch: list[SequenceMetadata],
    block_size: int,
    dtype: torch.dtype,
    *,
    sinks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a set and the oracle give for one round."""
    reference = dispatch.load("reference")
    data = build_input(batch, None, block_size, dtype, CPU)
    rows = len(data.token_ids)
    blocks = 1 + max(block for seq in batch for block in seq.block_table)
    cache = torch.randn(blocks, block_size, 2 * KV_HEADS, DIM, dtype=dtype)
    other = cache.clone()
    q, kv = (
        torch.randn(rows, HEADS, DIM, dtype=dtype),
        torch.randn(rows, 2 * KV_HEADS, DIM, dtype=dtype),
    )
    kernels.kv_write(cache, kv, data.slots)
    reference.kv_write(other, kv, data.slots)
    assert torch.equal(cache, other)
    own = torch.randn(HEADS).to(dtype) * 2

    def attend(these: Kernels, g: AttentionGroup, cache: torch.Tensor) -> torch.Tensor:
        parts = (q[g.rows], kv[g.rows], cache, g)
        return these.sink_attention(*parts, own) if sinks else these.attention(*parts)

    got = [attend(kernels, g, cache) for g in data.groups]
    want = [attend(reference, g, other) for g in data.groups]
    assert sum(len(part) for part in got) == rows
    return torch.cat(got), torch.cat(want)


def _batch(parts: list[tuple[int, int]], block_size: int) -> list[SequenceMetadata]:
    """Sequences of (start, new positions), their blocks scattered."""
    counts = [-(-(start + length) // block_size) for start, length in parts]
    ids = [1 + int(i) for i in torch.randperm(sum(counts))]
    batch = []
    for seq_id, ((start, length), count) in enumerate(zip(parts, counts, strict=True)):
        table, ids = tuple(ids[:count]), ids[count:]
        batch.append(SequenceMetadata(seq_id, start, (0,) * length, None, table, sample=True))
    return batch


LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize(
    ("block_size", "sinks"), [(1, False), (16, False), (32, False), (16, True)]
)
def test_mixed_rounds(case: tuple[Kernels, torch.dtype], block_size: int, sinks: bool) -> None:
    kernels, dtype = case
    parts = [(0, 1), (5, 1), (0, 40), (17, 9), (200, 1), (31, 1), (32, 33)]
    got, want = _run(kernels, _batch(parts, block_size), block_size, dtype, sinks=sinks)
    limit = LIMITS[dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=limit)


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([name for name in dispatch.SETS if name.startswith("torch")]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_round(parts: list[tuple[int, int]], block_size: int, name: str, sinks: bool) -> None:
    kernels = dispatch.load(name)
    got, want = _run(kernels, _batch(parts, block_size), block_size, torch.float32, sinks=sinks)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_group_of_one_row_without_history_sees_itself_alone(kernels: Kernels) -> None:
    cache = torch.zeros(2, 4, 2 * KV_HEADS, DIM)
    kv = torch.randn(1, 2 * KV_HEADS, DIM)
    data = build_input(
        [SequenceMetadata(0, 0, (0,), None, (1,), sample=True)], None, 4, torch.float32, CPU
    )
    (group,) = data.groups
    assert isinstance(group, AttentionGroup)
    kernels.kv_write(cache, kv, data.slots)
    out = kernels.attention(torch.randn(1, HEADS, DIM), kv, cache, group)
    own = kv[0, KV_HEADS:].repeat_interleave(HEADS // KV_HEADS, 0).flatten()
    torch.testing.assert_close(out[0], own)


def test_a_sink_takes_its_share_and_adds_nothing(kernels: Kernels) -> None:
    """One position with score 0 beside a sink of ln 3: a quarter of the value."""
    cache = torch.zeros(2, 4, 2 * KV_HEADS, DIM)
    kv = torch.ones(1, 2 * KV_HEADS, DIM)
    data = build_input(
        [SequenceMetadata(0, 0, (0,), None, (1,), sample=True)], None, 4, torch.float32, CPU
    )
    (group,) = data.groups
    kernels.kv_write(cache, kv, data.slots)
    sinks = torch.full((HEADS,), 3.0).log()
    out = kernels.sink_attention(torch.zeros(1, HEADS, DIM), kv, cache, group, sinks)
    torch.testing.assert_close(out, torch.full((1, HEADS * DIM), 0.25))


@pytest.mark.parametrize("start", [0, 37])
@pytest.mark.parametrize("limit", [1, 500])
def test_scores_of_a_prefill_with_sinks_are_bounded(
    start: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    weights = torch_sinks._weights

    def measure(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(scores.numel())
        return weights(scores, *rest)

    monkeypatch.setattr(torch_sinks, "_weights", measure)
    monkeypatch.setattr(torch_sinks, "SCORES", limit)
    got, want = _run(
        dispatch.load("torch"), _batch([(start, 41)], 16), 16, torch.float32, sinks=True
    )
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert max(seen) <= max(limit, HEADS // KV_HEADS * (start + 41))
    assert len(seen) > KV_HEADS


@pytest.mark.parametrize("start", [0, 37])
@pytest.mark.parametrize("window", [0, 20])
def test_masks_made_for_some_rows_give_the_bits_of_one_for_all(
    start: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attention with sinks needs none from outside."""
    batch = _batch([(start, 41)], 16)
    cache = torch.randn(9, 16, 2 * KV_HEADS, DIM)
    q, kv, own = torch.randn(41, HEADS, DIM), torch.randn(41, 2 * KV_HEADS, DIM), torch.randn(HEADS)
    monkeypatch.setattr(torch_sinks, "SCORES", 500)
    outputs = []
    for masks in (True, False):
        data = build_input(batch, None, 16, torch.float32, CPU, window, prefill_masks=masks)
        (group,) = data.window_groups
        assert (group.mask is not None) == (masks and bool(start or window))
        assert group.causal == (not start and not window)
        if masks and group.mask is not None:  # rows of the mask that `build_input` makes
            whole = group.mask
            monkeypatch.setattr(torch_sinks, "_mask", lambda _group, part, *_, m=whole: m[part])
        dispatch.load("torch").kv_write(cache, kv, data.slots)
        outputs.append(torch_sinks.sink_attention(q, kv, cache, group, own))
        monkeypatch.undo()
        monkeypatch.setattr(torch_sinks, "SCORES", 500)
    assert torch.equal(*outputs)


def test_on_a_gpu_exponentials_are_applied_whole() -> None:
    """Its elements do not depend on their neighbours, and each of many parts costs a launch."""
    x = SimpleNamespace(is_cuda=True)
    assert by_row(lambda given: given, x) is x  # type: ignore[arg-type, return-value]
