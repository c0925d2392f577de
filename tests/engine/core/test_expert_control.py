"""A placement's way into use, step by step, over a runner without tensors."""

from collections.abc import Callable, Iterator

import pytest

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.runner import ExpertPlacement, PlacementRefusedError
from services.engine.core.expert_control import LOADS_INTERVAL_S, ExpertControl
from services.engine.core.worker import Worker

MODEL = SimulatedModel.parse("experts=3,moe_layers=2,slots=4,ranks=2")
ROWS = ((0, 1, 2, 2), (2, 1, 0, 0))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(lambda: SimulatedRunner(4, MODEL))
    yield made
    made.close()


def placement(worker: Worker, version: int, rows=ROWS) -> ExpertPlacement:
    return ExpertPlacement(version, rows, worker.describe().model_revision)


def settle(control: ExpertControl, worker: Worker, done: Callable[[], bool]) -> None:
    """Advance as rounds would, each after what was handed over has ended."""
    for _ in range(20):
        control.advance()
        if done():
            return
        worker.expert_loads().result()
    raise AssertionError("it does not settle")


def test_a_map_is_prepared_in_steps_and_used_once_exchanged(worker: Worker) -> None:
    control = ExpertControl(worker)
    assert not control.pending
    control.want(placement(worker, 5))
    seen = []
    settle(control, worker, lambda: seen.append(control.version) or not control.pending)
    assert seen.count(0) >= 2
    assert seen[-1] == control.version == 5
    assert control.has_news
    assert control.take_news() == (5, None, None)
    assert not control.has_news


def test_a_refusal_is_told_once_and_the_old_map_stays(worker: Worker) -> None:
    control = ExpertControl(worker)
    control.want(placement(worker, 5, ROWS[:1]))
    settle(control, worker, lambda: control.has_news)
    assert not control.pending
    rejected = control.take_news().rejected
    assert (rejected.version, control.version) == (5, 0)
    assert "1 layers, the model has 2" in rejected.reason
    assert control.take_news().rejected is None


def test_the_last_of_several_maps_is_used(worker: Worker) -> None:
    control = ExpertControl(worker)
    seen = set()
    control.want(placement(worker, 1))
    control.advance()
    control.want(placement(worker, 2, ROWS[::-1]))
    settle(control, worker, lambda: seen.add(control.version) or not control.pending)
    assert seen == {0, 2}


def test_a_good_map_after_a_bad_one_is_used(worker: Worker) -> None:
    control = ExpertControl(worker)
    control.want(placement(worker, 1, ROWS[:1]))
    control.advance()
    control.want(placement(worker, 2))
    settle(control, worker, lambda: not control.pending)
    assert control.version == 2
    assert control.take_news().rejected.version == 1


def test_what_is_not_prepared_is_not_used(worker: Worker) -> None:
    with pytest.raises(PlacementRefusedError, match="version 3 is not prepared"):
        worker.apply_placement(3).result()


def test_loads_come_once_an_interval(worker: Worker) -> None:
    now = [0.0]
    control = ExpertControl(worker, lambda: now[0])
    assert control.poll_loads() is None
    worker.expert_loads().result()
    assert control.poll_loads() is None
    for _ in range(2):
        now[0] += LOADS_INTERVAL_S
        assert control.poll_loads() is None  # requested now, returned next time
        worker.expert_loads().result()
        assert control.poll_loads() == ((0, 0, 0), (0, 0, 0))
        assert control.poll_loads() is None


def test_the_loads_of_the_last_rounds_are_news_without_another_round(worker: Worker) -> None:
    now = [0.0]
    control = ExpertControl(worker, lambda: now[0])
    control.advance()
    now[0] += LOADS_INTERVAL_S
    assert not control.owes_loads  # nothing was counted
    assert not control.has_news
    control.take_news()
    worker.expert_loads().result()
    control.take_news()
    control.advance_round()
    assert control.owes_loads
    assert not control.has_news  # until the interval is over
    now[0] += LOADS_INTERVAL_S
    assert control.has_news
    assert control.take_news().loads is None
    worker.expert_loads().result()
    assert control.has_news
    assert control.take_news().loads == ((0, 0, 0), (0, 0, 0))
    assert not control.owes_loads
    assert not control.has_news
