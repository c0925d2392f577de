"""The requests of the clients; their answers must never depend on a fault."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from inferfleet_proto.v1 import inference_pb2 as pb

MODEL = "tiny"
_ORDINARY_IDS = 200
"""Ids below are single bytes in the tiny model's vocabulary."""
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["ada", "grace", "edsger", "barbara"]},
            "numbers": {
                "type": "array",
                "items": {"type": "integer", "minimum": 10, "maximum": 99},
                "minItems": 12,
                "maxItems": 24,
            },
            "done": {"type": "boolean"},
        },
        "required": ["name", "numbers", "done"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Case:
    """One kind of request; the same case must always have the same answer."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 1
    temperature: float = 0.0
    n: int = 1
    json_schema: bool = False

    def request(self) -> pb.GenerateRequest:
        """The message, without a request id: the gateway makes one."""
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=self.prompt))
        request.sampling.temperature = self.temperature
        request.sampling.seed = self.seed
        request.sampling.n = self.n
        request.stop.max_tokens = self.max_tokens
        if self.json_schema:
            request.constraint.json_schema = SCHEMA
        else:
            request.stop.ignore_eos = True
        return request


def cases(count: int, tokens: int) -> list[Case]:
    """`count` different requests: greedy, seeded, structured, n = 3 and long prompts in turn.

    Args:
        tokens: of output, for most of them.
    """
    return [_case(number, tokens) for number in range(count)]


def _case(number: int, tokens: int) -> Case:
    kind = ("greedy", "seeded", "json", "n3", "long")[number % 5]
    length = 300 if kind == "long" else 20 + 7 * (number % 9)
    prompt = _prompt(number, length)
    if kind == "greedy":
        return Case(f"greedy-{number}", prompt, tokens)
    if kind == "seeded":
        return Case(f"seeded-{number}", prompt, tokens, seed=number, temperature=1.0)
    if kind == "json":
        return Case(
            f"json-{number}", prompt, tokens, seed=number, temperature=0.9, json_schema=True
        )
    if kind == "n3":
        return Case(f"n3-{number}", prompt, tokens // 2, seed=number, temperature=0.8, n=3)
    return Case(f"long-{number}", prompt, tokens, seed=number, temperature=0.7)


def _prompt(number: int, length: int) -> tuple[int, ...]:
    """Ids from a hash, so that every run sends the same."""
    out: list[int] = []
    while len(out) < length:
        digest = hashlib.sha256(f"{number}/{len(out)}".encode()).digest()
        out.extend(byte % _ORDINARY_IDS for byte in digest)
    return tuple(out[:length])


@dataclass
class Answer:
    """What one stream gave, over all its interruptions."""

    tokens: dict[int, list[int]]
    text: dict[int, str]
    reasons: dict[int, int]
    continuations: int = 0
    exact: bool = True
    completion_tokens: int = 0

    @classmethod
    def empty(cls) -> "Answer":
        return cls({}, {}, {})

    def comparable(self) -> tuple[object, ...]:
        """What must be equal."""
        return (self.tokens, self.text, self.reasons, self.completion_tokens)


@dataclass(frozen=True)
class Difference:
    """Tokens of one answer beside the undisturbed one's."""

    duplicated: int = 0
    missing: int = 0
    changed: int = 0
    other: str = ""
    """Equal tokens, but something else is not as it should be."""

    def __bool__(self) -> bool:
        return bool(self.duplicated or self.missing or self.changed or self.other)


def compare(got: Answer, expected: Answer) -> Difference:
    """Count what a fault did to an answer; surplus tokens count as duplicated."""
    duplicated = missing = changed = 0
    for choice in {*got.tokens, *expected.tokens}:
        have, want = got.tokens.get(choice, []), expected.tokens.get(choice, [])
        surplus = len(have) - len(want)
        duplicated += max(surplus, 0)
        missing += max(-surplus, 0)
        changed += sum(a != b for a, b in zip(have, want, strict=False))
    other = ""
    if not (duplicated or missing or changed) and got.comparable() != expected.comparable():
        other = _what_differs(got, expected)
    return Difference(duplicated, missing, changed, other or ("" if got.exact else "not exact"))


def _what_differs(got: Answer, expected: Answer) -> str:
    names: Sequence[str] = ("text", "reasons", "completion_tokens")
    return ", ".join(n for n in names if getattr(got, n) != getattr(expected, n))
