"""Resolves `$ref` within one schema: pointers, anchors, and the ids of embedded schemas."""

from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from services.engine.grammar.schema_refused import SchemaRefusedError

MAX_INDEXED = 20_000
_MAX_DIGITS = 9
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = (
    *("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "items"),
    *("additionalItems", "unevaluatedProperties", "unevaluatedItems"),
)


class Place(NamedTuple):
    """A subschema, its path in the caller's schema, and the base of its references."""

    node: Any
    path: str
    base: str


class Resources:
    """The identified subschemas of one schema. Nothing is loaded from elsewhere."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._places: dict[str, Place] = {}
        self._bases: dict[int, str] = {}
        self._places[""] = Place(root, "", "")
        self._index(root)

    def base_of(self, node: dict[str, Any], outer: str) -> str:
        """The base of references in a node, given the base around it."""
        return self._bases.get(id(node), outer)

    def find(self, target: Any, base: str, path: str) -> Place:
        """The subschema that a reference names.

        Args:
            path: of the schema that holds the reference.

        Raises:
            SchemaRefusedError: it is not in this schema.
        """
        where = f"{path}/$ref"
        if not isinstance(target, str):
            raise SchemaRefusedError(where, "must be a string")
        try:
            document, fragment = urldefrag(urljoin(base, target))
        except ValueError as error:
            raise SchemaRefusedError(where, f"{target!r} is not a reference: {error}") from error
        fragment = unquote(fragment)
        if target.startswith("#"):
            document = base
        named = self._places.get(f"{document}#{fragment}")
        if named is not None and fragment and not fragment.startswith("/"):
            return named
        resource = self._places.get(document)
        if resource is None:
            raise SchemaRefusedError(where, f"{target!r} is not in this schema; embed it in $defs")
        if fragment and not fragment.startswith("/"):
            raise SchemaRefusedError(where, f"{target!r} is not defined")
        found = self._walk(resource, fragment)
        if found is None and target.startswith("#"):
            # `id` was no identifier after draft 4: the pointer begins at the root then.
            found = self._walk(self._places[""], fragment)
        if found is None:
            raise SchemaRefusedError(where, f"{target!r} is not defined")
        return found

    def _walk(self, resource: Place, pointer: str) -> Place | None:
        node, path, base = resource
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and is_index(name, len(node)):
                node = node[int(name)]
            else:
                return None
            path = f"{path}/{name}"
            if isinstance(node, dict):
                base = self.base_of(node, base)
        return Place(node, path, base)

    def _index(self, root: Any) -> None:
        todo: list[Place] = [Place(root, "", "")]
        for _ in range(MAX_INDEXED):
            if not todo:
                return
            node, path, base = todo.pop()
            if not isinstance(node, dict):
                continue
            base = self._register(node, path, base)
            for key in _MAPS:
                members = node.get(key)
                if isinstance(members, dict):
                    todo += [Place(one, f"{path}/{key}/{n}", base) for n, one in members.items()]
            for key in _LISTS:
                if isinstance(node.get(key), list):
                    todo += [
                        Place(one, f"{path}/{key}/{i}", base) for i, one in enumerate(node[key])
                    ]
            todo += [Place(node[key], f"{path}/{key}", base) for key in _SINGLES if key in node]

    def _register(self, node: dict[str, Any], path: str, base: str) -> str:
        own = _id_of(node)
        if own.startswith("#"):  # draft 4: a name within the document
            self._places.setdefault(f"{base}{own}", Place(node, path, base))
        elif own:
            base = urldefrag(urljoin(base, own))[0]
            self._places.setdefault(base, Place(node, path, base))
        self._bases[id(node)] = base
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._places.setdefault(f"{base}#{node[key]}", Place(node, path, base))
        return base


def is_index(name: str, size: int) -> bool:
    """Whether a part of a pointer is the index of one of `size` members."""
    return name.isdecimal() and len(name) <= _MAX_DIGITS and int(name) < size


def _id_of(node: Any) -> str:
    for key in ("$id", "id"):
        if isinstance(node, dict) and isinstance(node.get(key), str):
            try:
                urljoin("", node[key])
            except ValueError:
                return ""
            return str(node[key])
    return ""
