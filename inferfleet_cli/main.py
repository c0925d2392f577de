"""Entry point of the `inferfleet` command: one parser per command, errors as one line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from inferfleet import __version__
from inferfleet_cli import (
    chat,
    demo,
    down,
    generate,
    models,
    placement,
    status,
    tiny_model,
    trace,
    up,
)
from inferfleet_cli.errors import CliError

COMMANDS = (up, down, status, generate, chat, trace, models, placement, demo, tiny_model)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status of the process."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CliError as error:
        print(f"inferfleet: {error}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "inferfleet_cli":
            raise  # a defect of the command, not of the installation
        print(
            f"inferfleet: the module {error.name!r} is missing: this command needs a checkout with"
            " the services; clone the repository and run `make venv` there",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has ended, e.g. `| head`
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inferfleet",
        description="Serve language models with a fleet of engines, and send requests to it.",
        epilog="`inferfleet COMMAND --help` describes a command. Start with: inferfleet up",
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
            help="directory of a local fleet's state (default .inferfleet)",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
