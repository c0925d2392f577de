"""Loads a model from a GGUF file. Tensors stay in the file until they are packed."""

from functools import partial
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from services.engine.compute.loader.gguf_weights import ROPE_FACTORS, GgufWeights, decode_tensor
from services.engine.compute.loader.source import NOT_DIGESTED, ModelSource, file_digest
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.gguf_config import gguf_config
from services.engine.model_files.gguf_header import GgufHeader, read_header
from services.engine.model_files.gguf_text import eos_ids, text_assets


def load_gguf(path: Path, name: str, *, digest: bool = True) -> ModelSource:
    """Load the model of a GGUF file.

    Args:
        digest: whether to read the whole file for the revision.

    Raises:
        ModelFileError: an architecture that is not served, or a tensor that cannot be decoded.
    """
    with naming_file(path):
        return _load(path, name, digest=digest)


def _load(path: Path, name: str, *, digest: bool) -> ModelSource:
    header = read_header(path)
    config = gguf_config(header, path, _rope_factors(path, header))
    weights = GgufWeights(path, header, config)
    kinds = sorted({GGMLQuantizationType(t.ggml_type).name for t in header.tensors.values()})
    quantised = [kind for kind in kinds if kind not in ("F32", "F16", "BF16")]
    return ModelSource(
        name=name,
        config=config,
        weights=weights,
        read_text=partial(text_assets, header.metadata),
        eos_token_ids=eos_ids(header.metadata),
        revision=file_digest([path], name) if digest else NOT_DIGESTED,
        quantisation="+".join(quantised) or "none",
    )


def _rope_factors(path: Path, header: GgufHeader) -> tuple[float, ...] | None:
    info = header.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    data = np.memmap(path, dtype=np.uint8, mode="r")
    return tuple(decode_tensor(data, ROPE_FACTORS, info).tolist())
