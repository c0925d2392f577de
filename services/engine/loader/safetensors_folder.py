"""Weights of a Hugging Face folder; tensors stay mapped from the file until they are packed."""

from collections.abc import Callable, Sequence
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
    files = weight_files(folder)
    return ModelSource(
        name=name,
        config=config,
        weights=map_tensors(files),
        text=folder_text(folder),
        eos_token_ids=folder_eos(folder),
        revision=file_digest(files),
        quantisation="none",
    )


def weight_files(folder: Path) -> list[Path]:
    """All files with weights, in the order of their names.

    Raises:
        ModelFileError: there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{folder}: no *.safetensors file")
    return files


def map_tensors(
    files: Sequence[Path], wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, torch.Tensor]:
    """Tensors by name; read from disk when they are first touched.

    Raises:
        ModelFileError: a file that cannot be read.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                names = [name for name in opened.keys() if wanted(name)]  # noqa: SIM118 - not a dict
                weights.update((name, opened.get_tensor(name)) for name in names)
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{path}: {error}") from error
    return weights
