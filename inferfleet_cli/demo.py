"""`inferfleet demo` (`make run`): start a fleet, ask one question, show its trace, stop."""

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.gateway_client import Answer, GatewayClient, chat_prompt
from inferfleet_cli.generate import summary
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.supervisor.tls import ClientTls
from inferfleet_cli.trace import can_print_unicode
from inferfleet_cli.up import add_fleet_options, options_of, say, with_fleet
from inferfleet_cli.waterfall import ENGINE_STEPS, chart, seconds_by_step
from inferfleet_proto.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from inferfleet_cli.supervisor.fleet import Fleet

QUESTION = "What is the capital of France?"
MODEL_TIMEOUT_S = 30.0
TRACE_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 300.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="start a fleet, ask one question, show the request's waterfall, stop",
        description="Start a fleet, ask one question, show the request's waterfall and stop the"
        " fleet. `make run` does this. All processes and files are removed afterwards; only a run"
        " that fails keeps its logs.",
    )
    parser.add_argument("question", nargs="?", default=QUESTION, metavar="QUESTION")
    add_fleet_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    outer = args.state_dir
    outer_is_new = not outer.exists()
    args.state_dir = outer / "demo"  # `up` may run a fleet in the outer directory
    options = options_of(args)

    async def ask(fleet: "Fleet") -> int:
        return await _ask(fleet, args.question)

    state = StateDir(options.state_dir)
    try:
        status = asyncio.run(with_fleet(options, ask))
    except CliError as error:
        if state.logs.is_dir() and not state.is_claimed():
            raise CliError(f"{error}\nlogs: {args.state_dir}/logs", error.status) from error
        raise
    state.remove()
    if outer_is_new:
        with contextlib.suppress(OSError):  # not empty: `up` has started a fleet there meanwhile
            outer.rmdir()
    return status


async def _ask(fleet: "Fleet", question: str) -> int:
    at = fleet.addresses
    assert at is not None
    say(f"\n> {question}")
    # In a thread, so that the loop can still react to signals.
    answer = await asyncio.to_thread(_generate, at.gateway, question, fleet.tls)
    say(f"\n{summary(answer)}\n")
    trace = await _trace(fleet, answer)
    say(chart(trace, ascii_only=not can_print_unicode()))
    spent = seconds_by_step(trace)
    say("engine: " + "  ".join(f"{step} {spent[step] * 1e3:.1f} ms" for step in spent) + "\n")
    return 0


def missing_from(spans: list[dict[str, Any]]) -> str | None:
    """Name of a span that a finished request's trace still lacks; None if the trace is complete."""
    names = {span["name"] for span in spans if span["service"] == "engine"}
    if absent := [step for step in ENGINE_STEPS if step not in names]:
        return absent[0]
    known = {span["span_id"] for span in spans}
    roots = [span["service"] for span in spans if span["parent_span_id"] not in known]
    return None if roots == ["gateway"] else "span that joins the services"


def _generate(address: str, question: str, tls: ClientTls) -> Answer:
    with GatewayClient(address, tls=tls) as client:
        request = pb.GenerateRequest(model=_model(client), chat=chat_prompt([("user", question)]))
        request.sampling.temperature = 0.0
        request.stop.max_tokens = 128
        return client.generate(request, lambda t: print(t, end="", flush=True), REQUEST_TIMEOUT_S)


def _model(client: GatewayClient) -> str:
    """The served model. A gateway lists an engine shortly after the engine has registered."""
    deadline = time.monotonic() + MODEL_TIMEOUT_S
    while True:
        try:
            return client.default_model()
        except CliError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


async def _trace(fleet: "Fleet", answer: Answer) -> dict[str, Any]:
    """The complete trace; the services export it shortly after the answer."""
    from inferfleet_cli.supervisor.trace_json import trace_json

    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while True:
        spans = fleet.traces.find(answer.trace_id)
        trace = trace_json(spans) if spans else {"spans": []}
        missing = missing_from(trace["spans"])
        if missing is None:
            return trace
        if time.monotonic() > deadline:
            raise CliError(
                f"the trace of {answer.request_id} lacks a {missing} after {TRACE_TIMEOUT_S:g} s"
            )
        await asyncio.sleep(0.05)
