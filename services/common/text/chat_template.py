"""A model's chat template: turns messages into the text format that the model was trained on.

Templates come from model files. They run in jinja2's immutable sandbox with the helpers that
Hugging Face's libraries provide. Any error in a template is an INVALID_ARGUMENT on `chat`.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from google.protobuf import json_format

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.text.assets import TextAssets
from services.common.text.bounded_template import BoundedEnvironment, TemplateTooCostlyError
from services.common.text.control_tokens import ControlTokens, without_surrogates
from services.common.text.deepseek_encoding import DeepseekEncoding, is_deepseek_v4
from services.common.text.template_check import is_bounded
from services.common.text.tool_prompt import (
    in_messages,
    takes_text_arguments,
    with_text_arguments,
)
from services.common.text.tool_schema import plain, schema_of
from services.common.text.trusted_template import TrustedTemplate, replace_filter

log = logging.getLogger(__name__)

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Names that a caller's template_args must not replace.
_RESERVED = frozenset({"messages", "tools", "documents", "raise_exception", "strftime_now"})


class ChatTemplate:
    """A compiled template; thread-safe."""

    def __init__(self, assets: TextAssets, now: Callable[[], datetime] = datetime.now) -> None:
        self._tokens = dict(assets.special_tokens)
        self._problem = "" if assets.chat_template else "the model has no chat template"
        self.source = assets.chat_template
        self._text_arguments = takes_text_arguments(self.source)
        self.uses_tools = False
        """Whether the template supports tools; otherwise `tool_prompt` converts them."""
        self.bounded = False
        """Whether `render` may run within `bounded_template.limited`; otherwise only a process
        that can be killed may call it (or compile it), unless its operator trusts it."""
        self._template: jinja2.Template | None = None
        self._environment = _environment(now)
        self._trusted: TrustedTemplate | None = None
        if self.source:
            self._examine()

    def _examine(self) -> None:
        try:
            tree = self._environment.parse(self.source)
            self.bounded = is_bounded(tree, self.source)
            self.uses_tools = "tools" in _free_names(self.source)
            if self.bounded:
                self._compile()
        except (jinja2.TemplateError, RecursionError) as error:
            self._problem = f"the model's chat template cannot be used: {error}"

    def _compile(self) -> jinja2.Template:
        if self._template is None:
            self._template = self._environment.from_string(self.source)
        return self._template

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Names that the template uses, e.g. "bos_token" → "<s>"."""
        return self._tokens

    @property
    def problem(self) -> str:
        """The reason why `render` refuses every chat; empty if the template can be used."""
        return self._problem

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, ready for the model's next turn.

        Args:
            messages: dictionaries with "role", "content" and what else the template knows.
            tools: functions in OpenAI's form, or None.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_args: further variables of the template, e.g. enable_thinking.

        Raises:
            InvalidArgumentError: on `chat`, with the template's own words where it has some.
            TemplateTooCostlyError: within `bounded_template.limited` only.
        """
        if self._problem:
            _refuse("chat", self._problem)
        variables = self._variables(add_generation_prompt, template_args)
        if not self.uses_tools:
            messages, tools = in_messages(messages, tools or ()), None
        elif self._text_arguments:
            messages = [with_text_arguments(message) for message in messages]
        try:
            return self._compile().render(
                messages=messages, tools=tools or None, **self._tokens, **variables
            )
        except (TemplateTooCostlyError, MemoryError):
            raise
        except Exception as error:  # a template may fail in any way Python can
            _refuse("chat", f"the model's chat template refuses it: {error or type(error)}")

    def render_marked(
        self,
        control: ControlTokens,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str | None:
        """As `render`, with the server's own text in trusted characters.

        None if the template does something with that text that loses this.

        Raises:
            TemplateTooCostlyError: within `bounded_template.limited` only.
        """
        variables = self._variables(True, template_args)
        if not self.uses_tools:
            messages, tools = in_messages(messages, tools or (), control.trusted), None
        elif self._text_arguments:
            messages = [with_text_arguments(message) for message in messages]
        try:
            trusted = self._trusted_template(control)
            return trusted.render(messages, self._tokens, tools=tools or None, **variables)
        except (TemplateTooCostlyError, MemoryError):
            raise
        except Exception as error:  # as in `render`
            log.debug("the chat template does not keep its own text apart: %s", error)
            return None

    def prepare(self, control: ControlTokens) -> None:
        """Compile now, if it is bounded, what the first `render_marked` would have to wait for."""
        if self.bounded and not self._problem:
            with contextlib.suppress(Exception):  # `render_marked` then returns None
                self._trusted_template(control)

    def _trusted_template(self, control: ControlTokens) -> TrustedTemplate:
        if self._trusted is None or self._trusted.control is not control:
            self._trusted = TrustedTemplate(self._environment, self.source, control)
        return self._trusted

    def _variables(
        self, add_generation_prompt: bool, template_args: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        extra = dict(template_args or {})
        for name in extra:
            if name in _RESERVED or name in self._tokens:
                _refuse("chat.template_args", f"{name} is set by the server")
        return {"add_generation_prompt": add_generation_prompt, **extra}


Template = ChatTemplate | DeepseekEncoding


def template_of(assets: TextAssets) -> Template:
    """The renderer for the chats of a model."""
    return DeepseekEncoding(assets) if is_deepseek_v4(assets) else ChatTemplate(assets)


def render_chat(template: Template, chat: inference_pb2.Chat) -> str:
    """Render a Chat message of the API.

    Raises:
        InvalidArgumentError: no messages, an unknown role, or the template refuses.
    """
    messages, tools, args = chat_parts(chat)
    return template.render(messages, tools=tools, template_args=args)


def chat_ids(template: Template, chat: inference_pb2.Chat) -> list[int] | None:
    """The token ids, if the template makes them itself; None if its text has to be tokenised.

    Raises:
        InvalidArgumentError: as render_chat.
    """
    if isinstance(template, ChatTemplate):
        return None
    messages, tools, args = chat_parts(chat)
    return template.encode(messages, tools=tools, template_args=args)


def chat_parts(
    chat: inference_pb2.Chat,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """The messages, tools and template arguments of a Chat.

    Raises:
        InvalidArgumentError: no messages, an unknown role, or a tool that cannot be read.
    """
    if not chat.messages:
        _refuse("chat.messages", "must not be empty")
    messages = [_message(index, message) for index, message in enumerate(chat.messages)]
    _name_results(messages)
    args = plain(json_format.MessageToDict(chat.template_args))
    return messages, [_tool(index, tool) for index, tool in enumerate(chat.tools)], args


def _message(index: int, message: inference_pb2.ChatMessage) -> dict[str, Any]:
    if message.role not in ROLES:
        known = ", ".join(sorted(ROLES))
        _refuse(f"chat.messages[{index}].role", f"must be one of {known}, got {message.role!r}")
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if getattr(message, name):
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Add the function's name to tool results: clients send an id, some templates need a name."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name:
            message.setdefault("name", name)


def _tool_call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
        if "\\u" in call.arguments:
            arguments = without_surrogates(arguments)
    except (ValueError, RecursionError):  # an answer was cut inside its call
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(index: int, tool: inference_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    schema = schema_of(index, tool)
    function["parameters"] = without_surrogates(schema) if "\\u" in tool.parameters_json else schema
    return {"type": "function", "function": function}


def _free_names(source: str) -> set[str]:
    """The variables that a template expects, without computing what is constant in it."""
    environment = BoundedEnvironment(
        extensions=_EXTENSIONS, optimized=False, finalize=jinja2.pass_context(lambda _, made: made)
    )
    return jinja2.meta.find_undeclared_variables(environment.parse(source))


def _environment(now: Callable[[], datetime]) -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
    environment.filters["tojson"] = _tojson
    environment.filters["replace"] = replace_filter
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.check_filters()
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """Supports {% generation %}…{% endgeneration %}, which marks answers for training only."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


_EXTENSIONS = (_GenerationTag, jinja2.ext.loopcontrols)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter, which escapes for HTML; models were not trained on that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(field, problem, reason="CHAT_TEMPLATE")
