"""Parts of DeepSeek V4.1 against those of the oracle, and weights that do not fit."""

import logging

import numpy as np
import pytest
import torch

from services.engine.compute.models.cache_tensors import block_bytes
from services.engine.compute.models.v4_modules.fixed_order import row_sums
from services.engine.compute.models.v41_modules import quantisers
from services.engine.compute.models.v41_modules.engram import Engram
from services.engine.compute.models.v41_modules.memory import cache_tensors, state_bytes
from services.engine.compute.models.v41_modules.model import V41Model
from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.deepseek_v41 import deepseek_v41_config
from services.engine.model_files.json_keys import Keys
from tests.doubles.tiny_v41 import tiny_v41_config, tiny_v41_weights
from tests.doubles.v4_driver import V4Driver, make_tiny
from tests.engine.compute.models.v41_oracle import engram, formats, golden
from tests.engine.model_files.test_deepseek_v41 import FLASH

ROUNDINGS = {
    "window": (quantisers.round_window_keys, formats.window_values),
    "entry": (quantisers.round_entries, formats.entry_values),
    "index": (quantisers.round_index, formats.index_values),
}


def spread_values(rows: int) -> torch.Tensor:
    """[rows, 64]: rows of all sizes, one of zeros, and one of FP4's ties."""
    draw = torch.Generator().manual_seed(5)
    values = torch.randn(rows, 64, generator=draw)
    values *= torch.exp2(torch.randint(-30, 12, (rows, 1), generator=draw).float())
    values[0] = 0
    values[1] = torch.arange(64).float().remainder(25).sub(12) / 2
    return values


@pytest.mark.parametrize("name", ROUNDINGS)
def test_roundings_are_those_of_the_oracle_at_any_place(name: str) -> None:
    ours, theirs = ROUNDINGS[name]
    values = spread_values(257)
    found = ours(values)
    assert torch.equal(found.double(), theirs(values.double()))
    assert torch.equal(ours(values[3:78].view(5, 15, 64)).view(75, 64), found[3:78])
    assert not torch.equal(found, values)


def test_an_odd_width_is_left_as_it_is() -> None:
    values = spread_values(3)[:, :24]
    for ours, _ in ROUNDINGS.values():
        assert ours(values) is values


@pytest.mark.parametrize("width", [1, 2, 7, 32, 100])
def test_a_sum_of_a_row_has_the_same_bits_in_any_company(width: int) -> None:
    values = torch.randn(9, width, generator=torch.Generator().manual_seed(1))
    sums = row_sums(values)
    assert torch.allclose(sums, values.sum(-1), atol=1e-5)
    assert torch.equal(row_sums(values[4:5]), sums[4:5])
    assert torch.equal(row_sums(values.view(3, 3, width)), sums.view(3, 3))


@pytest.fixture(scope="module")
def model() -> V41Model:
    found: V41Model = make_tiny(tiny_v41_config(), tiny_v41_weights(), "torch")
    return found


def test_look_ups_find_the_rows_of_the_oracle(model: V41Model) -> None:
    rows = np.random.PCG64(4).random_raw(4 * 50).reshape(50, 4) % 69
    for layer in golden.SHAPE.engram_layer_ids:
        own = model._layers[layer]._engram
        assert isinstance(own, Engram)
        found = own._table_rows(torch.from_numpy(rows.astype(np.int64))).flatten(1)
        wanted = [
            engram.rows_of(golden.SHAPE, layer, golden.COMPRESSED, row)
            for row in rows.astype(int).tolist()
        ]
        assert found.tolist() == wanted


def test_the_committed_logits_of_the_oracle(model: V41Model) -> None:
    with np.load(golden.FILE) as file:
        tokens, whole = file["tokens"].tolist(), torch.from_numpy(file["whole"])
    driver = V4Driver(model)
    assert (driver.run((driver.open(), tokens))[0] - whole).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("kernels", "sizes"),
    [("torch", (22,)), ("torch", (3, 5, 14)), ("torch-tiled", (1, 12, 9))],
    ids=str,
)
def test_a_replay_gives_what_the_oracle_computes(kernels: str, sizes: tuple[int, ...]) -> None:
    """It writes no history before the hit, and reads no window that was not computed again."""
    with np.load(golden.FILE) as file:
        tokens, wanted = file["tokens"].tolist(), torch.from_numpy(file["replay"])
    model = make_tiny(tiny_v41_config(), tiny_v41_weights(), kernels, block_size=2)
    driver = V4Driver(model, block_size=2)
    source = driver.open(40)
    driver.run((source, tokens))
    before = [cache.clone() for cache in driver.memory.caches]
    request, found = driver.restart_by_replay(source, tokens, golden.HIT), []
    for size in sizes:
        found += driver.run((request, tokens[request.start : request.start + size]))
    assert (torch.cat(found) - wanted).abs().max() <= 1e-4
    kept = list(source.blocks)
    for old, new in zip(before, driver.memory.caches, strict=True):
        assert torch.equal(old[kept], new[kept])


def test_memory_of_the_published_sizes() -> None:
    """In float32; an entry takes 4 * (512 + 128) bytes, of which there are 2.5 per position."""
    flash = deepseek_v41_config(Keys(FLASH, "config.json"))
    assert state_bytes(flash) == 4 * (4 + 128 * 512 * 40 + 2 * 2 * 512 * 3)
    assert state_bytes(flash, drafts=6) == 4 * (10 + 134 * 512 * 40 + 8 * 2 * 512 * 3)
    assert block_bytes(cache_tensors(flash), 128) == 128 * 5 * 4 * (512 + 128) // 2


MISSING = (
    "layers.1.engram.embed.weight",
    "layers.3.engram.k_weight",
    "layers.2.attn.compressor.wgate.weight",
    "layers.5.attn.compressor.norm.weight",
    "layers.4.attn.indexer.wk.weight",
    "layers.7.attn.indexer.weights_proj.weight",
    "layers.8.hc_ffn_base",
    "layers.0.ffn.gate.bias",
)


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_or_misshapen_tensor_is_named(name: str) -> None:
    weights = tiny_v41_weights()
    tensor = weights.pop(name)
    with pytest.raises(ModelFileError, match=f"'{name}' is missing"):
        make_tiny(tiny_v41_config(), weights, "torch")
    weights[name] = tensor[1:]
    with pytest.raises(ModelFileError, match=f"'{name}' has shape .* implies"):
        make_tiny(tiny_v41_config(), weights, "torch")


def test_left_over_tensors_are_refused_but_those_of_images(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = tiny_v41_weights() | {"vision.patch.weight": torch.zeros(2)}
    with caplog.at_level(logging.INFO):
        make_tiny(tiny_v41_config(), weights, "torch")
    assert "1 tensors for images are not loaded" in caplog.text
    left = {"layers.5.attn.compressor.wgate.weight": torch.zeros(32, 32)}
    with pytest.raises(ModelFileError, match=r"1 tensors do not belong .*compressor.wgate"):
        make_tiny(tiny_v41_config(), weights | left, "torch")


def test_a_model_without_its_token_ids_is_refused() -> None:
    config = tiny_v41_config(vocab_size=97)
    assert isinstance(config.v4, DeepseekV41Config)
    weights = tiny_v41_weights()
    for name in ("embed.weight", "head.weight"):
        weights[name] = torch.cat((weights[name], weights[name][:1]))
    with pytest.raises(ModelFileError, match=r"compressed ids for 96 tokens, but .* has 97"):
        make_tiny(config, weights, "torch")
