"""Rounds without a wait, on the host: their numbers are those of the rounds served today."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.reference import KERNELS as REFERENCE
from services.engine.compute import model_runner
from services.engine.compute.device.cpu import CpuDevice, HostFetch
from services.engine.compute.device_rounds.graphs import batch_buckets, length_buckets
from services.engine.compute.device_rounds.layout import PADDING, lay_out
from services.engine.contract.runner import (
    PendingOutput,
    SamplerOutput,
    SamplingRow,
    SequenceMetadata,
)
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from tests.doubles.tiny_published import PUBLISHED, write_published

PROMPTS = [[5, 6, 7], [(3 * i) % 250 for i in range(35)], [200]]
ROW = SamplingRow(SamplingParams(temperature=0), 0, 0, 3)
OPTIONS = {"kernels": "torch", "block_size": 16, "max_num_seqs": 6}


@pytest.fixture
def ragged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets runners that are made from now on run rounds without a wait, by plain kernels."""

    def use(*, captures: bool = False) -> None:
        load = dispatch.load

        def with_ragged(name: str):
            latent = load(name).latent
            assert latent is not None
            return replace(
                load(name),
                ragged=REFERENCE.ragged,
                round_rows=REFERENCE.round_rows,
                latent=replace(latent, ragged=REFERENCE.latent.ragged),
            )

        monkeypatch.setattr(dispatch, "load", with_ragged)
        device = CpuDevice(captures=captures)
        monkeypatch.setattr(model_runner, "make_device", lambda config, rank=0: device)

    return use


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = ("gemma3", "gpt_oss", "mixtral", "phi3")
    return {name: write_published(root / name, PUBLISHED[name]()) for name in names}


@pytest.mark.parametrize(
    ("name", "captures"),
    [("gemma3", False), ("gpt_oss", False), ("mixtral", False), ("gemma3", True), ("phi3", True)],
)
def test_tokens_are_those_of_rounds_by_groups(name, captures, folders, drive, ragged) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=5, top_p=0.9, logprobs=True, top_logprobs=2),
        SamplingParams(temperature=0, repetition_penalty=1.5),
    ]
    counts = (5, 4, 6)
    expected = drive(folders[name], **OPTIONS).generate(PROMPTS, counts, params=params, chunk=20)
    ragged(captures=captures)
    run = drive(folders[name], **OPTIONS)
    assert run.generate(PROMPTS, counts, params=params, chunk=20) == expected
    assert run.runner._rounds.num_graphs == 4 * captures


def test_reports_are_those_of_rounds_by_groups(folders, ragged) -> None:
    """Through `LLM`: log-probabilities, penalties, allowed ids, several choices."""

    def answers() -> list:
        params = SamplingParams(
            max_tokens=5,
            seed=3,
            n=2,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=2,
            prompt_logprobs=True,
            presence_penalty=0.7,
            min_p=0.02,
            allowed_token_ids=tuple(range(3, 90)),
        )
        with LLM(str(folders["gemma3"]), threads=1, num_blocks=64, **OPTIONS) as llm:
            return llm.generate(PROMPTS, params)

    expected = answers()
    ragged(captures=True)
    for own, other in zip(answers(), expected, strict=True):
        for choice, wanted in zip(own.choices, other.choices, strict=True):
            assert choice.token_ids == wanted.token_ids
            assert _values(choice.logprobs) == pytest.approx(_values(wanted.logprobs), abs=1e-4)
        assert _values(own.prompt_logprobs) == pytest.approx(
            _values(other.prompt_logprobs), abs=1e-4
        )


def _values(entries) -> list[float]:
    return [
        value
        for entry in entries
        if entry is not None
        for value in (entry.logprob, *(logprob for _, logprob in entry.top))
        if value is not None
    ]


class LateDevice(CpuDevice):
    """The results of all rounds but the last arrive once the next round has been launched."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.launched, self.late = rounds, 0, 0
        self.changed = threading.Condition()

    def upload(self, words, target=None):
        with self.changed:
            self.launched += 1
            self.changed.notify_all()
        return super().upload(words, target)

    def fetch(self, tensors):
        device, launched = self, self.launched

        class Late(HostFetch):
            def wait(self):
                with device.changed:
                    if launched < device.rounds:
                        arrived = device.changed.wait_for(lambda: device.launched > launched, 50)
                        device.late += arrived
                return super().wait()

        return Late(tensors)


def test_the_next_forward_is_launched_before_tokens_are_read(folders, ragged, monkeypatch) -> None:
    ragged()
    device = LateDevice(rounds=6)
    monkeypatch.setattr(model_runner, "make_device", lambda config, rank=0: device)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folders["mixtral"]), threads=1, num_blocks=64, **OPTIONS) as llm:
        out = llm.generate(PROMPTS[:1], params)
    assert len(out[0].choices[0].token_ids) == 6
    assert device.late == 5


def test_a_broken_row_ends_alone_and_blocks_are_cleaned(folders, drive, ragged) -> None:
    ragged()
    run = drive(folders["mixtral"], **OPTIONS)
    table = run.table(8)
    batch = [SequenceMetadata(0, 0, (1, 2, 3), None, table, sample=True)]
    hidden = run.runner.execute_main_model(1, batch, None)
    with torch.inference_mode():
        run.runner._caches[0][table[0]] = float("nan")
        hidden.logits[0, 5] = float("nan")
    out: SamplerOutput | PendingOutput = run.runner.execute_sample(1, hidden, [ROW])
    assert not isinstance(out, SamplerOutput)
    assert out.wait().nan_rows == (0,)
    assert out.wait() is out.wait()
    run.runner.scrub()
    assert all(torch.isfinite(cache).all() for cache in run.runner._caches)


def test_a_previous_row_without_a_previous_round_is_refused(folders, drive, ragged) -> None:
    ragged()
    run = drive(folders["mixtral"], **OPTIONS)
    batch = [SequenceMetadata(0, 4, (0,), 0, run.table(8), sample=True)]
    with pytest.raises(ValueError, match="prev_row"):
        run.runner.execute_main_model(1, batch, None)


def test_decodes_come_first_and_samples_keep_the_order_of_the_batch() -> None:
    batch = [
        SequenceMetadata(0, 0, (7, 8, 9), None, (4,), sample=True),
        SequenceMetadata(1, 17, (0,), 2, (5, 6), sample=True),
        SequenceMetadata(2, 0, (1, 2), None, (9,), sample=False),
    ]
    made = lay_out(batch, 16)
    words = torch.from_numpy(made.words)
    assert words[made.query_starts].tolist() == [0, 1, 4, 6]
    assert words[made.lengths].tolist() == [18, 3, 2]
    assert words[made.previous].tolist() == [2, -1, -1]
    assert words[made.tokens].tolist() == [0, 7, 8, 9, 1, 2]
    assert words[made.sampled].tolist() == [3, 0]
    assert words[made.tables].tolist() == [5, 6, 4, 0, 9, 0]
    assert (made.num_decodes, made.max_queries, made.max_length) == (1, 3, 18)


def test_a_captured_rounds_places_do_not_depend_on_its_sequences() -> None:
    one = SequenceMetadata(0, 3, (7,), None, (4,), sample=True)
    full, padded = ([one] * n + [PADDING] * (8 - n) for n in (8, 3))
    places = [
        (made.query_starts, made.lengths, made.previous, made.tokens, made.tables)
        for made in (lay_out(own, 16, width=9, max_length=144) for own in (full, padded))
    ]
    assert places[0] == places[1]


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (6, [1, 2, 4, 6]), (40, 8), (5000, 13)])
def test_every_round_has_a_bucket(most: int, sizes) -> None:
    buckets = batch_buckets(most)
    assert buckets == sizes if isinstance(sizes, list) else len(buckets) == sizes
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == min(most, 256)


def test_the_last_length_is_the_longest() -> None:
    assert length_buckets(1000) == [1000]
    assert length_buckets(2048) == [2048]
    assert length_buckets(40960) == [2048, 8192, 32768, 40960]


def test_empty_rows_of_a_captured_round_touch_block_0_only(folders, drive, ragged) -> None:
    ragged(captures=True)
    run = drive(folders["gemma3"], **OPTIONS)
    caches = run.runner._caches
    with torch.inference_mode():
        for cache in caches:
            cache.fill_(7)
    table = run.table(40)
    batch = [SequenceMetadata(i, 0, (3 + i,), None, table[i : i + 1], True) for i in range(3)]
    run.runner.execute_main_model(1, batch, None)
    written = {0, *table[:3]}
    for cache in caches:
        changed = {int(b) for b in (cache != 7).flatten(1).any(1).nonzero()}
        assert changed == written
