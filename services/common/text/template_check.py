"""Whether each single operation of a template takes little time and memory.

A list of what is allowed: a template with anything else is rendered in a process of its own. What
is allowed makes values at most a few times larger than what it got, and what repeats (loops,
macros, `+`, `~`) is limited by `bounded_template`. Lists and maps of variables are not allowed:
nested in one another they grow with every level when they are printed.
"""

from collections.abc import Iterable

import jinja2.nodes as n

from services.common.text.bounded_template import OPERATORS

MAX_SOURCE_CHARS = 64 * 1024
_NODES = (
    n.Template, n.Output, n.TemplateData, n.Const, n.Name, n.NSRef, n.Getattr, n.Getitem, n.Slice,
    n.If, n.CondExpr, n.For, n.Assign, n.AssignBlock, n.Macro, n.Scope, n.Break, n.Continue,
    n.Filter, n.Test, n.Call, n.Keyword, n.Compare, n.Operand, n.And, n.Or, n.Not, n.Sub,
    n.Mod, n.Neg, n.Pos, n.List, n.Tuple, n.Dict, n.Pair, n.ExprStmt,
)  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    "trim length count string upper lower capitalize title first last default d list int float "
    "items dictsort map select reject selectattr rejectattr tojson join replace safe"
)
_MAPPED = _words("trim length string upper lower capitalize first last")
_METHODS = _words(
    "strip lstrip rstrip split rsplit splitlines startswith endswith upper lower title capitalize "
    "removeprefix removesuffix items keys values get replace"
)
# Their arguments are compared with each character, or are inserted.
_CONSTANT_ARGUMENTS = _words(
    "strip lstrip rstrip split rsplit replace join tojson trim strftime_now"
)
_INSERTING = frozenset({"replace", "join", "tojson"})
_FUNCTIONS = frozenset({"namespace", "raise_exception", "strftime_now", "range"})
_MAX_INSERTED = 8


def is_bounded(tree: n.Template, source: str) -> bool:
    """Whether a template may be rendered within `bounded_template.limited`.

    Args:
        tree: as BoundedEnvironment parsed the source.
    """
    if len(source) > MAX_SOURCE_CHARS:
        return False
    macros = {macro.name for macro in tree.find_all(n.Macro)}
    stored = {name.name for name in tree.find_all(n.Name) if name.ctx != "load"}
    # A variable of such a name could hold another function.
    callable_names = (_FUNCTIONS | macros) - stored
    return all(_is_allowed(node, callable_names) for node in (tree, *tree.find_all(n.Node)))


def _is_allowed(node: n.Node, callable_names: Iterable[str]) -> bool:
    if not isinstance(node, _NODES):
        return False
    match node:
        case n.For():
            return not node.recursive
        case n.NSRef():
            return node.attr not in _METHODS
        case n.Tuple():
            return node.ctx == "store" or _constant(node.items)
        case n.List():
            return _constant(node.items)
        case n.Dict():
            return _constant(pair.value for pair in node.items)
        case n.Filter():
            return node.name in OPERATORS or (node.name in _FILTERS and _filter_allowed(node))
        case n.Call():
            return _call_allowed(node, callable_names)
    return True


def _filter_allowed(node: n.Filter) -> bool:
    if node.dyn_args or node.dyn_kwargs:
        return False
    if node.name == "map" and node.args:
        first = node.args[0]
        return isinstance(first, n.Const) and first.value in _MAPPED
    return _arguments_allowed(node.name, node)


def _call_allowed(node: n.Call, callable_names: Iterable[str]) -> bool:
    if node.dyn_args or node.dyn_kwargs:
        return False
    target = node.node
    if isinstance(target, n.Getattr):
        return target.attr in _METHODS and _arguments_allowed(target.attr, node)
    if not isinstance(target, n.Name) or target.name not in callable_names:
        return False
    if target.name == "namespace":
        return not node.args and all(pair.key not in _METHODS for pair in node.kwargs)
    return _arguments_allowed(target.name, node)


def _arguments_allowed(name: str, node: n.Filter | n.Call) -> bool:
    if name not in _CONSTANT_ARGUMENTS:
        return True
    values = [*node.args, *(pair.value for pair in node.kwargs)]
    return _constant(values) and (name not in _INSERTING or all(map(_small, values)))


def _small(node: n.Expr) -> bool:
    value = getattr(node, "value", None)
    if isinstance(value, str):
        return len(value) <= _MAX_INSERTED
    return not isinstance(value, int) or value <= _MAX_INSERTED


def _constant(nodes: Iterable[n.Node]) -> bool:
    return all(
        isinstance(node, n.Const) or (isinstance(node, n.List | n.Tuple) and _constant(node.items))
        for node in nodes
    )
