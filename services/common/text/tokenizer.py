"""Text to token ids and back, and the exact bytes of every token."""

import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import tokenizers

from services.common.text.assets import TextAssets
from services.common.text.byte_level import byte_alphabet
from services.common.text.control_tokens import ControlTokens, RenamedTokenizer, control_ids

_METASPACE = "\u2581"


class Tokenizer:
    """The tokenizer of one model; immutable and thread-safe.

    Raises:
        ValueError: the assets contain no readable tokenizer.
    """

    def __init__(self, assets: TextAssets) -> None:
        try:
            text = assets.tokenizer_json.decode()
            spec = json.loads(text)
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error
        # The server checks length limits and reports an error; the tokenizer must not truncate.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._decoders = _decoder_types(spec.get("decoder"))
        self._added = dict(inner.get_added_tokens_decoder())
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._bos = _bos_id(inner, assets)
        self._start = _added_start(inner)
        self._control_ids = control_ids(self._added)
        self.control = ControlTokens(
            self._control_ids,
            in_normalized=inner.normalizer is not None
            and any(self._added[i].normalized for i in self._control_ids.values()),
        )
        """The tokens that callers' text never becomes."""
        self._source = assets.tokenizer_json
        self._renamed: RenamedTokenizer | ValueError | None = None
        self.digest = assets.digest
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        """Ids are below this."""
        self._bytes = tuple(self._bytes_of(i) for i in range(self.vocab_size))
        self.max_token_bytes = max(map(len, self._bytes), default=0)
        """A text has at least as many tokens as its bytes divided by this."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text whose names of control tokens become those tokens.

        Args:
            text: text of the server, or of a caller that requests this.
            add_special_tokens: add the model's tokens around plain text; False for a rendered
                chat template, which contains them already.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_one_bos(ids) if add_special_tokens else ids

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text of a caller: names of control tokens in it remain text.

        A text that begins with the token that the model's texts begin with has it once.

        Raises:
            ValueError: the text spells a control token that cannot be kept out of text.
        """
        encoding = self._inner.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if not self.control.ids.isdisjoint(ids):
            # The mask is 1 for the tokens that the post-processor adds.
            added = encoding.special_tokens_mask
            of_text = [i for i, is_added in zip(ids, added, strict=True) if not is_added]
            if not self.control.ids.isdisjoint(of_text):
                return self._encode_renamed(text, add_special_tokens=add_special_tokens)
        return self._with_one_bos(ids) if add_special_tokens else ids

    def _encode_renamed(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._bos_text and text.startswith(self._bos_text):
            text = text[len(self._bos_text) :]
        inner = self._renamed_tokenizer().inner
        ids = list(inner.encode(text, add_special_tokens=add_special_tokens).ids)
        return self._with_one_bos(ids) if add_special_tokens else ids

    def encode_marked(self, text: str, marked: str) -> list[int]:
        """Encode a rendered chat: only its trusted control tokens become tokens.

        Args:
            text: the rendered text.
            marked: the same with the template's own text in trusted characters.

        Raises:
            ValueError: the text spells a control token that cannot be kept out of text.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if [i for i in ids if i in self.control.ids] == self.control.trusted_ids(marked):
            return ids
        renamed = self._renamed_tokenizer()
        named = self.control.replace_trusted(marked, renamed.names)
        return list(renamed.inner.encode(named, add_special_tokens=False).ids)

    def prepare(self) -> None:
        """Build now what the first text with a control token would have to wait for.

        Raises:
            ValueError: the tokenizer has a control token that cannot be kept out of text.
        """
        self._renamed_tokenizer()

    def _renamed_tokenizer(self) -> RenamedTokenizer:
        if self._renamed is None:
            try:
                self._renamed = RenamedTokenizer(self._source, self._control_ids)
            except Exception as error:  # the library raises bare Exception
                self._renamed = ValueError(f"control tokens cannot be kept out of text: {error}")
        if isinstance(self._renamed, ValueError):
            raise ValueError(str(self._renamed))
        return self._renamed

    @property
    def _bos_text(self) -> str:
        """The text of the tokens that are put before plain text; empty if there are none."""
        first = [self._bos] if self._bos is not None else self._start
        return "".join(self._added[i].content for i in first if i in self._added)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        size = len(self._start)
        if size and ids[: 2 * size] == self._start * 2:
            return ids[size:]  # the post-processor adds them; the text began with them
        if self._bos is not None and ids[:1] != [self._bos]:
            return [self._bos, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids; incomplete characters become U+FFFD, unknown ids are dropped."""
        if "ByteLevel" in self._decoders:
            # Not the library's decode, which reads added tokens with accents as byte-level text.
            kept = (i for i in token_ids if not (skip_special_tokens and i in self._special))
            return self.token_bytes_of(kept).decode(errors="replace")
        known = [i for i in token_ids if i < self.vocab_size]
        text: str = self._inner.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, possibly a part of a character; b"" for an id without a token."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of several tokens, joined."""
        return b"".join(self.token_bytes(i) for i in token_ids)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special, so that it is dropped from text."""
        return token_id in self._special

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            content: str = self._added[token_id].content
            return content.encode()
        token: str | None = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            return _byte_level(token)
        if "ByteFallback" in self._decoders and _is_byte_name(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(_METASPACE, " ").encode()


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[c] for c in token)
    except KeyError:
        return token.encode()


def _is_byte_name(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoder_types(decoder: Any) -> frozenset[str]:
    if not isinstance(decoder, dict):
        return frozenset()
    parts = [decoder, *decoder.get("decoders", [])]
    return frozenset(str(part.get("type")) for part in parts)


def _added_start(inner: tokenizers.Tokenizer) -> list[int]:
    """The tokens that the post-processor puts before plain text, e.g. [BOS]."""
    encoding = inner.encode("a", add_special_tokens=True)
    added = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    return [i for i, _ in takewhile(lambda pair: pair[1] == 1, added)]


def _bos_id(inner: tokenizers.Tokenizer, assets: TextAssets) -> int | None:
    name = assets.special_tokens.get("bos_token")
    if not assets.add_bos or name is None:
        return None
    found: int | None = inner.token_to_id(name)
    return found
