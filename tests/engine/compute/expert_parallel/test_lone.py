"""One process with all experts runs compiled rounds: what placements and counts mean there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.engine.compute.expert_parallel.leader import ExpertLeader
from services.engine.compute.expert_parallel.lone import LoneExperts
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.runner import ExpertPlacement, PlacementRefusedError
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

FIELDS = {"threads": 1, "num_blocks": 96, "block_size": 16, "max_num_batched_tokens": 48}
REVERSED = ((7, 6, 5, 4, 3, 2, 1, 0),) * 2
TOKENS = 12


@pytest.fixture
def open_llm(tiny_moe: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def make(**fields) -> LLM:
        opened.append(LLM(str(tiny_moe), **FIELDS, prefix_cache=False, **fields))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def _run(llm: LLM, each_step: Callable[[int], None] = lambda _: None) -> dict[str, list]:
    for index, length in enumerate((3, 30, 90)):
        prompt = [(11 * index + 7 * at) % 256 for at in range(length)]
        params = SamplingParams(
            temperature=0.9, seed=index, max_tokens=TOKENS, ignore_eos=True, logprobs=True
        )
        llm.engine.add_request(AddRequest(str(length), CoreRequest(prompt, params)))
    outputs: dict[str, list] = {}
    step = 0
    while llm.engine.has_unfinished_requests():
        each_step(step)
        for output in llm.engine.step().outputs:
            outputs.setdefault(output.request_key, []).append((output.token_ids, output.logprobs))
        step += 1
    llm.engine.check_integrity()
    return outputs


def _placement(llm: LLM, version: int, rows=REVERSED) -> ExpertPlacement:
    return ExpertPlacement(version, rows, llm.engine.info.model_revision)


def test_a_placement_is_taken_and_changes_no_bit(open_llm: Callable) -> None:
    llm = open_llm()
    want = _run(llm)
    versions = []

    def place(step: int) -> None:
        versions.append(llm.engine._experts.version)
        if step == 4:
            llm.engine.set_placement(_placement(llm, 1))

    assert _run(llm, place) == want
    assert versions[0] == 0
    assert versions[-1] == 1
    assert llm.engine.worker._runner.placement_version == 1


def test_a_placement_that_does_not_fit_is_refused(open_llm: Callable) -> None:
    runner = open_llm().engine.worker._runner
    revision = runner.describe().model_revision
    with pytest.raises(PlacementRefusedError, match="1 layers"):
        runner.prepare_placement(ExpertPlacement(3, REVERSED[:1], revision))
    with pytest.raises(PlacementRefusedError, match="version 3 is not prepared"):
        runner.apply_placement(3)
    assert runner.placement_version == 0


def test_experts_count_the_same_rows_as_when_they_are_called_layer_by_layer(
    open_llm: Callable,
) -> None:
    loads = []
    for fields in ({}, {"kernels": "torch"}):
        llm = open_llm(expert_load_window=1000, **fields)
        _run(llm)
        loads.append(llm.engine.worker.expert_loads().result())
    assert loads[0] == loads[1]
    assert sum(loads[0][0]) == sum(loads[0][1]) >= 2 * (3 + 30 + 90 + 3 * (TOKENS - 1))


def test_replicas_of_experts_are_called_layer_by_layer(open_llm: Callable) -> None:
    alone, replicas = open_llm(), open_llm(redundant_experts=4)
    assert isinstance(alone.engine.worker._runner._experts, LoneExperts)
    assert isinstance(replicas.engine.worker._runner._experts, ExpertLeader)
    assert replicas.engine.info.numerics_id != alone.engine.info.numerics_id


def test_weights_are_in_memory_once(open_llm: Callable) -> None:
    infos = {
        name: open_llm(**fields).engine.info
        for name, fields in {
            "compiled": {},
            "bfloat16": {"dtype": "bfloat16"},
            "torch": {"kernels": "torch"},
        }.items()
    }
    sizes = {name: info.weights_bytes for name, info in infos.items()}
    assert sizes["bfloat16"] < 0.6 * sizes["compiled"]
    # Whole panels: 64 and 48 outputs of these experts become 72 or 96, and 48.
    assert sizes["torch"] < sizes["compiled"] < 1.6 * sizes["torch"]
    assert infos["compiled"].bit_identical
    assert len({info.numerics_id for info in infos.values()}) == 3
