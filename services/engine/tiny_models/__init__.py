"""Writes tiny checkpoints with random weights in the published layout. Imports no torch.

write.py           a whole folder: what `inferfleet tiny-model` and `--model tiny:NAME` call
declarations/      one file per family: the keys of config.json, and the tensors that follow
declaration.py     what a declaration consists of
values.py          random values, equal on every machine
formats.py         the formats that weights are stored in; float8.py rounds to FP8
safetensors_file.py   writes a file tensor by tensor
tokenizer.py       a small byte-level BPE tokenizer
"""

from services.engine.tiny_models.declarations import DECLARATIONS
from services.engine.tiny_models.formats import FORMATS
from services.engine.tiny_models.write import TinyModelError, find_architecture, write_tiny_model

__all__ = ["DECLARATIONS", "FORMATS", "TinyModelError", "find_architecture", "write_tiny_model"]
