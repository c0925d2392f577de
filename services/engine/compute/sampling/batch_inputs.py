"""The sampling parameters of one round as one array of words, for a sampler that reads a device.

The host turns rows into lists of (row, token id) pairs and into masks of bits. Words are 32 bits
wide; parts of floats are stored by their bits, so that one copy carries everything.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.compute.sampling.noise import row_key
from services.engine.compute.sampling.truncation import is_truncated
from services.engine.contract.runner import SamplingRow
from services.engine.contract.sampling_params import SamplingParams

ALIGNED = 4
"""Parts begin at a multiple of this many words: kernels load 16 bytes at a time."""
OFF = 2.0
"""A top_p that keeps everything whatever rounding does."""
Words = NDArray[np.int32]


class Parts:
    """Several lists of numbers in one array of words."""

    def __init__(self) -> None:
        self._parts: list[Words] = []
        self._size = 0

    def add(self, values: Iterable[int] | Words) -> slice:
        """Append integers; the place of the part among all words."""
        part = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int32)
        place = slice(self._size, self._size + part.size)
        padding = -part.size % ALIGNED
        self._parts += [part.ravel(), np.zeros(padding, np.int32)]
        self._size += part.size + padding
        return place

    def add_floats(self, values: Iterable[float]) -> slice:
        """Append floats, in float32."""
        return self.add(np.asarray(list(values), np.float32).view(np.int32))

    def words(self) -> Words:
        """All parts, one after another."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """R rows over a vocabulary of V ids. Parts are places in `words`; those of floats by bits.

    A place of a logit is row * V + id. `edits` and what follows are in the order in which they are
    applied.
    """

    words: Words
    rows: tuple[SamplingRow, ...]
    bias_at: slice
    biases: slice
    """Float: added to logits at `bias_at`."""
    repeated_at: slice
    factors: slice
    """Float: the repetition penalty of each place."""
    counted_at: slice
    drops: slice
    """Float: what presence and frequency penalties subtract."""
    masked_rows: slice
    masks: slice
    """[masked rows, ceil(V / 32)]: allowed ids, lowest bit first."""
    forbidden_at: slice
    drawn: slice
    """Rows with a temperature above 0."""
    temperatures: slice
    """Float, one per drawn row."""
    keys: slice
    """[drawn, 2]."""
    cut: slice
    """Indices among drawn rows of those with top_k, top_p or min_p."""
    top_k: slice
    top_p: slice
    """Float; OFF keeps everything."""
    min_p: slice
    """Float: the logarithm of min_p."""
    logprobs: slice
    """Rows that report log-probabilities."""
    num_top: int
    """Alternatives that a row reports, at most."""

    @property
    def edited(self) -> bool:
        """Whether any logit is changed before the temperature."""
        parts = (self.bias_at, self.repeated_at, self.counted_at, self.masked_rows)
        return any(has(part) for part in (*parts, self.forbidden_at))


def has(part: slice) -> bool:
    """Whether a part has any words."""
    return bool(part.stop > part.start)


def build_batch(rows: Sequence[SamplingRow], vocabulary: int) -> BatchInputs:
    """Collect the parameters of R rows over V ids."""
    parts = Parts()
    places, values = _biases(rows, vocabulary)
    bias_at, biases = parts.add(places), parts.add_floats(values)
    places, values = _repeated(rows, vocabulary)
    repeated_at, factors = parts.add(places), parts.add_floats(values)
    places, values = _counted(rows, vocabulary)
    counted_at, drops = parts.add(places), parts.add_floats(values)
    masked = [index for index, row in enumerate(rows) if _has_mask(row)]
    masks = [_mask(rows[index], vocabulary) for index in masked]
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    cut = [i for i, row in enumerate(drawn) if is_truncated(rows[row].params, vocabulary)]
    cut_params = [rows[drawn[i]].params for i in cut]
    logprobs = [index for index, row in enumerate(rows) if row.params.logprobs]
    made = {
        "masked_rows": parts.add(masked),
        "masks": parts.add(np.concatenate(masks) if masks else []),
        "forbidden_at": parts.add(_forbidden(rows, vocabulary)),
        "drawn": parts.add(drawn),
        "temperatures": parts.add_floats(rows[i].params.temperature for i in drawn),
        "keys": parts.add(
            word for i in drawn for word in row_key(rows[i].seed, rows[i].choice, rows[i].position)
        ),
        "cut": parts.add(cut),
        "top_k": parts.add(min(own.top_k or vocabulary, vocabulary) for own in cut_params),
        "top_p": parts.add_floats(own.top_p if own.top_p < 1 else OFF for own in cut_params),
        "min_p": parts.add_floats(_log(own) for own in cut_params),
        "logprobs": parts.add(logprobs),
    }
    return BatchInputs(
        words=parts.words(),
        rows=tuple(rows),
        bias_at=bias_at,
        biases=biases,
        repeated_at=repeated_at,
        factors=factors,
        counted_at=counted_at,
        drops=drops,
        num_top=max((rows[i].params.top_logprobs for i in logprobs), default=0),
        **made,
    )


def floats(words: Tensor, part: slice) -> Tensor:
    """A part of floats of uploaded words [N] int32."""
    return words[part].view(torch.float32)


def ids(words: Tensor, part: slice) -> Tensor:
    """A part of indices of uploaded words [N] int32, as int64."""
    return words[part].long()


_Pairs = tuple[list[int], list[float]]


def _biases(rows: Sequence[SamplingRow], vocabulary: int) -> _Pairs:
    pairs = [
        (index * vocabulary + token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.params.logit_bias
    ]
    return [place for place, _ in pairs], [bias for _, bias in pairs]


def _repeated(rows: Sequence[SamplingRow], vocabulary: int) -> _Pairs:
    """Each id of prompt and output once."""
    pairs = [
        (index * vocabulary + token, row.params.repetition_penalty)
        for index, row in enumerate(rows)
        if row.params.repetition_penalty != 1
        for token in {*row.prompt_token_ids, *row.output_token_ids}
    ]
    return [place for place, _ in pairs], [factor for _, factor in pairs]


def _counted(rows: Sequence[SamplingRow], vocabulary: int) -> _Pairs:
    """Each id of the output once, with what its count costs."""
    places, drops = [], []
    for index, row in enumerate(rows):
        own = row.params
        if not (own.presence_penalty or own.frequency_penalty):
            continue
        for token, times in Counter(row.output_token_ids).items():
            places.append(index * vocabulary + token)
            drops.append(times * own.frequency_penalty + own.presence_penalty)
    return places, drops


def _forbidden(rows: Sequence[SamplingRow], vocabulary: int) -> list[int]:
    return [
        index * vocabulary + token
        for index, row in enumerate(rows)
        for token in {*row.params.bad_token_ids, *row.forbid_token_ids}
    ]


def _has_mask(row: SamplingRow) -> bool:
    return bool(row.params.allowed_token_ids) or row.token_mask is not None


def _mask(row: SamplingRow, vocabulary: int) -> Words:
    """Words of the ids that both the list of allowed ids and the grammar allow."""
    size = -(-vocabulary // 32)
    allowed = np.full(size, -1, np.int32)
    if row.params.allowed_token_ids:
        bits = np.zeros(size * 32, np.uint8)
        bits[list(row.params.allowed_token_ids)] = 1
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    if row.token_mask is None:
        return allowed
    given = np.ascontiguousarray(np.asarray(row.token_mask, dtype=np.int32)).reshape(-1)[:size]
    mask = np.zeros(size, np.int32)  # missing words forbid
    mask[: len(given)] = given
    return mask & allowed


def _log(params: SamplingParams) -> float:
    return float(np.log(np.float32(params.min_p))) if params.min_p > 0 else float("-inf")
