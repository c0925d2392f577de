"""A model on two ranks compared with one rank: tokens, logprobs, determinism, failures."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.config.settings import ConfigError
from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.runner import RunnerFailedError
from services.engine.contract.sampling_params import SamplingParams
from services.engine.core.engine_factory import build_engine
from services.engine.offline.llm import LLM
from tests.doubles.tiny_model import TinyShape, write_tiny_model

# Every rank imports torch: seconds on a free machine.
pytestmark = pytest.mark.timeout(240)

FIELDS = {"threads": 1, "num_blocks": 96, "block_size": 16, "max_num_batched_tokens": 48}
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases on the split and on the summed products; four key heads."""
    shape = TinyShape(
        hidden_size=64, num_heads=8, num_kv_heads=4, seed=3, bias=True, tie_embeddings=False
    )
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", shape)


@pytest.fixture
def open_llm(model: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def make(**fields) -> LLM:
        opened.append(LLM(str(model), **{**FIELDS, **fields}))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def requests(**more) -> list[AddRequest]:
    """Greedy and seeded, short and chunked, with logprobs; one with choices that share blocks."""
    made = []
    for index, length in enumerate((3, 30, 90)):
        prompt = [(11 * index + 7 * at) % 256 for at in range(length)]
        for temperature in (0.0, 0.9):
            params = SamplingParams(
                temperature=temperature,
                seed=index,
                n=2 if temperature else 1,
                max_tokens=TOKENS,
                ignore_eos=True,
                logprobs=True,
                prompt_logprobs=length == 30,
                **more,
            )
            key = f"{length}/{temperature}"
            made.append(AddRequest(key, CoreRequest(prompt, params)))
    return made


def run(llm: LLM, wanted: list[AddRequest]) -> dict[str, dict]:
    """Request and choice → tokens, their logprobs, the prompt's logprobs, cached tokens."""
    outputs_by_key: dict[str, dict] = {}
    for request in wanted:
        llm.engine.add_request(request)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step().outputs:
            key = f"{output.request_key}#{output.choice}"
            entry = outputs_by_key.setdefault(
                key, {"ids": [], "logprobs": [], "prompt": [], "cached": 0}
            )
            entry["ids"] += output.token_ids
            entry["logprobs"] += [token.logprob for token in output.logprobs]
            entry["prompt"] += [token.logprob for token in output.prompt_logprobs]
            entry["cached"] = max(entry["cached"], output.num_cached_tokens)
    llm.engine.check_integrity()
    return outputs_by_key


def test_two_ranks_give_the_same_as_one(open_llm: Callable[..., LLM]) -> None:
    want, two = run(open_llm(), requests()), open_llm(tensor_parallel=2)
    got = run(two, requests())
    assert got.keys() == want.keys()
    for key, one in want.items():
        assert got[key]["ids"] == one["ids"], key
        assert len(one["ids"]) == TOKENS
        assert got[key]["logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)
        assert got[key]["prompt"] == pytest.approx(one["prompt"], abs=1e-4)
    assert any(one["prompt"] for one in want.values())
    again = run(two, requests())
    assert max(entry["cached"] for entry in again.values()) >= 64, "a prefix hit on both ranks"
    assert {key: entry["ids"] for key, entry in again.items()} == {
        key: entry["ids"] for key, entry in want.items()
    }


def test_two_ranks_are_deterministic(open_llm: Callable[..., LLM]) -> None:
    """Bit-identical: together or alone, whole or in chunks, with and without a cached prefix."""
    llm = open_llm(tensor_parallel=2, deterministic=True)
    together = run(llm, requests())
    warm = run(llm, requests())
    assert max(entry["cached"] for entry in warm.values()) >= 64
    alone: dict[str, dict] = {}
    chunked = open_llm(
        tensor_parallel=2, deterministic=True, max_num_batched_tokens=16, prefix_cache=False
    )
    for request in requests():
        alone |= run(chunked, [request])
    for key, entry in together.items():
        for other in (warm, alone):
            assert other[key]["ids"] == entry["ids"], key
            assert other[key]["logprobs"] == entry["logprobs"], key
    assert chunked.engine.info.numerics_id == llm.engine.info.numerics_id


def test_halves_stay_within_their_rounding(open_llm: Callable[..., LLM]) -> None:
    wanted = requests()[:1]
    one = run(open_llm(dtype="bfloat16"), wanted)
    two = run(open_llm(dtype="bfloat16", tensor_parallel=2), wanted)
    for key, entry in one.items():
        assert two[key]["logprobs"][0] == pytest.approx(entry["logprobs"][0], abs=0.1)


def test_what_an_engine_says_of_itself(open_llm: Callable[..., LLM]) -> None:
    one, two = open_llm().engine.info, open_llm(tensor_parallel=2).engine.info
    assert two.kv_bytes_per_block == one.kv_bytes_per_block
    assert two.numerics_id != one.numerics_id, "sums are in another order: no equal engine"
    assert one.weights_bytes < two.weights_bytes < 2 * one.weights_bytes
    assert two.model_revision == one.model_revision


def test_an_engine_ends_when_a_rank_is_killed(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(tensor_parallel=2)
    for request in requests():
        llm.engine.add_request(request)
    for _ in range(5):
        llm.engine.step()
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    children = [pid for task in tasks for pid in task.read_text().split()]
    ranks = [
        pid for pid in children if "tensor_parallel" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(ranks) == 1
    os.kill(int(ranks[0]), signal.SIGKILL)

    def go_on() -> None:
        for _ in range(50):
            llm.engine.step()

    with pytest.raises(RunnerFailedError, match="tensor rank 1 was killed by SIGKILL"):
        go_on()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tensor_parallel": 3}, "4 key and value heads are not a multiple of 3"),
        ({"tensor_parallel": 2, "dtype": "int8"}, "dtype=int8"),
        ({"tensor_parallel": 2, "expert_parallel": 2}, "cannot be combined with expert_parallel"),
    ],
)
def test_refusals_name_the_key(model: Path, fields: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build_engine(EngineConfig(model=str(model), **{**FIELDS, **fields}))


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "moe", TinyShape(kind="qwen3_moe", tie_embeddings=False))
    with pytest.raises(ConfigError, match="split by expert_parallel"):
        build_engine(EngineConfig(model=str(folder), **FIELDS, tensor_parallel=2))


@pytest.mark.verify
def test_four_ranks_give_the_same_as_one(open_llm: Callable[..., LLM]) -> None:
    want, got = run(open_llm(), requests()), run(open_llm(tensor_parallel=4), requests())
    assert {k: v["ids"] for k, v in got.items()} == {k: v["ids"] for k, v in want.items()}


@pytest.mark.verify
def test_a_gguf_file_on_three_ranks(open_llm: Callable[..., LLM]) -> None:
    """SmolLM2 has three key heads; its file is decoded tensor by tensor on each rank."""
    fields = {"model": "smollm2-135m-instruct", "threads": 1, "num_blocks": 64}
    wanted = requests()[:2]
    with LLM(**fields) as one, LLM(**fields, tensor_parallel=3) as three:
        want, got = run(one, wanted), run(three, wanted)
    assert {k: v["ids"] for k, v in got.items()} == {k: v["ids"] for k, v in want.items()}
