"""Loads a model with its weights: `load_model` returns a `ModelSource`. Imports torch.

source.py               `ModelSource`, and the digest of files
gguf_file.py            GGUF files; gguf_weights.py decodes their tensors
safetensors_folder.py   Hugging Face folders
"""

from services.engine.compute.loader.source import ModelSource
from services.engine.model_files.known_models import find_model

__all__ = ["ModelSource", "load_model"]


def load_model(model: str) -> ModelSource:
    """Load a model given by path or known name.

    Raises:
        ModelFileError: no such model, or files that cannot be served.
    """
    found = find_model(model)
    if found.path.is_dir():
        from services.engine.compute.loader.safetensors_folder import load_folder

        return load_folder(found.path, found.name)
    from services.engine.compute.loader.gguf_file import load_gguf

    return load_gguf(found.path, found.name)
