"""A chat template whose own text is rendered in trusted characters (see `control_tokens`).

Constants, special tokens and roles are `Trusted`: the template compares and splits with them as
with plain text, but what it outputs or joins is in trusted characters. An operation that could lose
this raises TypeError, so the template cannot be used this way; it is never wrong without a word.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import jinja2
import jinja2.nodes
import jinja2.visitor

from services.common.text.control_tokens import ControlTokens

_KEY = object()
_CONVERSION = re.compile(r"(%(?:\([^)]*\))?[-#0 +]*\d*(?:\.\d+)?[a-zA-Z%])")


class Trusted(str):
    """Text of the server that is joined and output in trusted characters.

    Only `of` makes it: `Trusted(text)` is plain text, since libraries call a text's own class.
    """

    __slots__ = ("_control",)
    _control: ControlTokens

    def __new__(cls, text: object = "", key: object = None) -> Any:
        return str.__new__(cls if key is _KEY else str, text)

    @classmethod
    def of(cls, text: str, control: ControlTokens) -> Self:
        """Make one."""
        made: Self = cls.__new__(cls, text, _KEY)
        made._control = control
        return made

    def __str__(self) -> str:
        return self._control.trusted(str.__str__(self))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __add__(self, other: str) -> str:
        return str(self) + str(other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return str(other) + str(self) if isinstance(other, str) else NotImplemented

    def __mod__(self, values: object) -> str:
        parts = _CONVERSION.split(str.__str__(self))  # text, conversion, text, …
        parts[::2] = map(self._control.trusted, parts[::2])
        return "".join(parts) % values

    def __getitem__(self, key: Any) -> Self:
        return self.of(str.__getitem__(self, key), self._control)

    def __iter__(self) -> Iterator[Self]:
        return (self.of(c, self._control) for c in str.__iter__(self))

    def join(self, texts: Iterable[object]) -> str:
        return str(self).join(map(str, texts))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if not old:
            raise TypeError("replace of an empty text in the template's own text")
        parts = str.split(self, str.__str__(old), count)
        return str(new).join(map(self._control.trusted, parts))


def _kept(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: Trusted, *args: Any, **named: Any) -> Any:
        made = method(self, *args, **named)
        if isinstance(made, str):
            return self.of(made, self._control)
        return type(made)(self.of(part, self._control) for part in made)

    return call


def _raising(name: str) -> Callable[..., NoReturn]:
    def call(self: Trusted, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{name} of the template's own text {str.__str__(self)!r}")

    return call


# Methods whose result consists of this text alone.
_KEEP = (
    *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "upper", "lower", "title"),
    *("capitalize", "casefold", "swapcase", "split", "rsplit", "splitlines", "__mul__", "__rmul__"),
)
# Other methods that return text. (`format`: jinja's sandbox calls str's own by its name.)
_RAISE = (
    *("format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate"),
    *("partition", "rpartition", "encode"),
)
for _name in _KEEP:
    setattr(Trusted, _name, _kept(_name))
for _name in _RAISE:
    setattr(Trusted, _name, _raising(_name))


class TrustedTemplate:
    """A template with trusted constants; thread-safe.

    Raises:
        jinja2.TemplateError: the source cannot be compiled.
    """

    def __init__(
        self, environment: jinja2.Environment, source: str, control: ControlTokens
    ) -> None:
        self.control = control
        marker = _Marker(control)
        tree = marker.visit(environment.parse(source))
        tree.set_environment(environment)
        code = environment.compile(tree)
        variables = environment.make_globals(marker.constants)
        self._template = jinja2.Template.from_code(environment, code, variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        **variables: Any,
    ) -> str:
        """As Template.render, but the template's own text is in trusted characters.

        Raises:
            Exception: of any kind, if the template fails or does not keep its text apart.
        """
        of, control = Trusted.of, self.control
        tokens = {name: of(text, control) for name, text in special_tokens.items()}
        marked = [{**message, "role": of(message["role"], control)} for message in messages]
        return self._template.render(messages=marked, **tokens, **variables)


def replace_filter(text: object, old: str, new: object, count: int | None = None) -> str:
    """Jinja's `replace`, which finds a trusted `old` as plain text."""
    most = -1 if count is None else count
    if isinstance(text, Trusted):
        return text.replace(old, str(new), most)
    found = str.__str__(old) if isinstance(old, str) else str(old)
    return str(text).replace(found, str(new), most)


class _Marker(jinja2.visitor.NodeTransformer):
    """Makes the text of a template trusted where it can be a part of a control token."""

    def __init__(self, control: ControlTokens) -> None:
        self.constants: dict[str, Any] = {}
        self._control = control

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Node:
        node.data = self._control.trusted(node.data)
        return node

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:
        if not isinstance(node.value, str) or not self._control.overlaps(node.value):
            return node
        name = f"_trusted_{len(self.constants)}"
        self.constants[name] = Trusted.of(node.value, self._control)
        return jinja2.nodes.Name(name, "load", lineno=node.lineno)

    def visit_Call(self, node: jinja2.nodes.Call) -> jinja2.nodes.Node:
        """Make filters of `join` and `replace`: a plain text's own do not see what is trusted."""
        self.generic_visit(node)
        method = node.node
        if not isinstance(method, jinja2.nodes.Getattr) or node.kwargs or not node.args:
            return node
        if method.attr == "join":
            value, arguments = node.args[0], [method.node]
        elif method.attr == "replace":
            value, arguments = method.node, node.args
        else:
            return node
        line = node.lineno
        return jinja2.nodes.Filter(value, method.attr, arguments, [], None, None, lineno=line)
