"""DeepSeek V4 and V4.1 served by an engine: state moves with requests, snapshots, forks, ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.config.settings import ConfigError
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.tensor_parallel.shard import Shard
from services.engine.contract.config import EngineConfig
from services.engine.contract.expert_placement import first_placement
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import ExpertPlacement, SequenceMetadata, StateReplay
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from services.engine.scheduling.scheduler import Scheduler
from tests.doubles.tiny_v4 import KEYS, SLIDING, write_tiny_v4
from tests.doubles.tiny_v41 import keys as v41_keys
from tests.doubles.tiny_v41 import write_tiny_v41
from tests.engine.compute.models.v4.conftest import Golden
from tests.parity.cases import CASES
from tests.parity.measure import LOGIT_PATHS, TOKEN_PATHS, measure

pytestmark = pytest.mark.timeout(240)  # minutes of torch's operators on a crowded machine

BLOCK = 16
TOKENS = 24


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "v4": write_tiny_v4(tmp_path_factory.mktemp("v4") / "model"),
        "v41": write_tiny_v41(tmp_path_factory.mktemp("v41") / "model"),
    }


@pytest.fixture
def folder(folders: dict[str, Path], family: str) -> Path:
    return folders[family]


def test_every_path_gives_what_the_reference_computes(folder: Path, family: str) -> None:
    (case,) = (case for case in CASES if case.name == f"deepseek_{family}")
    rows = list(measure(case, folder))
    assert [row.path for row in rows if row.error is not None] == list(LOGIT_PATHS)
    assert max(row.error for row in rows if row.error is not None) <= 1e-4
    assert {row.path for row in rows if row.error is None} == set(TOKEN_PATHS)
    assert all(row.tokens_equal for row in rows), rows


def _answers(llm: LLM, prompts: list[list[int]], **fields: Any) -> list[list[tuple[int, float]]]:
    """Tokens with their log-probabilities, of each choice."""
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, **fields
    )
    return [
        [(token.token_id, token.logprob) for token in choice.logprobs]
        for output in llm.generate(prompts, [params] * len(prompts))
        for choice in output.choices
    ]


def test_deterministic_answers_have_equal_bits_wherever_the_state_was(
    folder: Path, golden: list[Golden], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda *args: (preempted.append(args[1]), preempt(*args))
    )
    prompts = [one.prompt for one in golden]
    fields: dict[str, Any] = {"threads": 1, "block_size": BLOCK, "deterministic": True}
    with LLM(str(folder), num_blocks=64, **fields) as llm:
        want = [_answers(llm, [prompt])[0] for prompt in prompts]
        assert [[token for token, _ in answer] for answer in want] == [one.greedy for one in golden]
        assert _answers(llm, prompts, n=2) == [want[0]] * 2 + [want[1]] * 2
        (hit,) = llm.generate([prompts[1]], SamplingParams(temperature=0, max_tokens=1))
        assert hit.num_cached_tokens == 64
    assert not preempted
    # Four share two blocks, and each ends in three of its own; chunks end anywhere.
    with LLM(str(folder), num_blocks=8, max_num_batched_tokens=50, **fields) as llm:
        assert _answers(llm, prompts[:1] * 4) == want[:1] * 4
        assert preempted


def test_bounded_replay_gives_what_the_oracle_computes(folders: dict[str, Path]) -> None:
    """A hit restarts a window before the end of the cached history, with no snapshot at all."""
    with np.load(Path(__file__).with_name("v41_golden.npz")) as file:
        prompt, fresh = file["prompt_1"].tolist(), file["greedy_1"].tolist()
        replayed = file["replay_greedy"].tolist()
        first = torch.from_numpy(file["replay_logits"]).log_softmax(-1)[replayed[0]]
    config: dict[str, Any] = {"threads": 1, "block_size": BLOCK, "num_blocks": 64}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=True)
    with LLM(str(folders["v41"]), bounded_replay=True, state_slots=1, **config) as llm:
        for cached, tokens in ((0, fresh[:12]), (64 - 8, replayed)):
            (answer,) = llm.generate([prompt], params)
            assert answer.num_cached_tokens == cached
            assert list(answer.choices[0].token_ids) == tokens
        found = answer.choices[0].logprobs[0].logprob
        assert found == pytest.approx(float(first), abs=1e-4)


def _logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """After the whole prompt, computed in two rounds."""
    table = tuple(range(1, -(-len(prompt) // BLOCK) + 1))
    runner.clear_states([1])
    for start, end in ((0, 20), (20, len(prompt))):
        tokens = tuple(prompt[start:end])
        seq = SequenceMetadata(0, start, tokens, None, table, sample=True, state_slot=1)
        hidden: Any = runner.execute_main_model(0, [seq], None)
    return hidden.logits[0]


def test_a_placement_of_experts_changes_nothing(folder: Path, golden: list[Golden]) -> None:
    """A table chooses the experts of the first layer, and the router those of the others."""
    runner = ModelRunner(
        EngineConfig(
            model=str(folder),
            threads=1,
            block_size=BLOCK,
            deterministic=True,
            redundant_experts=4,
        )
    )
    runner.allocate(8, 2)
    want = _logits(runner, golden[0].prompt)
    assert torch.allclose(want, golden[0].logits[-1], atol=1e-4, rtol=0)
    info = runner.describe()
    assert info.experts is not None
    layers = runner._config.num_layers
    assert (info.experts.num_layers, info.experts.num_slots) == (layers, 12)
    old = first_placement(info.experts, info.model_revision)
    moved = ExpertPlacement(1, tuple(row[5:] + row[:5] for row in old.phy2log), old.model_revision)
    while not runner.prepare_placement(moved):
        pass
    runner.apply_placement(1)
    assert torch.equal(_logits(runner, golden[0].prompt), want)
    assert torch.tensor(runner.expert_loads()).sum(1).tolist() == [2 * 45 * 2] * layers


def test_only_a_model_that_can_rebuild_its_state_replays(folders: dict[str, Path]) -> None:
    fields: dict[str, Any] = {"threads": 1, "block_size": BLOCK, "bounded_replay": True}
    with pytest.raises(ConfigError, match="bounded_replay=true: not supported for deepseek_v4,"):
        ModelRunner(EngineConfig(model=str(folders["v4"]), **fields))
    runner = ModelRunner(EngineConfig(model=str(folders["v41"]), **fields))
    info, exact = runner.describe(), ModelRunner(EngineConfig(model=str(folders["v41"]), threads=1))
    assert info.state is not None
    assert (info.state.boundary, info.state.replay) == (2, StateReplay(8, 2, 3))
    assert info.numerics_id != exact.describe().numerics_id


SIZES = {
    "v4": (
        8 * 16 * 5 + 8 * 2 * (2 * 16 + 2 * 8) * 2 + 8 * 2 * 16 * 2,
        4 * (16 + 8) * 2 + 2 * 16 * 2,
        "2xentry16per4/float32+2xentry16per8/float32+2xindex8per4/float32",
    ),
    # Nine windows, open groups of two layers, four tokens; two sources by two and one by one.
    "v41": (
        8 * 32 * 9 + 2 * 2 * 32 * 2 + 4,
        (8 + 8 + 16) * (32 + 32),
        "1xentry32/float32+2xentry32per2/float32+1xindex32/float32+2xindex32per2/float32",
    ),
}
"""Elements of a slot and of a block of 16, and the layout."""


def test_an_engine_knows_the_sizes_of_history_and_state(folder: Path, family: str) -> None:
    runner = ModelRunner(EngineConfig(model=str(folder), threads=1, block_size=BLOCK))
    info = runner.describe()
    state, block, layout = SIZES[family]
    assert info.state is not None
    assert (info.state.nbytes, info.state.boundary) == (4 * state, 1)
    assert info.kv_bytes_per_block == 4 * block
    assert info.kv_layout == f"paged/{layout}"
    assert not info.bit_identical
    assert runner.profile_kv_bytes(16, 2) > 0
    assert not len(runner._model._states), "slots of the measurement stay allocated"
    runner.allocate(4, 3)
    assert runner._model._states.data_ptr() == runner._states.slots.data_ptr()
    runner.close()
    assert not len(runner._model._states)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel=2: .* split by expert_parallel"),
        ({"dtype": "int8"}, "dtype=int8: not supported for deepseek_{family}"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16: not supported for deepseek_{family}; use float32"),
        ({"dtype": "float16"}, "dtype=float16: not supported for deepseek_{family}"),
        ({"bounded_replay": True, "deterministic": True}, "bounded_replay=true: tokens would"),
        ({"block_size": 3}, "block_size is 3, it must be a multiple or a divisor of {ratio}"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(
    folder: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    config = EngineConfig(model=str(folder), **fields)
    message = message.format(family=family, ratio={"v4": 4, "v41": 2}[family])
    with pytest.raises(ConfigError, match=message):
        ModelRunner(config, partition=Shard(0, 2) if "tensor_parallel" in fields else None)


MOE = "layers.0.ffn.experts.0.w1.weight' .*has shape"
BROKEN = [
    ("v4", {"layer_types": [SLIDING] * 5}, "config.json: no layer compresses"),
    ("v4", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported for deepseek_v4"),
    ("v4", {"n_routed_experts": 7}, "expert 7 is beyond the 7 of config.json"),
    ("v4", {"moe_intermediate_size": 24}, MOE),
    ("v41", {"gate_temp": 2}, "gate_temp 2 is not supported for deepseek_v41"),
    ("v41", {"n_routed_experts": 7}, "expert 7 is beyond the 7 of config.json"),
    ("v41", {"moe_intermediate_size": 24}, MOE),
    ("v41", {"engram_head_dim": 4}, r"layers.1.engram.embed.weight' .*has shape \(.*, 8\)"),
    (
        "v41",
        {"engram_compressed_vocab_size": 70},
        "tokenizer.json: the texts of its tokens have 69 forms, but .* 70",
    ),
]


@pytest.mark.parametrize(("own", "edit", "message"), BROKEN, ids=str)
def test_files_that_cannot_be_served(
    tmp_path: Path, folders: dict[str, Path], own: str, edit: dict[str, Any], message: str
) -> None:
    for path in folders[own].iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    keys = KEYS | edit if own == "v4" else v41_keys(**edit)
    (tmp_path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    with pytest.raises(ModelFileError, match=message):
        ModelRunner(EngineConfig(model=str(tmp_path)))


def test_a_model_that_looks_up_tokens_needs_their_texts(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folders["v41"] / name)
    with pytest.raises(ModelFileError, match=r"tokenizer.json: needed for look-ups"):
        ModelRunner(EngineConfig(model=str(tmp_path)))
