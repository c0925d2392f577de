"""Builds a SentencePiece BPE tokenizer with the `tokenizers` library, from pieces and scores.

SentencePiece merges the adjacent pieces whose merged piece has the best score. The library needs an
ordered list of merges. Every way to cut a piece into two known pieces is a merge with the piece's
score.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from services.engine.contract.model_config import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces; the same in tokenizer.model and in `tokenizer.ggml.token_type`."""
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary: token, score and type of each piece.

    Raises:
        ModelFileError: the three lists differ in length.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.scores) == len(self.types):
            raise ModelFileError(
                f"{len(self.tokens)} pieces, {len(self.scores)} scores and {len(self.types)} types "
                "must be equally many"
            )


def spm_tokenizer(pieces: Pieces, *, add_prefix: bool) -> Tokenizer:
    """Build the tokenizer.

    Args:
        add_prefix: put a space before every text.

    Raises:
        ModelFileError: there is neither a piece for unknown text nor one for every byte.
    """
    vocab = {token: index for index, token in enumerate(pieces.tokens)}
    unknown = [t for t, kind in zip(pieces.tokens, pieces.types, strict=True) if kind == UNKNOWN]
    bytes_known = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not unknown and not bytes_known:
        raise ModelFileError(
            "the vocabulary has neither all bytes nor an unknown piece, so some text has no tokens"
        )
    model = BPE(
        vocab=vocab,
        merges=_merges(pieces, vocab),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=bytes_known,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    prepend = [normalizers.Prepend(_SPACE)] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_special(tokenizer, pieces.tokens, pieces.types)
    return tokenizer


def add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add control and user-defined tokens, in the order of their ids."""
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _merges(pieces: Pieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    ranked = []
    for token, score, kind in zip(pieces.tokens, pieces.scores, pieces.types, strict=True):
        if kind == NORMAL:
            # On equal scores the first piece wins; within a piece the cut into first pieces.
            cuts = sorted(_cuts(token, vocab))
            ranked += [((-score, vocab[token], cut), cut) for cut in cuts]
    ranked.sort()
    return [(pieces.tokens[left], pieces.tokens[right]) for _, (left, right) in ranked]


def _cuts(token: str, vocab: dict[str, int]) -> Iterator[tuple[int, int]]:
    for at in range(1, len(token)):
        left, right = vocab.get(token[:at]), vocab.get(token[at:])
        if left is not None and right is not None:
            yield left, right
