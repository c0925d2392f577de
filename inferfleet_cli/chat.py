"""`inferfleet chat`: a conversation in the terminal. Each turn reuses the cached prefix."""

import argparse
import contextlib
import sys

from inferfleet_cli.errors import CliError
from inferfleet_cli.gateway_client import GatewayClient, chat_prompt
from inferfleet_cli.generate import add_sampling, connect, set_sampling, summary
from inferfleet_proto.v1 import inference_pb2 as pb

HELP = "Ctrl-C stops an answer, Ctrl-D or /quit ends the chat, /new starts a new conversation."


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat", help="chat with a model", description=f"Chat with a model. {HELP}"
    )
    parser.add_argument("--model", default="", help="served model (default: the only one)")
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="system message of the conversation"
    )
    add_sampling(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (importing it gives input() line editing)
    with connect(args) as client:
        model = args.model or client.default_model()
        print(f"{model} at {client.address}. {HELP}")
        _converse(client, model, args)
    return 0


def _converse(client: GatewayClient, model: str, args: argparse.Namespace) -> None:
    opening = [("system", args.system)] if args.system else []
    history = list(opening)
    while (line := _read_line()) is not None:
        if line == "/quit":
            return
        if line == "/new":
            history = list(opening)
        elif line:
            turn = [*history, ("user", line)]
            text = _answer(client, model, turn, args)
            if text is not None:
                history = [*turn, ("assistant", text)]


def _answer(
    client: GatewayClient, model: str, turn: list[tuple[str, str]], args: argparse.Namespace
) -> str | None:
    """The answer's text; None if the request failed, which leaves the turn out of the history."""
    request = pb.GenerateRequest(model=model, chat=chat_prompt(turn))
    set_sampling(request, args)
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        print(text, end="", flush=True)

    try:
        answer = client.generate(request, show, args.timeout)
    except KeyboardInterrupt:
        print(" [stopped]")
        return "".join(shown)
    except CliError as error:
        if shown:
            print(flush=True)
        print(f"inferfleet: {error}", file=sys.stderr)
        return None
    print(flush=True)
    print(summary(answer), file=sys.stderr)
    return answer.text


def _read_line() -> str | None:
    interactive = sys.stdin.isatty()
    try:
        return input("> " if interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
        return None
