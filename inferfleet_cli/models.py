"""`inferfleet models`: which revisions serve a name, and with what share of its requests."""

import argparse
from collections.abc import Callable

from inferfleet_cli.etcd_arguments import add_etcd_arguments

_ABOUT = """\
A name that clients ask for may stand for several revisions of a model, each with a weight. The
record is kept in etcd; every gateway follows it and makes the same choice: a session (or else a
request) stays with its revision, and a stream never changes it.

  inferfleet models list                            names, revisions, engines, shares
  inferfleet models set chat qwen3@r1               `chat` is revision r1 of qwen3
  inferfleet models canary chat qwen3@r2 --percent 5    and r2 for 5 of 100 sessions
  inferfleet models promote chat qwen3@r2           r2 for all
  inferfleet models rollback chat                   what it was before the last change
  inferfleet models drain qwen3@r1                  end r1's engines gracefully

A name may be the model's own: then a plain request for the model is shared out by the record.
Without one, load alone decides among the revisions of a model.
"""
_STATUS = """\
Ends with status 0 if all went well, 3 if there is no such name or revision, 4 if somebody else
changed the record meanwhile, 1 otherwise.
"""
_TARGET = "MODEL@REVISION as `list` shows it; the beginning of a revision will do if it is unique"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "models",
        help="share a name's requests out to revisions",
        description=_ABOUT,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = _action(actions, "list", "show names, revisions and shares", "What etcd knows.")
    listing.add_argument("--json", action="store_true", help="print it as JSON")
    _set(actions)
    _canary(actions)
    _promote(actions)
    _rollback(actions)
    _drain(actions)


def _set(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "set",
        "say which revisions serve a name",
        "Write the whole record of a name. Weights are relative: a=9 b=1 is 90 and 10 of 100.",
    )
    _named(parser)
    parser.add_argument(
        "targets", nargs="*", metavar="MODEL@REVISION[=WEIGHT]", help=f"{_TARGET}; weight 1 if none"
    )
    parser.add_argument(
        "--delete", action="store_true", help="remove the record: load decides again"
    )
    _writing(parser)


def _canary(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "canary",
        "give a new revision a small share",
        "Give one revision a share of the requests; the others keep their shares of the rest. Run"
        " it again with a larger share: sessions move to the canary only, never between others.",
    )
    _named(parser)
    parser.add_argument("target", metavar="MODEL@REVISION", help=_TARGET)
    parser.add_argument(
        "--percent", type=float, default=5.0, metavar="P", help="its share, 0 to 50 (default 5)"
    )
    _writing(parser)


def _promote(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "promote",
        "give a revision all requests",
        "Let one revision serve the whole name. Streams that run stay where they are; the record"
        " before stays at hand for `rollback`.",
    )
    _named(parser)
    parser.add_argument("target", metavar="MODEL@REVISION", help=_TARGET)
    _writing(parser)


def _rollback(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "rollback",
        "undo the last change of a name",
        "Write the shares before the last change as a new version. Twice is there and back.",
    )
    _named(parser)
    _writing(parser)


def _drain(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _action(
        actions,
        "drain",
        "end the engines of a revision gracefully",
        "Take all engines of a revision out of routing and let their streams end. Refused while a"
        " name still gives it requests, unless --force.",
    )
    parser.add_argument("target", metavar="MODEL@REVISION", help=_TARGET)
    parser.add_argument(
        "--grace", type=float, default=600.0, metavar="S", help="for the streams (default 600)"
    )
    parser.add_argument("--force", action="store_true", help="even if a name still uses it")
    parser.add_argument(
        "--fleet-token-file", default="", metavar="FILE", help="default: the local fleet's"
    )
    for flag, text in (
        ("--tls-ca-file", "CA of the fleet; needed where it speaks TLS"),
        ("--tls-cert-file", "certificate that shows membership"),
        ("--tls-key-file", "key of that certificate"),
    ):
        parser.add_argument(flag, default="", metavar="FILE", help=text)


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help, description=description, epilog=_STATUS)
    add_etcd_arguments(parser)
    parser.set_defaults(run=_runner(name))
    return parser


def _named(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("alias", metavar="NAME", help="what clients ask for")


def _writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--if-version",
        type=int,
        metavar="N",
        help="write only over this version (0: there is no record yet)",
    )
    parser.add_argument(
        "--author", default="", metavar="NAME", help="who the record names (default user@host)"
    )


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        # Only here: etcd's client is no part of what a client installs.
        from inferfleet_cli.models_actions import perform

        return perform(name, args)

    return run
