"""Text on the way in and out: tokenizer and chat template, without torch or transformers.

assets.py         `TextAssets`: what an engine hands out by digest
tokenizer.py      `Tokenizer`: text to ids, ids to exact bytes
chat_template.py  `ChatTemplate`: messages to text, in jinja2's sandbox
deepseek_encoding.py  the same for DeepSeek V4 models, which have no template
tool_prompt.py    tools and calls as messages, for templates that know none
"""

from services.common.text.assets import TextAssets
from services.common.text.chat_template import ChatTemplate, chat_ids, render_chat, template_of
from services.common.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextAssets", "Tokenizer", "chat_ids", "render_chat", "template_of"]
