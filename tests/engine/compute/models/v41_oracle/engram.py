"""Engram: rows of a large table, found by hashing the last tokens, added to the streams."""

import functools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


def normalised(text: str) -> str:
    """What of a token's text counts: no accents, no case, whitespace as one space, none around.

    A text that is nothing but whitespace is one space.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(char for char in text if unicodedata.category(char) != "Mn").lower()
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


def compressed_ids(texts: Sequence[str], raw: Sequence[str]) -> list[int]:
    """One id per token: equal texts share one, in the order of first appearance.

    Args:
        texts: decoded text of each token.
        raw: its form in the vocabulary, the key where the text has a replacement character.
    """
    known: dict[str, int] = {}
    found = []
    for text, own in zip(texts, raw, strict=True):
        key = own if "\ufffd" in text else normalised(text) or text
        found.append(known.setdefault(key, len(known)))
    return found


def is_prime(number: int) -> bool:
    """By trial division; numbers are some ten millions at most."""
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % part for part in range(3, int(number**0.5) + 1, 2))


@functools.cache
def primes(shape: Shape) -> dict[int, list[list[int]]]:
    """By layer, then n-gram length (2 first), then head: primes, none of them used twice."""
    used: set[int] = set()
    table: dict[int, list[list[int]]] = {}
    for layer in shape.engram_layer_ids:
        table[layer] = []
        for _ in range(2, shape.engram_max_ngram_size + 1):
            heads: list[int] = []
            number = shape.engram_vocab_size - 1
            while len(heads) < shape.engram_n_heads:
                number += 1
                if number not in used and is_prime(number):
                    used.add(number)
                    heads.append(number)
            table[layer].append(heads)
    return table


def table_rows(shape: Shape) -> list[int]:
    """Rows of each Engram layer's table (`engram_num_embeddings`): the sum of its primes."""
    return [sum(map(sum, primes(shape)[layer])) for layer in shape.engram_layer_ids]


@functools.cache
def multipliers(shape: Shape, layer: int, compressed_vocab: int) -> list[int]:
    """One odd number for each token of the longest n-gram."""
    top = max(1, (2**63 - 1) // compressed_vocab // 2)
    drawn = np.random.default_rng(10007 * layer).integers(
        0, top, size=shape.engram_max_ngram_size, dtype=np.int64
    )
    return [2 * int(number) + 1 for number in drawn]


def look_back(ids: Sequence[int], position: int, length: int, pad: int) -> list[int]:
    """The `length` ids that end at `position`, newest first; `pad` before the sequence."""
    return [ids[p] if p >= 0 else pad for p in range(position, position - length, -1)]


def rows_of(
    shape: Shape, layer: int, compressed: Sequence[int], newest_first: Sequence[int]
) -> list[int]:
    """Row numbers in a layer's table for one position, by n-gram length and head.

    Args:
        compressed: compressed id of each token of the vocabulary.
        newest_first: compressed ids of the position and of those before it.
    """
    factors = multipliers(shape, layer, max(compressed) + 1)
    found, offset = [], 0
    mixed = newest_first[0] * factors[0]
    for back, heads in enumerate(primes(shape)[layer], start=1):
        mixed ^= newest_first[back] * factors[back]
        for prime in heads:
            found.append(mixed % prime + offset)
            offset += prime
    return found


def gate(streams: Tensor, keys: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, S] of streams and keys [T, S, D]: how much of the value each stream takes."""
    width = streams.shape[-1]

    def inverse(x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1) + eps)

    dot = (streams * keys * weight).sum(-1) * inverse(streams) * inverse(keys) * width**-0.5
    return torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())


def applied(
    shape: Shape,
    weights: Weights,
    layer: int,
    streams: Tensor,
    rows: Tensor,
) -> Tensor:
    """[T, S, D]: the streams with the looked-up values; rows [T, n-grams * heads] int64."""
    at = f"layers.{layer}.engram"
    looked_up = weights[f"{at}.embed.weight"][rows].flatten(1)
    parts = (looked_up @ weights[f"{at}.wkv.weight"].T).unflatten(-1, (-1, shape.hidden_size))
    keys, value = parts[:, :-1], parts[:, -1:]
    weight = weights[f"{at}.q_weight"] * weights[f"{at}.k_weight"]
    return streams + gate(streams, keys, weight, shape.rms_norm_eps)[..., None] * value
