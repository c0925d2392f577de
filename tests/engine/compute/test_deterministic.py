"""The deterministic mode is bit-identical alone, batched, in chunks and on a cached prefix."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.common.config.settings import ConfigError
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.marks import needs_vnni

LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 200)


@pytest.fixture(
    params=[
        "tied",
        pytest.param("smollm2-135m-instruct", marks=[pytest.mark.model, pytest.mark.verify]),
    ]
)
def model(request: pytest.FixtureRequest, tiny_folders: dict) -> str:
    return str(tiny_folders.get(request.param, request.param))


def _prompts() -> list[list[int]]:
    draw = random.Random(9)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def _last_logits(run, prompts: list[list[int]], chunk: int, batched: bool) -> list[torch.Tensor]:
    """Logits after each prompt, computed in chunks, one prompt a round or all together."""
    tables = [run.table(len(prompt)) for prompt in prompts]
    found: dict[int, torch.Tensor] = {}
    together = [list(range(len(prompts)))] if batched else [[i] for i in range(len(prompts))]
    for members in together:
        for start in range(0, max(len(prompts[i]) for i in members), chunk):
            batch = [
                SequenceMetadata(
                    i, start, tuple(prompts[i][start : start + chunk]), None, tables[i], sample=True
                )
                for i in members
                if start < len(prompts[i])
            ]
            logits = run.runner.execute_main_model(start, batch, None).logits
            found |= {meta.seq_id: row for meta, row in zip(batch, logits, strict=True)}
    return [found[i] for i in range(len(prompts))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("block_size", "fields"),
    [
        (16, {"kernels": "torch"}),
        (16, {}),
        (32, {"kernels": "torch"}),
        (32, {}),
        (12, {}),
        (16, {"dtype": "bfloat16"}),
        pytest.param(32, {"dtype": "int8"}, marks=needs_vnni),
    ],
)
def test_logits_are_bit_identical(
    model: str, block_size: int, fields: dict, drive: Callable
) -> None:
    run = drive(model, deterministic=True, block_size=block_size, num_blocks=400, **fields)
    prompts = _prompts() if "smollm2" not in model else [_prompts()[i] for i in (1, 4, 8)]
    _check_company(run, prompts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_experts_are_bit_identical(dtype: str, drive: Callable, tmp_path: Path) -> None:
    """In the default mode too: the rounds are compiled."""
    shape = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
    _check_company(drive(write_tiny_model(tmp_path, shape), dtype=dtype), _prompts())


def _check_company(run, prompts: list[list[int]]) -> None:
    """Alone and whole, in a batch, and in chunks: the same bits."""
    alone = _last_logits(run, prompts, 1000, batched=False)
    for chunk, batched in ((1000, True), (32, True), (7, False)):
        other = _last_logits(run, prompts, chunk, batched)
        for want, got in zip(alone, other, strict=True):
            assert torch.equal(want, got), (chunk, batched)


def test_torchs_default_is_not_equal_to_the_bit(drive: Callable, tiny_folders: dict) -> None:
    """Otherwise the test above would prove nothing."""
    run = drive(tiny_folders["tied"], kernels="torch")
    alone = _last_logits(run, _prompts(), 1000, batched=False)
    chunked = _last_logits(run, _prompts(), 7, batched=True)
    pairs = list(zip(alone, chunked, strict=True))
    assert not all(torch.equal(want, got) for want, got in pairs)
    for want, got in pairs:
        torch.testing.assert_close(want, got, atol=1e-3, rtol=1e-3)


def test_draws_do_not_depend_on_the_batch(drive: Callable, tiny_folders: dict) -> None:
    run = drive(tiny_folders["tied"], deterministic=True, block_size=8, num_blocks=600)
    prompts, counts = _prompts()[:7], [30] * 7
    params = [SamplingParams(temperature=1.0, top_p=0.95, seed=i) for i in range(7)]
    together = run.generate(prompts, counts, params=params, chunk=24)
    for index in (0, 3, 6):
        one = run.generate([prompts[index]], [30], params=[params[index]])
        assert one[0] == together[index]


def test_a_cached_prefix_is_bit_identical(drive: Callable, tiny_folders: dict) -> None:
    run = drive(tiny_folders["tied"], deterministic=True, block_size=8)
    prompt = _prompts()[-1]
    table = run.table(200)
    cold = run.runner.execute_main_model(
        1, [SequenceMetadata(0, 0, tuple(prompt), None, table, sample=True)], None
    )
    warm = run.runner.execute_main_model(
        2, [SequenceMetadata(1, 72, tuple(prompt[72:]), None, table, sample=True)], None
    )
    assert torch.equal(cold.logits, warm.logits)


def test_an_engine_says_whether_its_results_depend_on_batching(tiny_folders: dict) -> None:
    def says(**fields) -> bool:
        config = EngineConfig(model=str(tiny_folders["tied"]), threads=1, **fields)
        return ModelRunner(config).describe().bit_identical

    assert says(kernels="torch", deterministic=True)
    assert not says(kernels="torch")
    assert says()  # compiled rounds, in the default mode too


def test_torchs_mode_is_part_of_the_numerics_id(tiny_folders: dict) -> None:
    ids = {
        ModelRunner(
            EngineConfig(
                model=str(tiny_folders["tied"]), threads=1, kernels="torch", deterministic=mode
            )
        )
        .describe()
        .numerics_id
        for mode in (False, True)
    }
    assert len(ids) == 2


def test_other_formats_are_refused(tiny_folders: dict) -> None:
    for fields in ({"dtype": "bfloat16", "kernels": "torch"}, {"dtype": "float16"}):
        config = EngineConfig(
            model=str(tiny_folders["tied"]), threads=1, deterministic=True, **fields
        )
        with pytest.raises(ConfigError, match="deterministic"):
            ModelRunner(config)
