"""`ModelRunner`: the torch side of an engine; owns weights, block tensors and the device."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import dispatch
from kernels.interface import Kernels, UnsupportedError
from services.common.config.settings import ConfigError
from services.engine.compute.expert_parallel.leader import ExpertLeader, expert_shape
from services.engine.compute.loader import ModelSource, load_model
from services.engine.compute.memory import free_bytes, peak_bytes
from services.engine.compute.models.decode_rows import DecodeRows
from services.engine.compute.models.decoder import Decoder
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.input_metadata import InputMetadata, PromptRows, build_input
from services.engine.compute.models.registry import MODELS
from services.engine.compute.numerics import TORCH_DTYPES, Numerics, hardware_name, use_threads
from services.engine.compute.sampling.sampler import Sampler, token_logprobs
from services.engine.compute.sampling.sampling_inputs import build_sampling
from services.engine.contract.config import EngineConfig
from services.engine.contract.model_config import ModelConfig
from services.engine.contract.runner import (
    ExpertPlacement,
    PlacementRefusedError,
    RunnerInfo,
    SampledToken,
    SamplerOutput,
    SamplingRow,
    SequenceMetadata,
)
from services.engine.contract.sampling_params import SamplingParams
from services.engine.model_files.known_models import find_model

if TYPE_CHECKING:
    from services.engine.compute.models.fused import FusedDecoder
    from services.engine.compute.tensor_parallel.shard import Shard

PROMPT_LOGPROB_ROWS = 64
"""Rows of a prompt whose logits exist at one time."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a forward leaves for the sampler."""

    logits: Tensor
    """[sampled, vocabulary] float32."""
    prompt: tuple[tuple[int, tuple[SampledToken, ...]], ...]


class ModelRunner:
    """A `contract.runner.Runner` with torch; loads the model when constructed."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource | None = None,
        shard: "Shard | None" = None,
    ) -> None:
        """Load the model.

        Args:
            source: an already loaded model instead of `config.model`.
            shard: the part of the model to hold; None: all of it.

        Raises:
            ModelFileError: files that cannot be served.
            ConfigError: a device or number format that does not work here.
        """
        started = time.perf_counter()
        self._caches: list[Tensor] = []
        self._experts: ExpertLeader | None = None
        self._end_model: Callable[[], object] = lambda: None
        self._device = _device(config)
        if shard is not None and self._device.type == "cuda":
            self._device = torch.device("cuda", shard.rank)
        use_threads(config)
        source = source or load_model(config.model)
        if shard is not None:
            source = shard.part_of(source)
        self._config = source.config
        self._block_size = config.block_size
        self._dtype = TORCH_DTYPES[config.dtype]
        if config.dtype == "int8" and source.config.moe:
            raise ConfigError("dtype=int8: models with experts are not served in it")
        kernels = _kernels(config, self._device, source.config, alone=shard is None)
        if shard is not None:
            kernels = shard.kernels(kernels)
        self._compiled = kernels.name.startswith("jit")
        try:
            self._experts = self._start_experts(config, source, kernels)
            self._model = self._load(config, source, kernels)
        except UnsupportedError as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self._keeps_rows = kernels.keeps_rows and self._device.type == "cpu"
        self._rows: DecodeRows | None = None
        self._sampler = Sampler(kernels, one_by_one=config.deterministic)
        self._info = self._describe(config, source, kernels.name, started)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

    def describe(self) -> RunnerInfo:
        """See Runner."""
        return self._info

    @torch.inference_mode()
    def profile_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See Runner: the round has as many rows and draws as any, on blocks that go again."""
        length = min(max_num_batched_tokens, self._info.max_model_len)
        batch, blocks = _largest_round(
            max_num_batched_tokens, max_num_seqs, length, self._block_size
        )
        row = SamplingRow(SamplingParams(top_p=0.9), seed=0, choice=0, position=length)

        def largest() -> None:
            hidden = self.execute_main_model(0, batch, None)
            self.execute_sample(0, hidden, [row] * sum(seq.sample for seq in batch))

        self.allocate(blocks)
        try:
            peak = peak_bytes(self._device, largest)
        finally:
            self._caches, self._rows = [], None
        if self._keeps_rows:
            peak += DecodeRows.nbytes(self._info.kv_bytes_per_block // self._block_size)
        return max(0, free_bytes(self._device) - peak)

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """See Runner."""
        config = self._config
        shape = (num_blocks, self._block_size, 2 * config.num_kv_heads, config.head_dim)
        self._caches = [self._model.cache(shape) for _ in range(config.num_layers)]
        self._rows = DecodeRows(self._caches) if self._keeps_rows else None
        if self._experts:
            self._experts.run.loads.clear()  # of the rounds that were run to measure memory

    @torch.inference_mode()
    def execute_main_model(
        self, step: int, batch: Sequence[SequenceMetadata], previous: SamplerOutput | None
    ) -> object:
        """See Runner; the head runs here, so that logits are ready when masks are."""
        drawn = previous.device_tokens if previous else None
        hidden, data = self.forward(batch, drawn if isinstance(drawn, Tensor) else None)
        logits = self._model.logits(hidden.index_select(0, data.sampled_rows))
        return Hidden(logits, self._prompt_logprobs(hidden, data))

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[SequenceMetadata], drawn: Tensor | None
    ) -> tuple[Tensor, InputMetadata]:
        """All layers of one round: hidden states [T, hidden] and what the rows are.

        Args:
            drawn: tokens of the round before, one a row, for sequences with `prev_row`.
        """
        data = build_input(
            batch,
            drawn,
            self._block_size,
            self._dtype,
            self._device,
            self._config.sliding_window,
            self._rows,
            compiled=self._compiled,
        )
        with self._experts.round() if self._experts else contextlib.nullcontext():
            return self._model.forward(data, self._caches), data

    @torch.inference_mode()
    def execute_sample(
        self, step: int, hidden: object, rows: Sequence[SamplingRow]
    ) -> SamplerOutput:
        """See Runner."""
        if not isinstance(hidden, Hidden):
            raise TypeError(f"expected what execute_main_model returned, got {type(hidden)}")
        if not rows:
            return SamplerOutput(step, (), None, hidden.prompt)
        draw = self._sampler(hidden.logits, build_sampling(rows, self._device))
        if draw.nan_rows:
            self.scrub()
        return SamplerOutput(
            step=step,
            tokens=draw.tokens,
            device_tokens=draw.device_tokens,
            prompt_logprobs=hidden.prompt,
            nan_rows=draw.nan_rows,
            empty_rows=draw.empty_rows,
        )

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner; all sources are read before any target is written."""
        if not pairs:
            return
        sources, targets = (
            torch.tensor(ids, device=self._device) for ids in zip(*pairs, strict=True)
        )
        for cache in self._caches:
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    @property
    def placement_version(self) -> int:
        """See Runner."""
        return self._experts.placement.version if self._experts else 0

    @torch.inference_mode()
    def prepare_placement(self, placement: ExpertPlacement) -> bool:
        """See Runner."""
        if self._experts is None:
            raise PlacementRefusedError("the model has no experts")
        return self._experts.prepare(placement)

    def apply_placement(self, version: int) -> None:
        """See Runner."""
        if self._experts is None:
            raise PlacementRefusedError("the model has no experts")
        self._experts.apply(version)

    def expert_loads(self) -> tuple[tuple[int, ...], ...] | None:
        """See Runner."""
        return self._experts.run.loads.total() if self._experts else None

    def check(self) -> None:
        """See Runner."""
        if self._experts:
            self._experts.check()

    def close(self) -> None:
        """See Runner."""
        self._caches, self._rows = [], None
        self._end_model()
        if self._experts:
            self._experts.close()

    def _load(
        self, config: EngineConfig, source: ModelSource, kernels: Kernels
    ) -> "Decoder | FusedDecoder":
        architecture = MODELS[source.config.architecture]
        if self._compiled:
            from services.engine.compute.models.fused import FusedDecoder

            fused = FusedDecoder(
                source.config,
                source.weights,
                head_norms=architecture.head_norms,
                int8=config.dtype == "int8",
                block_size=config.block_size,
                max_positions=_max_len(config, source),
            )
            self._end_model = fused.close
            return fused
        return architecture(
            source.config,
            source.weights,
            kernels,
            dtype=self._dtype,
            device=self._device,
            max_positions=_max_len(config, source),
            experts=self._experts.run if self._experts else None,
        )

    def _start_experts(
        self, config: EngineConfig, source: ModelSource, kernels: Kernels
    ) -> ExpertLeader | None:
        model = source.config
        if model.moe is None:
            if config.expert_parallel > 1 or config.redundant_experts:
                raise ConfigError("expert_parallel, redundant_experts: the model has no experts")
            return None
        if config.expert_parallel > 1 and find_model(config.model).path.is_file():
            raise ConfigError("expert_parallel: more than one rank reads a folder, not a GGUF file")
        if config.expert_parallel > 1 and self._device.type != "cpu":
            raise ConfigError("expert_parallel: more than one rank runs on device=cpu only")
        shape = expert_shape(config, model.moe)
        weights = ExpertWeights.find(model, source.weights, self._dtype, self._device)
        return ExpertLeader(config, shape, weights, kernels, source.revision)

    def _prompt_logprobs(
        self, hidden: Tensor, data: InputMetadata
    ) -> tuple[tuple[int, tuple[SampledToken, ...]], ...]:
        return tuple((own.seq_id, self._score(hidden, own)) for own in data.prompt_rows)

    def _score(self, hidden: Tensor, own: PromptRows) -> tuple[SampledToken, ...]:
        entries: list[SampledToken] = []
        for at in range(0, len(own.rows), PROMPT_LOGPROB_ROWS):
            part = slice(at, at + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden.index_select(0, own.rows[part]))
            entries += token_logprobs(logits, own.targets[part], own.top)
        return tuple(entries)

    def scrub(self) -> None:
        """Values that are not finite must not reach the next owner of a block: a masked position
        has weight 0, and 0 times NaN is NaN."""
        if self._rows:
            self._rows.forget()
        for cache in self._caches:
            torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)

    def _describe(
        self, config: EngineConfig, source: ModelSource, kernels: str, started: float
    ) -> RunnerInfo:
        numerics = Numerics(
            revision=source.revision,
            dtype=config.dtype,
            quantisation=source.quantisation,
            kernels=f"{kernels}-{config.block_size}" if self._compiled else kernels,
            torch=torch.__version__,
            hardware=hardware_name(self._device),
            threads=0 if self._compiled else torch.get_num_threads(),
        )
        model = source.config
        row = 2 * model.num_kv_heads * model.head_dim * self._dtype.itemsize
        kind = str(self._dtype).removeprefix("torch.")
        return RunnerInfo(
            model=config.served_name or source.name,
            model_revision=source.revision,
            numerics_id=numerics.numerics_id,
            kv_layout=f"paged/{model.num_layers}x{2 * model.num_kv_heads}x{model.head_dim}/{kind}",
            vocab_size=model.vocab_size,
            max_model_len=_max_len(config, source),
            eos_token_ids=source.eos_token_ids,
            kv_bytes_per_block=row * config.block_size * model.num_layers,
            weights_bytes=self._model.nbytes + (self._experts.nbytes if self._experts else 0),
            load_s=time.perf_counter() - started,
            experts=self._experts.shape if self._experts else None,
        )


def _device(config: EngineConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if dispatch.has_device("cuda") else "cpu"
    if not dispatch.has_device(name):
        raise ConfigError(f"device={name}: torch finds no such device on this machine")
    return torch.device(name)


def _kernels(
    config: EngineConfig, device: torch.device, model: ModelConfig, *, alone: bool
) -> Kernels:
    """Args: alone: this process holds the whole model."""
    try:
        if config.kernels != "torch" and alone and model.moe is None:
            name = dispatch.compiled_set(
                device.type, config.dtype, sizes=(model.head_dim, config.block_size)
            )
            if name:
                return dispatch.load(name)
        name = dispatch.choose(device.type, dtype=config.dtype, deterministic=config.deterministic)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error
    return dispatch.load(name)


def _max_len(config: EngineConfig, source: ModelSource) -> int:
    allowed = source.config.max_position
    if config.max_model_len > allowed:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the model has {allowed} positions"
        )
    return config.max_model_len or allowed


def _largest_round(
    tokens: int, max_seqs: int, length: int, block_size: int
) -> tuple[list[SequenceMetadata], int]:
    """One long prefill, the rest decodes; each with blocks of its own, and how many those are."""
    decodes = max(0, min(max_seqs, tokens) - 1)
    long = max(1, min(length, tokens - decodes))
    lengths = [long] + [1] * decodes
    batch, block = [], 1
    for seq_id, count in enumerate(lengths):
        blocks = -(-count // block_size)
        table = tuple(range(block, block + blocks))
        block += blocks
        batch.append(SequenceMetadata(seq_id, 0, (0,) * count, None, table, sample=True))
    return batch, block
