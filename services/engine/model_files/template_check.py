"""Refuses a model whose chat template cannot be compiled, before its engine serves."""

from pathlib import Path

from services.common.errors import FleetError
from services.common.text.assets import TextAssets
from services.common.text.chat_template import ChatTemplate, template_of
from services.engine.contract.model_config import ModelFileError

MAX_BYTES = 1024 * 1024
"""Far above every template in use; larger ones would take seconds to compile."""


def check_template(assets: TextAssets, path: Path) -> None:
    """Compile the chat template, if the model has one.

    Args:
        path: the model's folder or GGUF file, for the message.

    Raises:
        ModelFileError: it is too long, or cannot be compiled.
    """
    source = assets.chat_template
    key = f"{path}: {'chat_template' if path.is_dir() else 'tokenizer.chat_template'}"
    if not source:
        return
    if len(source) > MAX_BYTES:
        raise ModelFileError(f"{key}: {len(source)} characters, at most {MAX_BYTES} are read")
    try:
        template = template_of(assets)
        problem = template.problem if isinstance(template, ChatTemplate) else ""
    except FleetError:
        return  # the library of its encoding is missing; the gateway reports that
    except Exception as error:  # compiling a template may fail in any way Python can
        problem = f"the model's chat template cannot be used: {type(error).__name__}: {error}"
    if problem:
        raise ModelFileError(
            f"{key}: {problem}: repair the template, or remove it to serve text alone"
        )
