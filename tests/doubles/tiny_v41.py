"""A tiny random DeepSeek V4.1: the model of the oracle, as an engine reads it.

Its vocabulary is the printable characters, and "é", whose text counts as that of "e".
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from services.engine.contract.model_config import ModelConfig
from services.engine.model_files.deepseek_v41 import v41_model_config
from services.engine.model_files.json_keys import Keys
from tests.engine.compute.models.v41_oracle.golden import COMPRESSED, SEED, SHAPE, TEXTS
from tests.engine.compute.models.v41_oracle.oracle import engram_rows
from tests.engine.compute.models.v41_oracle.published import text_config
from tests.engine.compute.models.v41_oracle.weights import random_weights

TEXT_KEYS: dict[str, Any] = {**text_config(SHAPE, COMPRESSED), "bos_token_id": 0, "eos_token_id": 1}
"""The part `text_config` of config.json."""


def keys(**changes: Any) -> dict[str, Any]:
    """config.json, with some keys of its text part changed."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": TEXT_KEYS | changes,
    }


def tiny_v41_config(**changes: Any) -> ModelConfig:
    """The configuration as the engine reads it, with the ids that follow from the tokenizer."""
    config = v41_model_config(Keys(keys(**changes), "config.json"))
    v41: Any = config.v4
    return replace(config, v4=replace(v41, engram=replace(v41.engram, ids=tuple(COMPRESSED))))


def tiny_v41_weights() -> dict[str, torch.Tensor]:
    """All tensors by their published names."""
    return dict(_weights())


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    return random_weights(SHAPE, engram_rows(SHAPE), SEED, torch.float32)


def write_tiny_v41(folder: Path) -> Path:
    """Write config.json and model.safetensors, as published, and a tokenizer of characters."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(keys(), indent=1), encoding="utf-8")
    save_file(tiny_v41_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny_tokenizer() -> Tokenizer:
    """One token for each text of the oracle's vocabulary."""
    tokenizer = Tokenizer(models.WordLevel({text: id_ for id_, text in enumerate(TEXTS)}, "!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
