"""Frozen records that the parts of the balancer exchange.

They describe a request as routing sees it, the engines that could serve it, and the choice that a
policy makes. Routing policies of users import from this module, so its names are public.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

RECENT_S = 60.0
"""Time constant, in seconds, of `EngineView.recent_uncached`."""

EngineLife = tuple[str, int]
"""Engine id and epoch in milliseconds. A restarted engine has another epoch, so it is another
life: it holds nothing that the earlier process held."""


class EngineState(StrEnum):
    """State of an engine. Only a `SERVING` engine gets new work."""

    SERVING = "serving"
    DRAINING = "draining"
    STALLED = "stalled"
    """The engine has work and makes no progress."""
    UNREACHABLE = "unreachable"
    """No load reports arrive from the engine."""
    OPEN = "open"
    """The circuit breaker of the engine is open."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at one moment.

    The load contains the last report and this balancer's own dispatches since that report.
    """

    engine_id: str
    epoch_ms: int
    model: str
    state: EngineState
    revision: str = ""
    numerics_id: str = ""
    deterministic: bool = False
    hash_namespace: bytes = b""
    block_size: int = 32
    """Tokens per KV block."""
    max_num_seqs: int = 64
    """Sequences that the engine runs at once."""
    in_flight: int = 0
    """Requests of this balancer at the engine."""
    occupancy: int = 0
    """Slots in use at the engine, including those of other balancers."""
    queued_uncached: int = 0
    """Prompt tokens that the engine still has to compute."""
    recent_uncached: float = 0.0
    """Uncached prompt tokens sent to the engine recently: an exponentially decayed sum with time
    constant RECENT_S. Each of these tokens evicts an older one from the cache."""
    held_blocks: int = 0
    """KV blocks held by running requests."""
    total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured prefill rate; 0 before the first measurement."""
    decode_round_s: float = 0.0
    """Measured seconds of one decode round; 0 before the first measurement."""
    needs_state: bool = False
    """Whether a prefix is usable only up to a block with a snapshot of fixed-size state."""

    @property
    def life(self) -> EngineLife:
        """The process behind this view: engine id and epoch."""
        return self.engine_id, self.epoch_ms


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The part of a request that routing and admission need."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    tenant: str = ""
    salt: bytes = b""
    """Separates the block hashes of tenants from one another."""
    priority: int = 0
    session_id: str = ""
    expected_output: int = 128
    """Expected completion tokens."""
    numerics_id: str = ""
    """If set, only engines with these numerics may serve the request."""
    revision: str = ""
    """If set, only engines of this model revision may serve the request."""
    use_cache: bool = True
    greedy: bool = False
    num_choices: int = 1
    """Sequences that the engine runs for the request. Each one takes a slot."""


Asked = RoutingRequest
"""Former name of `RoutingRequest`. Kept because policies of users may import it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could serve the request, and how much of the prompt it holds."""

    engine: EngineView
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of the expected time; `routing.policies.least_time` has the formula."""

    pressure_s: float = 0.5
    """λ, in seconds."""
    recompute_weight: float = 12.0
    """κ: what one second of prefill costs the fleet. Tuned with benchmarks.route_trace."""
    turnover_weight: float = 6.0
    """η: additional cost of one second of prefill at an engine of average cache turnover."""
    default_prefill_tokens_per_s: float = 1000.0
    """Used while no engine has measured its rate."""
    default_decode_round_s: float = 0.03
    """Used while no engine has measured its decode rounds."""
    max_utilisation: float = 0.98
    half_batch: int = 8
    """Running sequences that double the time of a decode round."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a policy may use for its choice."""

    request: RoutingRequest
    candidates: tuple[Candidate, ...]
    """Never empty."""
    cost: CostModel
    turn: int
    """Decisions made before this one."""

    @property
    def asked(self) -> RoutingRequest:
        """Former name of `request`. Kept because policies of users may read it."""
        return self.request


@dataclass(frozen=True, slots=True)
class Score:
    """Expected seconds at one engine, and the parts that add up to them. Lower is better."""

    expected_s: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a policy."""

    candidate: Candidate
    reason: str
    scores: Mapping[str, Score]
    """By engine id; empty for policies that do not score."""
