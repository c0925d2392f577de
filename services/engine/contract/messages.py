"""What the front and the core say to each other: one batch each way a round.

The front owns text and streams, the core owns scheduling, memory and the device. Both sides know
these records and nothing else of one another. They travel as msgpack (msgspec), ids as plain ints.
"""

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import ExpertPlacement, ExpertShape
from services.engine.contract.sampling_params import SamplingParams


class StartCore(msgspec.Struct, tag=True, frozen=True):
    """The first message to a core; answered by CoreReady or CoreFailed."""

    config: EngineConfig


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """A request that passed validation in the front; the seed is set."""

    request_key: str
    """Unique in this engine: the front's own, never the caller's request id."""
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: bytes = b""
    tenant: str = ""
    priority: int = 0
    deadline_unix_s: float | None = None
    continued: list[list[int]] = []
    """Per choice, the tokens that another engine already generated; empty for a fresh request."""
    finished_choices: list[int] = []
    """Choices that ended at another engine: they are not run and nothing is said of them."""


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    """End a request in any state; answered by no further output."""

    request_key: str
    reason: str = "client"
    choice: int | None = None
    """End this choice alone (its stop string was found); None ends all."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop the loop after the running round."""


class SendSnapshot(msgspec.Struct, tag=True, frozen=True):
    """List all cached blocks in the next report (the prefix index asked for them)."""


class SetLogLevel(msgspec.Struct, tag=True, frozen=True):
    """Log from this level on, as the front does."""

    level: str


class ApplyPlacement(msgspec.Struct, tag=True, frozen=True):
    """Use this expert placement from the first round for which its weights are loaded.

    The core answers with a report whose `placement_version` is the placement's version, or with
    `placement_rejected`. A newer placement that arrives before the switch replaces this one.
    """

    placement: ExpertPlacement
    """Its version is at least 1."""


class PlacementRejection(msgspec.Struct, frozen=True, array_like=True):
    """A map that does not fit; the one before it stays in use."""

    version: int
    reason: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class ChoiceOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one round gave one choice of one request."""

    request_key: str
    choice: int
    token_ids: list[int]
    finish_reason: str | None = None
    """EOS, STOP_TOKEN, MAX_TOKENS, CONTEXT_FULL or GRAMMAR_COMPLETE; STOP_STRING is the front's."""
    matched_token_id: int | None = None
    logprobs: list[TokenLogprobs] = []
    num_cached_tokens: int = 0
    """Set with the first token."""
    prompt_logprobs: list[TokenLogprobs] = []
    """With the first token, if asked for: one per prompt token from the second on."""


class RequestFailure(msgspec.Struct, frozen=True, array_like=True):
    """A request that ends with a status: `code` is the gRPC status name."""

    request_key: str
    code: str
    reason: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    """When a repeat is sensible, from the measured drain rate; with RESOURCE_EXHAUSTED."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A moment in a request's life: verb is enqueue, admit, submit, collect or release."""

    request_key: str
    verb: str
    unix_ns: int
    detail: dict[str, int] = {}


class StoredBlocks(msgspec.Struct, tag=True, frozen=True):
    """Blocks of one chain that became reusable: 32-byte hashes in order."""

    hashes: list[bytes]
    parent: bytes | None


class RemovedBlocks(msgspec.Struct, tag=True, frozen=True):
    hashes: list[bytes]


class ClearedBlocks(msgspec.Struct, tag=True, frozen=True):
    pass


CacheEvent = StoredBlocks | RemovedBlocks | ClearedBlocks


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The engine's load after a round; see LoadReport in the protos."""

    waiting_requests: int = 0
    running_requests: int = 0
    uncached_tokens_queued: int = 0
    held_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_round_s: float = 0.0
    drain_requests_per_s: float = 0.0


class CoreReady(msgspec.Struct, tag=True, frozen=True):
    """The core has loaded its model, measured its memory and serves."""

    model: str
    model_revision: str
    numerics_id: str
    hash_namespace: bytes
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    load_s: float
    weights_bytes: int
    kv_bytes: int
    experts: ExpertShape | None = None
    """None for a model without experts: it takes no placement."""


class CoreFailed(msgspec.Struct, tag=True, frozen=True):
    """The core cannot go on; the process ends after this message."""

    message: str


class RoundReport(msgspec.Struct, tag=True, frozen=True):
    """All that one round has to tell."""

    step: int
    outputs: list[ChoiceOutput] = []
    failures: list[RequestFailure] = []
    marks: list[Mark] = []
    cache_events: list[CacheEvent] = []
    snapshot: list[StoredBlocks] | None = None
    load: Load = Load()
    placement_version: int = 0
    """Of the map in use when the report was made; while idle a change has a report of its own."""
    placement_rejected: PlacementRejection | None = None
    """Told once, in the first report after the refusal."""
    expert_loads: list[list[int]] | None = None
    """[layers with experts, logical experts] tokens over the last rounds (the window is the
    setting `expert_load_window`); every few seconds while rounds run, else None."""


ToCore = (
    StartCore | AddRequest | AbortRequest | SendSnapshot | SetLogLevel | ApplyPlacement | Shutdown
)
ToFront = CoreReady | CoreFailed | RoundReport
