"""Reads a model's files, except the weights: configuration, tokenizer and chat template.

Both processes of an engine use it, so it imports no torch. `services.engine.compute.loader` reads
the weights.

known_models.py   finds the files of a model, by path or by a known name
gguf_*.py         GGUF files: header, configuration, tokenizer
spm_*.py          SentencePiece tokenizers
hf_*.py           Hugging Face folders: configuration (experts, rotary embeddings, windows),
                  tokenizer, chat template
quantisation.py, compressed_tensors.py   how a folder's weights are quantised
deepseek_v4.py, deepseek_v41.py   config.json of DeepSeek V4 and V4.1, which have keys of their own
engram.py         primes and factors of V4.1's look-ups; engram_ids.py: its token ids
template_check.py   refuses a chat template that cannot be compiled
json_keys.py, file_errors.py   checked access to keys; errors name the file
"""

from services.common.text.assets import TextAssets
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.known_models import find_model

__all__ = ["load_text_assets"]


def load_text_assets(model: str) -> TextAssets:
    """Tokenizer, template and special tokens of a model given by path or known name.

    Imports neither torch nor numpy.

    Raises:
        ModelFileError: no such model, or files that cannot be served.
    """
    found = find_model(model)
    if found.path.is_dir():
        from services.engine.model_files.hf_folder import folder_text

        return folder_text(found.path)
    from services.engine.model_files.gguf_header import read_header
    from services.engine.model_files.gguf_text import text_assets

    with naming_file(found.path):
        return text_assets(read_header(found.path).metadata)
