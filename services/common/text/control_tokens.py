"""Control tokens: which ones a tokenizer has, and how they are kept out of callers' text.

A control token is a special token, or an added one that is a mark rather than a word or white
space, e.g. `<think>`. A template's own text is written in "trusted" characters while it is
rendered: each character that control tokens consist of is replaced by a lone surrogate, which no
caller can send. Only control tokens in trusted characters become tokens.
"""

import json
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tokenizers

_FIRST_TRUSTED, _LAST_TRUSTED = 0xD800, 0xDFFF
# Symbols that are no letters, no marks and no controls: no normaliser changes or removes them.
_SECRET_CHARACTERS = [chr(c) for c in range(0x1D000, 0x1D0F0)]
_SURROGATES = re.compile("[\ud800-\udfff]+")


def control_ids(added: Mapping[int, tokenizers.AddedToken]) -> dict[str, int]:
    """The control tokens among a tokenizer's added tokens, text to id."""
    return {
        token.content: i
        for i, token in added.items()
        if token.content.strip() and (token.special or _is_mark(token.content))
    }


def _is_mark(text: str) -> bool:
    return not text.strip()[:1].isalnum()


class ControlTokens:
    """The control tokens of one tokenizer; immutable.

    Args:
        ids: text to id.
        in_normalized: tokens are searched in normalised text, so other characters may spell them.
    """

    def __init__(self, ids: Mapping[str, int], *, in_normalized: bool = False) -> None:
        self.items = tuple(ids.items())
        self.ids = frozenset(ids.values())
        self._id_of = dict(ids)
        self.in_normalized = in_normalized
        ordered = sorted(ids, key=len, reverse=True)
        self._longest = len(ordered[0]) if ordered else 0
        self._joined = "\0".join(ordered).lower()
        characters = sorted({c for text in ids for c in text if not c.isspace()})
        span = _LAST_TRUSTED - _FIRST_TRUSTED + 1
        self._to_trusted = {ord(c): _FIRST_TRUSTED + i for i, c in enumerate(characters[:span])}
        self._to_plain = {trusted: plain for plain, trusted in self._to_trusted.items()}
        # A caller could write the rest of a token that is not all in trusted characters.
        self._trusted = {self.trusted(text): text for text in ordered if self._is_covered(text)}
        self._found = _any_of(ordered)
        self._found_trusted = _any_of(self._trusted)
        ends = {end for text in ordered for end in (text[0], text[-1])}
        ends |= {case for end in ends for case in (*end.lower(), *end.upper())}
        self._ends = re.compile(f"[{re.escape(''.join(ends))}]") if ends else None
        cores = [text.strip() for text in ordered if text.strip()]
        self._symbols = {end for core in cores for end in (core[0], core[-1]) if not end.isalnum()}
        self._found_folded = _any_of(map(_folded, ordered)) if in_normalized else None

    def trusted(self, text: str) -> str:
        """A text in trusted characters."""
        return text.translate(self._to_trusted)

    def _is_covered(self, text: str) -> bool:
        return all(ord(c) in self._to_trusted for c in text if not c.isspace())

    def plain(self, text: str) -> str:
        """The inverse of `trusted`."""
        return _SURROGATES.sub(lambda match: match[0].translate(self._to_plain), text)

    def overlaps(self, text: str) -> bool:
        """Whether a text, joined to others, can be a part of a control token or contain one."""
        if self._ends is None or not text:
            return False
        core = text.strip().lower()
        infix = 0 < len(core) <= self._longest and core in self._joined
        return self.in_normalized or infix or self._ends.search(text) is not None

    def first_in(self, texts: Iterable[str]) -> str | None:
        """The first control token that one of the texts spells."""
        if self._found is None:
            return None
        found = (self._found.search(text) for text in texts)
        return next((match[0] for match in found if match), None)

    def all_in(self, text: str) -> list[str]:
        """The control tokens that a text spells, in order."""
        if self._found_folded is not None:
            return self._found_folded.findall(_folded(text))
        return self._found.findall(text) if self._found is not None else []

    def defused(self, text: str) -> str:
        """A text with U+FFFD for each symbol that control tokens begin or end with."""
        if not self.in_normalized:
            return "".join("\ufffd" if c in self._symbols else c for c in text)
        return "".join("\ufffd" if self._symbols & {*_folded(c)} else c for c in text)

    def trusted_ids(self, marked: str) -> list[int]:
        """The ids of the control tokens in trusted characters, in order."""
        if self._found_trusted is None:
            return []
        return [self._id_of[self._trusted[text]] for text in self._found_trusted.findall(marked)]

    def replace_trusted(self, marked: str, names: Mapping[str, str]) -> str:
        """Put a name for each control token in trusted characters; the rest becomes plain."""
        if self._found_trusted is None:
            return marked
        replaced = self._found_trusted.sub(lambda match: names[self._trusted[match[0]]], marked)
        return self.plain(replaced)


def without_surrogates(value: Any) -> Any:
    """A JSON value whose lone surrogates, which are not text, are U+FFFD."""
    return with_strings(
        value, lambda text: _SURROGATES.sub(lambda match: "\ufffd" * len(match[0]), text)
    )


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): with_strings(item, change) for key, item in value.items()}
    return value


def strings_in(value: Any) -> Iterable[str]:
    """Every string of a JSON value, keys included, in any order; for any depth."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            rest += item


class RenamedTokenizer:
    """A tokenizer whose control tokens have secret names, so that no text spells them.

    Everything else is as in the original: the same words, splits and flags.

    Raises:
        ValueError: a control token cannot be renamed.
    """

    def __init__(self, tokenizer_json: bytes, ids: Mapping[str, int]) -> None:
        secret = "".join(secrets.choice(_SECRET_CHARACTERS) for _ in range(20))
        self.names = {text: secret + _numeral(i) for i, text in enumerate(ids)}
        spec = json.loads(tokenizer_json)
        for token in spec["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        _rename_model(spec["model"], self.names)
        self.inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self.inner.no_truncation()
        self.inner.no_padding()
        for text, token_id in ids.items():
            found = self.inner.encode(self.names[text], add_special_tokens=False).ids
            if token_id not in found:
                raise ValueError(f"the tokenizer's token {text!r} cannot be kept out of text")


def _numeral(number: int) -> str:
    base = len(_SECRET_CHARACTERS)
    return "".join(_SECRET_CHARACTERS[number // base**i % base] for i in (2, 1, 0))


def _rename_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: [text, score]
        model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, names)]


def _makes(pair: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names


def _folded(text: str) -> str:
    """A text as the tokenizer's normaliser could change it: one form, no accents, no case."""
    parts = unicodedata.normalize("NFKD", text)
    return "".join(c for c in parts if not unicodedata.combining(c)).casefold()


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    alternatives = "|".join(re.escape(text) for text in texts)
    return re.compile(alternatives) if alternatives else None
