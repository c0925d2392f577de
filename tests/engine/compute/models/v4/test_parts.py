"""Parts of DeepSeek V4: weights that do not fit, and functions that depend on no other element."""

import logging

import pytest
import torch

from services.engine.compute.models.v4_modules.fixed_order import by_vectors
from services.engine.compute.models.v4_modules.hyper_connections import _balanced
from services.engine.compute.models.v4_modules.model import V4Model
from services.engine.contract.model_config import ModelFileError
from tests.doubles.tiny_v4 import tiny_weights
from tests.doubles.v4_driver import make_v4

TABLE = "layers.0.ffn.gate.tid2eid"


def make(weights: dict[str, torch.Tensor]) -> V4Model:
    return make_v4(weights, "torch")


@pytest.mark.parametrize(
    "name",
    [
        TABLE,
        "layers.1.attn.attn_sink",
        "layers.1.attn.indexer.compressor.ape",
        "layers.2.hc_ffn_scale",
        "layers.3.ffn.experts.7.w2.weight",
        "layers.4.ffn.gate.bias",
        "hc_head_base",
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(name: str):
    weights = tiny_weights()
    tensor = weights.pop(name)
    with pytest.raises(ModelFileError, match=f"'{name}' is missing"):
        make(weights)
    weights[name] = tensor[1:]
    with pytest.raises(ModelFileError, match=f"'{name}' has shape .* implies"):
        make(weights)


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_table_that_names_an_unknown_expert_is_refused(expert: int):
    weights = tiny_weights()
    weights[TABLE][17, 1] = expert
    with pytest.raises(ModelFileError, match=rf"{TABLE}': the experts of token 17 are .*0 to 7"):
        make(weights)


def test_left_over_tensors_are_refused_but_those_of_mtp(caplog: pytest.LogCaptureFixture):
    weights = tiny_weights() | {"mtp.0.e_proj.weight": torch.zeros(2)}
    with caplog.at_level(logging.INFO):
        make(weights)
    assert "1 tensors of layers that draft tokens (MTP) are not read" in caplog.text
    with pytest.raises(ModelFileError, match=r"1 tensors do not belong .*: 'layers.5.attn_norm"):
        make(weights | {"layers.5.attn_norm.weight": torch.zeros(32)})


@pytest.mark.parametrize("count", [1, 63, 65, 40_001])
@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid])
def test_a_function_has_the_same_bits_at_any_place(function, count: int):
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    want = by_vectors(function, values)
    assert torch.allclose(want, function(values))
    shifted = by_vectors(function, torch.cat((values.new_ones(5), values)))
    assert torch.equal(shifted[5:], want)


def test_mixing_matrices_are_nearly_doubly_stochastic():
    scores = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(2))
    mix = _balanced(scores, 20, 1e-6)
    assert torch.allclose(mix.sum(1), torch.ones(50, 4), atol=1e-5)
    assert torch.allclose(mix.sum(2), torch.ones(50, 4), atol=1e-3)
