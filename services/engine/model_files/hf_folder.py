"""Reads tokenizer, chat template and end-of-sequence ids of a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.text.assets import TextAssets
from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.json_keys import read_json
from services.engine.model_files.spm_file import read_spm

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def folder_eos(folder: Path) -> tuple[int, ...]:
    """All end-of-sequence ids; generation_config.json takes precedence over config.json, and there
    the model's own key over that of its text part."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        keys = read_json(path) if path.exists() else {}
        inner = keys.get("text_config")
        value = keys.get("eos_token_id")
        if value is None and isinstance(inner, dict):
            value = inner.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def folder_text(folder: Path) -> TextAssets:
    """Tokenizer and chat template of a folder; imports no torch.

    Raises:
        ModelFileError: there is no tokenizer.json, and no tokenizer.model that can be served.
    """
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special = {name: _token(config[name]) for name in _TOKEN_NAMES if config.get(name)}
    return TextAssets.of(
        tokenizer_json=_tokenizer(folder),
        chat_template=_template(folder, config),
        special_tokens=special,
        add_bos=bool(config.get("add_bos_token", False)),
    )


def _tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if path.exists():
        return path.read_bytes()
    path = folder / "tokenizer.model"
    if path.exists():
        return read_spm(path).to_str().encode()
    raise ModelFileError(
        f"{folder}: neither tokenizer.json nor tokenizer.model (SentencePiece) exists: save the "
        "tokenizer into the folder"
    )


def _token(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default", ""))
    return str(template)
