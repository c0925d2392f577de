"""Parses the file of API keys: which tenant has which key (by its hash), and the limits.

A line gives a key, the limits of a tenant, or the default limits of all tenants:

acme sha256:<hex of the key> [id=laptop] [requests_per_min=60] [concurrency=4]
acme limits requests_per_min=600 tokens_per_min=100000 concurrency=32
*    limits requests_per_min=60
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

QUOTAS = ("requests_per_min", "tokens_per_min", "concurrency")
ALL_TENANTS = "*"
MAX_LIMIT = 10**12
_TENANT = re.compile(r"[\x21-\x7e]{1,128}")
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Limits:
    """Upper bounds of usage; None is no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Prompt and output tokens together."""
    concurrency: int | None = None
    """Requests that run at the same time."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return any(getattr(self, name) is not None for name in QUOTAS)


@dataclass(frozen=True)
class Identity:
    """The caller: its tenant and key, and the limits of both. Empty if no key is required."""

    tenant: str = ""
    key_id: str = ""
    tenant_limits: Limits = field(default_factory=Limits)
    key_limits: Limits = field(default_factory=Limits)


def parse_keys(text: str) -> Mapping[str, Identity]:
    """Parse the file; returns identities by the hexadecimal SHA-256 of their keys.

    Raises:
        ValueError: naming the first bad line by its number.
    """
    keys: dict[str, Identity] = {}
    lines: dict[str, int] = {}
    limits: dict[str, Limits] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            digest = _read_line(words, keys, limits)
            if digest is None:
                continue
            if (first := lines.setdefault(digest, number)) != number:
                raise ValueError(f"repeats the key of line {first}: each key may occur once")
        except ValueError as error:
            raise ValueError(f"line {number} {error}") from None
    default = limits.get(ALL_TENANTS, Limits())
    return {
        digest: Identity(who.tenant, who.key_id, limits.get(who.tenant, default), who.key_limits)
        for digest, who in keys.items()
    }


def _read_line(
    words: list[str], keys: dict[str, Identity], limits: dict[str, Limits]
) -> str | None:
    """Add a line to `keys` or `limits`; returns the digest of its key, None for limits."""
    tenant, kind = words[0], words[1] if len(words) > 1 else ""
    found = _DIGEST.fullmatch(kind)
    if not _TENANT.fullmatch(tenant) or (found is None and kind != "limits"):
        raise ValueError(
            "is neither `tenant sha256:<64 hex digits> [id=…] [quota=…]` nor "
            "`tenant limits quota=…`"
        )
    options = _options(words[2:])
    if found is None:
        if "id" in options:
            raise ValueError("has id=, which is allowed for keys only")
        if tenant in limits:
            raise ValueError(f"gives {tenant} limits a second time")
        limits[tenant] = _limits(options)
        return None
    if tenant == ALL_TENANTS:
        raise ValueError(f"gives a key to {ALL_TENANTS}, which stands for all tenants")
    digest = found[1].lower()
    key_id = options.pop("id", digest[:8])
    if not _KEY_ID.fullmatch(key_id):
        raise ValueError(f"has id={key_id}: 1 to 64 letters, digits, '.', '_' and '-' are allowed")
    if any(who.tenant == tenant and who.key_id == key_id for who in keys.values()):
        raise ValueError(f"gives {tenant} a second key {key_id}")
    keys[digest] = Identity(tenant, key_id, key_limits=_limits(options))
    return digest


def _options(words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in (*QUOTAS, "id") or name in options:
            raise ValueError(f"has {word!r}: allowed are id and {', '.join(QUOTAS)}, once each")
        options[name] = value
    return options


def _limits(options: Mapping[str, str]) -> Limits:
    numbers: dict[str, int] = {}
    for name, value in options.items():
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MAX_LIMIT:
            raise ValueError(f"has {name}={value}: must be a whole number from 1 to {MAX_LIMIT:,}")
        numbers[name] = int(value)
    return Limits(**numbers)
