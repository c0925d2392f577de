"""`inferfleet placement`: shows, plans and sets which rank holds which expert of a model.

This module has the parser only. It must load without the services, which the actions need:
actions.py runs them, group.py finds the engines, planning.py plans, map_files.py reads and writes
files, tables.py prints.
"""

import argparse
from collections.abc import Callable

from inferfleet_cli.etcd_action import Actions, add_action, add_author

_STATUS = """\
Exit status: 0 success, 3 no such model or map, 4 the map was changed meanwhile, 5 the map does not
fit or an engine rejected it, 1 any other failure.
"""
_ABOUT = """\
The experts of a mixture-of-experts model are in slots on the ranks of an engine; a busy expert may
have several copies. All engines of a model follow one versioned map in etcd. They apply a new map
between two rounds: no request is dropped and no output changes.

  inferfleet placement plan              show what a new map would gain, for the counted load
  inferfleet placement set --plan        write the planned map and wait until all engines use it
  inferfleet placement get               show the map, and the version that each engine uses
  inferfleet placement rollback 3        write the map of version 3 again, as a new version
"""


def add_parser(commands: Actions) -> None:
    parser = commands.add_parser(
        "placement",
        help="show and set where a model's experts are",
        description=_ABOUT,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_get(actions)
    _add_plan(actions)
    _add_set(actions)
    _add_history(actions)
    _add_rollback(actions)


def _add_get(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "get",
        "show the map and the engines that use it",
        "Show the map of one group of engines.",
    )
    parser.add_argument("--json", action="store_true", help="print the whole map as JSON")


def _add_plan(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "plan",
        "show what another map would gain; writes nothing",
        "Plan a map for the load that the engines counted, or for the load in a file, and show the"
        " balance of today's map and of the planned one. Balance is the mean load of a rank"
        " divided by the largest; 1 is perfect. With --loads, --ranks and --slots no fleet is"
        " needed.",
    )
    _add_planning_flags(parser)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of one engine (default: the engines' number)"
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help="slots per layer (default: the engines' number)"
    )
    parser.add_argument("--all", action="store_true", help="show all layers, not the worst 16")
    parser.add_argument("--json", action="store_true", help="print a map that `set FILE` accepts")


def _add_set(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "set",
        "write a map and wait until the engines use it",
        "Write the next version. FILE is the JSON that `plan --json` or `get --json` prints, or"
        ' {"phy2log": [[...], ...]} with the expert in each slot, per layer. The map is checked'
        " against the shape of the engines before it is written.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", metavar="FILE", help="a map; - is standard input")
    source.add_argument("--plan", action="store_true", help="plan the map, as `plan` does")
    _add_planning_flags(parser)
    _add_writing_flags(parser)


def _add_history(actions: Actions) -> None:
    parser = _add_action(
        actions, "history", "list the last maps", "List the maps that etcd still holds."
    )
    parser.add_argument("--json", action="store_true", help="print the whole maps as JSON")


def _add_rollback(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "rollback",
        "write an earlier map again",
        "Write the map of an earlier version as the next version.",
    )
    parser.add_argument("version", type=int, metavar="VERSION", help="a version in `history`")
    _add_writing_flags(parser)


def _add_action(
    actions: Actions, name: str, help: str, description: str
) -> argparse.ArgumentParser:
    parser = add_action(
        actions,
        name,
        help=help,
        description=description,
        epilog=_STATUS,
        perform=_performer(name),
    )
    parser.add_argument(
        "--group",
        default="",
        metavar="NAME",
        help="a served model or its group in etcd; needed if there are several",
    )
    return parser


def _add_planning_flags(parser: argparse.ArgumentParser) -> None:
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
        help='JSON [[...], ...] with the tokens of each expert per layer, or {"load": ...}'
        " (default: the load that the engines counted)",
    )


def _add_writing_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="S",
        help="how long to wait until every engine uses the map; 0 does not wait (default 30)",
    )
    add_author(parser)


def _performer(name: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from inferfleet_cli.placement.actions import perform

        return perform(name, args)

    return run
