"""A small byte-level BPE tokenizer with control tokens."""

import functools
import itertools
from collections import Counter

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from services.engine.tiny_models.declaration import ControlTokens

_MERGES = 252
_TEXT = """
A tiny model has random weights, so what it says means nothing. It is there to show that the parts
of a fleet work together: the gateway renders a prompt, the balancer chooses an engine, the engine
computes token after token, and the client reads them as they come. The words of this text are what
its tokenizer has learned: common letters stand together, and everything else is spelled byte by
byte. What is the capital of France? The capital of France is Paris. What is the answer to this
question? The answer is that there is no answer in random numbers, only the time that they took.
Once upon a time there was a small machine in a large house. Every morning it counted the stars
that had gone, and every evening it wrote them down again: one, two, three, four, five, six, seven,
eight, nine, ten. Nobody asked it to, and nobody told it to stop. When the people of the house read
the list, they found that the machine had invented some stars, and had named them after the
neighbours. system user assistant tool {"name": "get_weather", "arguments": {"city": "London"}}
"""


def make_tokenizer(control: ControlTokens) -> Tokenizer:
    """All bytes, the most common pairs of a short text, then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    merges = list(_learned())
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(
        BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokens = (control.begin, *control.ends, *control.others)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


@functools.cache
def _learned() -> tuple[tuple[str, str], ...]:
    """The merges of the text; kept, as a process may write several models."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = Counter(word for word, _ in splitter.pre_tokenize_str(_TEXT))
    return tuple(_learn({tuple(word): count for word, count in words.items()}))


def _learn(words: dict[tuple[str, ...], int]) -> list[tuple[str, str]]:
    """The pairs to merge, most common first; of equally common ones, the first by alphabet."""
    merges: list[tuple[str, str]] = []
    while len(merges) < _MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = {_merged(word, best): count for word, count in words.items()}
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    found: list[str] = []
    for part in word:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return tuple(found)
