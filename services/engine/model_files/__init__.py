"""What both processes of an engine read of a model's files: configuration, tokenizer, template.

Free of torch. The weights are read by `services.engine.compute.loader`.

known_models.py   models by name, and where their files are
gguf_*.py         header, splits, configuration and tokenizer of GGUF files
spm_*.py          SentencePiece files
hf_*.py           JSON files of a Hugging Face folder
"""

from services.common.text.assets import TextAssets
from services.engine.model_files.known_models import find_model

__all__ = ["load_text_assets"]


def load_text_assets(model: str) -> TextAssets:
    """Tokenizer, template and special tokens of a model given by path or known name.

    Imports neither torch nor numpy.

    Raises:
        ModelFileError: nothing found there, or files that cannot be served.
    """
    found = find_model(model)
    if found.path.is_dir():
        from services.engine.model_files.hf_folder import folder_text

        return folder_text(found.path)
    from services.engine.model_files.gguf_header import read_header
    from services.engine.model_files.gguf_text import text_assets

    return text_assets(read_header(found.path).metadata)
