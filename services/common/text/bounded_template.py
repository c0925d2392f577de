"""jinja2's sandbox with limits of time and size, for templates whose every operation has a cost.

A template can loop for ever or make a string of gigabytes. Within `limited`, loops, macros, joined
and added texts check both limits. A single operation of Python cannot be interrupted, e.g.
`"x" * 10**10`: `template_check.is_bounded` says whether a template has none of these, and any other
must be rendered in a process that can be killed. Outside of `limited` nothing is checked.
"""

import functools
import threading
import time
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.nodes as n
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateTooCostlyError(Exception):
    """A limit of time or size is exceeded."""


class _Limits:
    def __init__(self, seconds: float, max_chars: int) -> None:
        self.max_chars = max_chars
        self.until_s = time.monotonic() + seconds
        self._seconds = seconds
        self._cpu_until_s: float | None = None

    def check_time(self) -> None:
        if time.monotonic() > self.until_s:
            self._check_cpu()

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise TemplateTooCostlyError(f"makes more than {self.max_chars} characters")
        self.check_time()

    def _check_cpu(self) -> None:
        """Other threads and processes do not count: give the thread its own time once more."""
        if self._cpu_until_s is None:
            self._cpu_until_s = time.thread_time() + self._seconds
        elif time.thread_time() > self._cpu_until_s:
            raise TemplateTooCostlyError("takes too long")


class _Current(threading.local):
    limits: _Limits | None = None


_current = _Current()


class limited:
    """Limit what templates do in this thread.

    Args:
        seconds: of the clock, and then again of this thread's processor time.
        max_chars: of each text, or items of each list, that a template makes.
    """

    __slots__ = ("_limits",)

    def __init__(self, seconds: float, max_chars: int) -> None:
        self._limits = _Limits(seconds, max_chars)

    def __enter__(self) -> None:
        _current.limits = self._limits

    def __exit__(self, *_: object) -> None:
        _current.limits = None


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module.

    Raises:
        TemplateTooCostlyError: while a template renders within `limited`.
    """

    # Also: these are not computed while a template is compiled.
    intercepted_binops = frozenset({"%", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["namespace"] = _Namespace
        self.filters.update({_TICK: _tick, _ADD: _add, _JOIN: _join})

    def check_filters(self) -> None:
        """Check the sizes of what filters make; call it when the environment has all of them."""
        for name in ("join", "replace", "tojson", "string"):
            self.filters[name] = _checked(self.filters[name])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        limits = _current.limits
        if limits is None:
            return "".join(parts)
        kept, size, most = [], 0, limits.max_chars
        for part in parts:
            size += len(part)
            if size > most:
                limits.check_size(size)
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator that may make something large of a text or a list."""
        if _current.limits is not None and (isinstance(left, _SIZED) or isinstance(right, _SIZED)):
            raise TemplateTooCostlyError(f"computes {operator} of a text or a list")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> n.Template:
        tree = super()._parse(source, name, filename)
        loops: list[n.For | n.Macro] = [*tree.find_all(n.For), *tree.find_all(n.Macro)]
        for loop in loops:
            tick = n.ExprStmt(_filter(n.Const(None), _TICK, []))
            loop.body.insert(0, tick)
        _Operators().visit(tree)
        tree.set_environment(self)
        return tree


class _Operators(jinja2.visitor.NodeTransformer):
    """Makes filters of `a + b` and `a ~ b`: jinja calls these without the sandbox's own cost."""

    def visit_Add(self, node: n.Add) -> n.Node:
        self.generic_visit(node)
        return _filter(node.left, _ADD, [node.right], node.lineno)

    def visit_Concat(self, node: n.Concat) -> n.Node:
        self.generic_visit(node)
        return _filter(node.nodes[0], _JOIN, node.nodes[1:], node.lineno)


# No name that a template can write.
_TICK, _ADD, _JOIN = "(tick)", "(add)", "(join)"
OPERATORS = frozenset({_TICK, _ADD, _JOIN})
_SIZED = (str, list, tuple)


def _filter(value: n.Expr, name: str, arguments: list[n.Expr], line: int = 1) -> n.Filter:
    return n.Filter(value, name, arguments, [], None, None, lineno=line)


# With the context, because jinja2 computes other filters of constants while it compiles.
@jinja2.pass_context
def _tick(_: object, nothing: None) -> None:
    if _current.limits is not None:
        _current.limits.check_time()


@jinja2.pass_context
def _add(_: object, left: Any, right: Any) -> Any:
    made = left + right
    if _current.limits is not None and isinstance(made, _SIZED):
        _current.limits.check_size(len(made))
    return made


@jinja2.pass_context
def _join(_: object, *parts: Any) -> str:
    return BoundedEnvironment.concat(map(str, parts))


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's own would print what namespaces hold, nested


def _checked(make: Any) -> Any:
    @functools.wraps(make)  # also copies the mark of filters that take the environment
    def make_checked(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        if _current.limits is not None:
            _current.limits.check_size(len(made))
        return made

    return make_checked
