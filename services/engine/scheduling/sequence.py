"""State that one request keeps across rounds: `Request` (shared by its choices) and `Sequence`.

One quantity drives scheduling: `num_computed` catches up with the number of tokens. Prefill, a
chunk of a prefill, decode, recompute after a preemption and a resumed stream are the same case.
Other modules read the fields; they change them through the methods.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from services.common.block_hash import BlockHash
from services.engine.contract.messages import TokenLogprobs
from services.engine.contract.runner import SequenceMetadata
from services.engine.contract.sampling_params import SamplingParams

__all__ = ["Matcher", "Request", "Sequence", "SequenceMetadata", "SequenceStatus"]


class Matcher(Protocol):
    """The state of one sequence in its grammar; see `so_matcher.SOMatcher`."""

    @property
    def mask(self) -> object | None:
        """int32 words, one bit per token id that is allowed next; None if all are."""

    @property
    def must_end(self) -> bool:
        """Whether the text is complete: only the end can follow."""

    @property
    def slow(self) -> bool:
        """Whether a token took longer to match than the limit."""

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token; False if the grammar does not allow it."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life. The last four are final; `finished` is set with them."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stopped"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "aborted"
    FINISHED_FAILED = "failed"


@dataclass(eq=False, slots=True)
class Request:
    """What the choices of one request share; kept until its last block is released."""

    key: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    """Running number in the order of arrival."""
    root_hash: BlockHash
    end_ids: frozenset[int]
    """The model's end tokens; empty if the request ignores them."""
    never_ids: tuple[int, ...] = ()
    """Tokens that a constrained text may not contain: stop tokens and ignored end tokens."""
    held: bool = False
    """Whether it waits for its grammar: it is not admitted before that is built."""
    priority: int = 0
    tenant: str = ""
    deadline_unix_s: float | None = None
    max_length: int = 0
    """Prompt plus output: no choice grows beyond it."""
    choices: list["Sequence"] = field(default_factory=list)
    open_choices: int = 0
    """Choices that have not ended."""
    unreleased_choices: int = 0
    """Choices that still hold blocks, or will."""
    admitted: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache at the first admission."""

    @property
    def end_and_stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a choice, in rising order."""
        return tuple(sorted(self.end_ids.union(self.params.stop_token_ids)))

    def set_choices(self, choices: list["Sequence"]) -> None:
        """Set the sequences to run; all of them are open."""
        self.choices = choices
        self.open_choices = self.unreleased_choices = len(choices)

    def hold(self) -> None:
        """Keep it out of admission until `unhold`."""
        self.held = True

    def unhold(self) -> None:
        """Let it be admitted."""
        self.held = False

    def admit(self, num_cached_tokens: int) -> None:
        """Record the first admission."""
        self.admitted = True
        self.num_cached_tokens = num_cached_tokens

    def end_choice(self) -> bool:
        """Count one choice as ended; returns whether it was the last."""
        self.open_choices -= 1
        return self.open_choices == 0

    def release_choice(self) -> bool:
        """Count one choice as released; returns whether it was the last."""
        self.unreleased_choices -= 1
        return self.unreleased_choices == 0


class Sequence:
    """One choice of a request."""

    __slots__ = (
        "answer_snapshot",
        "block_table",
        "blocked_at",
        "capacity",
        "choice",
        "finished",
        "fork_of",
        "hashes",
        "history_from",
        "inflight",
        "inflight_row",
        "last_step",
        "look_back",
        "matcher",
        "max_length",
        "num_computed",
        "num_initial",
        "num_prompt",
        "num_registered",
        "num_released",
        "order",
        "passed_over",
        "prompt_logprobs",
        "prompt_logprobs_next",
        "prompt_step",
        "request",
        "seq_id",
        "snapshot_at",
        "state_from",
        "state_slot",
        "status",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        choice: int,
        continued: tuple[int, ...] = (),
        fork_of: "Sequence | None" = None,
    ) -> None:
        """Args:
        continued: tokens of this choice that another engine generated.
        fork_of: the choice whose prompt blocks this one shares once they are computed.
        """
        self.seq_id = seq_id
        self.order: tuple[int, ...] = ()
        """Rank among all sequences, the lowest first; assigned by the policy."""
        self.request = request
        self.choice = choice
        self.tokens = [*request.prompt, *continued]
        """Known tokens: the prompt, then generated ones."""
        self.num_prompt = len(request.prompt)
        self.num_initial = len(self.tokens)
        """Tokens of the prompt and of a continuation: they are not part of the output."""
        self.max_length = request.max_length
        self.status = SequenceStatus.WAITING
        self.finished = False
        """Whether the status is final; stored because it is read several times per round."""
        self.num_computed = 0
        """Positions submitted: their keys and values are written, or will be by launched rounds."""
        self.inflight = 0
        """Tokens sampled by a launched round whose result is not collected: 0 or 1."""
        self.inflight_row = 0
        """Row of that token in its round's SamplerOutput."""
        self.last_step = 0
        """Last round with this sequence in it: it may write to the blocks until collected."""
        self.block_table: tuple[int, ...] = ()
        self.capacity = 0
        """Positions that the block table holds."""
        self.hashes: list[BlockHash] = []
        """Hashes of the leading full blocks of `tokens`, filled on demand by the block manager."""
        self.num_registered = 0
        """Leading blocks of the table that are in the prefix map."""
        self.num_released = 0
        """Leading entries of the table that are 0: blocks before the window of all layers."""
        self.state_slot = 0
        """Slot of its fixed-size state; 0 if the model has none or it does not run."""
        self.snapshot_at = 0
        """Boundary up to which the cache held its history without a snapshot; 0 if none."""
        self.answer_snapshot: BlockHash | None = None
        """Content of the last snapshot made of its answer; None if there is none."""
        self.state_from = self.history_from = self.look_back = 0
        """See `SequenceMetadata` and `StateReplay`; 0 if its state was not rebuilt."""
        self.fork_of = fork_of
        self.prompt_step = 0
        """Last round that submitted the prompt's end; 0 if none has."""
        self.matcher: Matcher | None = None
        """Set for a constrained request once its grammar is built; has read all output tokens."""
        self.passed_over = 0
        """Later sequences admitted while this one did not fit."""
        self.blocked_at: int | None = None
        """Version of the block manager at which this sequence did not fit; None if it may fit."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        wanted = request.params.prompt_logprobs and choice == 0 and not continued
        self.prompt_logprobs_next = 0 if wanted else self.num_prompt
        """First prompt position whose log probability is still to be requested."""

    @property
    def num_output(self) -> int:
        """Generated tokens, those of another engine included."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Positions still to be submitted, a token in flight included."""
        return len(self.tokens) + self.inflight - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether a prompt position is still to be computed for its log probability."""
        return self.prompt_logprobs_next < self.num_prompt - 1

    def enter(self, order: tuple[int, ...]) -> None:
        """Set the rank; called once, when the sequence enters the queue."""
        self.order = order

    def attach(self, matcher: Matcher) -> None:
        """Set the grammar that the output must follow."""
        self.matcher = matcher

    def block(self, version: int) -> None:
        """Record that it did not fit at this version of the block manager."""
        self.blocked_at = version

    def pass_over(self) -> None:
        """Record that a later sequence was admitted first."""
        self.passed_over += 1

    def admit(self) -> None:
        """Move from waiting to running; the blocks are set already."""
        self.status = SequenceStatus.RUNNING
        self.fork_of = None
        self.passed_over = 0

    def allocate(
        self,
        table: tuple[int, ...],
        block_size: int,
        num_computed: int,
        num_registered: int,
        num_released: int = 0,
    ) -> None:
        """Set the first block table.

        Args:
            num_computed: leading positions whose keys and values are in the blocks.
            num_registered: leading blocks that are in the prefix map.
            num_released: leading entries that are 0.
        """
        self.set_blocks(table, block_size)
        self.num_computed = num_computed
        self.num_registered = num_registered
        self.num_released = num_released

    def set_state(self, slot: int, snapshot_at: int) -> None:
        """Set the slot of the state, and where a snapshot is missing (0: nowhere)."""
        self.state_slot = slot
        self.snapshot_at = snapshot_at

    def set_answer_snapshot(self, block_hash: BlockHash) -> None:
        """Record the last snapshot of its answer; it outlives a preemption."""
        self.answer_snapshot = block_hash

    def set_replay(self, start: int, count: int, look_back: int) -> None:
        """Record that the cached history's last `count` positions, from `start` on, rebuild the
        state; the model reads `look_back` tokens before them."""
        self.state_from, self.history_from = start, start + count
        self.look_back = look_back

    def earlier_tokens(self) -> tuple[int, ...]:
        """Tokens before replayed positions, for the round that begins with these."""
        if not self.state_from or self.num_computed != self.state_from:
            return ()
        return tuple(self.tokens[max(0, self.state_from - self.look_back) : self.state_from])

    def release_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Replace the blocks before the first `num_blocks` by 0, and return them."""
        released = self.block_table[self.num_released : num_blocks]
        self.block_table = (0,) * num_blocks + self.block_table[num_blocks:]
        self.num_released = num_blocks
        return released

    def set_blocks(self, table: tuple[int, ...], block_size: int) -> None:
        """Replace the block table; the positions computed stay."""
        self.block_table = table
        self.capacity = len(table) * block_size

    def set_registered(self, num_blocks: int) -> None:
        """Set the number of leading blocks that are in the prefix map."""
        self.num_registered = num_blocks

    def remove_blocks(self) -> tuple[int, ...]:
        """Clear the block table and return its blocks."""
        held = self.block_table[self.num_released :]
        self.block_table, self.capacity, self.num_released = (), 0, 0
        return held

    def remove_state(self) -> int:
        """Clear the slot of the state and return it; 0 if there is none."""
        slot, self.state_slot = self.state_slot, 0
        return slot

    def planned(self, step: int, end: int, row: int | None) -> None:
        """Record that a round computes the positions up to `end`.

        Args:
            row: row of the token that the round samples for this sequence; None if none.
        """
        if self.num_computed < self.num_prompt <= end:
            self.prompt_step = step
        if row is not None:
            self.inflight += 1
            self.inflight_row = row
        self.num_computed = end
        self.last_step = step

    def request_prompt_logprobs(self, end: int) -> None:
        """Record that the log probabilities of the prompt positions before `end` are requested."""
        self.prompt_logprobs_next = end

    def add_prompt_logprobs(self, entries: Iterable[TokenLogprobs]) -> None:
        """Append log probabilities of prompt tokens."""
        self.prompt_logprobs.extend(entries)

    def append(self, token_id: int) -> None:
        """Append the token that was in flight."""
        self.inflight -= 1
        self.tokens.append(token_id)

    def preempt(self) -> None:
        """Go back to waiting without blocks; a token in flight stays expected."""
        self.status = SequenceStatus.WAITING
        self.block_table = ()
        self.capacity = 0
        self.num_computed = 0
        self.num_registered = 0
        self.num_released = 0
        self.state_slot = 0
        self.snapshot_at = 0
        self.state_from = self.history_from = self.look_back = 0
        self.blocked_at = None

    def end(self, status: SequenceStatus) -> None:
        """Set a final status."""
        self.status = status
        self.finished = True
