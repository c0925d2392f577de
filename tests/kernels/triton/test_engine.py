"""The engine's CUDA path, run by the interpreter: scheduler, runner and every kernel together."""

import pytest

from kernels import dispatch
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM
from tests.doubles.tiny_model import TinyShape, write_tiny_model

PROMPTS = [[5, 6, 7], list(range(40, 75)), [200]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def tokens(folder, params) -> list[list[int]]:
    with LLM(str(folder), device="cpu", block_size=8, num_blocks=64, threads=1) as llm:
        return [list(out.choices[0].token_ids) for out in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=11, max_tokens=6, ignore_eos=True),
    ],
    ids=["greedy", "seeded"],
)
def test_triton_kernels_give_the_tokens_of_torchs(folder, params, monkeypatch):
    expected = tokens(folder, params)
    loaded = []
    real = dispatch.load

    def load(name):
        loaded.append(real("triton"))
        return loaded[-1]

    monkeypatch.setattr(dispatch, "load", load)
    assert tokens(folder, params) == expected
    assert [kernels.name for kernels in loaded] == ["triton"]


def test_experts_in_one_call_give_the_tokens_and_counts_of_a_loop_over_them(tmp_path, monkeypatch):
    shape = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
    folder = write_tiny_model(tmp_path / "moe", shape)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def run() -> tuple[list[list[int]], tuple[tuple[int, ...], ...], str]:
        fields = {"block_size": 8, "num_blocks": 64, "threads": 1, "kernels": "torch"}
        with LLM(str(folder), device="cpu", **fields) as llm:
            tokens = [list(out.choices[0].token_ids) for out in llm.generate(PROMPTS, params)]
            runner = llm.engine.worker._runner
            return tokens, runner.expert_loads(), type(runner._experts).__name__

    want, loads, experts = run()
    assert experts == "ExpertLeader"
    real = dispatch.load
    monkeypatch.setattr(dispatch, "load", lambda _name: real("triton"))
    got, counted, experts = run()
    assert experts == "GroupedExperts"
    assert got == want
    assert counted == loads


def test_a_cuda_device_uses_the_triton_set():
    assert dispatch.choose("cuda", dtype="bfloat16") == "triton"
    assert dispatch.choose("cpu") == "torch"
    with pytest.raises(dispatch.UnsupportedError, match="deterministic=true"):
        dispatch.choose("cuda", dtype="bfloat16", deterministic=True)


def test_the_sets_load_under_their_names():
    for name in ("triton", "triton-tiled"):
        assert dispatch.load(name).name == name
    assert dispatch.load("triton-tiled").experts is not dispatch.load("triton").experts
