"""`Runner`: the interface between scheduling and tensors, and the records that cross it.

`ModelRunner` (torch) and `SimulatedRunner` (arithmetic, for load simulation) implement it.
All methods but `describe` and `check` run on the worker's one thread, which plays the part of a
device stream: calls run in the order in which they were submitted. Records that a round creates by
the hundred are msgspec structs, which take a fraction of a frozen dataclass's time to create.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.engine.contract.sampling_params import SamplingParams


class SequenceMetadata(msgspec.Struct, frozen=True):
    """One sequence's part in one round; made by the scheduler."""

    seq_id: int
    start: int
    """Positions already computed: this round computes start to start + len(token_ids) - 1."""
    token_ids: tuple[int, ...]
    """Input ids of this round. The last one is ignored if `prev_row` is set."""
    prev_row: int | None
    """Row of the previous round's SamplerOutput whose token is the last input of this round: the
    token was not known when the round was planned."""
    block_table: tuple[int, ...]
    """Blocks of the positions from 0 on; at least those of all positions before seqlen_k. With
    `RunnerInfo.window`, blocks that lie wholly before the window of `start` may be 0: their content
    is undefined and no position of the round may depend on it."""
    sample: bool
    """Whether a token is sampled: not for the chunks of a prompt before the last."""
    prompt_logprobs_from: int | None = None
    """First position of this round whose prediction of the next prompt token is requested."""
    next_prompt_token: int | None = None
    """With prompt_logprobs_from: the prompt token after this round's last position, which that
    position predicts; None if the prompt ends there."""
    num_prompt_top_logprobs: int = 0
    """With prompt_logprobs_from: number of likeliest alternatives to return per position."""
    state_from: int = 0
    """First position that the state knows of, other than 0 after a replay (`StateReplay`): rows
    attend to no window before it."""
    history_from: int = 0
    """Positions before it are in the blocks already: the round does not write their history."""
    earlier_tokens: tuple[int, ...] = ()
    """In the round that starts at a `state_from` above 0: the tokens before it, at most
    `StateReplay.look_back`."""
    state_slot: int = 0
    """Slot of the sequence's fixed-size state, for models that declare a `StateBlock`; 0 for other
    models. When the forward begins, the slot holds the state after positions 0 to start - 1: zeros
    if start is 0 or `state_from`. When it ends, it holds the state after position seqlen_k - 1."""

    @property
    def seqlen_q(self) -> int:
        """Positions computed in this round."""
        return len(self.token_ids)

    @property
    def seqlen_k(self) -> int:
        """Positions that the last of them attends to."""
        return self.start + len(self.token_ids)


class SamplingRow(msgspec.Struct, frozen=True):
    """What the sampler needs of one sequence that samples a token in this round.

    Made once the previous round's tokens are known, so history and mask are exact.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    """Absolute position of the token; with seed and choice it determines the noise."""
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    """Set only if a penalty is on, like the prompt."""
    forbid_token_ids: tuple[int, ...] = ()
    """Tokens that may not be sampled: end and stop tokens while fewer than min_tokens are
    generated, and those that a constrained text may not contain."""
    token_mask: object | None = None
    """The grammar's allowed ids as int32 words, one bit per id; None allows all."""


class SampledToken(msgspec.Struct, frozen=True):
    """A token with its log probability and its likeliest alternatives, if requested."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens of one round, one per sequence with `sample`, in the order of the batch."""

    step: int
    tokens: tuple[SampledToken, ...]
    device_tokens: object | None = None
    """Private to the runner, which gets it back as `previous` for the next round's inputs."""
    prompt_logprobs: tuple[tuple[int, tuple[SampledToken, ...]], ...] = ()
    """Pairs of seq_id and the entries of the prompt positions requested in this round."""
    nan_rows: tuple[int, ...] = ()
    """Rows whose logits were not finite: their requests end with DATA_LOSS."""
    nan_blocks: tuple[int, ...] = ()
    """With nan_rows: blocks in which values that were not finite are 0 now. A sequence that has one
    in its table would go on with wrong values: its request ends with DATA_LOSS too."""
    empty_rows: tuple[int, ...] = ()
    """Rows whose masks leave no token: their requests end with FAILED_PRECONDITION."""


class PendingOutput(Protocol):
    """A `SamplerOutput` that is still on its way from the device."""

    @property
    def device_tokens(self) -> object:
        """See SamplerOutput."""

    def wait(self) -> SamplerOutput:
        """The output. The caller may be any thread; a second call returns the same.

        If it has `nan_rows`, call `Runner.scrub` before a block of the round is used again: it
        returns the `nan_blocks`.
        """


@dataclass(frozen=True, slots=True)
class StateReplay:
    """How state is rebuilt from cached history without a snapshot (bounded replay).

    The last `positions` of the history are computed again from a slot of zeros. They write no
    history, and nothing is sampled from them. What follows differs a little from what an uncut
    prompt gives: the first of them lack what was before.
    """

    positions: int
    boundary: int
    """History can be continued after a multiple of this many positions."""
    look_back: int
    """Tokens before the replayed positions that the model reads."""


@dataclass(frozen=True, slots=True)
class StateBlock:
    """The fixed-size state of one sequence, as a model declares it: e.g. a ring of window keys and
    the open rows of compressors. It is beside the history in blocks, which grows.

    The runner allocates slots of this size. Slot 0 is the target of padding and never a sequence's.
    A sequence has one slot from its admission on; the runner updates it in place, round by round.
    Other slots hold snapshots: whole copies of a sequence's slot at a boundary. A sequence that
    finds its history in the cache restarts at a boundary that has a snapshot, with a copy of it.

    One round runs on the device in this order; nothing of round n + 1 begins before round n ends:
    `copy_blocks`, `clear_states`, `copy_states` (snapshot to sequence: restores),
    `execute_main_model`, `copy_states` (sequence to snapshot: saves), `execute_sample`.
    """

    nbytes: int
    """Bytes of one slot, all layers together."""
    boundary: int
    """A snapshot can be taken after a multiple of this many positions, and only there: at other
    positions the state would depend on more than its slot, e.g. on an open group of a compressor
    that is not kept. 1 if every position will do. Snapshots are taken where it coincides with the
    end of a block."""
    replay: StateReplay | None = None
    """Instead of snapshots: how a hit rebuilds the state. None: a hit needs a snapshot."""

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.boundary < 1:
            raise ValueError(
                f"a state of {self.nbytes} bytes with a boundary every {self.boundary} positions: "
                "both must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts, slots and ranks that a placement must fit; fixed at load."""

    num_layers: int
    """Layers with experts; dense layers are not counted."""
    num_experts: int
    """Logical experts of each such layer."""
    num_slots: int
    """Physical slots of each such layer on all ranks: one per expert plus the redundant ones."""
    num_ranks: int
    """Rank r owns num_slots / num_ranks slots, from r * num_slots / num_ranks on."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which expert is in which slot. A runner starts with version 0."""

    version: int
    phy2log: tuple[tuple[int, ...], ...]
    """[num_layers, num_slots] the logical expert in each slot."""
    model_revision: str


class PlacementRefusedError(ValueError):
    """A placement does not fit; the message gives the reason."""


class RunnerFailedError(RuntimeError):
    """A part of the runner, e.g. a rank, has failed for good; the message names it."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts of the model, fixed at load."""

    model: str
    model_revision: str
    """Digest of the weights."""
    numerics_id: str
    kv_layout: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_block: int
    weights_bytes: int
    load_s: float
    experts: ExpertShape | None = None
    """None for a dense model."""
    bit_identical: bool = False
    """Whether a request's tokens never depend on batching, chunking and caching."""
    window: int = 0
    """Positions that a row attends to at most, its own included, if all layers slide; 0 if some
    layer attends to the whole history. Blocks before the window of a round are released."""
    state: StateBlock | None = None
    """None if blocks are all that a sequence keeps."""


class Runner(Protocol):
    """The device side of an engine."""

    def describe(self) -> RunnerInfo:
        """Facts fixed at load."""

    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Bytes left for blocks beside the largest round, which it runs to measure them."""

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """Allocate the block tensors, and state slots if the model declares a `StateBlock`.

        Block 0 is the target of padding and of released blocks: finite and never a sequence's.

        Args:
            num_states: slots, slot 0 included; 0 without a `StateBlock`.
        """

    def execute_main_model(
        self,
        step: int,
        batch: Sequence[SequenceMetadata],
        previous: SamplerOutput | PendingOutput | None,
    ) -> object:
        """Run the forward of one round; writes keys and values of every position of the batch.

        Returns what `execute_sample` of the same round needs: the hidden states of sampled rows.
        """

    def execute_sample(
        self, step: int, hidden: object, rows: Sequence[SamplingRow]
    ) -> SamplerOutput | PendingOutput:
        """Sample one token per row; the rows are the batch's sampled sequences, in order.

        A runner whose device works beside the host returns a `PendingOutput` at once.
        """

    def scrub(self) -> tuple[int, ...]:
        """Replace values in blocks that are not finite by 0; returns the blocks that had some.

        See `PendingOutput.wait`.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks for copy-on-write; pairs are (source, target)."""

    def clear_states(self, slots: Sequence[int]) -> None:
        """Fill whole state slots with zeros: the state before position 0."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole state slots; pairs are (source, target).

        No slot is a target twice in one call, and no target is a source of the same call.
        """

    @property
    def placement_version(self) -> int:
        """Version of the placement in use; always 0 for a dense model."""

    def prepare_placement(self, placement: ExpertPlacement) -> bool:
        """Load the next part of the weights that a placement needs.

        Call it between rounds until it returns True. Another version starts from the beginning.
        Nothing that a round reads changes.

        Raises:
            PlacementRefusedError: the placement does not fit; nothing of it is kept.
        """

    def apply_placement(self, version: int) -> None:
        """Use the prepared placement of this version, on all ranks from the next round on.

        Raises:
            PlacementRefusedError: it is not prepared.
        """

    def expert_loads(self) -> tuple[tuple[int, ...], ...] | None:
        """Tokens over the last rounds, [layers, logical experts]; None for a dense model."""

    def check(self) -> None:
        """Check that all parts of the runner are alive.

        Raises:
            RunnerFailedError: one is not.
        """

    def close(self) -> None:
        """Free tensors, threads and processes; idempotent."""
