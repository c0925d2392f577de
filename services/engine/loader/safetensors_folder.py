"""Weights of a Hugging Face folder; tensors stay mapped from the file until they are packed."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.engine.loader.hf_folder import folder_config, folder_eos, folder_text
from services.engine.loader.source import ModelSource, file_digest
from services.engine.models.config import ModelFileError


def load_folder(folder: Path, name: str) -> ModelSource:
    """Read a whole model.

    Raises:
        ModelFileError: a file that is missing, broken or of an unsupported kind.
    """
    config = folder_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{folder}: no *.safetensors file")
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                weights.update((key, opened.get_tensor(key)) for key in opened.keys())  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{path}: {error}") from error
    return ModelSource(
        name=name,
        config=config,
        weights=weights,
        text=folder_text(folder),
        eos_token_ids=folder_eos(folder),
        revision=file_digest(files),
        quantisation="none",
    )
