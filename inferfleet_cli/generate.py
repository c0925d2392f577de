"""`inferfleet generate`: sends one prompt and prints the answer, streamed or as JSON."""

import argparse
import sys
from pathlib import Path

from inferfleet_cli.errors import CliError, to_json
from inferfleet_cli.gateway_client import (
    Answer,
    GatewayClient,
    chat_prompt,
    gateway_address,
    gateway_tls,
)
from inferfleet_cli.supervisor.tls import ClientTls
from inferfleet_proto.v1 import inference_pb2 as pb

EXAMPLES = """\
examples:
  inferfleet generate --chat "What is the capital of France?" --temperature 0
  inferfleet generate "Once upon a time" --max-tokens 64 --seed 7 --stop "."
  inferfleet generate --token-ids 504,3575,282 --json
  inferfleet generate "A city as JSON:" --json-schema city.schema.json
  inferfleet generate "A phone number: " --regex "[0-9]{3}-[0-9]{4}"
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="send one prompt and stream the answer",
        description="Send one prompt to a gateway and print the answer as it arrives.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text; - reads it from standard input"
    )
    parser.add_argument("--chat", action="store_true", help="PROMPT is a chat message of a user")
    parser.add_argument("--token-ids", metavar="1,2,3", help="token ids instead of PROMPT")
    parser.add_argument("--model", default="", help="served model (default: the only one)")
    add_sampling(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--json-schema", metavar="FILE|TEXT", help="the answer is JSON that this JSON Schema allows"
    )
    shape.add_argument("--regex", metavar="R", help="the answer matches this regular expression")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `generate` and `chat`. Missing flags use the server's defaults."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most N tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same answer")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before TEXT; repeatable"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after S seconds")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="API key, if the gateway requires one"
    )
    parser.add_argument(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="gateway (default: the fleet of --state-dir, else 127.0.0.1:50051)",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="connect with TLS; a local fleet's own is known without this flag",
    )
    parser.add_argument(
        "--ca-file", default="", metavar="FILE", help="CA of the gateway; implies --tls"
    )
    parser.add_argument(
        "--cert-file", default="", metavar="FILE", help="client certificate; implies --tls"
    )
    parser.add_argument("--key-file", default="", metavar="FILE", help="key of --cert-file")


def run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        request = _request(args)
        request.model = args.model or client.default_model()
        answer = _stream(client, request, args)
    if args.json:
        print(to_json(answer.to_json()))
    else:
        print()
        print(summary(answer), file=sys.stderr)
    return 0


def _stream(client: GatewayClient, request: pb.GenerateRequest, args: argparse.Namespace) -> Answer:
    """Run the request; print its text as it arrives, unless --json was given."""
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        if text and not args.json:
            shown = True
            print(text, end="", flush=True)

    try:
        return client.generate(request, show, args.timeout)
    except (CliError, KeyboardInterrupt):
        if shown:
            print(flush=True)  # the error message starts on a new line
        raise


def connect(args: argparse.Namespace) -> GatewayClient:
    """Connect to the gateway that the flags name."""
    files = (args.ca_file, args.cert_file, args.key_file)
    requested = ClientTls(args.tls or any(files), *files)
    tls = gateway_tls(requested, args.address, args.state_dir)
    return GatewayClient(gateway_address(args.address, args.state_dir), args.api_key_file, tls)


def summary(answer: Answer) -> str:
    """One line about a finished request."""
    usage = answer.usage
    rate = usage.completion_tokens / answer.total_s if answer.total_s else 0.0
    return (
        f"[{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached),"
        f" {usage.completion_tokens} generated, first after {answer.ttft_s:.2f} s,"
        f" {rate:.1f} tokens/s, {answer.finish_reason}, {answer.engine_id};"
        f" inferfleet trace {answer.request_id}]"
    )


def set_sampling(request: pb.GenerateRequest, args: argparse.Namespace) -> None:
    """Copy the flags that were given.

    Raises:
        CliError: the message cannot hold a value. The server checks the allowed ranges.
    """
    values = {
        "--temperature": (request.sampling, "temperature", args.temperature),
        "--top-p": (request.sampling, "top_p", args.top_p),
        "--top-k": (request.sampling, "top_k", args.top_k),
        "--seed": (request.sampling, "seed", args.seed),
        "--max-tokens": (request.stop, "max_tokens", args.max_tokens),
    }
    for flag, (message, name, value) in values.items():
        if value is not None:
            try:
                setattr(message, name, value)
            except ValueError as error:
                raise CliError(f"{flag}: {value} is out of range", status=2) from error
    request.stop.stop_strings.extend(args.stop)


def _request(args: argparse.Namespace) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    if (args.prompt is None) == (args.token_ids is None):
        raise CliError("give either PROMPT or --token-ids, and not both", status=2)
    if args.token_ids is not None:
        request.token_ids.ids.extend(_ids(args.token_ids))
    else:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        if args.chat:
            request.chat.CopyFrom(chat_prompt([("user", text)]))
        else:
            request.text = text
    set_sampling(request, args)
    if args.json_schema is not None:
        request.constraint.json_schema = _schema(args.json_schema)
    if args.regex is not None:
        request.constraint.regex = args.regex
    return request


def _schema(given: str) -> str:
    """The schema as text: the argument itself, or the content of the file that it names."""
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(
            f"--json-schema: neither JSON text nor a readable file: {error}", 2
        ) from error


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
        pb.TokenIds(ids=ids)
    except ValueError as error:
        raise CliError(f"--token-ids: expected numbers such as 1,2,3, got {text!r}", 2) from error
    return ids
