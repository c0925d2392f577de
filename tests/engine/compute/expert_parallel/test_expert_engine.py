"""Engines with experts on one rank and on two, and maps that change meanwhile: no bit moves."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreDiedError, CoreLink
from services.engine.contract.messages import AddRequest, ApplyPlacement, CoreRequest, RoundReport
from services.engine.contract.runner import ExpertPlacement
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from tests.doubles.tiny_gguf import write_gguf

# Every rank imports torch: seconds on a free machine.
pytestmark = pytest.mark.timeout(240)

REDUNDANT = 4
FIELDS = {
    "threads": 1,
    "num_blocks": 96,
    "block_size": 16,
    "max_num_batched_tokens": 48,
    "kernels": "torch",  # one rank without replicas would run compiled rounds, which sum otherwise
}
MAPS = [
    ((7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 1, 2), (3, 3, 3, 0, 1, 2, 7, 6, 5, 4, 3, 3)),
    ((0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7), (1, 0, 3, 2, 5, 4, 7, 6, 5, 4, 7, 6)),
]
MODES = [{}, {"deterministic": True}]


def _requests(tokens: int) -> list[AddRequest]:
    """Greedy and seeded, short and chunked; logprobs, so that a changed bit is seen."""
    made = []
    for index, length in enumerate((3, 30, 90)):
        prompt = [(11 * index + 7 * at) % 256 for at in range(length)]
        for temperature in (0.0, 0.9):
            params = SamplingParams(
                temperature=temperature,
                seed=index,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=True,
                top_logprobs=3,
            )
            key = f"{length}/{temperature}"
            made.append(AddRequest(key, CoreRequest(prompt, params)))
    return made


def _run(llm: LLM, tokens: int, each_step: Callable[[int], None] = lambda _: None) -> dict:
    """All outputs of each request."""
    outputs_by_key: dict[str, list] = {}
    for request in _requests(tokens):
        llm.engine.add_request(request)
    step = 0
    while llm.engine.has_unfinished_requests():
        each_step(step)
        for output in llm.engine.step().outputs:
            outputs_by_key.setdefault(output.request_key, []).append(
                (output.token_ids, output.logprobs)
            )
        step += 1
    assert all(len(outputs) == tokens for outputs in outputs_by_key.values())
    llm.engine.check_integrity()
    return outputs_by_key


@pytest.fixture
def open_llm(tiny_moe: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def make(model: Path = tiny_moe, **fields) -> LLM:
        opened.append(LLM(str(model), **{**FIELDS, **fields}))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def _placement(llm: LLM, version: int, rows=MAPS[0]) -> ExpertPlacement:
    return ExpertPlacement(version, rows, llm.engine.info.model_revision)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_changes_before_during_and_after_reloads(
    mode: dict, ranks: int, open_llm: Callable
) -> None:
    want = _run(open_llm(**mode, prefix_cache=False), 40)
    llm = open_llm(**mode, prefix_cache=False, redundant_experts=REDUNDANT, expert_parallel=ranks)
    versions = []

    def place(step: int) -> None:
        versions.append(llm.engine._experts.version)
        if step == 6:
            llm.engine.set_placement(_placement(llm, 1))
        if step > 6 and not llm.engine._experts.pending and versions[-1] == 1:
            llm.engine.set_placement(_placement(llm, 2, MAPS[1]))

    assert _run(llm, 40, place) == want
    assert versions.count(0) > 6
    assert versions.count(1) > 1
    assert versions.count(2) > 1, "the streams ended before the second map was in use"
    assert _run(llm, 40) == want


def test_two_ranks_with_a_gguf_file_say_what_one_with_the_folder_says(
    open_llm: Callable, tiny_moe: Path, tmp_path: Path
) -> None:
    want = _run(open_llm(), 24)
    two = open_llm(write_gguf(tiny_moe, tmp_path / "m.gguf"), expert_parallel=2)
    assert _run(two, 24) == want
    assert two.engine.info.experts.num_ranks == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": MAPS[0][:1]}, "1 layers"),
        ({"rows": (MAPS[0][0], (0,) * 12)}, "layer 1: expert 1 has no slot"),
        ({"revision": "sha256:other"}, "model revision 'sha256:other'"),
    ],
    ids=str,
)
def test_a_map_that_does_not_fit_is_refused_and_the_old_one_stays(
    change: dict, reason: str, open_llm: Callable
) -> None:
    llm = open_llm(redundant_experts=REDUNDANT)
    want = _run(llm, 8)
    revision = change.get("revision", llm.engine.info.model_revision)
    bad = ExpertPlacement(3, change.get("rows", MAPS[0]), revision)

    def place(step: int) -> None:
        if step == 2:
            llm.engine.set_placement(bad)

    assert [k for k, v in _run(llm, 8, place).items() if v[0][0] != want[k][0][0]] == []
    rejected = llm.engine.take_placement_news().rejected
    assert rejected.version == 3
    assert reason in rejected.reason
    assert llm.engine.take_placement_news().rejected is None
    assert llm.engine._experts.version == 0
    assert not llm.engine._experts.pending


def test_a_newer_map_takes_the_place_of_one_that_is_being_prepared(open_llm: Callable) -> None:
    llm = open_llm(redundant_experts=REDUNDANT, expert_parallel=2)
    seen = set()

    def place(step: int) -> None:
        seen.add(llm.engine._experts.version)
        if step in (3, 4):
            version = step - 2
            llm.engine.set_placement(_placement(llm, version, MAPS[version - 1]))

    _run(llm, 30, place)
    assert seen == {0, 2}


def test_loads_are_the_rows_that_were_routed(open_llm: Callable, monkeypatch) -> None:
    llm = open_llm(redundant_experts=REDUNDANT, expert_load_window=1000, prefix_cache=False)
    runner = llm.engine.worker._runner
    want = torch.zeros(2, 8, dtype=torch.long)
    route = runner._experts.run_experts.__class__.__call__

    def record(experts, layer, x, ids, weights):
        want[layer] += torch.bincount(ids.flatten(), minlength=8)
        return route(experts, layer, x, ids, weights)

    monkeypatch.setattr(runner._experts.run_experts.__class__, "__call__", record)
    _run(llm, 10)
    loads = llm.engine.worker.expert_loads().result()
    assert loads == tuple(map(tuple, want.tolist()))
    rows = 2 * (3 + 30 + 90) + 6 * 9  # every prompt, and each token but the last
    # A round is launched before the ends of the previous one are processed: at most one more row
    # per sequence.
    assert 2 * rows <= sum(loads[0]) <= 2 * (rows + 6)
    assert sum(loads[0]) == sum(loads[1])


async def _until(link: CoreLink, done: Callable[[RoundReport], bool]) -> list[RoundReport]:
    reports = []
    async for report in link:
        reports.append(report)
        if done(report):
            return reports
    raise AssertionError("the link ended")


def _config(model: Path, **fields) -> EngineConfig:
    return EngineConfig(model=str(model), **{**FIELDS, **fields})


def _request(key: str, tokens: int) -> AddRequest:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=1)
    return AddRequest(key, CoreRequest([1, 2, 3], params))


async def test_a_core_applies_maps_idle_and_busy_and_reports_its_loads(tiny_moe: Path) -> None:
    link = CoreLink()
    try:
        config = _config(tiny_moe, expert_parallel=2, redundant_experts=REDUNDANT)
        ready = await link.start(config)
        assert (ready.info.experts.num_slots, ready.info.experts.num_ranks) == (12, 2)
        revision = ready.info.model_revision
        link.send([ApplyPlacement(ExpertPlacement(1, MAPS[0], revision))])
        (report,) = await _until(link, lambda r: r.placement_version == 1)
        assert (report.step, report.placement_rejected) == (0, None)
        link.send([ApplyPlacement(ExpertPlacement(2, MAPS[0][:1], revision))])
        (report,) = await _until(link, lambda r: r.placement_rejected is not None)
        assert report.placement_rejected.version == 2
        assert report.placement_version == 1
        third = ApplyPlacement(ExpertPlacement(3, MAPS[0], revision))
        link.send([_request("long", 400), third])
        reports = await _until(link, lambda r: r.placement_version == 3)
        assert any(report.step for report in reports), "it was not busy"
        loads, deadline, number = None, time.monotonic() + 120, 0
        while loads is None:
            assert time.monotonic() < deadline
            number += 1
            link.send([_request(f"more{number}", 100)])
            reports = await _until(link, lambda r: bool(r.expert_loads or r.marks))
            loads = next((r.expert_loads for r in reports if r.expert_loads), None)
        assert [len(row) for row in loads] == [8, 8]
        assert sum(loads[0]) == sum(loads[1]) > 0
    finally:
        await link.stop()


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [pid for pid in found if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_that_dies_ends_the_core_within_three_seconds(
    busy: bool, tiny_moe: Path
) -> None:
    link = CoreLink()
    try:
        await link.start(_config(tiny_moe, expert_parallel=2))
        (rank,) = _children(link.pid)
        if busy:
            link.send([_request("long", 450)])
            await _until(link, lambda report: bool(report.outputs))
        os.kill(rank, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(CoreDiedError, match=r"expert rank 1 was killed by SIGKILL"):
            async for _ in link:
                pass
        assert time.monotonic() - started < 3
    finally:
        await link.stop()


async def test_ranks_end_with_a_core_that_is_killed(tiny_moe: Path) -> None:
    link = CoreLink()
    try:
        await link.start(_config(tiny_moe, expert_parallel=4))
        ranks = _children(link.pid)
        assert len(ranks) == 3
        os.kill(link.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not all(map(_gone, ranks)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    finally:
        await link.stop()
