"""Loads a model from a Hugging Face folder. Tensors stay in their files until packed."""

import re
from functools import partial
from pathlib import Path

from services.engine.compute.loader.folder_weights import FolderWeights
from services.engine.compute.loader.source import NOT_DIGESTED, ModelSource, file_digest
from services.engine.compute.loader.tensor_files import TensorFiles
from services.engine.compute.models.weights import EMBEDDING, HEAD
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.engram_ids import with_token_ids
from services.engine.model_files.hf_config import folder_config
from services.engine.model_files.hf_folder import folder_eos, folder_text
from services.engine.model_files.json_keys import read_json
from services.engine.model_files.quantisation import folder_quantisation

MAX_PADDING = 1024
"""Rows of an embedding beyond the vocabulary that are taken as padding, fewer than this."""
_TABLES = (EMBEDDING, HEAD, "embed.weight", "head.weight")
"""Embedding and head, and those of DeepSeek V4; its tables of experts have rows per token too."""
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def load_folder(folder: Path, name: str, *, digest: bool = True) -> ModelSource:
    """Load the model of a folder.

    Args:
        digest: whether to read all files for the revision.

    Raises:
        ModelFileError: a file is missing, broken or not supported, or a tensor does not fit the
            configuration.
    """
    config, quantisation = (
        with_token_ids(folder_config(folder), folder),
        folder_quantisation(folder),
    )
    files = weight_files(folder)
    stored = TensorFiles(files)
    if config.moe:
        _check_expert_ids(stored, config.moe.num_experts)
    cut = _unpadded(stored, config.vocab_size)
    return ModelSource(
        name=name,
        config=config,
        weights=FolderWeights(stored, quantisation, name=name, most_rows=cut),
        read_text=partial(folder_text, folder),
        eos_token_ids=folder_eos(folder),
        revision=file_digest(files, name) if digest else NOT_DIGESTED,
        quantisation=quantisation.label if quantisation else "none",
    )


def weight_files(folder: Path) -> list[Path]:
    """The files with weights, sorted by name; those of the index if there is one.

    A folder may also hold the weights in the publisher's own format; those files are not read.

    Raises:
        ModelFileError: there is no such file, or a file of the index is missing or wrong.
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
    return _whole_set(folder, files)


def _listed_files(index: Path) -> list[Path]:
    listed = read_json(index)
    names = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(names, dict) or not names:
        raise ModelFileError(f"{index}: weight_map is missing or empty")
    files = [index.parent / Path(str(name)).name for name in sorted(set(names.values()))]
    for path in files:
        if not path.exists():
            raise ModelFileError(f"{path}: missing, but {index.name} names it: download it")
    found = TensorFiles(files).entries
    for tensor, file in names.items():
        if tensor not in found or found[tensor].file.name != Path(str(file)).name:
            raise ModelFileError(
                f"{index}: tensor {tensor!r} is not in {file}: download the files again"
            )
    return files


def _whole_set(folder: Path, files: list[Path]) -> list[Path]:
    """Check, without an index, that no shard is missing; names say how many there are.

    Raises:
        ModelFileError: one is missing.
    """
    shards = [found for path in files if (found := _SHARD.match(path.name))]
    if not shards:
        return files
    stem, count = shards[0]["stem"], int(shards[0]["count"])
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name in names:
        if not (folder / name).exists():
            raise ModelFileError(f"{folder / name}: missing, one of {count} files: download it")
    return [folder / name for name in names]


def _check_expert_ids(stored: TensorFiles, count: int) -> None:
    for name in stored.entries:
        found = _EXPERT.search(name)
        if found and int(found[1]) >= count:
            raise stored.error(name, f"expert {found[1]} is beyond the {count} of config.json")


def _unpadded(stored: TensorFiles, vocab_size: int) -> dict[str, int]:
    """Tables with a few more rows than the vocabulary: these are not used."""
    tables = (name for name in stored.entries if name in _TABLES or name.endswith(".tid2eid"))
    shapes = ((name, stored.entries[name].shape) for name in tables)
    return {
        name: vocab_size
        for name, shape in shapes
        if shape and vocab_size < shape[0] < vocab_size + MAX_PADDING
    }
