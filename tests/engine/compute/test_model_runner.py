"""The runner against transformers' logits, and its rounds: chunks, batches, prefixes, copies."""

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from services.common.config.settings import ConfigError
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.models import decode_rows, input_metadata
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SamplingRow, SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
NAMES = ("tied", "untied_llama3")


def _prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def _forward_logits(drive, prompt: list[int], chunk: int) -> torch.Tensor:
    """Logits of the last position of every chunk of one prompt."""
    table = drive.table(len(prompt))
    found = []
    for start in range(0, len(prompt), chunk):
        part = tuple(prompt[start : start + chunk])
        meta = SequenceMetadata(0, start, part, None, table, sample=True)
        found.append(drive.runner.execute_main_model(start, [meta], None).logits)
    return torch.cat(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 64])
def test_logits_equal_those_of_transformers(
    name: str, chunk: int, drive: Callable, tiny_golden: dict, tiny_folders: dict
) -> None:
    golden = tiny_golden[name]
    got = _forward_logits(drive(tiny_folders[name], block_size=16), golden["prompt_ids"], chunk)
    want = dict(zip(golden["positions"], golden["logits"], strict=True))
    ends = [min(start + chunk, 200) - 1 for start in range(0, 200, chunk)]
    compared = [(got[row], want[end]) for row, end in enumerate(ends) if end in want]
    assert len(compared) >= 3
    for ours, theirs in compared:
        torch.testing.assert_close(ours, torch.tensor(theirs), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_formats_come_close(
    dtype: str, drive: Callable, tiny_golden: dict, tiny_folders: dict
) -> None:
    golden = tiny_golden["tied"]
    got = _forward_logits(drive(tiny_folders["tied"], dtype=dtype), golden["prompt_ids"], 200)
    want = torch.tensor(golden["logits"][-1])
    similarity = torch.nn.functional.cosine_similarity(got[-1], want, dim=0)
    assert similarity > 0.998
    assert not torch.equal(got[-1], want)


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_batches_and_chunks_give_the_tokens_of_one_alone(
    block_size: int, drive: Callable, tiny_folders: dict
) -> None:
    prompts, counts = _prompts(1, 3, 17, 40, 64, 65, 100), [9, 12, 7, 10, 3, 8, 5]
    run = drive(tiny_folders["tied"], block_size=block_size, num_blocks=4000 // block_size)
    alone = [run.generate([p], [n])[0] for p, n in zip(prompts, counts, strict=True)]
    assert run.generate(prompts, counts) == alone
    assert run.generate(prompts, counts, chunk=7) == alone


def test_a_warm_prefix_gives_the_same_tokens(drive: Callable, tiny_folders: dict) -> None:
    run = drive(tiny_folders["tied"], block_size=8)
    prefix, first_tail, second_tail = _prompts(64, 9, 30)
    cold = run.generate([prefix + second_tail], [12])[0]
    shared = run.table(64)
    own = [shared + run.table(60), shared + run.table(60)]
    run.generate([prefix + first_tail], [4], tables=[own[0]])
    warm = run.generate([prefix + second_tail], [12], tables=[own[1]], computed=[64])[0]
    assert warm == cold


def test_copied_blocks_serve_as_well_as_their_source(drive: Callable, tiny_folders: dict) -> None:
    run = drive(tiny_folders["tied"], block_size=8)
    (prompt,) = _prompts(20)
    table = run.table(40)
    run.generate([prompt], [1], tables=[table])
    want = run.generate([prompt], [6], tables=[table], computed=[16])[0]
    other = run.table(40)
    run.runner.copy_blocks(list(zip(table[:2], other[:2], strict=True)))
    assert run.generate([prompt], [6], tables=[other], computed=[16])[0] == want
    run.runner.copy_blocks([])


def test_seeded_noise_does_not_see_the_batch(drive: Callable, tiny_folders: dict) -> None:
    prompts, counts = _prompts(5, 40, 9), [20, 20, 20]
    params = [
        SamplingParams(temperature=0.9, seed=2**64 - 1),
        SamplingParams(temperature=1.3, top_p=0.8, seed=7),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.02, seed=7),
    ]
    run = drive(tiny_folders["tied"])
    together = run.generate(prompts, counts, params=params, chunk=16)
    for index in range(3):
        one = run.generate([prompts[index]], [20], params=[params[index]])
        assert together[index] == one[0]
    other = dataclasses.replace(params[0], seed=3)
    assert run.generate([prompts[0]], [20], params=[other])[0] != together[0]


@pytest.mark.parametrize("chunk", [200, 16, 7])
def test_prompt_logprobs_do_not_depend_on_chunks(
    chunk: int, drive: Callable, tiny_golden: dict, tiny_folders: dict
) -> None:
    golden = tiny_golden["tied"]
    prompt = golden["prompt_ids"]
    run = drive(tiny_folders["tied"], block_size=16)
    table, entries = run.table(200), []
    for start in range(0, 200, chunk):
        part = tuple(prompt[start : start + chunk])
        end = start + len(part)
        meta = SequenceMetadata(
            9,
            start,
            part,
            None,
            table,
            sample=end == 200,
            prompt_logprobs_from=start,
            next_prompt_token=prompt[end] if end < 200 else None,
            num_prompt_top_logprobs=2,
        )
        rows = [SamplingRow(GREEDY, 0, 0, end)] if end == 200 else []
        output = run.round([meta], rows)
        ((seq_id, found),) = output.prompt_logprobs
        assert seq_id == 9
        entries += found
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, logits in zip(golden["positions"][:-1], golden["logits"], strict=False):
        want = torch.tensor(logits).log_softmax(-1)
        entry = entries[position]
        assert entry.logprob == pytest.approx(want[prompt[position + 1]].item(), abs=1e-3)
        assert [token for token, _ in entry.top] == want.topk(2).indices.tolist()


def test_a_broken_sequence_affects_no_other(drive: Callable, tiny_folders: dict) -> None:
    run = drive(tiny_folders["tied"], block_size=8)
    (healthy,) = _prompts(30)
    want = run.generate([healthy], [5])[0]
    table = run.table(40)
    with torch.inference_mode():
        run.runner._caches[0][table[0]] = float("nan")
    rows = [SamplingRow(GREEDY, 0, 0, 9), SamplingRow(GREEDY, 0, 0, 30)]
    batch = [
        SequenceMetadata(0, 8, (1,), None, table, sample=True),
        SequenceMetadata(1, 0, tuple(healthy), None, run.table(40), sample=True),
    ]
    output = run.round(batch, rows)
    assert output.nan_rows == (0,)
    assert output.nan_blocks == tuple(sorted(table[:2])), "where it read, and where it wrote"
    assert output.tokens[1].token_id == want[0]
    assert run.generate([healthy], [5], tables=[table])[0] == want


def test_identity_names_all_that_changes_bits(tiny_folders: dict) -> None:
    def identity(**fields) -> str:
        config = EngineConfig(model=str(tiny_folders["tied"]), **fields)
        return ModelRunner(config).describe().numerics_id

    same = identity(threads=1)
    assert identity(threads=1, max_num_seqs=3) == same
    assert identity(threads=1, block_size=64) != same  # compiled rounds sum block by block
    assert identity(threads=1, kernels="torch", block_size=64) == identity(
        threads=1, kernels="torch"
    )
    assert identity(threads=2) == same  # compiled rounds are the same on any number
    torchs = identity(threads=1, kernels="torch")
    others = {identity(threads=1, dtype="bfloat16"), identity(threads=2, kernels="torch"), torchs}
    assert len({same, *others}) == 4


def test_describe_gives_the_memory_of_a_block(tiny_folders: dict) -> None:
    runner = ModelRunner(EngineConfig(model=str(tiny_folders["tied"]), block_size=16, threads=1))
    info = runner.describe()
    assert info.kv_bytes_per_block == 2 * 16 * 2 * 2 * 8 * 4  # layers, rows, k and v, heads, D, f32
    assert info.kv_layout == "paged/2x4x8/float32"
    short = EngineConfig(
        model=str(tiny_folders["tied"]), block_size=16, threads=1, dtype="bfloat16"
    )
    halved = ModelRunner(short).describe()
    assert halved.kv_bytes_per_block * 2 == info.kv_bytes_per_block
    assert halved.kv_layout == "paged/2x4x8/bfloat16"
    assert info.max_model_len == 512
    assert info.eos_token_ids == (257, 258)
    source = load_model(str(tiny_folders["tied"]))
    stored = sum(w.nbytes for w in source.weights.values())
    assert stored <= info.weights_bytes < 1.5 * stored  # whole panels; a tied head beside the table
    free = runner.profile_kv_bytes(128, 8)
    assert 2**20 < free < 2**46
    runner.allocate(4)
    runner.close()
    runner.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 1000}, "max_model_len"),
        ({"device": "cuda"}, "device"),
        ({"dtype": "int8", "deterministic": True, "kernels": "torch"}, "deterministic"),
    ],
)
def test_what_cannot_run_here_is_refused_by_its_key(
    fields: dict, message: str, tiny_folders: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        ModelRunner(EngineConfig(model=str(tiny_folders["tied"]), **fields))


def test_a_missing_previous_round_is_an_error(drive: Callable, tiny_folders: dict) -> None:
    run = drive(tiny_folders["tied"])
    meta = SequenceMetadata(0, 4, (0,), 0, run.table(8), sample=True)
    with pytest.raises(ValueError, match="previous round"):
        run.runner.execute_main_model(1, [meta], None)


def test_long_histories_attend_in_groups_of_bounded_size(
    drive: Callable, tiny_folders: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, counts = _prompts(150, 3, 60, 5, 149, 90), [6] * 6
    want = drive(tiny_folders["tied"]).generate(prompts, counts)
    monkeypatch.setattr(decode_rows, "POSITIONS", 0)  # what is kept is not gathered
    run = drive(tiny_folders["tied"], kernels="torch")
    monkeypatch.setattr(input_metadata, "GATHERED", 200)
    groups = []
    build = input_metadata._decode_group
    monkeypatch.setattr(
        input_metadata,
        "_decode_group",
        lambda seqs, *rest: groups.append([s.seqlen_k for s in seqs]) or build(seqs, *rest),
    )
    assert run.generate(prompts, counts) == want
    assert max(len(group) for group in groups) > 1
    assert all(len(group) == 1 or len(group) * max(group) <= 200 for group in groups)
