"""`inferfleet models`: shows and sets which revisions of a model serve a name, and their shares.

This module has the parser only. It must load without the services, which the actions need:
actions.py runs them, store.py reads and writes the records.
"""

import argparse
from collections.abc import Callable

from inferfleet_cli.etcd_action import Actions, add_action, add_author

_ABOUT = """\
A name that clients use in requests may stand for several revisions of a model, each with a weight.
The record is in etcd. All gateways follow it and make the same choice: a session (or a request
without one) stays with its revision, and a stream never changes its revision.

  inferfleet models list                            names, revisions, engines, shares
  inferfleet models set chat qwen3@r1               `chat` is revision r1 of qwen3
  inferfleet models canary chat qwen3@r2 --percent 5    r2 gets 5 of 100 sessions
  inferfleet models promote chat qwen3@r2           r2 gets all sessions
  inferfleet models rollback chat                   undo the last change
  inferfleet models drain qwen3@r1                  the engines of r1 take no new requests

The name may be the model's own name; then the record distributes the plain requests for the model.
Without a record the balancer chooses among the revisions of a model by load.
"""
_STATUS = """\
Exit status: 0 success, 3 no such name or revision, 4 the record was changed meanwhile, 1 any other
failure.
"""
_TARGET = "MODEL@REVISION as `list` shows it; a unique beginning of the revision is enough"


def add_parser(commands: Actions) -> None:
    parser = commands.add_parser(
        "models",
        help="distribute the requests for a name over revisions",
        description=_ABOUT,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_list(actions)
    _add_set(actions)
    _add_canary(actions)
    _add_promote(actions)
    _add_rollback(actions)
    _add_drain(actions)


def _add_list(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "list",
        "show names, revisions and shares",
        "Show the names, their revisions and shares, and the engines that are registered in etcd.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_set(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "set",
        "set the revisions of a name",
        "Write the whole record of a name. Weights are relative: a=9 b=1 is 90 and 10 of 100.",
    )
    _add_name(parser)
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="MODEL@REVISION[=WEIGHT]",
        help=f"{_TARGET}; the default weight is 1",
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete the record; then the load decides again"
    )
    _add_writing_flags(parser)


def _add_canary(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "canary",
        "give a new revision a small share",
        "Give one revision a share of the requests; the others keep their proportions. To increase"
        " the share, run the command again: sessions move to the canary only, never between the"
        " other revisions.",
    )
    _add_name(parser)
    parser.add_argument("target", metavar="MODEL@REVISION", help=_TARGET)
    parser.add_argument(
        "--percent", type=float, default=5.0, metavar="P", help="its share, 0 to 50 (default 5)"
    )
    _add_writing_flags(parser)


def _add_promote(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "promote",
        "give a revision all requests",
        "Let one revision serve the whole name. Running streams stay where they are. `rollback`"
        " restores the record before.",
    )
    _add_name(parser)
    parser.add_argument("target", metavar="MODEL@REVISION", help=_TARGET)
    _add_writing_flags(parser)


def _add_rollback(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "rollback",
        "undo the last change of a name",
        "Write the shares before the last change as a new version. A second rollback undoes the"
        " first.",
    )
    _add_name(parser)
    _add_writing_flags(parser)


def _add_drain(actions: Actions) -> None:
    parser = _add_action(
        actions,
        "drain",
        "drain the engines of a revision",
        "Exclude all engines of a revision from routing and let their streams end. The command"
        " fails if a name still sends requests to the revision, unless --force is given.",
    )
    parser.add_argument("target", metavar="MODEL@REVISION", help=_TARGET)
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="S",
        help="how long streams may take to end (default 600)",
    )
    parser.add_argument("--force", action="store_true", help="drain even if a name still uses it")
    parser.add_argument(
        "--fleet-token-file", default="", metavar="FILE", help="default: the local fleet's"
    )
    for flag, text in (
        ("--tls-ca-file", "CA of the fleet; needed if the fleet uses TLS"),
        ("--tls-cert-file", "certificate of a member of the fleet"),
        ("--tls-key-file", "private key of that certificate"),
    ):
        parser.add_argument(flag, default="", metavar="FILE", help=text)


def _add_action(
    actions: Actions, name: str, help: str, description: str
) -> argparse.ArgumentParser:
    return add_action(
        actions,
        name,
        help=help,
        description=description,
        epilog=_STATUS,
        perform=_performer(name),
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("alias", metavar="NAME", help="the name that clients use in requests")


def _add_writing_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--if-version",
        type=int,
        metavar="N",
        help="write only if the record has this version (0: there is no record yet)",
    )
    add_author(parser)


def _performer(name: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from inferfleet_cli.models.actions import perform

        return perform(name, args)

    return run
