"""The cases of the parity table: a tiny model, and what its reference computes.

To add one: write golden data in the form of `tests/data/tiny_published_golden.json` (of each model
`prompt_ids`, `positions`, `logits` and `items`), and append `Case`s to CASES.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.doubles.tiny_deepseek import DeepseekShape, write_tiny_deepseek
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.doubles.tiny_published import PUBLISHED, write_published
from tests.doubles.tiny_v4 import write_tiny_v4
from tests.doubles.tiny_v41 import write_tiny_v41

DATA = Path(__file__).parents[1] / "data"
V4_DATA = Path(__file__).parents[1] / "engine/compute/models/v4"


@dataclass(frozen=True)
class Case:
    """A model with its golden data."""

    name: str
    reference: str
    """What computed the golden data."""
    write: Callable[[Path], Path]
    """Writes the model into a folder, which it returns."""
    golden: Mapping[str, Any]
    """`prompt_ids`, and the reference's `logits` [positions, vocabulary] at `positions` of it;
    `items`: prompts with the reference's greedy tokens."""
    limit: float = 1e-4
    """Largest error of a logit in float32."""


def golden_models(file: str) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """The reference's version, and the golden data by name, of a file in tests/data."""
    data = json.loads((DATA / file).read_text(encoding="utf-8"))
    return f"transformers {data['transformers']}", data["models"]


def _shaped(file: str) -> list[Case]:
    reference, models = golden_models(file)
    cases = []
    for name, golden in models.items():
        fields = golden["shape"]
        shape = TinyShape(**{**fields, "dense_layers": tuple(fields["dense_layers"])})

        def write(folder: Path, shape: TinyShape = shape) -> Path:
            return write_tiny_model(folder, shape)

        # Their logits reach 40, where float32 has steps of 4e-6, and are stored with 5 decimals.
        cases.append(Case(name, reference, write, golden, limit=5e-4))
    return cases


def _published(file: str) -> list[Case]:
    reference, models = golden_models(file)
    cases = []
    for name, golden in models.items():

        def write(folder: Path, name: str = name) -> Path:
            return write_published(folder, PUBLISHED[name]())

        cases.append(Case(name, reference, write, golden))
    return cases


def _deepseek(file: str) -> list[Case]:
    reference, models = golden_models(file)
    cases = []
    for name, golden in models.items():
        shape = DeepseekShape(**golden["shape"])

        def write(folder: Path, shape: DeepseekShape = shape) -> Path:
            return write_tiny_deepseek(folder, shape)

        cases.append(Case(f"deepseek_{name}", reference, write, golden))
    return cases


def _v4(
    name: str,
    reference: str,
    write: Callable[[Path], Path],
    data: str,
    positions: tuple[int, ...] = (12, 44, 63, 69),
) -> Case:
    with np.load(V4_DATA / data) as file:
        longest = file["prompt_1"].tolist()
        golden = {
            "prompt_ids": longest,
            "positions": positions,
            "logits": file["logits_1"][list(positions)].tolist(),
            "items": [
                {
                    "prompt_ids": file[f"prompt_{number}"].tolist(),
                    "output_ids": file[f"greedy_{number}"].tolist(),
                }
                for number in range(2)
            ],
        }
    return Case(name, reference, write, golden)


CASES: list[Case] = [
    *_shaped("tiny_qwen3_golden.json"),
    *_shaped("tiny_variants_golden.json"),
    *_published("tiny_published_golden.json"),
    *_deepseek("tiny_deepseek_golden.json"),
    _v4("deepseek_v4", "transformers 5.24.0", write_tiny_v4, "golden.npz"),
    _v4("deepseek_v41", "oracle of this repository", write_tiny_v41, "v41_golden.npz"),
]
