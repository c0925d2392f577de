"""What one request keeps across rounds: `Request` (shared by its choices) and `Sequence`.

One quantity drives scheduling: `num_computed` catches up with the number of tokens. Prefill, a
chunk of it, decode, recompute after a preemption and a stream carried on are the same case.
"""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from services.common.block_hash import BlockHash
from services.engine.contract.messages import TokenLogprobs
from services.engine.contract.runner import SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams

__all__ = ["Matcher", "Request", "Sequence", "SequenceMetadata", "SequenceStatus"]


class Matcher(Protocol):
    """A sequence's place in its grammar; see `so_matcher.SOMatcher`."""

    @property
    def mask(self) -> object | None:
        """int32 words of the ids allowed next, or None if all are."""

    @property
    def spent(self) -> bool:
        """Whether nothing but the end can follow."""

    @property
    def slow(self) -> bool:
        """Whether a token took longer than any may."""

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; False if the grammar does not allow it."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life; the last four are final, and then `finished` is set."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stopped"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "aborted"
    FINISHED_FAILED = "failed"


@dataclass(eq=False, slots=True)
class Request:
    """One request: what its choices share. Owned by the engine, dropped with its last block."""

    key: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    """Running number: the order of arrival."""
    root_hash: BlockHash
    end_ids: frozenset[int]
    """The model's end tokens, unless ignored."""
    never_ids: tuple[int, ...] = ()
    """Tokens that a constraint's text may not hold: stop tokens and ignored end tokens."""
    held: bool = False
    """Whether its grammar is still to be built: it is not admitted before."""
    priority: int = 0
    tenant: str = ""
    deadline_unix_s: float | None = None
    max_length: int = 0
    """Prompt plus output: no choice grows past it."""
    choices: list["Sequence"] = field(default_factory=list)
    open_choices: int = 0
    """Choices that have not ended."""
    unreleased_choices: int = 0
    """Choices that have not given back all blocks."""
    admitted: bool = False
    num_cached_tokens: int = 0
    """Of the first admission: prompt tokens that were not computed for this request."""

    @property
    def end_and_stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a choice, in rising order."""
        return tuple(sorted(self.end_ids.union(self.params.stop_token_ids)))


class Sequence:
    """One choice of a request. Written by the scheduler and the engine's post-processing only."""

    __slots__ = (
        "admissions",
        "block_table",
        "blocked_at",
        "capacity",
        "choice",
        "finished",
        "fork_of",
        "hashes",
        "inflight",
        "inflight_row",
        "last_step",
        "matcher",
        "max_length",
        "num_computed",
        "num_initial",
        "num_prompt",
        "num_registered",
        "order",
        "passed_over",
        "prompt_logprobs",
        "prompt_logprobs_next",
        "prompt_step",
        "request",
        "seq_id",
        "status",
        "tokens",
    )

    def __init__(
        self, seq_id: int, request: Request, choice: int, continued: tuple[int, ...] = ()
    ) -> None:
        self.seq_id = seq_id
        self.order: tuple[int, ...] = ()
        """Rank among all sequences, the lowest first; given by the policy."""
        self.request = request
        self.choice = choice
        self.tokens = [*request.prompt, *continued]
        """Known tokens: prompt, continued and accepted ones."""
        self.num_prompt = len(request.prompt)
        self.num_initial = len(self.tokens)
        """Tokens of the prompt and of a continuation: they are not told again."""
        self.max_length = request.max_length
        self.status = SequenceStatus.WAITING
        self.finished = False
        """Whether the status is one of the final ones; asked too often to be worked out."""
        self.num_computed = 0
        """Positions submitted: their keys and values are written, or will be by launched rounds."""
        self.inflight = 0
        """Tokens sampled by a launched round whose outcome is not collected: 0 or 1."""
        self.inflight_row = 0
        """Row of that token in its round's SamplerOutput."""
        self.last_step = 0
        """Last round launched with this sequence in it: it may write until that is collected."""
        self.block_table: tuple[int, ...] = ()
        self.capacity = 0
        """Positions that the block table holds."""
        self.hashes: list[BlockHash] = []
        """Of the full blocks of `tokens`, as far as anybody asked."""
        self.num_registered = 0
        """Leading blocks of the table that the prefix map knows."""
        self.fork_of: Sequence | None = None
        """The choice whose prompt blocks this one shares once they are computed."""
        self.prompt_step = 0
        """Last round that submitted the prompt's end; 0 if none has."""
        self.matcher: Matcher | None = None
        """Of a constrained request, once its grammar is built; knows all known output tokens."""
        self.admissions = 0
        self.passed_over = 0
        """Later sequences admitted while this one could not get its blocks."""
        self.blocked_at = -1
        """Version of the block manager at which this one did not fit."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        wanted = request.params.prompt_logprobs and choice == 0 and not continued
        self.prompt_logprobs_next = 0 if wanted else self.num_prompt
        """First prompt position whose prediction is still to be asked for."""

    def end(self, status: SequenceStatus) -> None:
        """It is over, for whatever reason."""
        self.status = status
        self.finished = True

    @property
    def num_output(self) -> int:
        """Generated tokens that are known, continued ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Positions still to be submitted, a token in flight included."""
        return len(self.tokens) + self.inflight - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether a prompt position has still to be computed for its prediction."""
        return self.prompt_logprobs_next < self.num_prompt - 1

    def take_blocks(self, table: tuple[int, ...], block_size: int) -> None:
        """Hold these blocks."""
        self.block_table = table
        self.capacity = len(table) * block_size

    def reset_for_recompute(self) -> None:
        """Back to the queue without blocks; a token in flight stays expected."""
        self.status = SequenceStatus.WAITING
        self.block_table = ()
        self.capacity = 0
        self.num_computed = 0
        self.num_registered = 0
        self.blocked_at = -1
