"""A checked structural tag as the compiler wants it: tokens by id, white space capped."""

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
    """The tag with ids for the names of tokens and each schema in the compiler's form.

    Args:
        text: what `tag_check.check_tag` has passed.
        id_of: the id of a token by its name.
        vocab_size: ids are below it.
        end_ids: tokens that end an answer; none can stand inside one.
        json_format: the format of a schema, given it and the wanted cap of blanks in a row.

    Raises:
        ValueError: naming a token that cannot be used.
    """

    def token(named: Any) -> int:
        token_id = id_of(named) if isinstance(named, str) else named
        if token_id is None or not 0 <= token_id < vocab_size:
            raise ValueError(f"the model has no token {named!r}")
        if token_id in end_ids:
            raise ValueError(f"token {named!r} ends an answer and cannot stand inside one")
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
    return json.dumps(converted(_in_today_s_form(tag)))


def _in_today_s_form(tag: dict[str, Any]) -> dict[str, Any]:
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
