"""jinja2's sandbox with limits of time and size, for templates whose every operation has a cost.

A template can loop for ever or make a string of gigabytes. Within `limited`, loops, macros, joined
and added texts check both limits. A single operation of Python cannot be interrupted, e.g.
`"x" * 10**10`: `template_check.is_bounded` says whether a template has none of these, and any other
must be rendered in a process that can be killed. Outside of `limited` nothing is checked.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2.nodes as n
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateTooCostlyError(Exception):
    """A limit of time or size is exceeded."""


class _Limits(threading.local):
    until_s: float | None = None
    cpu_until_s = 0.0
    max_chars = 0


_limits = _Limits()


@contextlib.contextmanager
def limited(seconds: float, max_chars: int) -> Iterator[None]:
    """Limit what templates do in this thread.

    Args:
        seconds: of this thread's processor time: other threads and processes do not count.
        max_chars: of each text, or items of each list, that a template makes.
    """
    _limits.until_s, _limits.max_chars = time.monotonic() + seconds, max_chars
    _limits.cpu_until_s = time.thread_time() + seconds
    try:
        yield
    finally:
        _limits.until_s = None


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module.

    Raises:
        TemplateTooCostlyError: while a template renders within `limited`.
    """

    # Also: these are not computed while a template is compiled.
    intercepted_binops = frozenset({"+", "%", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["namespace"] = _Namespace

    def check_filters(self) -> None:
        """Check the sizes of what filters make; call it when the environment has all of them."""
        for name in ("join", "replace", "tojson", "string"):
            self.filters[name] = _checked(self.filters[name])

    def tick(self) -> None:
        """Called at the start of each turn of a loop and of each macro."""
        _check(0)

    def join_parts(self, *parts: Any) -> str:
        """What `a ~ b` does."""
        return self.concat(map(str, parts))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        if _limits.until_s is None:
            return "".join(parts)
        kept, size = [], 0
        for part in parts:
            size += len(part)
            _check(size)
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator that may make something large."""
        if _limits.until_s is not None:
            sized = isinstance(left, str | list | tuple)
            if operator == "+":
                _check(len(left) + len(right) if sized and hasattr(right, "__len__") else 0)
            elif sized or isinstance(right, str | list | tuple):
                raise TemplateTooCostlyError(f"{operator} of a text or a list")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> n.Template:
        tree = super()._parse(source, name, filename)
        loops: list[n.For | n.Macro] = [*tree.find_all(n.For), *tree.find_all(n.Macro)]
        for loop in loops:
            loop.body.insert(0, self._node(n.ExprStmt(self._call("tick", [])), loop.lineno))
        _Joins(self).visit(tree)
        return tree

    def _call(self, method: str, arguments: list[n.Expr]) -> n.Call:
        return n.Call(n.EnvironmentAttribute(method), arguments, [], None, None)

    def _node(self, node: Any, line: int) -> Any:
        return node.set_lineno(line).set_environment(self)


class _Joins(jinja2.visitor.NodeTransformer):
    """Makes `a ~ b` a call of `join_parts`."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_Concat(self, node: n.Concat) -> n.Node:
        self.generic_visit(node)
        call = self._environment._call("join_parts", node.nodes)
        made: n.Node = self._environment._node(call, node.lineno)
        return made


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's own would print what namespaces hold, nested


def _check(size: int) -> None:
    until_s = _limits.until_s
    if until_s is None:
        return
    if size > _limits.max_chars:
        raise TemplateTooCostlyError(f"makes more than {_limits.max_chars} characters")
    # The second clock costs more, and is never ahead of the first.
    if time.monotonic() > until_s and time.thread_time() > _limits.cpu_until_s:
        raise TemplateTooCostlyError("takes too long")


def _checked(make: Any) -> Any:
    @functools.wraps(make)  # also copies the mark of filters that take the environment
    def make_checked(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        _check(len(made))
        return made

    return make_checked
