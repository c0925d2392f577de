"""The data of a model for tokenising and rendering: an immutable record with a digest."""

import hashlib
import struct
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from inferfleet_proto.internal.v1 import engine_pb2

CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class TextAssets:
    """Tokenizer and chat template of a model; build it with `of`, which computes the digest."""

    tokenizer_json: bytes
    """A tokenizer in the format of the `tokenizers` library."""
    chat_template: str
    """Jinja source; empty if the model has none."""
    special_tokens: Mapping[str, str]
    """Names that the template uses, e.g. "bos_token" → "<s>"."""
    add_bos: bool
    """Plain text starts with the beginning-of-sequence token."""
    digest: str
    """"sha256:…" over all of the above."""

    @classmethod
    def of(
        cls,
        *,
        tokenizer_json: bytes,
        chat_template: str = "",
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool = False,
    ) -> "TextAssets":
        """Make the record and compute its digest."""
        tokens = dict(special_tokens or {})
        digest = _digest(tokenizer_json, chat_template, tokens, add_bos)
        return cls(tokenizer_json, chat_template, tokens, add_bos, digest)

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[engine_pb2.TokenizerChunk]:
        """The messages that GetTokenizer streams; `from_chunks` is the inverse."""
        first = engine_pb2.TokenizerChunk(
            digest=self.digest,
            chat_template=self.chat_template,
            special_tokens=self.special_tokens,
            add_bos=self.add_bos,
            tokenizer_json=self.tokenizer_json[:chunk_bytes],
        )
        yield first
        for start in range(chunk_bytes, len(self.tokenizer_json), chunk_bytes):
            part = self.tokenizer_json[start : start + chunk_bytes]
            yield engine_pb2.TokenizerChunk(tokenizer_json=part)

    @classmethod
    async def from_chunks(
        cls,
        chunks: AsyncIterable[engine_pb2.TokenizerChunk] | Iterable[engine_pb2.TokenizerChunk],
    ) -> "TextAssets":
        """Join the messages of GetTokenizer and check the content against the digest.

        Raises:
            ValueError: there are no messages, or the digest does not match.
        """
        first: engine_pb2.TokenizerChunk | None = None
        parts: list[bytes] = []
        async for chunk in _async(chunks):
            first = first or chunk
            parts.append(chunk.tokenizer_json)
        if first is None:
            raise ValueError("the tokenizer's stream was empty")
        assets = cls.of(
            tokenizer_json=b"".join(parts),
            chat_template=first.chat_template,
            special_tokens=first.special_tokens,
            add_bos=first.add_bos,
        )
        if assets.digest != first.digest:
            raise ValueError(f"the tokenizer's digest is {assets.digest}, expected {first.digest}")
        return assets


async def _async(
    chunks: AsyncIterable[engine_pb2.TokenizerChunk] | Iterable[engine_pb2.TokenizerChunk],
) -> AsyncIterator[engine_pb2.TokenizerChunk]:
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield chunk
    else:
        for chunk in chunks:
            yield chunk


def _digest(
    tokenizer_json: bytes, chat_template: str, special_tokens: Mapping[str, str], add_bos: bool
) -> str:
    pairs = [text.encode() for pair in sorted(special_tokens.items()) for text in pair]
    hasher = hashlib.sha256()
    for part in (tokenizer_json, chat_template.encode(), b"\x01" if add_bos else b"\x00", *pairs):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return "sha256:" + hasher.hexdigest()
