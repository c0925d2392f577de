"""The command's entry: one parser per command, errors as one line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from inferfleet import __version__
from inferfleet_cli import chat, demo, down, generate, models, placement, status, trace, up
from inferfleet_cli.errors import CliError

COMMANDS = (up, down, status, generate, chat, trace, models, placement, demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CliError as error:
        print(f"inferfleet: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left, e.g. `| head`
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inferfleet",
        description="Serve language models with a fleet of engines, and talk to it.",
        epilog="`inferfleet COMMAND --help` says more. Start with: inferfleet up",
    )
    parser.add_argument("--version", action="version", version=f"inferfleet {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    for sub in commands.choices.values():
        sub.add_argument(
            "--state-dir",
            type=Path,
            default=Path(".inferfleet"),
            metavar="DIR",
            help="where a local fleet keeps its state (default .inferfleet)",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
