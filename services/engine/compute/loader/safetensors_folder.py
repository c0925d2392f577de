"""Loads a model from a Hugging Face folder. Tensors stay mapped from the file until packed."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.engine.compute.loader.source import ModelSource, file_digest
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.hf_config import folder_config
from services.engine.model_files.hf_folder import folder_eos, folder_text
from services.engine.model_files.json_keys import read_json


def load_folder(folder: Path, name: str) -> ModelSource:
    """Load the model of a folder.

    Raises:
        ModelFileError: a file is missing, broken or not supported.
    """
    config = folder_config(folder)
    files = weight_files(folder)
    return ModelSource(
        name=name,
        config=config,
        weights=map_tensors(files),
        read_text=partial(folder_text, folder),
        eos_token_ids=folder_eos(folder),
        revision=file_digest(files),
        quantisation="none",
    )


def weight_files(folder: Path) -> list[Path]:
    """The files with weights, sorted by name; those of the index if there is one.

    A folder may also hold the weights in the publisher's own format; those files are not read.

    Raises:
        ModelFileError: there is no such file, or a file of the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _listed_files(index)
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {others[0]} is not read: save the model as safetensors" if others else ""
        raise ModelFileError(f"{folder}: no *.safetensors file{hint}")
    return files


def _listed_files(index: Path) -> list[Path]:
    listed = read_json(index)
    names = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(names, dict) or not names:
        raise ModelFileError(f"{index}: weight_map is missing or empty")
    files = [index.parent / Path(str(name)).name for name in sorted(set(names.values()))]
    for path in files:
        if not path.exists():
            raise ModelFileError(f"{path}: missing, but {index.name} names it: download it")
    return files


def map_tensors(
    files: Sequence[Path], wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, torch.Tensor]:
    """Tensors by name; a tensor is read from disk when it is first used.

    Args:
        wanted: which names to include.

    Raises:
        ModelFileError: a file cannot be read.
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
