"""/v1/completions: parses the body into one GenerateRequest per prompt."""

from typing import Any

from inferfleet_proto.v1 import inference_pb2
from services.gateway.openai.fields import Fields, describe_value, refuse
from services.gateway.openai.parsed_body import ParsedBody
from services.gateway.openai.shared_fields import (
    IGNORED_FIELDS,
    MAX_INT,
    read_constraint,
    read_routing,
    read_sampling,
    read_stop,
    read_stream,
    token_ids_of,
)

MAX_PROMPTS = 64
MAX_PROMPT_IDS = 1_000_000


def parse_completion(body: Any) -> ParsedBody:
    """Parse a body.

    Raises:
        InvalidArgumentError: names the field that is invalid or not supported.
    """
    fields = Fields(body)
    common = inference_pb2.GenerateRequest(model=fields.text("model") or "")
    read_sampling(fields, common)
    read_stop(fields, common)
    read_routing(fields, common)
    read_constraint(fields, common)
    max_tokens = fields.integer("max_tokens", 1, MAX_INT)
    if max_tokens is not None:
        common.stop.max_tokens = max_tokens
    best_of = fields.integer("best_of", 1, MAX_INT)
    n = common.sampling.n if common.sampling.HasField("n") else 1
    if best_of is not None and best_of != n:
        refuse("best_of", f"must be equal to n, which is {n}; got {best_of}")
    logprobs = fields.integer("logprobs", 0, 20)
    common.parse_special_tokens = bool(fields.boolean("parse_special_tokens"))
    echo = bool(fields.boolean("echo"))
    common.response.echo = echo
    if logprobs is not None:
        common.response.logprobs = True
        common.response.top_logprobs = logprobs
        common.response.prompt_logprobs = echo
    stream, include_usage = read_stream(fields)
    requests = _requests(fields.value("prompt"), common)
    fields.ignore(*IGNORED_FIELDS)
    fields.refuse_unread()
    return ParsedBody(requests, stream, include_usage, logprobs is not None)


def _requests(
    prompt: Any, common: inference_pb2.GenerateRequest
) -> tuple[inference_pb2.GenerateRequest, ...]:
    requests = []
    prompts = _prompts(prompt)
    ids = sum(len(single) for single in prompts if isinstance(single, list))
    if ids > MAX_PROMPT_IDS:
        refuse("prompt", f"at most {MAX_PROMPT_IDS} token ids in all prompts, got {ids}")
    for single in prompts:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(single, str):
            request.text = single
        else:
            request.token_ids.ids.extend(token_ids_of(single, "prompt"))
        requests.append(request)
    return tuple(requests)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A string, an array of strings, an array of ids, or an array of such arrays."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        refuse(
            "prompt", f"must be text, token ids or an array of these, got {describe_value(prompt)}"
        )
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        refuse("prompt", f"at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    for index, single in enumerate(prompt):
        if not isinstance(single, str | list):
            refuse(f"prompt[{index}]", f"must be text or token ids, got {describe_value(single)}")
    return prompt
