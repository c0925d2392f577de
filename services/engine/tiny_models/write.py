"""Writes the folder of a tiny model."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from services.engine.tiny_models.declaration import Config, Declaration, TinyTensor
from services.engine.tiny_models.declarations import DECLARATIONS
from services.engine.tiny_models.formats import FORMATS, Format
from services.engine.tiny_models.safetensors_file import write_safetensors
from services.engine.tiny_models.tokenizer import make_tokenizer
from services.engine.tiny_models.values import tensor_values

_MADE_BY = "inferfleet tiny-model"
"""`_name_or_path` in config.json: folders with another one are not replaced."""
_OUTER_KEYS = (
    "_name_or_path",
    "architectures",
    "model_type",
    "torch_dtype",
    "quantization_config",
)
"""Keys of config.json that are no part of the text model, where this has a part of its own."""


class TinyModelError(ValueError):
    """What was asked for cannot be written; the message names the value and what is possible."""


def find_architecture(name: str) -> str:
    """The architecture that a name means: `qwen3-moe` and `qwen3_moe` are the same, and
    `deepseek-v4.1` and `deepseek_v41`.

    Raises:
        TinyModelError: there is none; the message lists all.
    """
    found = name.lower().replace("-", "_").replace(".", "")
    if found not in DECLARATIONS:
        raise TinyModelError(f"architecture {name!r} is none of {', '.join(sorted(DECLARATIONS))}")
    return found


def write_tiny_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    number_format: str = "float32",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors.

    The same arguments write the same bytes on every machine. The folder replaces that of an
    earlier call when it is complete.

    Args:
        folder: made if it does not exist; must be empty, or made by this function.
        number_format: one of FORMATS that the architecture has.
        changes: values of config.json other than those of the declaration.

    Raises:
        TinyModelError: an argument is invalid; nothing is written.
        OSError: the folder cannot be written.
    """
    architecture = find_architecture(architecture)
    declaration = DECLARATIONS[architecture]
    if number_format not in declaration.formats:
        known = ", ".join(declaration.formats)
        raise TinyModelError(
            f"format {number_format!r} is none of {known}, those of {architecture}"
        )
    if folder.exists() and not _may_replace(folder):
        raise TinyModelError(
            f"{folder}: exists, and was not written by this command: choose another folder"
        )
    packing = FORMATS[number_format]
    files = _text_files(declaration)
    config = _config(declaration, packing, files["tokenizer.json"], changes or {})
    place = folder.resolve()  # "." has no name of its own
    scratch = place.with_name(f".{place.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        written = _as_published(config, declaration.text_part)
        files |= {"config.json": _json(written), "generation_config.json": _json(ids)}
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8")
        _write_weights(scratch / "model.safetensors", declaration, config, packing, seed)
        _replace(place, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _replace(folder: Path, scratch: Path) -> None:
    """Put the files of `scratch` where `folder` is."""
    if folder != Path.cwd():
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        return
    for path in folder.iterdir():  # without its current folder the caller's shell would be lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in scratch.iterdir():
        path.rename(folder / path.name)


def _may_replace(folder: Path) -> bool:
    if not folder.is_dir() or not any(folder.iterdir()):
        return folder.is_dir()
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("_name_or_path") == _MADE_BY


def _text_files(declaration: Declaration) -> dict[str, str]:
    control = declaration.control_tokens
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": control.begin,
        "eos_token": control.ends[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    if declaration.chat_template:
        settings["chat_template"] = declaration.chat_template
    return {
        "tokenizer.json": make_tokenizer(control).to_str(pretty=True),
        "tokenizer_config.json": _json(settings),
    }


def _config(
    declaration: Declaration, packing: Format, tokenizer: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json, checked."""
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    tokens = max(ids.values()) + 1
    config: dict[str, Any] = {
        "_name_or_path": _MADE_BY,
        **declaration.config,
        "vocab_size": tokens,
        "bos_token_id": ids[declaration.control_tokens.begin],
        "eos_token_id": [ids[token] for token in declaration.control_tokens.ends],
        **packing.config,
    }
    for key, value in changes.items():
        if key not in declaration.config and key != "vocab_size":
            known = ", ".join(sorted([*declaration.config, "vocab_size"]))
            raise TinyModelError(f"config.json has no key {key!r} to change, only {known}")
        config[key] = value
    if config["vocab_size"] < tokens:
        raise TinyModelError(
            f"vocab_size {config['vocab_size']} is less than the tokenizer's {tokens} tokens"
        )
    try:
        config |= declaration.derive(config, Tokenizer.from_str(tokenizer))
        declaration.check(config)
    except ValueError as error:
        raise TinyModelError(str(error)) from error
    return config


def _as_published(config: Config, text_part: str) -> Config:
    """config.json, with the keys of the text model where its publisher has them."""
    if not text_part:
        return config
    outer = {key: config[key] for key in _OUTER_KEYS if key in config}
    return outer | {text_part: {key: config[key] for key in config if key not in outer}}


def _write_weights(
    path: Path, declaration: Declaration, config: Config, packing: Format, seed: int
) -> None:
    tensors = list(declaration.tensors(config))
    entries = [entry for tensor in tensors for entry in packing.entries(tensor)]
    write_safetensors(path, entries, _data(tensors, packing, seed))


def _data(tensors: list[TinyTensor], packing: Format, seed: int) -> Iterator[NDArray[np.generic]]:
    for tensor in tensors:
        yield from packing.encode(tensor, tensor_values(tensor, seed))


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
