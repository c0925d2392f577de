"""The rounds of a GPU, run without one: no wait, no tensor on the wrong side, no stray launch.

What runs is `ModelRunner` as it serves, on tensors that have shapes only.
"""

from pathlib import Path

import pytest
import torch

from services.engine.compute.device.rehearsal import DisciplineError
from services.engine.compute.device_rounds import rounds as rounds_module
from services.engine.compute.models.attention import Attention
from services.engine.compute.models.cache_tensors import block_bytes, keys_and_values, latents
from services.engine.contract.runner import SamplingRow
from services.engine.contract.sampling_params import SamplingParams
from tests.doubles.fake_model import fake_source
from tests.doubles.rehearsal import Rehearsal
from tests.engine.compute.device_rounds import record

DENSE = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3"]
ROUTED = ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3", "deepseek_v32"]
EVERYTHING = SamplingRow(
    SamplingParams(
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((3, 1.0),),
        allowed_token_ids=(1, 2, 3),
        bad_token_ids=(4,),
        logprobs=True,
        top_logprobs=2,
    ),
    7,
    0,
    9,
    (1, 2),
    (3,),
    (5,),
)


@pytest.mark.parametrize("architecture", DENSE)
def test_no_round_of_a_dense_model_waits(architecture: str, tmp_path: Path) -> None:
    run = Rehearsal(tmp_path, architecture)
    prefill = run.round(20, 7, scored=True)
    assert len(run.device.uploads) == len(run.device.fetches) == 1
    mixed = run.round(1, 33, previous=prefill, row=EVERYTHING)
    decode = run.round(1, 1, 1, previous=mixed)
    run.round(*[1] * 4, previous=decode, row=EVERYTHING)
    # One copy up for the forward, one for rows that are not plain, one copy down.
    assert len(run.device.uploads) == 6
    assert len(run.device.fetches) == 4
    assert run.device.launches.count("graph") == 2
    assert [len(out.wait().tokens) for out in (prefill, mixed, decode)] == [2, 2, 3]
    with run.device.running():
        run.runner.copy_blocks([(1, 2), (3, 4)])


@pytest.mark.parametrize("architecture", ROUTED)
def test_no_round_of_a_model_with_experts_waits(architecture: str, tmp_path: Path) -> None:
    run = Rehearsal(tmp_path, architecture)
    prefill = run.round(20, 7)
    run.round(1, 33, previous=prefill, row=EVERYTHING)
    run.round(1, 1, 1, previous=prefill)


class _Planted:
    """Runs something in the middle of a round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work) -> None:
        plain = Attention.add_to

        def add_to(own, x, cos_sin, data, caches):
            work(x)
            plain(own, x, cos_sin, data, caches)

        monkeypatch.setattr(Attention, "add_to", add_to)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense: reads a value"),
        (lambda x: x.cpu(), "_to_copy: .* becomes a tensor on cpu"),
        (lambda x: x[:, :2] + torch.ones(2), "on cpu"),
        (lambda x: torch.tensor([1, 2], device=x.device), "only Device.upload"),
        (lambda x: x[x > 0], "the host waits for the number of its ones"),
        (lambda x: x.masked_fill_(x > 0, 1).nonzero(), "nonzero: reads a value"),
        (lambda x: bool((x > 0).all()), "reads a value"),
    ],
    ids=["item", "copy down", "host tensor", "copy up", "mask as index", "nonzero", "bool"],
)
def test_a_planted_wait_is_found(work, message: str, tmp_path: Path, monkeypatch) -> None:
    _Planted(monkeypatch, work)
    run = None
    with pytest.raises(Exception, match=message):
        run = Rehearsal(tmp_path, "llama", num_hidden_layers=1)
    assert run is None


def test_a_wait_after_the_layers_is_found(tmp_path: Path, monkeypatch) -> None:
    run = Rehearsal(tmp_path, "llama", num_hidden_layers=1)
    plain = rounds_module.sample_batch

    def sample(kernels, logits, inputs, words):
        draw = plain(kernels, logits, inputs, words)
        draw.tokens.tolist()
        return draw

    monkeypatch.setattr(rounds_module, "sample_batch", sample)
    with pytest.raises(DisciplineError, match="reads a value"):
        run.round(3)


@pytest.mark.parametrize(
    ("name", "on_the_host", "products_of_experts"),
    [("decode_round", 13, 0), ("decode_round_experts", 17, 2 * 2)],
)
def test_a_decode_rounds_launches_are_the_recorded_ones(
    name: str, on_the_host: int, products_of_experts: int, tmp_path: Path
) -> None:
    """At published sizes. After a wanted change: run the module `record`, read its diff."""
    recorded = record.recorded(name)
    assert record.rehearse(name, tmp_path) == recorded
    # One graph holds the layers: the host launches that, and sampling and counts behind it.
    assert sum(not line.startswith("  ") for line in recorded) == on_the_host
    # Two launches per layer, whatever the number of experts.
    grouped = [line for line in recorded if line.startswith("  grouped_kernel")]
    assert len(grouped) == products_of_experts
    assert not [line for line in recorded if " f64" in line or "_to_copy f32" in line]


PUBLISHED = {
    "qwen3_moe": record.QWEN3_30B_A3B,
    "deepseek_v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
}
"""Sizes in config.json of Qwen/Qwen3-30B-A3B and deepseek-ai/DeepSeek-V3."""


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_a_model_of_its_published_size_is_rehearsed(architecture: str, tmp_path: Path) -> None:
    """Nothing is allocated; one dense or plain layer, and one with experts."""
    changes = {"num_hidden_layers": 2, **PUBLISHED[architecture]}
    run = Rehearsal(tmp_path, architecture, **changes)
    prefill = run.round(2048, 100)
    run.round(*[1] * 4, previous=prefill)


@pytest.mark.parametrize(
    ("architecture", "layers", "weights", "position"),
    # Billions of parameters as published; bytes of a position's keys and values in bfloat16.
    [("qwen3_moe", 48, 30.5, 48 * 2 * 4 * 128 * 2), ("deepseek_v3", 61, 671, 61 * (512 + 64) * 2)],
)
def test_sizes_are_the_published_ones(
    architecture: str, layers: int, weights: float, position: int, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": layers, **PUBLISHED[architecture]}
    if architecture == "deepseek_v3":
        changes["first_k_dense_replace"] = 3
    source = fake_source(tmp_path, architecture, **changes)
    assert sum(source.weights.sizes()) / 1e9 == pytest.approx(weights, rel=0.01)
    config = source.config
    tensors = (
        keys_and_values(config, torch.bfloat16)
        if config.mla is None
        else latents(config, config.mla, torch.bfloat16)
    )
    assert block_bytes(tensors, 16) == 16 * position
