"""`inferfleet tiny-model`, which `--model tiny:NAME` uses too: writes a model of random weights.

The module must load without the services, which the functions need.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.state_dir import StateDir

PREFIX = "tiny:"
_ABOUT = """\
Write a small model with random weights as its publisher would: config.json, safetensors with the
published names, a tokenizer, a chat template. It answers nonsense, and shows how a fleet serves an
architecture and a number format. Without ARCH: list both.
"""
_EXAMPLES = """\
examples:
  inferfleet tiny-model qwen3_moe --out tiny-moe
  inferfleet tiny-model llama --out tiny --format bfloat16 --set num_hidden_layers=12
  inferfleet up --model tiny-moe
  inferfleet up --model tiny:qwen3-moe              writes it into the state directory and serves it
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tiny-model",
        help="write a small model with random weights",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arch", nargs="?", metavar="ARCH", help="model_type of config.json")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default tiny-ARCH)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the weights (default 0)"
    )
    parser.add_argument(
        "--format", default="float32", metavar="FORMAT", help="of the weights (default float32)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_change,
        dest="changes",
        metavar="KEY=VALUE",
        help="another value (JSON) of a key of config.json, e.g. hidden_size=256; repeatable",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from services.engine.tiny_models import DECLARATIONS, FORMATS

    if args.arch is None:
        print(
            f"architectures  {', '.join(sorted(DECLARATIONS))}\nformats        {', '.join(FORMATS)}"
        )
        return 0
    folder = args.out or Path(f"tiny-{args.arch.replace('_', '-')}")
    _write(folder, args.arch, args.seed, args.format, dict(args.changes))
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>12}  {path}")
    return 0


def tiny_model_in(state_dir: Path, model: str) -> str:
    """Folder of the model `tiny:NAME` or `tiny:NAME:FORMAT` in a state directory; written anew.

    Raises:
        CliError: no such architecture or format, or another fleet runs in the directory.
    """
    name, _, number_format = model.removeprefix(PREFIX).partition(":")
    state = StateDir(state_dir)
    state.make()
    state.require_free()
    labels = ["tiny", name.lower().replace("_", "-"), *filter(None, [number_format])]
    folder = state.tiny_models / "-".join(labels)
    _write(folder, name, 0, number_format or "float32", {})
    return str(folder)


def _write(folder: Path, arch: str, seed: int, number_format: str, changes: dict[str, Any]) -> None:
    from services.engine.tiny_models import TinyModelError, write_tiny_model

    try:
        write_tiny_model(folder, arch, seed=seed, number_format=number_format, changes=changes)
    except TinyModelError as error:
        raise CliError(str(error), status=2) from error
    except OSError as error:
        raise CliError(f"cannot write {folder}: {error}") from error


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    try:
        return key, json.loads(value if equals and key else "")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected KEY=VALUE with a JSON value, got {text!r}"
        ) from None
