"""Chooses the engine of a JSON schema: xgrammar where it enforces all of it, else llguidance."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from services.engine.grammar.schema_check import SchemaCheck, parse_json
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.schema_simplify import Simplified, simplify
from services.engine.grammar.strict_schema import strict_schema

XGRAMMAR = "xgrammar"
LLGUIDANCE = "llguidance"


@dataclass(frozen=True, slots=True)
class SchemaPlan:
    """The engine that enforces a schema, and the schema in that engine's form."""

    backend: str
    schema: Any


def plan_schema(text: str) -> SchemaPlan:
    """Choose the engine of a schema and rewrite the schema for it. The same text, the same plan.

    Raises:
        SchemaRefusedError: no engine enforces it; the path is that of the keyword in `text`.
    """
    return plan_of(simplify(parse_json(text)))


def plan_of(simplified: Simplified) -> SchemaPlan:
    """Choose the engine of a simplified schema.

    Raises:
        SchemaRefusedError: no engine enforces it; the path is that in the caller's schema.
    """
    try:
        SchemaCheck().run(simplified.schema)
        if not _has_format(simplified.schema):
            return SchemaPlan(XGRAMMAR, simplified.schema)
    except SchemaRefusedError:
        pass
    try:
        return SchemaPlan(LLGUIDANCE, strict_schema(simplified.schema))
    except SchemaRefusedError as error:
        raise SchemaRefusedError(simplified.path_of(error.path), error.problem) from error


def _has_format(schema: Any) -> bool:
    """Whether a schema has a format: xgrammar allows more than some of them do."""
    if isinstance(schema, list):
        return any(map(_has_format, schema))
    if not isinstance(schema, dict):
        return False
    return isinstance(schema.get("format"), str) or any(map(_has_format, schema.values()))


@lru_cache(maxsize=64)
def backend_of(text: str) -> str:
    """The engine of a schema; remembered, because clients send the same schemas again.

    Raises:
        SchemaRefusedError: as `plan_schema`.
    """
    return plan_schema(text).backend
