"""The simulated runner's tokens depend on every block that a sequence reads."""

import pytest

from services.common.config.settings import ConfigError
from services.engine.compute.simulated_runner import (
    SimulatedModel,
    SimulatedRunner,
    checksum_of,
    next_token,
)
from services.engine.contract.runner import SamplingRow, SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams

ROW = SamplingRow(SamplingParams(temperature=0.0), seed=1, choice=0, position=6)


def draw(runner, table=(1, 2), start=0, tokens=(5, 6, 7, 8, 9, 10)) -> int:
    batch = [SequenceMetadata(0, start, tuple(tokens), None, table, True)]
    hidden = runner.execute_main_model(1, batch, None)
    return runner.execute_sample(1, hidden, [ROW]).tokens[0].token_id


@pytest.fixture
def runner():
    runner = SimulatedRunner(4, SimulatedModel(vocab_size=500))
    runner.allocate(4)
    return runner


def test_tokens_follow_from_the_history_alone(runner):
    assert draw(runner) == next_token(checksum_of([5, 6, 7, 8, 9, 10]), ROW, 500)
    assert draw(runner, table=(3, 1)) == draw(runner)


def test_chunks_give_the_same_token(runner):
    whole = draw(runner)
    draw(runner, tokens=(5, 6, 7))
    assert draw(runner, start=3, tokens=(8, 9, 10)) == whole


def test_a_wrong_block_and_a_lost_write_give_another_token(runner):
    whole = draw(runner)
    assert draw(runner, table=(3, 2), start=5, tokens=(10,)) != whole
    draw(runner, table=(2, 3), tokens=(1, 1, 1, 1))
    assert draw(runner, start=5, tokens=(10,)) != whole


def test_a_copied_block_holds_the_same(runner):
    whole = draw(runner)
    runner.copy_blocks([(2, 3)])
    assert draw(runner, table=(1, 3), start=5, tokens=(10,)) == whole


def test_models_are_described_in_a_line():
    assert SimulatedModel.parse("yes") == SimulatedModel()
    assert SimulatedModel.parse("vocab_size=9, token_us=2.5").token_us == 2.5
    with pytest.raises(ConfigError, match="unknown name 'size'; use vocab_size"):
        SimulatedModel.parse("size=3")
    with pytest.raises(ConfigError, match="eos='x' is not a number"):
        SimulatedModel.parse("eos=x")
    for below in ("window=-3", "state_boundary=-4"):
        with pytest.raises(ConfigError, match=f"^simulate: {below} is below 0"):
            SimulatedModel.parse(below)


WINDOWED = SimulatedModel(vocab_size=500, window=3)
STATEFUL = SimulatedModel(vocab_size=500, state_boundary=4)


def made(model) -> SimulatedRunner:
    runner = SimulatedRunner(2, model)
    runner.allocate(8, 4)
    runner.clear_states([1, 2])
    return runner


def part(runner, start, tokens, table=(1, 2, 3), slot=1) -> int:
    batch = [SequenceMetadata(0, start, tuple(tokens), None, table, True, state_slot=slot)]
    hidden = runner.execute_main_model(1, batch, None)
    return runner.execute_sample(1, hidden, [ROW]).tokens[0].token_id


@pytest.mark.parametrize("model", [WINDOWED, STATEFUL])
def test_window_and_state_follow_from_the_history_however_it_is_cut(model):
    tokens = [5, 6, 7, 8, 9, 10]
    expected = next_token(model.checksum(tokens), ROW, 500)
    for cut in range(1, 6):
        runner = made(model)
        part(runner, 0, tokens[:cut])
        assert part(runner, cut, tokens[cut:]) == expected
    assert expected != next_token(checksum_of(tokens), ROW, 500)


def test_a_window_reads_no_block_before_it_and_depends_on_what_was_there():
    runner = made(WINDOWED)
    part(runner, 0, [5, 6, 7, 8])
    assert part(runner, 4, [9], (0, 2, 3)) == part(made(WINDOWED), 0, [5, 6, 7, 8, 9])
    assert part(runner, 4, [9], (0, 2, 3)) != part(made(WINDOWED), 0, [1, 6, 7, 8, 9])
    with pytest.raises(AssertionError, match="block 0"):
        part(runner, 3, [8], (0, 2, 3))


def test_a_wrong_state_gives_another_token():
    runner = made(STATEFUL)
    whole = part(runner, 0, [5, 6, 7, 8, 9])
    runner.copy_states([(1, 3)])
    after = part(runner, 5, [10])
    assert part(runner, 5, [10], slot=3) == after, "the copy is the state after five tokens"
    runner.clear_states([1])
    assert part(runner, 5, [10]) != after
    runner.clear_states([1])
    assert part(runner, 0, [5, 6, 7, 8, 9]) == whole
