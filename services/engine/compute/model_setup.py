"""What a model runner decides before it loads weights: device, kernel set, length, experts."""

import importlib

import torch

from kernels import dispatch
from kernels.interface import Kernels, UnsupportedError
from services.common.config.settings import ConfigError
from services.engine.compute.device.cpu import CpuDevice
from services.engine.compute.device.interface import Device
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.expert_parallel.grouped import GroupedExperts
from services.engine.compute.expert_parallel.leader import ExpertLeader, expert_shape
from services.engine.compute.expert_parallel.lone import LoneExperts
from services.engine.compute.loader import ModelSource
from services.engine.compute.models.cache_tensors import rows_per_block
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.mtp import KeptMtp, draft_layers
from services.engine.compute.models.registry import runs_whole_rounds
from services.engine.compute.numerics import TORCH_DTYPES
from services.engine.compute.ranks.groups import LoneGroup
from services.engine.compute.state_cache import StatefulModel
from services.engine.contract.config import EngineConfig
from services.engine.contract.expert_placement import first_placement
from services.engine.contract.model_config import ModelConfig
from services.engine.contract.runner import ExpertShape, StateBlock


def make_device(config: EngineConfig, rank: int = 0) -> Device:
    """The device that the option `device` names; "auto" is a GPU if there is one.

    Args:
        rank: number of the GPU, where ranks have one each.

    Raises:
        ConfigError: torch cannot use the device on this machine.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if dispatch.has_device("cuda") else "cpu"
    if not dispatch.has_device(name):
        raise ConfigError(f"device={name}: torch finds no such device on this machine; use cpu")
    if name == "cpu":
        return CpuDevice()
    made: Device = importlib.import_module("services.engine.compute.device.cuda").CudaDevice(rank)
    return made


def choose_kernels(
    config: EngineConfig, device: torch.device, model: ModelConfig, *, whole_model: bool
) -> Kernels:
    """The kernel set for a model: one that runs whole rounds if there is one and it is not off.

    Whole rounds hold all experts in one process, each once. So other ranks and replicas of experts
    need the sets that are called layer by layer.

    Args:
        whole_model: this process holds the whole model, not a rank's part of it.

    Raises:
        ConfigError: no kernel set supports the options; the message names one.
    """
    if config.dtype == "int8" and model.mla:
        raise ConfigError(
            "dtype=int8: not supported for latent attention (MLA); use float32 or bfloat16"
        )
    if config.dtype == "float16" and model.architecture == "gemma3":
        raise ConfigError(
            "dtype=float16: values inside gemma3 models exceed its range; use bfloat16 or float32"
        )
    if model.v4:
        _check_v4(config, device, model)
    name = None
    if config.kernels != "torch" and whole_model and _fits_whole_rounds(config, model):
        sizes = (model.head_dim, config.block_size)
        name = dispatch.compiled_set(device.type, config.dtype, sizes, config.kv_dtype)
    if config.kv_dtype != "auto" and name is None:
        _check_kv_dtype(config)
    if config.dtype == "int8" and model.moe and not runs_whole_rounds(model):
        raise ConfigError(
            "dtype=int8: a model with experts is served for qwen3_moe only, and this is "
            f"{model.architecture}; use float32 or bfloat16"
        )
    if config.dtype == "int8" and model.moe and name is None:
        raise ConfigError(
            "dtype=int8: models with experts need compiled rounds: kernels=auto, device=cpu, "
            "expert_parallel=1, redundant_experts=0, a CPU with byte products (AVX-512 VNNI); "
            "use float32 or bfloat16"
        )
    try:
        return dispatch.load(
            name
            or dispatch.choose(device.type, dtype=config.dtype, deterministic=config.deterministic)
        )
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error


def _check_kv_dtype(config: EngineConfig) -> None:
    """Refuse a format of keys and values where operators are called layer by layer."""
    if config.kv_dtype != config.dtype:
        raise ConfigError(
            f"kv_dtype={config.kv_dtype}: supported with dtype=int8 in compiled rounds "
            "(kernels=auto, device=cpu, a CPU with AVX-512 VNNI, a model that they serve), not "
            f"here with dtype={config.dtype}; use kv_dtype=auto"
        )


def _check_v4(config: EngineConfig, device: torch.device, model: ModelConfig) -> None:
    """Refuse what DeepSeek V4 and V4.1 are not computed with."""
    name = model.architecture
    if config.dtype != "float32":
        raise ConfigError(f"dtype={config.dtype}: not supported for {name}; use float32")
    if config.bounded_replay and config.deterministic:
        raise ConfigError(
            "bounded_replay=true: tokens would depend on what is cached, which deterministic=true "
            "rules out; use one of them"
        )
    if device.type != "cpu":
        raise ConfigError(f"device={device.type}: not supported for {name}; use device=cpu")
    try:
        for layer in model.v4.layers if model.v4 else ():
            rows_per_block(layer.ratio or 1, config.block_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def declared_state(config: EngineConfig, architecture: str, model: object) -> StateBlock | None:
    """What a sequence keeps beside its blocks, and how a hit brings it back.

    Raises:
        ConfigError: the model cannot rebuild its state as the option demands.
    """
    replay = model.state_replay if isinstance(model, StatefulModel) else None
    if config.bounded_replay and replay is None:
        raise ConfigError(
            f"bounded_replay=true: not supported for {architecture}, only for deepseek_v41; use "
            "bounded_replay=false"
        )
    if not isinstance(model, StatefulModel):
        return None
    state = model.state_block
    if not config.bounded_replay or replay is None:
        return state
    return StateBlock(state.nbytes, replay.boundary, replay)


def kernels_label(config: EngineConfig, kernels: str, *, whole_rounds: bool) -> str:
    """What computes, for `Numerics`: block size and replays change results too."""
    label = f"{kernels}-{config.block_size}" if whole_rounds else kernels
    return f"{label}-replay" if config.bounded_replay else label


def _fits_whole_rounds(config: EngineConfig, model: ModelConfig) -> bool:
    alone = config.expert_parallel == 1 and config.redundant_experts == 0
    return runs_whole_rounds(model) and (model.moe is None or alone)


def window_of_all_layers(model: ModelConfig) -> int:
    """Positions that a row attends to at most; 0 if a layer attends to all."""
    return model.sliding_window if len(model.sliding_layers) == model.num_layers else 0


def max_positions(config: EngineConfig, model: ModelConfig) -> int:
    """Positions that a sequence may reach: the option `max_model_len`, else the model's limit.

    Raises:
        ConfigError: the option exceeds the model's limit.
    """
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the model supports at most "
            f"{model.max_position} positions"
        )
    return config.max_model_len or model.max_position


def start_mtp(
    config: EngineConfig, source: ModelSource, kernels: Kernels, device: torch.device
) -> KeptMtp | None:
    """Load the experts of the layers that draft tokens; None if no such layer is kept.

    They have no replicas and are never moved: all are in this process.

    Raises:
        ModelFileError: an expert's tensor is missing or of the wrong shape.
    """
    model = source.config
    numbers = draft_layers(model, source.weights)
    if not numbers or not config.mtp or config.expert_parallel > 1:
        return None
    if model.moe is None:
        return KeptMtp(numbers, None)
    weights = ExpertWeights.find(
        model, source.weights, TORCH_DTYPES[config.dtype], device, drafting=numbers
    )
    count = model.moe.num_experts
    shape = ExpertShape(len(numbers), count, count, 1)
    bank = ExpertBank(weights, kernels, shape, 0, first_placement(shape, source.revision))
    return KeptMtp(numbers, Experts(bank, shape, LoneGroup(), 1), bank.nbytes)


def start_experts(
    config: EngineConfig, source: ModelSource, kernels: Kernels, device: torch.device
) -> ExpertLeader | LoneExperts | None:
    """Load the experts and start the other ranks; None for a dense model.

    Whole rounds load their experts with the model: only placements and counts remain. A set that
    runs all experts of a layer in one call does so where one rank holds them all.

    Raises:
        ConfigError: an option does not fit the model, or does not work on this device.
        ModelFileError: an expert's tensor is missing or of the wrong shape.
        RunnerFailedError: another rank ended.
    """
    model = source.config
    if model.moe is None:
        if config.expert_parallel > 1 or config.redundant_experts:
            raise ConfigError("expert_parallel, redundant_experts: the model has no experts")
        return None
    if config.expert_parallel > 1 and device.type != "cpu":
        raise ConfigError(
            f"expert_parallel={config.expert_parallel}: more than one rank needs device=cpu, "
            f"not {device.type}"
        )
    shape = expert_shape(config, model.moe)
    if kernels.whole_rounds is not None:
        return LoneExperts(shape, source.revision, config.expert_load_window)
    weights = ExpertWeights.find(model, source.weights, TORCH_DTYPES[config.dtype], device)
    if kernels.experts is not None and config.expert_parallel == 1:
        window = config.expert_load_window
        return GroupedExperts(shape, source.revision, window, weights, kernels.experts)
    return ExpertLeader(config, shape, weights, kernels, source.revision)
