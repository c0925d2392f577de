"""The oracle of DeepSeek V4.1 against itself, against published numbers, and its golden values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.compute.models.v41_oracle import engram, formats, golden, published, selection
from tests.engine.compute.models.v41_oracle.mutations import MUTATIONS
from tests.engine.compute.models.v41_oracle.oracle import Oracle, State, replayed
from tests.engine.compute.models.v41_oracle.shape import Shape

PUBLISHED = Shape(engram_layer_ids=(1, 14), engram_vocab_size=16_000_000, engram_n_heads=8)
TOKENS = golden.TOKENS
SHAPE = golden.SHAPE


@pytest.fixture(scope="module")
def model() -> Oracle:
    return golden.oracle(torch.float64)


@pytest.fixture(scope="module")
def whole(model: Oracle) -> torch.Tensor:
    return golden.whole(model)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", golden.SCENARIOS)
def test_golden_values_hold_in_single_precision(name: str) -> None:
    """No score, quantiser or router of these scenarios is so near a tie that rounding decides."""
    expected = np.load(golden.FILE)[name]
    found = golden.SCENARIOS[name](golden.oracle(torch.float32)).numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 5e-5
    assert expected.std() > 0.5


def _pieces(model: Oracle, sizes: list[int], decoder_from: int = 0) -> torch.Tensor:
    state, found, start = State(), [], 0
    for size in sizes:
        part, state = model.forward(TOKENS[start : start + size], state, decoder_from=decoder_from)
        found.append(part)
        start += size
    assert state.tokens == TOKENS[:start]
    return torch.cat(found)


@pytest.mark.parametrize(
    "sizes", [[32] + [1] * 8, [1, 13, 9, 1, 16], [7, 33]], ids=["decoded", "mixed", "odd cut"]
)
def test_chunks_equal_the_whole(model: Oracle, whole: torch.Tensor, sizes: list[int]) -> None:
    assert torch.allclose(_pieces(model, sizes), whole, atol=1e-10)


def test_a_later_token_changes_no_earlier_row(model: Oracle, whole: torch.Tensor) -> None:
    other = [*TOKENS[:-1], (TOKENS[-1] + 40) % SHAPE.vocab_size]
    assert torch.allclose(model.forward(other)[0][:-1], whole[:-1], atol=1e-10)


def test_chunks_with_a_cut_decoder_equal_the_cut_whole(model: Oracle) -> None:
    start = len(TOKENS) - golden.KEPT
    cut = golden.cut(model)
    assert len(cut) == golden.KEPT
    assert torch.allclose(_pieces(model, [10, 9, 21], start), cut, atol=1e-10)
    assert torch.allclose(_pieces(model, [30, 3, 7], start), cut, atol=1e-10)


def test_a_cut_decoder_lacks_old_window_keys_only(model: Oracle, whole: torch.Tensor) -> None:
    """Rows that find no cut within reach of the decoder's layers are exact; others are near."""
    layers = SHAPE.num_hidden_layers - SHAPE.last_source
    reach = layers * (SHAPE.sliding_window - 1)
    assert torch.allclose(
        model.forward(TOKENS, decoder_from=4)[0][reach:], whole[4 + reach :], atol=1e-10
    )
    assert not torch.allclose(golden.cut(model), whole[-golden.KEPT :], atol=1e-3)


def test_a_replay_at_the_start_is_exact(model: Oracle, whole: torch.Tensor) -> None:
    """The window before the hit is all there is before it: nothing is cut."""
    _, cold = model.forward(TOKENS)
    state = replayed(SHAPE, cold, SHAPE.sliding_window)
    assert not state.tokens
    assert torch.allclose(model.forward(TOKENS, state)[0], whole, atol=1e-10)


def test_a_replay_in_chunks_writes_history_from_the_hit_on(model: Oracle) -> None:
    _, cold = model.forward(TOKENS)
    state = replayed(SHAPE, cold, golden.HIT)
    start = len(state.tokens)
    assert start == golden.HIT - SHAPE.sliding_window
    found = []
    for begin, end in ((start, start + 3), (start + 3, golden.HIT), (golden.HIT, 40)):
        part, state = model.forward(TOKENS[begin:end], state)
        found.append(part)
        for layer, source in state.sources.items():
            kept = golden.HIT // SHAPE.compress_ratios[layer]
            assert torch.equal(source.entries[:kept], cold.sources[layer].entries[:kept])
            assert len(source.entries) == max(end, golden.HIT) // SHAPE.compress_ratios[layer]
    assert torch.allclose(torch.cat(found), golden.replay(model), atol=1e-10)


@pytest.mark.parametrize("hit", [0, 7, 41])
def test_a_hit_inside_a_group_or_outside_is_refused(model: Oracle, hit: int) -> None:
    _, cold = model.forward(TOKENS[:9])
    with pytest.raises(ValueError, match=f"hit {hit} is not a multiple of 2 within 1 and 9"):
        replayed(SHAPE, cold, hit)


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_formula_matters(
    model: Oracle, whole: torch.Tensor, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, broken = MUTATIONS[name]
    monkeypatch.setattr(module, function, broken(getattr(module, function)))
    assert (model.forward(TOKENS[:28])[0] - whole[:28]).abs().max() > 2e-4


def test_rows_of_the_published_tables() -> None:
    """`engram_num_embeddings` of the published config follows from the primes alone."""
    assert engram.table_rows(PUBLISHED) == [384006168, 384016682]


def test_config_has_the_sizes_that_follow() -> None:
    config = published.text_config(SHAPE, golden.COMPRESSED)
    tables = dict(zip(SHAPE.engram_layer_ids, config["engram_num_embeddings"], strict=True))
    weights = golden.oracle(torch.float32).weights
    for layer, rows in tables.items():
        assert len(weights[f"layers.{layer}.engram.embed.weight"]) == rows
    assert config["engram_compressed_vocab_size"] == 69
    assert config["rope_scaling"]["factor"] == 16


def test_compressed_ids_of_equal_texts() -> None:
    texts = ["The", "the", " the", "th\u00e9", " ", "  ", "\n", "\ufffd", "\ufffd", "\ufb01", "fi"]
    raw = ["The", "the", "_the", "th\u00e9", "_", "__", "nl", "<80>", "<81>", "\ufb01", "fi"]
    assert engram.compressed_ids(texts, raw) == [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4]


def test_hashes_stay_within_their_parts_of_the_table() -> None:
    pad = golden.COMPRESSED[SHAPE.engram_pad_token_id]
    sizes = [prime for heads in engram.primes(SHAPE)[1] for prime in heads]
    ends = np.cumsum(sizes)
    for token in range(SHAPE.vocab_size):
        ids = [golden.COMPRESSED[token], 3]
        back = engram.look_back(ids, 1, 4, pad)
        assert back == [3, ids[0], pad, pad]
        rows = engram.rows_of(SHAPE, 1, golden.COMPRESSED, back)
        assert all(
            end - size <= row < end for row, size, end in zip(rows, sizes, ends, strict=True)
        )


def _grid(mantissa: int, exponents: range, smallest: float, top: float) -> list[float]:
    """Values of a small float format, in the order of their codes."""
    steps = 1 << mantissa
    low = [index * smallest for index in range(steps)]
    high = [(1 + part / steps) * 2.0**power for power in exponents for part in range(steps)]
    return [value for value in low + high if value <= top]


GRIDS = {
    "e2m1": (formats.e2m1, _grid(1, range(3), 0.5, 6.0)),
    "e4m3": (formats.e4m3, _grid(3, range(-6, 9), 2.0**-9, 448.0)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_rounding_takes_the_nearest_and_the_even_code_of_two(name: str) -> None:
    nearest, grid = GRIDS[name]
    values = torch.tensor(grid, dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    even = torch.arange(len(middles)) // 2 * 2 + torch.arange(len(middles)) % 2 * 2
    for sign in (1, -1):
        assert torch.equal(nearest(sign * values), sign * values)
        assert torch.equal(nearest(sign * middles), sign * values[even.clamp(max=len(grid) - 1)])
        assert torch.equal(nearest(sign * middles * (1 + 1e-6)), sign * values[1:])
        assert torch.equal(nearest(sign * middles * (1 - 1e-6)), sign * values[:-1])
        assert nearest(torch.tensor([sign * 1e4], dtype=torch.float64)) == sign * grid[-1]


@given(st.floats(2.0**-40, 2.0**40), st.sampled_from([6.0, 448.0]))
def test_a_power_of_two_scale_is_the_smallest_that_fits(largest: float, top: float) -> None:
    scale = float(formats.power_of_two_scale(torch.tensor([largest], dtype=torch.float64), top))
    assert largest <= scale * top < 2 * largest * (1 + 1e-12)


def test_candidates_hold_the_newest_block_and_the_best() -> None:
    score = torch.tensor([[9.0, 0, 1, 0, 5, 0, 0, -1, -2]])
    seen = torch.ones(1, 9, dtype=torch.bool)
    chosen = selection.candidates(score, seen, 2, 2)[0].tolist()
    assert chosen == [True, True, *[False] * 6, True]
    seen[:, 7:] = False
    chosen = selection.candidates(score, seen, 2, 2)[0].tolist()
    assert chosen == [True, True, False, False, False, False, True, False, False]


def test_of_equal_scores_the_older_entry_is_chosen() -> None:
    score = torch.tensor([[1.0, 2, 2, 2, 0]])
    chosen = selection.best(score, torch.ones(1, 5, dtype=torch.bool), 2)
    assert chosen[0].tolist() == [False, True, True, False, False]


def test_no_two_index_scores_are_equal(model: Oracle) -> None:
    """16 index heads and more: with few, many scores are zero, and ties decide what is chosen."""
    queries = torch.randn(20, SHAPE.index_n_heads, 32, generator=torch.Generator().manual_seed(0))
    keys = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    score = selection.scores(
        formats.index_values(queries),
        formats.index_values(keys),
        torch.randn(20, SHAPE.index_n_heads, generator=torch.Generator().manual_seed(2)),
    )
    assert all(len(row.unique()) == 20 for row in score)
