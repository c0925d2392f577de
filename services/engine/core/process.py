"""The core process of an engine; the front starts it (see `contract.core_link.CoreLink`).

    python -m services.engine.core.process --fd N

The loop takes the front's messages, runs one round and sends one report. It plans round n+1 only
when forward n has ended, and takes messages until then: the device cannot start n+1 earlier, and a
request that arrives during forward n would otherwise wait for one more round. Sampling n and the
host's work on n+1 still overlap.
"""

import argparse
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from services.common.config.settings import ConfigError
from services.common.errors import FleetError
from services.common.service import telemetry
from services.common.service.child_process import die_with_parent
from services.common.service.log_level import LogLevel
from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreEnd, LinkClosedError
from services.engine.contract.messages import (
    AbortRequest,
    AddRequest,
    ApplyPlacement,
    CoreFailed,
    CoreReady,
    RoundReport,
    SendSnapshot,
    SetLogLevel,
    Shutdown,
    StartCore,
    StoredBlocks,
    ToCore,
)
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import Runner
from services.engine.core.engine_factory import build_engine
from services.engine.core.llm_engine import LLMEngine
from services.engine.core.step_result import StepResult

log = logging.getLogger(__name__)

_FORWARD_POLL_S = 1.0
_HEARTBEAT_S = 0.5
"""Interval of reports while all requests wait for grammars."""
_STUCK_POLL_S = 0.02
_LOADS_POLL_S = 0.25
"""How often an idle core looks whether the expert loads of its last rounds can be reported."""
_RANKS_POLL_S = 1.0
"""How often an idle core checks its expert ranks; a round detects a failed rank by itself."""


def run_core(
    link: CoreEnd, config: EngineConfig, runner: Callable[[], Runner] | None = None
) -> None:
    """Load the model, send CoreReady and serve until Shutdown.

    Args:
        runner: makes the runner instead of the configuration.

    Raises:
        LinkClosedError: the front has closed the connection.
        ConfigError: the configuration cannot be used; the message names the key.
    """
    engine = build_engine(
        config,
        runner,
        on_forward_end=lambda _: link.wake(),
        on_grammar=link.wake,
        preload_grammars=True,
    )
    try:
        _log_memory(engine, config)
        link.send([_ready(engine)])
        gc.enable()
        gc.collect()
        gc.freeze()  # keeps objects that are never freed out of later collections
        _Loop(link, engine).run()
    finally:
        engine.close()


class _Loop:
    """The core's loop: messages in, one round, one report out."""

    def __init__(self, link: CoreEnd, engine: LLMEngine) -> None:
        self._link = link
        self._engine = engine
        self._shutdown = False
        self._snapshot_requested = False
        self._stuck = False
        self._reported_at = 0.0
        experts = engine.info.experts
        self._idle_poll_s = _RANKS_POLL_S if experts and experts.num_ranks > 1 else None

    def run(self) -> None:
        """Serve until Shutdown."""
        while not self._shutdown:
            for message in self._link.poll(self._poll_timeout_s()):
                self._handle(message)
            self._advance_idle()
            due = self._snapshot_requested or self._engine.has_unfinished_requests()
            if due and self._engine.forward_done:
                self._run_round()

    def _poll_timeout_s(self) -> float | None:
        """How long to wait for messages; None: until one arrives."""
        if not self._engine.has_unfinished_requests():
            return _LOADS_POLL_S if self._engine.owes_expert_loads() else self._idle_poll_s
        if not self._engine.forward_done:
            return _FORWARD_POLL_S
        return _STUCK_POLL_S if self._stuck else 0.0

    def _handle(self, message: ToCore) -> None:
        match message:
            case AddRequest():
                try:
                    self._engine.add_request(message)
                except FleetError as error:
                    self._engine.refuse(message.request_key, error)
            case AbortRequest():
                self._engine.abort_request(message.request_key, message.choice)
            case ApplyPlacement(placement=placement):
                self._engine.set_placement(placement)
            case SendSnapshot():
                self._snapshot_requested = True
            case Shutdown():
                self._shutdown = True
            case SetLogLevel(level=level):
                LogLevel().set(level, by="the front")
            case StartCore():
                log.warning("ignoring a second StartCore: the core runs already")

    def _advance_idle(self) -> None:
        """Without rounds, load a pending placement here and report it when it is in use."""
        engine = self._engine
        if engine.has_unfinished_requests():
            return
        if engine.advance_idle():
            self._link.send([self._report(StepResult(), None)])

    def _run_round(self) -> None:
        engine = self._engine
        result = engine.step() if engine.has_unfinished_requests() else StepResult()
        self._stuck = engine.is_stuck(result)
        snapshot = engine.cache_snapshot() if self._snapshot_requested else None
        self._snapshot_requested = False
        if self._stuck and snapshot is None and not self._heartbeat_due():
            return
        self._reported_at = time.monotonic()
        self._link.send([self._report(result, snapshot)])

    def _heartbeat_due(self) -> bool:
        """Whether to send an empty report because all requests wait for grammars.

        Without it the front would take the wait for a stall, although no other engine is faster.
        """
        waited_s = time.monotonic() - self._reported_at
        return self._engine.num_held > 0 and waited_s > _HEARTBEAT_S

    def _report(self, result: StepResult, snapshot: list[StoredBlocks] | None) -> RoundReport:
        engine = self._engine
        placement = engine.take_placement_news()
        return RoundReport(
            step=result.step,
            outputs=result.outputs,
            failures=result.failures,
            marks=result.marks,
            cache_events=engine.drain_cache_events(),
            snapshot=snapshot,
            load=engine.load(),
            placement_version=placement.version,
            placement_rejected=placement.rejected,
            expert_loads=[list(row) for row in placement.loads] if placement.loads else None,
        )


def _ready(engine: LLMEngine) -> CoreReady:
    memory = engine.memory
    return CoreReady(
        info=engine.info,
        hash_namespace=engine.hash_namespace,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        max_model_len=memory.max_model_len,
        kv_bytes=memory.kv_bytes,
        max_num_seqs=engine.scheduler.max_running,
    )


def _log_memory(engine: LLMEngine, config: EngineConfig) -> None:
    memory = engine.memory
    log.info(
        "KV cache: %d blocks of %d tokens, %.0f MiB; room for %.1f requests of %d tokens",
        memory.num_blocks,
        memory.block_size,
        memory.kv_bytes / 2**20,
        memory.num_positions / memory.max_model_len,
        memory.max_model_len,
    )
    if config.max_num_seqs > engine.scheduler.max_running:
        log.warning(
            "max_num_seqs: only %d of %d sequences can run at once; each takes one token per round "
            "of max_num_batched_tokens%s",
            engine.scheduler.max_running,
            config.max_num_seqs,
            f" and one of {memory.num_states} slots of state (state_slots, kv_memory)"
            if memory.num_states
            else "",
        )
    state = engine.info.state
    stride = math.lcm(state.boundary, memory.block_size) if state and config.prefix_cache else 0
    if stride >= memory.max_model_len:
        log.warning(
            "block_size: no prefix can be reused: snapshots of the model's state end at a multiple "
            "of %d tokens (its boundary is %d, block_size %d), and max_model_len is %d",
            stride,
            state.boundary if state else 0,
            memory.block_size,
            memory.max_model_len,
        )


def _first_message(link: CoreEnd) -> EngineConfig:
    while True:
        for message in link.poll(None):
            if isinstance(message, StartCore):
                return message.config
            if isinstance(message, Shutdown):
                raise LinkClosedError("received Shutdown before StartCore")


def _serve(link: CoreEnd) -> int:
    try:
        run_core(link, _first_message(link))
    except LinkClosedError:
        return 0
    except (ConfigError, ModelFileError) as error:
        return _report_failure(link, str(error), 2)
    except Exception as error:  # the top of the process: it can only report and end
        log.exception("the core failed")
        return _report_failure(link, f"{type(error).__name__}: {error}", 1)
    return 0


def _report_failure(link: CoreEnd, message: str, status: int) -> int:
    try:
        link.send([CoreFailed(message=message)])
    except LinkClosedError:
        log.error("cannot report to the front, it is gone: %s", message)
    return status


def main() -> None:
    """Serve on an inherited socket, then exit at once, without waiting for threads."""
    parser = argparse.ArgumentParser(
        prog="python -m services.engine.core.process", description=__doc__
    )
    parser.add_argument(
        "--fd", type=int, required=True, help="descriptor of the socket to the front"
    )
    args = parser.parse_args()
    gc.disable()  # until the model is loaded: imports make many objects and leave no garbage
    die_with_parent()
    # A terminal or supervisor signals the whole process group; the front drains and stops the core.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    telemetry.setup("engine", otlp_endpoint="", log_level="info")
    telemetry.log_stray_output()
    status = _serve(CoreEnd(socket.socket(fileno=args.fd)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
