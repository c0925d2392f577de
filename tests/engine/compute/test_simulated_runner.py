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
