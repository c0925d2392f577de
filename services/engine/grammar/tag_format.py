"""Converts a checked structural tag for the compiler: tokens by id, white space limited."""

import json
from collections.abc import Callable, Collection
from typing import Any


def compiler_tag(
    text: str,
    *,
    id_of: Callable[[str], int | None],
    vocab_size: int,
    end_ids: Collection[int],
    json_format: Callable[[Any, int | None], dict[str, Any]],
) -> str:
    """Replace token names by ids and convert each schema to the compiler's form.

    Args:
        text: a tag that `tag_check.check_tag` accepts.
        id_of: returns the id of a token by its name, or None.
        vocab_size: token ids are below it.
        end_ids: tokens that end an answer; they cannot occur inside one.
        json_format: returns the format of a schema, given the schema and the requested limit of
            white space in a row.

    Raises:
        ValueError: a token cannot be used; the message names it.
    """

    def token(named: Any) -> int:
        token_id = id_of(named) if isinstance(named, str) else named
        if token_id is None or not 0 <= token_id < vocab_size:
            raise ValueError(f"the model has no token {named!r}")
        if token_id in end_ids:
            raise ValueError(f"token {named!r} ends an answer and cannot occur inside one")
        return int(token_id)

    def converted(node: Any) -> Any:
        if isinstance(node, list):
            return [converted(member) for member in node]
        if not isinstance(node, dict):
            return node
        match node.get("type"):
            case "json_schema":
                return json_format(node["json_schema"], node.get("max_whitespace_cnt"))
            case "token":
                return {**node, "token": token(node["token"])}
        members = {name: converted(member) for name, member in node.items()}
        if "trigger_tokens" in node:
            members["trigger_tokens"] = [token(named) for named in node["trigger_tokens"]]
        return members

    tag = json.loads(text)
    return json.dumps(converted(_current_form(tag)))


def _current_form(tag: dict[str, Any]) -> dict[str, Any]:
    if "structures" not in tag:
        return tag
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    triggered = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    return {"type": "structural_tag", "format": triggered}
