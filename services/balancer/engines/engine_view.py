"""The frozen records that the balancer's rooms exchange: what is asked, who could serve it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

RECENT_S = 60.0


class EngineState(StrEnum):
    """Whether an engine gets new work; only `SERVING` does."""

    SERVING = "serving"
    DRAINING = "draining"
    STALLED = "stalled"
    """Work in hand and no progress."""
    UNREACHABLE = "unreachable"
    """Its load reports do not come through."""
    OPEN = "open"
    """Its circuit breaker is open."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at one moment; its own dispatches since the last report are credited."""

    engine_id: str
    epoch_ms: int
    model: str
    state: EngineState
    revision: str = ""
    numerics_id: str = ""
    deterministic: bool = False
    hash_namespace: bytes = b""
    block_size: int = 32
    max_num_seqs: int = 64
    in_flight: int = 0
    """Requests of this balancer that the engine holds now."""
    occupancy: int = 0
    """All requests at the engine, other balancers' included."""
    queued_uncached: int = 0
    """Prompt tokens it has still to compute."""
    recent_uncached: float = 0.0
    """Prompt tokens lately sent here to be computed (a sum with RECENT_S of memory): each of them
    takes the place of an older one in the cache."""
    held_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    decode_round_s: float = 0.0
    """0: not measured yet."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What routing needs to know of a request."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    tenant: str = ""
    salt: bytes = b""
    priority: int = 0
    session_id: str = ""
    expected_output: int = 128
    numerics_id: str = ""
    """If set, only engines of these numerics."""
    revision: str = ""
    """If set, only engines of this revision."""
    use_cache: bool = True
    greedy: bool = False
    num_choices: int = 1
    """Sequences that the engine runs for it: it takes as many places."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could serve the request, and how much of its prompt it holds."""

    engine: EngineView
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of the expected time."""

    pressure_s: float = 0.5
    """λ in seconds."""
    recompute_weight: float = 12.0
    """κ: what a second of prefill costs the fleet; found with benchmarks.route_trace."""
    turnover_weight: float = 6.0
    """η: what it costs besides where the cache turns over as fast as the others' on average."""
    default_prefill_tokens_per_s: float = 1000.0
    default_decode_round_s: float = 0.03
    max_utilisation: float = 0.98
    half_batch: int = 8
    """Sequences that double the time of a decode round."""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a policy may look at."""

    asked: Asked
    candidates: tuple[Candidate, ...]
    """Never empty."""
    cost: CostModel
    turn: int
    """Decisions made before this one."""


@dataclass(frozen=True, slots=True)
class Score:
    """Expected seconds at one engine and the parts that add up to it; lower is better."""

    expected_s: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer."""

    candidate: Candidate
    reason: str
    scores: Mapping[str, Score]
    """By engine id; empty for policies that do not score."""
