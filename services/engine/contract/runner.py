"""The seam between orchestration and tensors: what a worker asks of a model runner.

`ModelRunner` (torch) and `SimulatedRunner` (arithmetic, for load simulation) implement it.
All methods but `describe` run on the worker's one thread, which plays the part of a device stream:
calls run in the order in which they were handed over. Records of which a round makes hundreds are
msgspec structs: one is made in a fraction of a frozen dataclass's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.engine.contract.sampling_params import SamplingParams


class SequenceMetadata(msgspec.Struct, frozen=True):
    """One sequence's part in one round; frozen, made by the scheduler."""

    seq_id: int
    start: int
    """Positions already computed: this round computes start .. start + len(token_ids) - 1."""
    token_ids: tuple[int, ...]
    """Input ids of this round. The last is ignored if `prev_row` is set."""
    prev_row: int | None
    """Row of the previous round's SamplerOutput whose token is the last input of this one: it was
    not known on the host when the round was scheduled."""
    block_table: tuple[int, ...]
    sample: bool
    """False for all chunks of a prompt but the last."""
    prompt_logprobs_from: int | None = None
    """First position of this round whose prediction of the next prompt token is wanted."""
    next_prompt_token: int | None = None
    """With prompt_logprobs_from: the prompt token after this round's last position; None if the
    prompt ends there. Without it the last position of a chunk would have nothing to predict."""
    num_prompt_top_logprobs: int = 0
    """With prompt_logprobs_from: likeliest alternatives to report per position."""

    @property
    def seqlen_q(self) -> int:
        """Positions computed in this round."""
        return len(self.token_ids)

    @property
    def seqlen_k(self) -> int:
        """Positions attended to by the last of them."""
        return self.start + len(self.token_ids)


class SamplingRow(msgspec.Struct, frozen=True):
    """What the sampler needs of one sequence that draws a token this round.

    Made after the previous round's tokens are known, so history and mask are exact.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    """Absolute position of the token to be drawn: the noise depends on it alone."""
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    """Filled only if a penalty is on."""
    forbid_token_ids: tuple[int, ...] = ()
    """End tokens while fewer than min_tokens are out."""
    token_mask: object | None = None
    """int32 words of a grammar's allowed ids, one bit each, or None."""


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens of one round, one per sequence with `sample`, in the round's order.

    `device_tokens` is the runner's own, handed back as `previous` for the next round's inputs.
    """

    step: int
    tokens: tuple[SampledToken, ...]
    device_tokens: object | None = None
    prompt_logprobs: tuple[tuple[int, tuple[SampledToken, ...]], ...] = ()
    """Pairs of seq_id and the entries of the prompt positions asked for in this round."""
    nan_rows: tuple[int, ...] = ()
    """Rows whose logits were not finite: their requests end with DATA_LOSS."""
    empty_rows: tuple[int, ...] = ()
    """Rows whose masks leave no token: their requests end with FAILED_PRECONDITION."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What a placement must fit; decided at load."""

    num_layers: int
    """Layers with experts; dense layers are not counted."""
    num_experts: int
    """Logical experts of each such layer."""
    num_slots: int
    """Physical slots of each such layer, all ranks together: experts plus redundant ones."""
    num_ranks: int
    """Rank r owns the slots r * num_slots / num_ranks and following."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """A map of experts; version 0 is the one that a runner starts with."""

    version: int
    phy2log: tuple[tuple[int, ...], ...]
    """[num_layers, num_slots] the logical expert in each slot."""
    model_revision: str


class PlacementRefusedError(ValueError):
    """A placement that does not fit; the message says what of it."""


class RunnerFailedError(RuntimeError):
    """A part of the runner is gone for good (a rank died); the message says which."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the model is; decided at load, never changed."""

    model: str
    model_revision: str
    """Digest over the weights."""
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


class Runner(Protocol):
    """The device side of an engine."""

    def describe(self) -> RunnerInfo:
        """Facts fixed at load."""

    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Bytes that blocks may take after the largest round's own needs; runs such a round."""

    def allocate(self, num_blocks: int) -> None:
        """Make the block tensors. Block 0 is the target of padding and never handed out."""

    def execute_main_model(
        self, step: int, batch: Sequence[SequenceMetadata], previous: SamplerOutput | None
    ) -> object:
        """Forward of one round; writes keys and values of every position it computes.

        Returns what `execute_sample` of the same round needs (hidden states of sampled rows).
        """

    def execute_sample(
        self, step: int, hidden: object, rows: Sequence[SamplingRow]
    ) -> SamplerOutput:
        """Draw one token per row; rows are the batch's sampled sequences in order."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), for copy-on-write."""

    @property
    def placement_version(self) -> int:
        """Of the map of experts in use; 0 is the first one, and a dense model's only one."""

    def prepare_placement(self, placement: ExpertPlacement) -> bool:
        """Bring a little more of what a placement needs into memory of its own.

        Call between rounds until it returns True; another version begins anew. Nothing that a
        round reads changes.

        Raises:
            PlacementRefusedError: it does not fit; nothing is kept of it.
        """

    def apply_placement(self, version: int) -> None:
        """Use the map that was prepared under this version, on all ranks from the next round on.

        Raises:
            PlacementRefusedError: it is not prepared.
        """

    def expert_loads(self) -> tuple[tuple[int, ...], ...] | None:
        """[layers, logical experts] tokens of the last rounds; None for a dense model."""

    def check(self) -> None:
        """Look whether all parts of the runner live.

        Raises:
            RunnerFailedError: one does not.
        """

    def close(self) -> None:
        """Free tensors, threads and processes; idempotent."""
