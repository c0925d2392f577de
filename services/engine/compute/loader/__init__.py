"""Loads a model with its weights: `load_model` returns a `ModelSource`. Imports torch.

source.py               `ModelSource`, and the digest of files
gguf_file.py            GGUF files; gguf_weights.py decodes their tensors
safetensors_folder.py   Hugging Face folders; tensor_files.py finds their tensors
folder_weights.py       decodes a folder's tensors one at a time; formats/ has the decoders
progress.py             log lines while a model is read
"""

from services.engine.compute.loader.source import ModelSource
from services.engine.model_files.known_models import find_model

__all__ = ["ModelSource", "load_model"]


def load_model(model: str, *, digest: bool = True) -> ModelSource:
    """Load a model given by path or known name; weights stay in their files until they are used.

    Args:
        digest: whether to read all files for the revision. A rank that is not the first needs none,
            and reads its part only.

    Raises:
        ModelFileError: no such model, or files that cannot be served.
    """
    found = find_model(model)
    if found.path.is_dir():
        from services.engine.compute.loader.safetensors_folder import load_folder

        return load_folder(found.path, found.name, digest=digest)
    from services.engine.compute.loader.gguf_file import load_gguf

    return load_gguf(found.path, found.name, digest=digest)
