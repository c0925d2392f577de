"""How a model is made from its weights, and which models run whole rounds.

docs/models.md says how to add an architecture.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.architecture import PLAIN, Architecture, Experts, GroupedQuery
from services.engine.compute.models.architectures import ARCHITECTURES
from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.decoder import Decoder
from services.engine.compute.models.fused import CountRows, FusedDecoder
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.kept_weights import KeptWeights
from services.engine.compute.models.moe import RunExperts
from services.engine.compute.models.mtp import KeptMtp, Part
from services.engine.compute.models.v4_modules.model import V4Model
from services.engine.compute.models.v41_modules.model import V41Model
from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.model_config import ModelConfig

_ROUTED = Architecture(experts=Experts())


class Model(Protocol):
    """A decoder with its weights; holds no state of any request. Letters: see kernels.interface."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, without those that `experts` holds."""

    @property
    def mtp(self) -> Sequence[Part]:
        """The packed layers that draft tokens; part of `nbytes`, run by no round yet."""

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """The tensors of the KV cache, in the order in which `forward` takes them."""

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """Compute all rows of a round and write what the cache keeps of them.

        Args:
            caches: one per tensor of `cache_tensors`, made by `cache`.

        Returns:
            [T, hidden], before the last norm.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32, of rows [rows, hidden] that `forward` returned."""

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros [blocks, rows, *row] for one tensor of the cache, on the model's device."""

    def close(self) -> None:
        """End the model's threads, if it has any; idempotent."""


def runs_whole_rounds(config: ModelConfig) -> bool:
    """Whether a kernel set's `whole_rounds` can run the model, on one rank.

    It can if the layers are plain: SwiGLU, dense or with experts of a softmax over all scores and
    nothing beside, separate projections, and one rotary embedding for the whole of every head.
    """
    moe = config.moe
    return (
        ARCHITECTURES[config.architecture] in (PLAIN, _ROUTED)
        and (moe is None or (moe.scale, moe.groups, moe.num_shared) == (1.0, 1, 0))
        and config.rotary_dim in (0, config.head_dim)
        and config.query_scale is None
        and config.sliding_rope_theta is None
    )


def reads_prefill_masks(config: ModelConfig) -> bool:
    """Whether the layers' attention reads `AttentionGroup.mask` of prefills."""
    attention = ARCHITECTURES[config.architecture].attention
    return isinstance(attention, GroupedQuery) and attention.sinks is None


def make_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_positions: int,
    experts: RunExperts | None,
    count_rows: CountRows | None = None,
    kept: Path | None = None,
    mtp: KeptMtp | None = None,
) -> Model:
    """Pack the weights for a kernel set.

    Args:
        dtype: number format of activations, keys and values; of embeddings in whole rounds.
        block_size: positions of a KV-cache block.
        max_positions: positions that a sequence may reach.
        experts: runs the experts of all layers; None for a dense model, and for whole rounds.
        count_rows: whole rounds only: is given the rows of each expert after each round.
        kept: file of weights that an earlier start packed; written if it does not exist.
        mtp: the layers that draft tokens; None: those of the files are not read.

    Raises:
        ModelFileError: a tensor is missing, left over or of the wrong shape.
        UnsupportedError: the kernel set does not serve the model.
    """
    if config.v4 is not None:
        assert experts is not None, "DeepSeek V4 has experts in every layer"
        sizes = {"block_size": block_size, "max_positions": max_positions}
        if isinstance(config.v4, DeepseekV41Config):
            return V41Model(config.v4, weights, kernels, experts, **sizes)
        return V4Model(config.v4, weights, kernels, experts, **sizes, mtp=mtp)
    if kernels.whole_rounds is not None:
        kept_weights = KeptWeights(kept)  # read while the next lines load what was compiled
        return FusedDecoder(
            config,
            weights,
            kernels.whole_rounds(),
            head_norms=config.head_norms,
            block_size=block_size,
            max_positions=max_positions,
            table_dtype=dtype,
            count_rows=count_rows,
            kept=kept_weights,
        )
    return Decoder(
        ARCHITECTURES[config.architecture],
        config,
        weights,
        kernels,
        dtype=dtype,
        device=device,
        max_positions=max_positions,
        experts=experts,
        mtp=mtp,
    )
