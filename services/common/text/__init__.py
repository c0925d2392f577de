"""Tokenizer and chat template of a model, without torch or transformers; for gateway and engine.

assets.py         `TextAssets`: the files behind both, which engines send by digest
tokenizer.py      `Tokenizer`: text to ids, ids to exact bytes
chat_template.py  `ChatTemplate`: messages to text, in jinja2's sandbox
bounded_template.py, template_check.py  what a template may cost, and which may be limited
prompt.py         a caller's prompt to ids; names of control tokens in it remain text
control_tokens.py, trusted_template.py  how these are told from the template's own
deepseek_encoding.py  the same for DeepSeek V4 models, which have no template
deepseek_marks.py, deepseek_recipe.py  marks and library of DeepSeek's chats
tool_prompt.py    tools and calls as messages, for templates without support for them
tool_schema.py    the schema of a tool's arguments
parser_names.py   the names of answer parsers, as options spell them
byte_level.py     a tokenizer with one token per byte, for simulated engines and tests
"""

from services.common.text.assets import TextAssets
from services.common.text.chat_template import ChatTemplate, chat_ids, render_chat, template_of
from services.common.text.prompt import RenderedChat, render_prompt, rendered_ids, text_ids
from services.common.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "RenderedChat",
    "TextAssets",
    "Tokenizer",
    "chat_ids",
    "render_chat",
    "render_prompt",
    "rendered_ids",
    "template_of",
    "text_ids",
]
