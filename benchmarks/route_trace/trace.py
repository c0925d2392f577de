"""A trace of requests: read from JSON lines, or generated with the same shape from a seed.

One line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]},
one id per block of 512 tokens, the last one possibly partial; equal ids mean equal content up to
there. An optional "session" names who asks; without it the first block does.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from services.common import block_hash
from services.common.block_hash import BlockHash

BLOCK_SIZE = 512
NAMESPACE = block_hash.namespace(
    model_revision="trace", kv_layout="trace", numerics_id="trace", block_size=BLOCK_SIZE
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `chain` are the hashes of the prompt's full blocks."""

    number: int
    arrival_s: float
    input_length: int
    output_length: int
    session: str
    chain: tuple[BlockHash, ...]

    @property
    def reusable(self) -> int:
        """Blocks that a hit can save: the last prompt token is always computed."""
        return (self.input_length - 1) // BLOCK_SIZE


class Hasher:
    """The fleet's own block hashes over synthetic tokens: block id i is 512 tokens of value i."""

    def __init__(self) -> None:
        self._root = block_hash.root(NAMESPACE)
        self._known: dict[tuple[BlockHash, int], BlockHash] = {}

    def chain(self, ids: Iterable[int]) -> tuple[BlockHash, ...]:
        """Hashes of consecutive full blocks."""
        parent, chain = self._root, []
        for block in ids:
            if (parent, block) not in self._known:
                tokens = [block] * BLOCK_SIZE
                self._known[parent, block] = block_hash.hash_block(parent, tokens)
            parent = self._known[parent, block]
            chain.append(parent)
        return tuple(chain)


def load(path: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a file.

    Raises:
        ValueError: naming the line and the field at fault.
    """
    hasher, requests, before = Hasher(), [], 0.0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            try:
                request = _parsed(number, json.loads(line), hasher)
                if request.arrival_s < before:
                    raise ValueError("timestamp: earlier than the line before")
            except ValueError as error:
                raise ValueError(f"{path}, line {number + 1}: {error!s}") from error
            before = request.arrival_s
            requests.append(request)
    if not requests:
        raise ValueError(f"{path}: holds no request")
    return requests


def _parsed(number: int, record: Any, hasher: Hasher) -> Request:
    if not isinstance(record, dict):
        raise ValueError("is not an object")
    at_ms = record.get("timestamp")
    if not isinstance(at_ms, (int, float)) or not math.isfinite(at_ms):
        raise ValueError(f"timestamp: {at_ms!r} is not a number")
    length, output = (_tokens(record, name) for name in ("input_length", "output_length"))
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < 2**32 for i in ids):
        raise ValueError("hash_ids: is not a list of block ids")
    if len(ids) != -(-length // BLOCK_SIZE):
        raise ValueError(f"hash_ids: {len(ids)} blocks for {length} tokens")
    session = str(record.get("session", ids[0]))
    chain = hasher.chain(ids[: length // BLOCK_SIZE])
    return Request(number, at_ms / 1000, length, output, session, chain)


def _tokens(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {value!r} is not a number above 0")
    return value


def generate(count: int, seed: int) -> list[Request]:
    """Sessions that grow turn by turn on shared system prefixes.

    Popularity of the prefixes is Zipf, lengths are log-normal, sessions come in bursts. About 15k
    tokens in, 150 out; two thirds of the prompt blocks were seen before.
    """
    rng, hasher, ids = Random(seed), Hasher(), iter(range(2**32))
    prefixes = [[next(ids) for _ in range(_heavy(rng, 8, 0.8, 60))] for _ in range(64)]
    weights = [1 / (rank + 1) for rank in range(len(prefixes))]
    turns: list[tuple[float, int, int, str, list[int]]] = []
    clock, session = 0.0, 0
    while len(turns) < count * 3 // 2:
        # A burst starts several sessions within a few seconds; then it is quiet for a while.
        clock += rng.expovariate(1 / 4)
        for _ in range(1 + int(rng.expovariate(1 / 3))):
            begin = clock + rng.uniform(0, 5)
            prefix = rng.choices(prefixes, weights)[0]
            turns += _session(rng, ids, begin, f"s{session}", prefix)
            session += 1
    turns.sort(key=lambda turn: turn[0])
    return [
        Request(n, at, tokens, output, name, hasher.chain(blocks))
        for n, (at, tokens, output, name, blocks) in enumerate(turns[:count])
    ]


def _session(
    rng: Random, ids: Iterable[int], begin: float, name: str, prefix: Sequence[int]
) -> list[tuple[float, int, int, str, list[int]]]:
    blocks, length, turns = list(prefix), len(prefix) * BLOCK_SIZE, []
    fresh = iter(ids)
    while True:
        length += _heavy(rng, 2500, 1.2, 60_000)
        output = _heavy(rng, 80, 1.1, 2000)
        blocks += [next(fresh) for _ in range(length // BLOCK_SIZE - len(blocks))]
        turns.append((begin, length, output, name, list(blocks)))
        length += output
        begin += output * 0.02 + rng.expovariate(1 / 30)
        if rng.random() < 0.35 or length > 100_000:
            return turns


def _heavy(rng: Random, middle: float, sigma: float, most: int) -> int:
    return max(1, min(most, int(middle * rng.lognormvariate(0, sigma))))
