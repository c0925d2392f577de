"""Checks the constraint of a request, in the front and before the request is queued.

It applies the rules without the compiler: it loads neither torch nor xgrammar.
"""

from collections.abc import Callable, Sequence
from typing import Any

from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.regex_check import regex_problem
from services.engine.grammar.schema_plan import XGRAMMAR, backend_of
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.tag_check import check_tag

KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
MAX_CONSTRAINT_CHARS = 64 * 1024
MAX_CHOICES = 1000


def check_constraint(constraint: Constraint) -> str:
    """Refuse a constraint that cannot be enforced.

    Returns:
        The engine that enforces it: `xgrammar` or `llguidance`.

    Raises:
        InvalidArgumentError: naming `constraint.<kind>` and, for a schema, the keyword's path.
    """
    field = f"constraint.{constraint.kind}"
    if constraint.kind not in KINDS:
        raise InvalidArgumentError.for_field(
            "constraint", f"unknown kind {constraint.kind!r}; known are {', '.join(KINDS)}"
        )
    length = len(constraint.text) + sum(map(len, constraint.choices))
    if length > MAX_CONSTRAINT_CHARS:
        raise InvalidArgumentError.for_field(
            field, f"has {length} characters, at most {MAX_CONSTRAINT_CHARS} are allowed"
        )
    if constraint.kind == "json_schema":
        return str(_check_parsed(field, backend_of, constraint.text))
    if constraint.kind == "structural_tag":
        _check_parsed(field, check_tag, constraint.text)
    elif constraint.kind == "choice":
        _check_choices(field, constraint.choices)
    elif constraint.kind != "json_object" and not constraint.text:
        raise InvalidArgumentError.for_field(field, "must not be empty")
    elif constraint.kind == "regex" and (problem := regex_problem(constraint.text)):
        raise InvalidArgumentError.for_field(field, problem)
    return XGRAMMAR


def _check_parsed(field: str, check: Callable[[str], Any], text: str) -> Any:
    try:
        return check(text)
    except SchemaRefusedError as error:
        raise InvalidArgumentError.for_field(
            field, str(error), reason="SCHEMA_NOT_ENFORCEABLE", keyword=error.path
        ) from error


def _check_choices(field: str, choices: Sequence[str]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidArgumentError.for_field(
            field, f"must have 1 to {MAX_CHOICES} texts, got {len(choices)}"
        )
    if not all(choices):
        raise InvalidArgumentError.for_field(field, "texts must not be empty")
