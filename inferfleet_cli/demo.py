"""`inferfleet demo`, which is `make run`: a fleet, one question, where the time went, and out."""

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.gateway_client import Answer, GatewayClient, chat_prompt
from inferfleet_cli.generate import summary
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.trace import speaks_unicode
from inferfleet_cli.up import add_fleet_options, options_of, say, with_fleet
from inferfleet_cli.waterfall import VERBS, chart, verbs_of
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
        description="What `make run` does: nothing is left running or lying about afterwards;"
        " only a run that fails keeps its logs.",
    )
    parser.add_argument("question", nargs="?", default=QUESTION, metavar="QUESTION")
    add_fleet_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    outer = args.state_dir
    outer_is_new = not outer.exists()
    args.state_dir = outer / "demo"  # beside a fleet that `up` keeps
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
        with contextlib.suppress(OSError):  # a fleet of `up` has moved in meanwhile
            outer.rmdir()
    return status


async def _ask(fleet: "Fleet", question: str) -> int:
    at = fleet.addresses
    assert at is not None
    say(f"\n> {question}")
    # A thread, so that a signal can still stop the fleet; the client is the one of `generate`.
    answer = await asyncio.to_thread(_generate, at.gateway, question)
    say(f"\n{summary(answer)}\n")
    trace = await _trace(fleet, answer)
    say(chart(trace, ascii_only=not speaks_unicode()))
    spent = verbs_of(trace)
    say("engine: " + "  ".join(f"{verb} {spent[verb] * 1e3:.1f} ms" for verb in spent) + "\n")
    return 0


def missing_from(spans: list[dict[str, Any]]) -> str:
    """What has not come yet of a finished request's trace; "" if it is whole."""
    names = {span["name"] for span in spans if span["service"] == "engine"}
    if absent := [verb for verb in VERBS if verb not in names]:
        return absent[0]
    known = {span["span_id"] for span in spans}
    roots = [span["service"] for span in spans if span["parent_span_id"] not in known]
    return "" if roots == ["gateway"] else "span that joins the services"


def _generate(address: str, question: str) -> Answer:
    with GatewayClient(address) as client:
        request = pb.GenerateRequest(model=_model(client), chat=chat_prompt([("user", question)]))
        request.sampling.temperature = 0.0
        request.stop.max_tokens = 128
        return client.generate(request, lambda t: print(t, end="", flush=True), REQUEST_TIMEOUT_S)


def _model(client: GatewayClient) -> str:
    """The served model; a gateway learns of an engine a moment after it has registered."""
    deadline = time.monotonic() + MODEL_TIMEOUT_S
    while True:
        try:
            return client.default_model()
        except CliError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


async def _trace(fleet: "Fleet", answer: Answer) -> dict[str, Any]:
    """The whole trace, which the services send a moment after the answer."""
    from inferfleet_cli.supervisor.trace_json import trace_json

    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while True:
        spans = fleet.traces.find(answer.trace_id)
        trace = trace_json(spans) if spans else {"spans": []}
        missing = missing_from(trace["spans"])
        if not missing:
            return trace
        if time.monotonic() > deadline:
            raise CliError(f"the trace of {answer.request_id} is incomplete: no {missing}")
        await asyncio.sleep(0.05)
