"""The fields of both endpoints: sampling, stop conditions, constraints, stream options."""

from typing import Any

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.request_limits import MAX_BIASED_IDS, MAX_STOP_STRINGS
from services.gateway.openai.fields import Fields, describe_value, refuse

# Labels, retention and tiers of a hosted product: they do not change the answer.
IGNORED_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
MAX_INT = 2**31 - 1
MAX_IDS = 100_000
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def read_sampling(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    """Fill `request.sampling`; request/checks.py checks the ranges of numbers."""
    sampling = request.sampling
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        number = fields.number(name)
        if number is not None:
            setattr(sampling, name, number)
    top_k = fields.integer("top_k", -1, MAX_INT)
    if top_k is not None:
        sampling.top_k = max(top_k, 0)  # -1 and 0 both mean off
    n = fields.integer("n", 0, MAX_INT)
    if n is not None:
        sampling.n = n
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    if seed is not None:
        sampling.seed = seed % 2**64  # the engine counts from 0: -1 is the largest seed
    _read_bias(fields, sampling)


def read_stop(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    """Fill `request.stop`, except for max_tokens, whose name differs between endpoints."""
    stop = fields.value("stop")
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        refuse("stop", f"must be a string or an array of strings, got {describe_value(stop)}")
    if len(texts) > MAX_STOP_STRINGS:
        refuse("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(texts)}")
    request.stop.stop_strings.extend(texts)
    min_tokens = fields.integer("min_tokens", 0, MAX_INT)
    if min_tokens is not None:
        request.stop.min_tokens = min_tokens
    ids = fields.items("stop_token_ids", MAX_IDS) or []
    request.stop.stop_token_ids.extend(token_ids_of(ids, "stop_token_ids"))
    request.stop.ignore_eos = bool(fields.boolean("ignore_eos"))
    request.stop.include_stop_in_output = bool(fields.boolean("include_stop_str_in_output"))
    request.response.keep_special_tokens = fields.boolean("skip_special_tokens") is False


def read_routing(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    """Fill `request.routing` from fields that are extensions of OpenAI's API."""
    priority = fields.integer("priority", -(2**31), MAX_INT)
    if priority is not None:
        request.routing.priority = priority
    session = fields.text("session_id")
    if session is not None:
        request.routing.session_id = session


def read_constraint(fields: Fields, request: inference_pb2.GenerateRequest) -> None:
    """Fill `request.constraint` from response_format or structured_outputs."""
    response_format = fields.nested("response_format")
    if response_format is not None:
        _read_response_format(response_format, request.constraint)
    structured = fields.nested("structured_outputs")
    if structured is not None:
        if request.constraint.WhichOneof("kind") is not None:
            refuse("structured_outputs", "cannot be combined with response_format")
        _read_structured(structured, request.constraint)


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """`stream`, and whether the last event holds the usage."""
    stream = bool(fields.boolean("stream"))
    options = fields.nested("stream_options")
    if options is None:
        return stream, False
    if not stream:
        refuse("stream_options", "is only allowed with stream: true")
    usage = bool(options.boolean("include_usage"))
    options.ignore("include_obfuscation")
    options.refuse_unread()
    return stream, usage


def token_ids_of(values: list[Any], field: str) -> list[int]:
    """Check that the values are token ids.

    Raises:
        InvalidArgumentError: a value is not an unsigned 32-bit integer.
    """
    for value in values:
        if type(value) is not int or not 0 <= value < 2**32:
            refuse(field, f"{describe_value(value)} is not a token id")
    return values


def _read_bias(fields: Fields, sampling: inference_pb2.SamplingParams) -> None:
    bias = fields.value("logit_bias")
    if bias is None:
        return
    if not isinstance(bias, dict):
        refuse("logit_bias", f"must be an object of token id to bias, got {describe_value(bias)}")
    if len(bias) > MAX_BIASED_IDS:
        refuse("logit_bias", f"at most {MAX_BIASED_IDS} ids, got {len(bias)}")
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and int(key) < 2**32):
            refuse("logit_bias", f"{key[:40]!r} is not a token id")
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(f"logit_bias[{key}]", f"must be a number, got {describe_value(value)}")
        if not -100 <= value <= 100:
            refuse(f"logit_bias[{key}]", f"must be in [-100, 100], got {describe_value(value)}")
        sampling.logit_bias[int(key)] = value


def _read_response_format(wanted: Fields, constraint: inference_pb2.Constraint) -> None:
    kind = wanted.text("type")
    if kind == "json_object":
        constraint.json_object = True
    elif kind == "json_schema":
        named = wanted.nested("json_schema")
        if named is None:
            refuse("response_format.json_schema", "is required for this type")
        named.ignore("name", "description", "strict")
        constraint.json_schema = _schema_text(named, "schema")
        named.refuse_unread()
    elif kind != "text":
        allowed = "text, json_object or json_schema"
        refuse("response_format.type", f"must be {allowed}, got {describe_value(kind)}")
    wanted.refuse_unread()


def _read_structured(wanted: Fields, constraint: inference_pb2.Constraint) -> None:
    """vLLM's extension: one of json, regex, choice, grammar, json_object, structural_tag."""
    _refuse_two(wanted)
    if wanted.value("json") is not None:
        constraint.json_schema = _schema_text(wanted, "json")
    tag = wanted.value("structural_tag")
    if isinstance(tag, dict):
        constraint.structural_tag = msgspec.json.encode(tag).decode()
    elif tag is not None:
        constraint.structural_tag = wanted.text("structural_tag") or ""
    for theirs, ours in (("regex", "regex"), ("grammar", "ebnf")):
        text = wanted.text(theirs)
        if text is not None:
            setattr(constraint, ours, text)
    if wanted.boolean("json_object"):
        constraint.json_object = True
    choice = wanted.items("choice", MAX_IDS)
    if choice is not None:
        if not all(isinstance(text, str) for text in choice):
            refuse(wanted.name("choice"), "must be an array of strings")
        constraint.choice.texts.extend(choice)
    wanted.refuse_unread()


def _refuse_two(wanted: Fields) -> None:
    """Refuse two kinds: a GenerateRequest holds only one, the other would be dropped silently."""
    given = [kind for kind in _STRUCTURED if wanted.value(kind) is not None]
    if wanted.value("json_object") is False:
        given.remove("json_object")
    if len(given) > 1:
        refuse(wanted.name(given[1]), f"cannot be combined with {wanted.name(given[0])}")


def _schema_text(fields: Fields, name: str) -> str:
    schema = fields.value(name)
    if not isinstance(schema, dict | bool):
        refuse(fields.name(name), f"must be a JSON Schema, got {describe_value(schema)}")
    return msgspec.json.encode(schema).decode()
