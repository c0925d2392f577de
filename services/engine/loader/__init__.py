"""Model files in, `ModelSource` out; and, for the front process, the text parts without torch.

source.py              `ModelSource` and the digest of files
gguf_header.py         header of a GGUF file; gguf_text.py its tokenizer; gguf_file.py its weights
hf_folder.py           JSON files of a Hugging Face folder; safetensors_folder.py its weights
"""

from services.common.text.assets import TextAssets
from services.engine.known_models import find_model
from services.engine.loader.source import ModelSource

__all__ = ["ModelSource", "load_model", "load_text_assets"]


def load_model(model: str) -> ModelSource:
    """All parts of a model given by path or known name; needs torch.

    Raises:
        ModelFileError: nothing found there, or files that cannot be served.
    """
    found = find_model(model)
    if found.path.is_dir():
        from services.engine.loader.safetensors_folder import load_folder

        return load_folder(found.path, found.name)
    from services.engine.loader.gguf_file import load_gguf

    return load_gguf(found.path, found.name)


def load_text_assets(model: str) -> TextAssets:
    """Tokenizer, template and special tokens alone; imports neither torch nor numpy.

    Raises:
        ModelFileError: as `load_model`.
    """
    found = find_model(model)
    if found.path.is_dir():
        from services.engine.loader.hf_folder import folder_text

        return folder_text(found.path)
    from services.engine.loader.gguf_header import read_header
    from services.engine.loader.gguf_text import text_assets

    return text_assets(read_header(found.path).metadata)
