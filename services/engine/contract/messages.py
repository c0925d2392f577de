"""Messages between an engine's front process and its core process.

The front owns text and streams; the core owns scheduling, memory and the device. They exchange one
batch of these records each way per round, as msgpack. Token ids are plain ints.
"""

from typing import Literal

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.finish_reason import FinishReason
from services.engine.contract.runner import ExpertPlacement, RunnerInfo
from services.engine.contract.sampling_params import SamplingParams


class StartCore(msgspec.Struct, tag=True, frozen=True):
    """The first message to a core, which answers with CoreReady or CoreFailed."""

    config: EngineConfig


class CoreRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the core needs of a request.

    The front's `AcceptedRequest` extends it, so a request is passed on without being copied; fields
    that only the front uses are dropped when the core decodes the message.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    """Validated in the front; the seed is set."""
    salt: bytes = b""
    """Requests with different salts never share cached blocks."""
    tenant: str = ""
    priority: int = 0
    continued: tuple[tuple[int, ...], ...] = ()
    """Per choice, the tokens that another engine already generated; empty for a new request."""
    finished_choices: tuple[int, ...] = ()
    """Choices that ended on another engine: they are not run and produce no output."""


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """Run a request."""

    request_key: str
    """Unique in this engine: assigned by the front, never the client's request id."""
    request: CoreRequest
    deadline_unix_s: float | None = None


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    """End a request in any state. The core sends no further output for it."""

    request_key: str
    choice: int | None = None
    """End this choice alone (its stop string was found); None ends all."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop the loop after the running round."""


class SendSnapshot(msgspec.Struct, tag=True, frozen=True):
    """List all reusable blocks in the next report; the prefix index has requested them."""


class SetLogLevel(msgspec.Struct, tag=True, frozen=True):
    """Set the core's log level to the front's."""

    level: str


class ApplyPlacement(msgspec.Struct, tag=True, frozen=True):
    """Use this expert placement from the first round for which its weights are loaded.

    The core answers with a report whose `placement_version` is the placement's version, or with
    `placement_rejected`. A newer placement that arrives before the switch replaces this one.
    """

    placement: ExpertPlacement
    """Its version is at least 1."""


class PlacementRejection(msgspec.Struct, frozen=True, array_like=True):
    """A placement that does not fit; the previous one stays in use."""

    version: int
    reason: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class ChoiceOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one round produced for one choice of one request."""

    request_key: str
    choice: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set when the choice has ended; never STOP_STRING."""
    matched_token_id: int | None = None
    """The end or stop token that ended the choice."""
    logprobs: list[TokenLogprobs] = []
    """One per token of `token_ids`, if requested."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache; set with the first token."""
    prompt_logprobs: list[TokenLogprobs] = []
    """With the first token, if requested: one per prompt token from the second on."""


class RequestFailure(msgspec.Struct, frozen=True, array_like=True):
    """A request that ends with an error."""

    request_key: str
    code: str
    """Name of the gRPC status."""
    reason: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    """When to retry, from the measured drain rate; with RESOURCE_EXHAUSTED."""


Verb = Literal["enqueue", "admit", "submit", "collect", "release"]
"""Steps of a request's life; see docs/request-lifecycle.md."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A timestamp in a request's life; the fields after `unix_ns` depend on the verb."""

    request_key: str
    verb: Verb
    unix_ns: int
    choice: int | None = None
    """The choice that was preempted, got its first token or ended."""
    preempted: bool = False
    """submit: the choice lost its blocks and went back to the queue."""
    first: bool = False
    """collect: the choice got its first token."""
    end: bool = False
    """collect: the choice ended."""
    step: int | None = None
    """submit: the round of a prompt chunk."""
    start: int | None = None
    """submit: first position of the chunk."""
    tokens: int | None = None
    """submit: tokens of the chunk. collect, with `end`: output tokens of the choice."""
    lost_tokens: int | None = None
    """submit, with `preempted`: positions to be computed again."""
    prompt_tokens: int | None = None
    """enqueue: length of the prompt."""
    cached_tokens: int | None = None
    """admit: leading prompt tokens found in the cache."""


BlockKind = Literal["history", "state"]
"""What an event is about: keys and values of a block, or a snapshot of fixed-size state at its end.
A sequence can restart after a block of a model with state only if the engine holds both."""


class StoredBlocks(msgspec.Struct, tag=True, frozen=True):
    """Consecutive blocks of one chain that became reusable, or one snapshot."""

    hashes: list[bytes]
    """32 bytes each, parents first."""
    parent: bytes | None
    """Hash of the block before the first; None if the chain starts here, and for a snapshot."""
    kind: BlockKind = "history"


class RemovedBlocks(msgspec.Struct, tag=True, frozen=True):
    """Blocks or snapshots that were evicted."""

    hashes: list[bytes]
    kind: BlockKind = "history"


class ClearedBlocks(msgspec.Struct, tag=True, frozen=True):
    """All blocks and snapshots were dropped."""


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
    """The core has loaded its model, allocated its memory and accepts requests."""

    info: RunnerInfo
    hash_namespace: bytes
    """Root of all block hashes; engines share cached blocks only if theirs are equal."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    max_model_len: int
    """Longest prompt plus output of this engine; at most the model's (`info.max_model_len`)."""
    kv_bytes: int
    """Memory of all blocks."""
    max_num_seqs: int
    """Sequences that can run at once: at most the configured ones, less if a round's tokens or the
    slots of state are fewer."""


class CoreFailed(msgspec.Struct, tag=True, frozen=True):
    """The core has failed; its process ends after this message."""

    message: str


class RoundReport(msgspec.Struct, tag=True, frozen=True):
    """Everything that one round produced."""

    step: int
    """The round whose tokens these are; 0 for none."""
    outputs: list[ChoiceOutput] = []
    failures: list[RequestFailure] = []
    marks: list[Mark] = []
    cache_events: list[CacheEvent] = []
    snapshot: list[StoredBlocks] | None = None
    """All reusable blocks, in the report after SendSnapshot."""
    load: Load = Load()
    placement_version: int = 0
    """Version of the placement in use. A change while the engine is idle has its own report."""
    placement_rejected: PlacementRejection | None = None
    """Set once, in the first report after the rejection."""
    expert_loads: list[list[int]] | None = None
    """[layers with experts, logical experts] tokens over the last `expert_load_window` rounds;
    sent every few seconds while rounds run, otherwise None."""


ToCore = (
    StartCore | AddRequest | AbortRequest | SendSnapshot | SetLogLevel | ApplyPlacement | Shutdown
)
ToFront = CoreReady | CoreFailed | RoundReport
