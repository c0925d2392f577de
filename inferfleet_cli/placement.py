"""`inferfleet placement`: see, plan and set which rank holds which expert of a model."""

import argparse
from collections.abc import Callable

from inferfleet_cli.etcd_arguments import add_etcd_arguments

_STATUS = """\
Ends with status 0 if all went well, 3 if there is nothing of the kind, 4 if somebody else wrote a
map meanwhile, 5 if the map does not fit or an engine refused it, 1 otherwise.
"""
_ABOUT = """\
The experts of a mixture-of-experts model lie in slots on the engine's ranks; busy experts may have
several. All engines of a model follow one versioned map in etcd and go over to a new one between
two rounds: no request is dropped and no output changes.

  inferfleet placement plan              what would be gained, by the load just counted
  inferfleet placement set --plan        write it, and wait until all engines use it
  inferfleet placement get               the map, and which version each engine uses
  inferfleet placement rollback 3        write version 3 once more, as a new version
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "placement",
        help="see and set where a model's experts are",
        description=_ABOUT,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _get(actions)
    _plan(actions)
    _set(actions)
    _history(actions)
    _rollback(actions)


def _get(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(actions, "get", "show the map and who uses it", "The map of one group.")
    parser.add_argument("--json", action="store_true", help="print the whole map as JSON")


def _plan(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "plan",
        "show what another map would gain; writes nothing",
        "Plan a map for the load that the engines counted, or for one in a file, and show today's"
        " and tomorrow's balance: the mean by the largest load of a rank, 1 is perfect. With"
        " --loads, --ranks and --slots no fleet is needed.",
    )
    _planning(parser)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of one engine; default: as the engines say"
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help="slots per layer; default: as the engines say"
    )
    parser.add_argument("--all", action="store_true", help="show all layers, not the worst 16")
    parser.add_argument("--json", action="store_true", help="print a map that `set FILE` takes")


def _set(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "set",
        "write a map and wait until the engines use it",
        "Write the next version. FILE is JSON: what `plan --json` or `get --json` prints, or just"
        ' {"phy2log": [[...], ...]}, per layer the expert in each slot. It is checked against the'
        " engines' shape before anything is written.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", metavar="FILE", help="a map; - is standard input")
    source.add_argument("--plan", action="store_true", help="plan one, as `plan` does")
    _planning(parser)
    _writing(parser)


def _history(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(actions, "history", "list the last maps", "The maps that are kept.")
    parser.add_argument("--json", action="store_true", help="print them as JSON, whole")


def _rollback(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "rollback",
        "write an earlier map once more",
        "Write the map of an earlier version as the next version.",
    )
    parser.add_argument("version", type=int, metavar="VERSION", help="one that `history` lists")
    _writing(parser)


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help, description=description, epilog=_STATUS)
    add_etcd_arguments(parser)
    parser.add_argument(
        "--group",
        default="",
        metavar="NAME",
        help="a served model or its group in etcd; needed if there are several",
    )
    parser.set_defaults(run=_runner(name))
    return parser


def _planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        choices=("global", "hierarchical"),
        default="global",
        help="hierarchical keeps each expert group on one node (default global)",
    )
    parser.add_argument(
        "--groups", type=int, default=1, metavar="N", help="expert groups of the router (default 1)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="machines of one engine (default 1)"
    )
    parser.add_argument(
        "--loads",
        metavar="FILE",
        help='JSON [[...], ...], per layer the tokens of each expert, or {"load": ...}; default:'
        " what the engines counted",
    )


def _writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="S",
        help="how long to wait until every engine uses it; 0 does not wait (default 30)",
    )
    parser.add_argument(
        "--author", default="", metavar="NAME", help="who the history names (default user@host)"
    )


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        # Only here: numpy and etcd's client are no part of what a client installs.
        from inferfleet_cli.placement_actions import perform

        return perform(name, args)

    return run
