"""Prompts of callers as token ids: what a caller writes never becomes a control token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.text.chat_template import (
    ChatTemplate,
    Template,
    chat_ids,
    chat_parts,
)
from services.common.text.control_tokens import ControlTokens, strings_in, with_strings
from services.common.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation."""

    text: str
    marked: str | None = None
    """The same with the template's own text in trusted characters. None if no text of the caller
    can be a part of a control token."""


def render_prompt(
    template: Template, control: ControlTokens, chat: inference_pb2.Chat
) -> RenderedChat:
    """Render a Chat; again if the caller's text may spell a control token, or be a part of one.

    Raises:
        InvalidArgumentError: as render_chat; or the chat spells a control token, or the template
            would make one of it, and the template does not show which text is its own.
    """
    messages, tools, args = chat_parts(chat)
    text = template.render(messages, tools=tools, template_args=args)
    callers = [*_strings(messages), *strings_in(tools), *strings_in(args)]
    if not isinstance(template, ChatTemplate) or not any(map(control.overlaps, callers)):
        return RenderedChat(text)
    marked = template.render_marked(control, messages, tools=tools, template_args=args)
    if marked is not None and control.plain(marked) == text:
        return RenderedChat(text, marked)
    spelled = control.first_in(callers)
    if spelled is not None:
        problem = f"the text {spelled!r} is a control token of the model, and its chat template "
        _refuse(problem + "cannot keep it apart; leave it out")
    if control.all_in(text) != _all_without(template, control, messages, tools, args):
        _refuse(
            "parts of its text would become control tokens of the model when the chat template "
            "joins or changes them; leave out the symbols that control tokens begin and end with"
        )
    return RenderedChat(text)


def _all_without(
    template: ChatTemplate, control: ControlTokens, *parts: Any
) -> Sequence[str] | None:
    """The control tokens of a chat whose callers' text can make none; None if it has no form."""
    try:
        messages, tools, args = (with_strings(part, control.defused) for part in parts)
        return control.all_in(template.render(messages, tools=tools, template_args=args))
    except (InvalidArgumentError, RecursionError):
        return None


def rendered_ids(
    template: Template, tokenizer: Tokenizer, chat: inference_pb2.Chat, rendered: RenderedChat
) -> list[int]:
    """The token ids of a rendered Chat.

    Raises:
        InvalidArgumentError: as render_prompt.
    """
    own = chat_ids(template, chat)
    if own is not None:  # this template makes token ids itself
        return own
    if rendered.marked is None:
        return tokenizer.encode(rendered.text, add_special_tokens=False)
    try:
        return tokenizer.encode_marked(rendered.text, rendered.marked)
    except ValueError as error:
        raise InvalidArgumentError.for_field("chat", str(error)) from error


def text_ids(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[int]:
    """The token ids of a plain text.

    Args:
        parse_special: names of control tokens in it become those tokens.

    Raises:
        InvalidArgumentError: a control token cannot be kept out of the text.
    """
    if parse_special:
        return tokenizer.encode(text)
    try:
        return tokenizer.encode_text(text)
    except ValueError as error:
        raise InvalidArgumentError.for_field("text", str(error)) from error


def _strings(messages: list[dict[str, Any]]) -> list[str]:
    """What the caller wrote in messages; names of fields and roles are the server's."""
    texts = []
    for message in messages:
        inner: Mapping[str, Any]
        for name, value in message.items():
            if name == "tool_calls":
                for inner in value:
                    texts += [inner["id"], *strings_in([*inner["function"].values()])]
            elif name != "role":
                texts.append(value)
    return texts


def _refuse(problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field("chat", problem, reason="CHAT_TEMPLATE")
