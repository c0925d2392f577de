"""Layers that draft tokens (MTP) of DeepSeek V3 and V4: packed, counted, complete or refused."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from services.engine.compute.loader import load_model
from services.engine.compute.loader.source import ModelSource
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.model_setup import start_mtp
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import SequenceMetadata
from tests.doubles.tiny_deepseek import DeepseekShape, write_tiny_deepseek
from tests.doubles.tiny_v4 import write_tiny_v4

KINDS = ("v3", "v32", "v4")
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")


def _v3(folder: Path, kind: str = "deepseek_v3") -> ModelSource:
    """Two layers, and one that drafts, whose tensors are those of layer 1 with more before it."""
    shape = DeepseekShape(kind=kind, seed=5, num_layers=2, draft_layers=1, num_experts=4, top_k=2)
    source = load_model(str(write_tiny_deepseek(folder, replace(shape, groups=2))))
    weights = dict(source.weights)
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        weights[name.replace("layers.1", "layers.2")] = weights[name].clone()
    weights |= {name: torch.full((1, 1), torch.nan) for name in COPIES}
    return replace(source, weights=weights, config=replace(source.config, mtp_layers=1))


def _v4(folder: Path) -> ModelSource:
    """The tiny model, and a layer that drafts: attention of layer 0, experts of layer 1."""
    source = load_model(str(write_tiny_v4(folder)))
    weights = dict(source.weights)
    for name, tensor in source.weights.items():
        if name.startswith(("layers.1.ffn.", "layers.1.hc_")):
            weights["mtp.0." + name.removeprefix("layers.1.")] = tensor.clone()
        elif name.startswith("layers.0.attn") or name == "layers.0.ffn_norm.weight":
            weights["mtp.0." + name.removeprefix("layers.0.")] = tensor.clone()
        elif name.startswith("hc_head") or name == "norm.weight":
            weights[f"mtp.0.{name}"] = tensor.clone()
    draw = torch.Generator().manual_seed(2)
    for part in ("e_proj", "h_proj"):
        weights[f"mtp.0.{part}.weight"] = torch.randn(32, 32, generator=draw)
    for part in ("enorm", "hnorm"):
        weights[f"mtp.0.{part}.weight"] = torch.randn(32, generator=draw)
    return replace(source, weights=weights, config=replace(source.config, mtp_layers=1))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ModelSource]:
    root = tmp_path_factory.mktemp("mtp")
    v32 = _v3(root / "v32", "deepseek_v32")
    return {"v3": _v3(root / "v3"), "v32": v32, "v4": _v4(root / "v4")}


def _own(source: ModelSource) -> list[str]:
    """The tensors of the layer that drafts, without copies."""
    found = [name for name in source.weights if name.startswith(("mtp.", "model.layers.2."))]
    return [name for name in found if name not in COPIES]


def _runner(source: ModelSource, weights: Mapping[str, Tensor] | None = None, **fields: Any) -> Any:
    if weights is not None:
        source = replace(source, weights=weights)
    return ModelRunner(EngineConfig(threads=1, block_size=16, **fields), source)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_are_packed_counted_and_change_no_result(
    kind: str, sources: Mapping[str, ModelSource], caplog: pytest.LogCaptureFixture
) -> None:
    source = sources[kind]
    kept = _runner(source)
    with caplog.at_level(logging.INFO):
        left_out = _runner(source, mtp=False)
    own = _own(source)
    unread = len(own) + (0 if kind == "v4" else len(COPIES))
    assert f"{unread} tensors of layers that draft tokens (MTP) are not read" in caplog.messages
    assert (len(kept._model.mtp), len(left_out._model.mtp)) == (1, 0)
    more = kept.describe().weights_bytes - left_out.describe().weights_bytes
    stored = sum(source.weights[name].float().nbytes for name in own)
    constants = 4 * 16 + 3 * 4 * 4 * 32 + 4 * (2 * (24 - 3) + 4 - 1) if kind == "v4" else 0
    assert more == stored + constants, "norms of ones, and scales repeated per output, are ours"
    logits = []
    for runner in (kept, left_out):
        runner.allocate(3, 2)
        meta = SequenceMetadata(0, 0, tuple(range(40, 60)), None, (2, 1), sample=True, state_slot=1)
        logits.append(runner.execute_main_model(0, [meta], None).logits)
        runner.close()
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", ["v3", "v32"])
def test_the_layer_of_v3_is_one_of_the_models_after_a_product(
    kind: str, sources: Mapping[str, ModelSource]
) -> None:
    source = sources[kind]
    model = _runner(source)._model
    (drafts,) = model.mtp
    name = "model.layers.2.eh_proj.weight"
    assert torch.equal(drafts.project(torch.eye(96)), source.weights[name].T)
    for part in ("enorm", "hnorm", "shared_head.norm"):
        stored = source.weights[f"model.layers.2.{part}.weight"]
        field = {"enorm": "embedding_norm", "hnorm": "hidden_norm"}.get(part, "norm")
        assert torch.equal(getattr(drafts, field), stored)
    rows = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    outputs = []
    for layer in (drafts.layer, model._layers[1]):
        x = torch.zeros(9, 48)
        layer.feed_forward.add_to(x, rows)
        outputs.append(x)
    assert torch.equal(*outputs), "the experts are those of the same tensors"
    assert outputs[0].abs().max() > 0.1


def test_the_layer_of_v4_is_one_of_the_models_after_two_products(
    sources: Mapping[str, ModelSource],
) -> None:
    source = sources["v4"]
    model = _runner(source)._model
    (drafts,) = model.mtp
    for part, field in (("e_proj", "from_embedding"), ("h_proj", "from_stream")):
        stored = source.weights[f"mtp.0.{part}.weight"]
        assert torch.equal(getattr(drafts, field)(torch.eye(32)), stored.T)
    assert torch.equal(drafts.norm, source.weights["mtp.0.norm.weight"])
    rows = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(9)
    got, want = (layer._experts(rows, tokens) for layer in (drafts.layer, model._layers[1]))
    assert torch.equal(got, want), "the experts are those of the same tensors"
    streams = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(1))
    got, want = (layer._to_attention.connect(streams) for layer in (drafts.layer, model._layers[1]))
    assert torch.equal(got.mix, want.mix)
    assert torch.equal(drafts.join(streams), model._join(streams))


@pytest.mark.parametrize("kind", ["v3", "v4"])
def test_each_missing_tensor_and_wrong_shape_is_named(
    kind: str, sources: Mapping[str, ModelSource]
) -> None:
    source = sources[kind]
    names = [name for name in _own(source) if ".experts." not in name or ".experts.2." in name]
    assert len(names) > 20
    for number, name in enumerate(names):
        weights = dict(source.weights)
        tensor = weights.pop(name)
        with pytest.raises(ModelFileError, match=f"'{name}' is missing from"):
            _runner(source, weights)
        if number % 4 == 0:
            weights[name] = torch.cat((tensor, tensor))
            with pytest.raises(ModelFileError, match=f"'{name}' has shape"):
                _runner(source, weights)


@pytest.mark.parametrize(
    ("kind", "extra"), [("v3", "model.layers.2.mlp.bias"), ("v4", "mtp.0.attn.compressor.ape")]
)
def test_a_tensor_too_many_is_named(
    kind: str, extra: str, sources: Mapping[str, ModelSource]
) -> None:
    weights = dict(sources[kind].weights) | {extra: torch.ones(3)}
    with pytest.raises(ModelFileError, match=f"1 tensors do not belong .*'{extra}'"):
        _runner(sources[kind], weights)


@pytest.mark.parametrize(
    ("kind", "missing"), [("v3", "model.layers.3.mlp.experts.0"), ("v4", "mtp.1.ffn.experts.0")]
)
def test_all_layers_that_the_configuration_announces_must_exist_or_none(
    kind: str, missing: str, sources: Mapping[str, ModelSource]
) -> None:
    source = sources[kind]
    announced = replace(source, config=replace(source.config, mtp_layers=2))
    with pytest.raises(ModelFileError, match=f"'{missing}.*is missing"):
        _runner(announced)
    drafting = {*_own(source), *COPIES}
    without = {name: t for name, t in source.weights.items() if name not in drafting}
    runner = _runner(announced, without)
    assert runner._model.mtp == (), "as transformers writes them"


def test_another_drafter_is_not_kept(sources: Mapping[str, ModelSource]) -> None:
    weights = dict(sources["v4"].weights) | {"mtp.0.main_proj.weight": torch.ones(3, 3)}
    assert _runner(sources["v4"], weights)._model.mtp == ()


def test_ranks_of_experts_keep_none(sources: Mapping[str, ModelSource]) -> None:
    device = torch.device("cpu")
    for ranks, found in ((1, True), (2, False)):
        config = EngineConfig(expert_parallel=ranks)
        kept = start_mtp(config, sources["v3"], dispatch.load("torch"), device)
        assert (kept is not None) == found


def test_a_folder_counts_them_from_its_configuration(drive: Callable, tmp_path: Path) -> None:
    shape = DeepseekShape(seed=5, num_layers=2, draft_layers=1)
    run = drive(write_tiny_deepseek(tmp_path / "m", shape), dtype="bfloat16")
    assert run.runner._config.mtp_layers == 1
    (layer,) = run.runner._model.mtp
    assert layer.embedding_norm.dtype == torch.bfloat16
