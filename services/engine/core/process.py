"""The core process of an engine, started by `contract.core_link.CoreLink`.

Run as `python -m services.engine.core.process --fd N`.

Its loop takes the front's messages, runs one round and sends one report. It plans round n+1 only
when forward n has ended, and listens to the front until then: planned any earlier, a request that
arrives during forward n would wait for a whole round more, and nothing would be gained, since the
device cannot start n+1 before. Sampling n and the host's work on n+1 still overlap.
"""

import argparse
import gc
import logging
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
from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreEnd, LinkClosedError
from services.engine.contract.messages import (
    AbortRequest,
    AddRequest,
    ApplyPlacement,
    CoreFailed,
    CoreReady,
    PlacementRejection,
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
_ALIVE_S = 0.5
_STUCK_POLL_S = 0.02
_CHECK_POLL_S = 1.0
"""An idle core looks so often whether its expert ranks live; in a round it sees it at once."""


def run_core(
    link: CoreEnd, config: EngineConfig, runner: Callable[[], Runner] | None = None
) -> None:
    """Load, announce readiness, serve until Shutdown.

    Args:
        runner: used in place of the configured one.

    Raises:
        LinkClosedError: the front is gone.
        ConfigError: the configuration cannot be used.
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
        gc.collect()
        gc.freeze()  # what lives for ever is not to be looked at again in mid-round
        _Loop(link, engine).run()
    finally:
        engine.close()


class _Loop:
    """The core's only loop."""

    def __init__(self, link: CoreEnd, engine: LLMEngine) -> None:
        self._link = link
        self._engine = engine
        self._shutdown = False
        self._snapshot_wanted = False
        self._stuck = False
        self._told_at = 0.0
        self._version = engine.experts.version
        experts = engine.info.experts
        self._idle_s = _CHECK_POLL_S if experts and experts.num_ranks > 1 else None

    def run(self) -> None:
        """Until Shutdown."""
        while not self._shutdown:
            for message in self._link.poll(self._patience_s()):
                self._take(message)
            self._place()
            due = self._snapshot_wanted or self._engine.has_unfinished_requests()
            if due and self._engine.worker.forward_done:
                self._round()

    def _patience_s(self) -> float | None:
        if not self._engine.has_unfinished_requests():
            return self._idle_s
        if not self._engine.worker.forward_done:
            return _FORWARD_POLL_S
        return _STUCK_POLL_S if self._stuck else 0.0

    def _take(self, message: ToCore) -> None:
        match message:
            case AddRequest():
                try:
                    self._engine.add_request(message)
                except FleetError as error:
                    self._engine.refuse(message.request_key, error)
            case AbortRequest():
                self._engine.abort_request(message.request_key, message.choice)
            case ApplyPlacement(placement=placement):
                self._engine.experts.want(placement)
            case SendSnapshot():
                self._snapshot_wanted = True
            case Shutdown():
                self._shutdown = True
            case SetLogLevel(level=level):
                telemetry.set_log_level(level, by="the front")
            case StartCore():
                log.warning("told to start twice; ignored")

    def _place(self) -> None:
        """Without rounds, placements go on by themselves and have reports of their own."""
        engine = self._engine
        if engine.has_unfinished_requests():
            return
        engine.worker.check()
        if engine.experts.pending:
            engine.experts.advance()
        if engine.experts.news or engine.experts.version != self._version:
            self._link.send([self._report(StepResult(), None)])

    def _round(self) -> None:
        engine = self._engine
        result = engine.step() if engine.has_unfinished_requests() else StepResult()
        # Neither work in flight nor anything told: whatever holds the queue up needs a message.
        self._stuck = not (engine.worker.in_flight or result.step or result.marks)
        snapshot = engine.cache_snapshot() if self._snapshot_wanted else None
        self._snapshot_wanted = False
        if self._stuck and snapshot is None and not self._is_compiling():
            return
        self._told_at = time.monotonic()
        self._link.send([self._report(result, snapshot)])

    def _is_compiling(self) -> bool:
        """Whether it is time to say that this loop lives although only grammars are awaited: that
        is no stall, and no other engine would be sooner."""
        held = self._engine.constraints.num_held
        return held > 0 and time.monotonic() - self._told_at > _ALIVE_S

    def _report(self, result: StepResult, snapshot: list[StoredBlocks] | None) -> RoundReport:
        engine, experts = self._engine, self._engine.experts
        rejected = experts.take_rejection()
        loads = experts.poll_loads() if engine.info.experts else None
        self._version = experts.version
        return RoundReport(
            step=result.step,
            outputs=result.outputs,
            failures=result.failures,
            marks=result.marks,
            cache_events=engine.drain_cache_events(),
            snapshot=snapshot,
            load=engine.load(),
            placement_version=experts.version,
            placement_rejected=PlacementRejection(*rejected) if rejected else None,
            expert_loads=[list(row) for row in loads] if loads else None,
        )


def _ready(engine: LLMEngine) -> CoreReady:
    info, memory = engine.info, engine.memory
    return CoreReady(
        model=info.model,
        model_revision=info.model_revision,
        numerics_id=info.numerics_id,
        hash_namespace=engine.limits.hash_namespace,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        max_model_len=memory.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        load_s=info.load_s,
        weights_bytes=info.weights_bytes,
        kv_bytes=memory.kv_bytes,
        experts=info.experts,
    )


def _log_memory(engine: LLMEngine, config: EngineConfig) -> None:
    memory = engine.memory
    log.info(
        "%d blocks of %d tokens for keys and values, %.0f MiB: %.1f requests of %d tokens",
        memory.num_blocks,
        memory.block_size,
        memory.kv_bytes / 2**20,
        memory.num_positions / memory.max_model_len,
        memory.max_model_len,
    )
    if config.max_num_seqs > config.max_num_batched_tokens:
        log.warning(
            "max_num_seqs: only %d of %d can run at once, one token each of max_num_batched_tokens",
            config.max_num_batched_tokens,
            config.max_num_seqs,
        )


def _first_message(link: CoreEnd) -> EngineConfig:
    while True:
        for message in link.poll(None):
            if isinstance(message, StartCore):
                return message.config
            if isinstance(message, Shutdown):
                raise LinkClosedError("told to stop before the start")


def _serve(link: CoreEnd) -> int:
    try:
        run_core(link, _first_message(link))
    except LinkClosedError:
        return 0
    except (ConfigError, ModelFileError) as error:
        return _report_failure(link, str(error), 2)
    except Exception as error:  # the edge: nothing above could do better than end the process
        log.exception("the core cannot go on")
        return _report_failure(link, f"{type(error).__name__}: {error}", 1)
    return 0


def _report_failure(link: CoreEnd, message: str, status: int) -> int:
    try:
        link.send([CoreFailed(message=message)])
    except LinkClosedError:
        log.error("the front is gone as well: %s", message)
    return status


def main() -> None:
    """Serve on an inherited socket; never returns, so that no thread can hold the exit up."""
    parser = argparse.ArgumentParser(
        prog="python -m services.engine.core.process", description=__doc__
    )
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the front")
    args = parser.parse_args()
    die_with_parent()
    # A terminal or a supervisor signals the whole group; it is the front that drains and stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    telemetry.setup("engine", otlp_endpoint="", log_level="info")
    status = _serve(CoreEnd(socket.socket(fileno=args.fd)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
