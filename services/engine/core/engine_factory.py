"""Builds an `LLMEngine`: runner, worker, measured memory, grammar builder."""

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from services.common import block_hash
from services.common.text import TextAssets
from services.common.text.byte_level import byte_assets
from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import Runner, RunnerInfo
from services.engine.core.constraints import Constraints
from services.engine.core.llm_engine import LLMEngine
from services.engine.core.request_checks import Limits
from services.engine.core.worker import Worker
from services.engine.grammar.so_matcher import Preload
from services.engine.grammar.structured_output import SOMatcherBuilder
from services.engine.grammar.wire import Setup
from services.engine.model_files import load_text_assets
from services.engine.scheduling.kv_cache import KVCacheManager, check_kinds


def make_runner(config: EngineConfig, beside: Callable[[], None] = lambda: None) -> Runner:
    """Make the configured runner. torch is imported for a real model only.

    Args:
        beside: called after torch is imported and before the weights are loaded.
    """
    if config.simulate:
        return SimulatedRunner(config.block_size, SimulatedModel.parse(config.simulate))
    module = importlib.import_module("services.engine.compute.model_runner")
    beside()
    if config.tensor_parallel > 1:
        module = importlib.import_module("services.engine.compute.tensor_parallel.runner")
        return cast("Runner", module.TensorParallelRunner(config))
    return cast("Runner", module.ModelRunner(config))


def build_engine(
    config: EngineConfig,
    runner: Callable[[], Runner] | None = None,
    on_forward_end: Callable[[object], None] | None = None,
    on_grammar: Callable[[], None] | None = None,
    preload_grammars: bool = False,
    now_ns: Callable[[], int] = time.time_ns,
) -> LLMEngine:
    """Load the model, measure the memory and allocate the blocks.

    Args:
        runner: makes the runner on the worker's thread, instead of the configuration.
        on_forward_end: called on the worker's thread when a forward has ended; ignore the argument.
        on_grammar: called on the grammar thread when a grammar is built.
        preload_grammars: import the grammar library while the weights are loaded. Otherwise the
            first constraint imports it, which slows down running streams.
        now_ns: Unix time.

    Raises:
        ConfigError: a key cannot be used; the message names it.
    """
    preload = Preload()
    beside = preload.start if preload_grammars else lambda: None
    worker = Worker(runner or (lambda: make_runner(config, beside)), on_forward_end)
    preload.join()
    try:
        info = worker.describe()
        check_kinds(info)
        free = 0
        if not config.num_blocks:
            free = worker.profile_kv_bytes(config.max_num_batched_tokens, config.max_num_seqs)
        memory = KVCacheManager.plan(config, info, free)
        worker.allocate(memory.num_blocks + 1, memory.num_states + 1 if info.state else 0)
    except BaseException:
        worker.close()
        raise
    namespace = block_hash.namespace(
        model_revision=info.model_revision,
        kv_layout=info.kv_layout,
        numerics_id=info.numerics_id,
        block_size=memory.block_size,
    )
    constraints = _constraints(config, info, on_grammar)
    if config.warm_grammars:
        constraints.warm()
    return LLMEngine(config, worker, Limits(info, memory, namespace), now_ns, constraints)


def text_assets(config: EngineConfig) -> TextAssets:
    """Tokenizer and template of the configured model; a simulated model's tokens are bytes."""
    return byte_assets() if config.simulate else load_text_assets(config.model)


def _constraints(
    config: EngineConfig, info: RunnerInfo, on_grammar: Callable[[], None] | None
) -> Constraints:
    """Constraints whose builder starts with the first one; none are served without a tokenizer."""
    if not (config.simulate or config.model):
        return Constraints()
    setup = Setup(
        model="" if config.simulate else config.model,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        memory_bytes=config.grammar_memory_mib << 20,
    )
    return Constraints(
        partial(
            SOMatcherBuilder,
            setup,
            timeout_s=config.grammar_timeout_s,
            keep=config.warm_grammars,
            on_done=on_grammar,
        )
    )
