"""`ModelRunner`: the tensor side of an engine. It owns the weights, KV-cache blocks and device."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.interface import Kernels, UnsupportedError
from services.common.config.settings import ConfigError
from services.engine.compute.device.interface import Device, without_gradients
from services.engine.compute.device_rounds.results import DeviceHidden
from services.engine.compute.device_rounds.rounds import DeviceRounds, make_rounds
from services.engine.compute.expert_parallel.leader import ExpertLeader
from services.engine.compute.expert_parallel.lone import LoneExperts
from services.engine.compute.loader import ModelSource, load_model
from services.engine.compute.memory import largest_round
from services.engine.compute.model_setup import (
    choose_kernels,
    declared_state,
    kernels_label,
    make_device,
    max_positions,
    start_experts,
    start_mtp,
    window_of_all_layers,
)
from services.engine.compute.models import kept_weights
from services.engine.compute.models.cache_tensors import block_bytes, layout_name, replace_spoilt
from services.engine.compute.models.decode_rows import DecodeRows
from services.engine.compute.models.input_metadata import InputMetadata, build_input
from services.engine.compute.models.registry import Model, make_model, reads_prefill_masks
from services.engine.compute.numerics import TORCH_DTYPES, Numerics, use_threads
from services.engine.compute.ranks.partition import Partition
from services.engine.compute.sampling.prompt_scores import score_prompts
from services.engine.compute.sampling.sampler import Sampler
from services.engine.compute.sampling.sampling_inputs import Hidden, build_sampling
from services.engine.compute.state_cache import StateCache, StatefulModel
from services.engine.contract.config import EngineConfig
from services.engine.contract.memory_size import parse_size
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import (
    ExpertPlacement,
    PendingOutput,
    PlacementRefusedError,
    RunnerInfo,
    SamplerOutput,
    SamplingRow,
    SequenceMetadata,
)
from services.engine.contract.sampling_params import SamplingParams


class ModelRunner:
    """A `contract.runner.Runner` with PyTorch; loads the model when constructed."""

    _kept: Path | None = None
    """Packed weights of earlier starts, for this one and later ones."""
    _rounds: DeviceRounds | None = None
    """Runs the rounds where the host need not wait for the device."""
    _resources: contextlib.ExitStack | None = None
    """What `close` ends; None before the model is loaded."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource | None = None,
        partition: Partition | None = None,
        device: Device | None = None,
    ) -> None:
        """Load the model.

        Args:
            source: an already loaded model, used instead of `config.model`.
            partition: the part of the model to hold; None for the whole model.
            device: what computes; None: what the option `device` names.

        Raises:
            ModelFileError: files that cannot be served.
            ConfigError: a device or number format that does not work here.
        """
        started = time.perf_counter()
        self._caches: list[Tensor] = []
        self._rows: DecodeRows | None = None
        self._states: StateCache | None = None
        self._machine = device or make_device(config, 0 if partition is None else partition.rank)
        self._device = self._machine.place
        use_threads(config)
        keep = source is None and partition is None and config.keep_weights
        source = source or load_model(config.model)
        if partition is not None:
            source = partition.part_of(source)
        self._config = source.config
        self._block_size = config.block_size
        self._sized = isinstance(parse_size(config.kv_memory), int)
        self._dtype = TORCH_DTYPES[config.dtype]
        kernels = choose_kernels(config, self._device, source.config, whole_model=partition is None)
        if partition is not None:
            kernels = partition.kernels(kernels)
        self._whole_rounds = kernels.whole_rounds is not None
        keeps_rows = kernels.uses_kept_rows and not (source.config.mla or source.config.v4)
        self._uses_rows = keeps_rows and self._device.type == "cpu"
        self._sampler = Sampler(kernels, one_by_one=config.deterministic)
        try:
            with contextlib.ExitStack() as resources:
                self._experts = self._start_experts(config, source, kernels, resources)
                kept = keep and self._whole_rounds
                if kept:
                    made_of = f"{source.revision} {source.quantisation}"
                    self._kept = kept_weights.path_of(made_of, source.config, kernels.name)
                self._model = self._load(config, source, kernels, resources)
                if partition is None:
                    self._rounds = make_rounds(
                        self._machine, kernels, self._model, config, source.config
                    )
                self._resources = resources.pop_all()
        except UnsupportedError as error:
            raise ConfigError(str(error)) from error
        except ModelFileError as error:
            raise ModelFileError(f"model {source.name}: {error}") from error
        self._info = self._describe(config, source, kernels.name, started)

    @property
    def device(self) -> torch.device:
        """The device of weights and blocks."""
        return self._device

    def describe(self) -> RunnerInfo:
        """See Runner."""
        return self._info

    @without_gradients
    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See Runner; it runs the largest round on blocks that are freed again.

        For compiled rounds with a size of `kv_memory`, which need it as a check only, the peak
        that an earlier start measured will do.
        """
        shape = (
            f"{max_num_batched_tokens} {max_num_seqs} {self._block_size} {self._info.max_model_len}"
        )
        peak = kept_weights.kept_peak(self._kept, shape) if self._sized else None
        if peak is None:
            peak = self._measure_peak(max_num_batched_tokens, max_num_seqs)
            kept_weights.keep_peak(self._kept, shape, peak)
        return max(0, self._machine.free_bytes() - peak)

    def _measure_peak(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        length = min(max_num_batched_tokens, self._info.max_model_len)
        batch, blocks = largest_round(
            max_num_batched_tokens, max_num_seqs, length, self._block_size
        )
        row = SamplingRow(SamplingParams(top_p=0.9), seed=0, choice=0, position=length)

        def run_largest() -> None:
            hidden = self.execute_main_model(0, batch, None)
            self.execute_sample(0, hidden, [row] * sum(seq.sample for seq in batch))

        self.allocate(blocks, len(batch) + 1)
        try:
            peak = self._machine.peak_bytes(run_largest)
            peak += self._rounds.graph_bytes if self._rounds else 0
        finally:
            self._free()
        if self._uses_rows:
            peak += DecodeRows.nbytes(self._info.kv_bytes_per_block // self._block_size)
        return peak

    @without_gradients
    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See Runner."""
        self._caches = [
            self._model.cache(tensor.shape(num_blocks, self._block_size), tensor.dtype)
            for tensor in self._model.cache_tensors
        ]
        self._rows = DecodeRows(self._caches) if self._uses_rows else None
        if self._rounds is not None:
            self._rounds.allocate(self._caches)
        if isinstance(self._model, StatefulModel):
            self._states = StateCache(self._model.state_block, num_states, self._device)
            self._model.use_states(self._states.slots)
        if self._experts:
            self._experts.clear_loads()  # the rounds that measured memory do not count

    @without_gradients
    def execute_main_model(
        self,
        step: int,
        batch: Sequence[SequenceMetadata],
        previous: SamplerOutput | PendingOutput | None,
    ) -> object:
        """See Runner. The head runs here, so that logits are ready before grammar masks are."""
        if self._rounds is not None:
            with self._round_of_experts():
                return self._rounds.forward(batch, has_previous=previous is not None)
        tokens = previous.device_tokens if previous else None
        hidden, data = self.forward(batch, tokens if isinstance(tokens, Tensor) else None)
        logits = self._model.logits(hidden.index_select(0, data.sampled_rows))
        return Hidden(logits, score_prompts(self._model.logits, hidden, data.prompt_rows))

    @without_gradients
    def forward(
        self, batch: Sequence[SequenceMetadata], previous_tokens: Tensor | None
    ) -> tuple[Tensor, InputMetadata]:
        """Run all layers of one round.

        Args:
            previous_tokens: [rows] sampled tokens of the previous round, for sequences with
                `prev_row`.

        Returns:
            Hidden states [T, hidden], and the layout of the rows.
        """
        data = build_input(
            batch,
            previous_tokens,
            self._block_size,
            self._dtype,
            self._device,
            self._config.sliding_window,
            self._rows,
            whole_rounds=self._whole_rounds,
            own_layout=self._config.v4 is not None,
            prefill_masks=reads_prefill_masks(self._config),
        )
        with self._round_of_experts():
            return self._model.forward(data, self._caches), data

    @without_gradients
    def execute_sample(
        self, step: int, hidden: object, rows: Sequence[SamplingRow]
    ) -> SamplerOutput | PendingOutput:
        """See Runner."""
        if self._rounds is not None and isinstance(hidden, DeviceHidden):
            return self._rounds.sample(step, hidden, rows)
        if not isinstance(hidden, Hidden):
            raise TypeError(f"hidden must be what execute_main_model returned, got {type(hidden)}")
        if not rows:
            return SamplerOutput(step, (), None, hidden.prompt)
        draw = self._sampler(hidden.logits, build_sampling(rows, self._device))
        nan_blocks = self.scrub() if draw.nan_rows else ()
        return SamplerOutput(
            step=step,
            tokens=draw.tokens,
            device_tokens=draw.device_tokens,
            prompt_logprobs=hidden.prompt,
            nan_rows=draw.nan_rows,
            nan_blocks=nan_blocks,
            empty_rows=draw.empty_rows,
        )

    @without_gradients
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner. All sources are read before the first target is written."""
        if not pairs:
            return
        ids = np.array(pairs, np.int32).T.ravel()
        sources, targets = self._machine.upload(ids).long().view(2, -1)
        for cache in self._caches:
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    @without_gradients
    def clear_states(self, slots: Sequence[int]) -> None:
        """See Runner."""
        self._allocated_states().clear(slots)

    @without_gradients
    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner."""
        self._allocated_states().copy(pairs)

    @property
    def placement_version(self) -> int:
        """See Runner."""
        return self._experts.placement.version if self._experts else 0

    @without_gradients
    def prepare_placement(self, placement: ExpertPlacement) -> bool:
        """See Runner."""
        if self._experts is None:
            raise PlacementRefusedError("the model has no experts to place")
        return self._experts.prepare(placement)

    def apply_placement(self, version: int) -> None:
        """See Runner."""
        if self._experts is None:
            raise PlacementRefusedError("the model has no experts to place")
        self._experts.apply(version)

    def expert_loads(self) -> tuple[tuple[int, ...], ...] | None:
        """See Runner."""
        return self._experts.loads() if self._experts else None

    def check(self) -> None:
        """See Runner."""
        if self._experts:
            self._experts.check()

    def close(self) -> None:
        """See Runner."""
        self._free()
        if self._resources is not None:
            self._resources.close()

    def _free(self) -> None:
        """Free blocks and slots, those that the model views included."""
        self._caches, self._rows = [], None
        if self._rounds is not None:
            self._rounds.allocate(())
        if self._states is not None and isinstance(self._model, StatefulModel):
            self._model.use_states(self._states.slots[:0].clone())
        self._states = None

    def _start_experts(
        self,
        config: EngineConfig,
        source: ModelSource,
        kernels: Kernels,
        resources: contextlib.ExitStack,
    ) -> ExpertLeader | LoneExperts | None:
        experts = start_experts(config, source, kernels, self._device)
        if experts is not None:
            resources.callback(experts.close)
        return experts

    def _load(
        self,
        config: EngineConfig,
        source: ModelSource,
        kernels: Kernels,
        resources: contextlib.ExitStack,
    ) -> Model:
        experts = self._experts
        model = make_model(
            source.config,
            source.weights,
            kernels,
            dtype=self._dtype,
            device=self._device,
            block_size=config.block_size,
            max_positions=max_positions(config, source.config),
            experts=experts.run_experts if experts else None,
            count_rows=experts.count_rows if isinstance(experts, LoneExperts) else None,
            kept=self._kept,
            mtp=start_mtp(config, source, kernels, self._device),
        )
        resources.callback(model.close)
        return model

    def _round_of_experts(self) -> contextlib.AbstractContextManager[None]:
        return self._experts.round() if self._experts else contextlib.nullcontext()

    def _allocated_states(self) -> StateCache:
        if self._states is None:
            raise RuntimeError(f"model {self._info.model} has no state slots: it declares no state")
        return self._states

    @without_gradients
    def scrub(self) -> tuple[int, ...]:
        """Replace values that are not finite in all blocks by 0; returns the blocks that had some.

        A later owner of a block must not read them: a masked position has weight 0; 0 × NaN is NaN.
        """
        if self._rows:
            self._rows.drop()
        return replace_spoilt(self._caches)

    def _describe(
        self, config: EngineConfig, source: ModelSource, kernels: str, started: float
    ) -> RunnerInfo:
        numerics = Numerics(
            revision=source.revision,
            dtype=config.dtype,
            quantisation=source.quantisation,
            kernels=kernels_label(config, kernels, whole_rounds=self._whole_rounds),
            torch=torch.__version__,
            hardware=self._machine.name,
            threads=0 if self._whole_rounds else torch.get_num_threads(),
        )
        model = source.config
        tensors = self._model.cache_tensors
        return RunnerInfo(
            model=config.served_name or source.name,
            model_revision=source.revision,
            numerics_id=numerics.numerics_id,
            kv_layout=layout_name(tensors),
            vocab_size=model.vocab_size,
            max_model_len=max_positions(config, source.config),
            eos_token_ids=source.eos_token_ids,
            kv_bytes_per_block=block_bytes(tensors, config.block_size),
            weights_bytes=self._model.nbytes + (self._experts.nbytes if self._experts else 0),
            load_s=time.perf_counter() - started,
            experts=self._experts.shape if self._experts else None,
            bit_identical=config.deterministic or self._whole_rounds,
            window=window_of_all_layers(model),
            state=declared_state(config, model.architecture, self._model),
        )
