"""What `placement` and `models` share: etcd's flags, the connection, and the author's name."""

import argparse
import asyncio
import getpass
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.state_dir import StateDir

if TYPE_CHECKING:
    from services.common.etcd.client import Etcd

Perform = Callable[[argparse.Namespace], int]
Actions = Any
"""argparse's action of sub-commands, which is generic at type-checking time only."""
_FLAGS = {
    "--etcd-tls-ca-file": "CA of etcd's certificate; https:// without it uses the system's CAs",
    "--etcd-tls-cert-file": "client certificate, if etcd requires one",
    "--etcd-tls-key-file": "private key of the client certificate",
    "--etcd-user": "user name, if etcd's authentication is on",
    "--etcd-password-file": "file with the user's password",
}


def add_action(
    actions: Actions, name: str, *, help: str, description: str, epilog: str, perform: Perform
) -> argparse.ArgumentParser:
    """Add the parser of one action, with the flags of etcd; `perform` runs the action."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=help, description=description, epilog=epilog
    )
    parser.add_argument(
        "--etcd",
        default="",
        metavar="HOST:PORT,...",
        help="etcd of the fleet (default: of the local fleet in --state-dir)",
    )
    for flag, text in _FLAGS.items():
        parser.add_argument(flag, default="", metavar=flag.rpartition("-")[2].upper(), help=text)
    parser.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(run=perform)
    return parser


def add_author(parser: argparse.ArgumentParser) -> None:
    """Add --author; `author_of` reads it."""
    parser.add_argument(
        "--author", default="", metavar="NAME", help="author of the change (default user@host)"
    )


def author_of(args: argparse.Namespace) -> str:
    """The --author flag, else user@host; the host alone if the user id has no name."""
    given: str = getattr(args, "author", "")
    if given:
        return given
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return socket.gethostname()


def run_connected(
    args: argparse.Namespace, action: "Callable[[Etcd], Coroutine[Any, Any, int]]"
) -> int:
    """Connect to etcd, run the action, and return its exit status.

    Raises:
        CliError: no etcd is given and no local fleet runs, or etcd does not answer.
    """

    async def run() -> int:
        async with _connected(args) as etcd:
            return await action(etcd)

    return asyncio.run(run())


@asynccontextmanager
async def _connected(args: argparse.Namespace) -> "AsyncIterator[Etcd]":
    # Imported here, because the parser of the command must work without the services.
    from services.common.config.settings import ConfigError
    from services.common.etcd.client import EtcdError
    from services.common.etcd.config import EtcdKeys, connect

    endpoints, user, password_file = args.etcd, args.etcd_user, args.etcd_password_file
    if not endpoints:
        record = _local_fleet(args.state_dir)
        endpoints = str(record["etcd"])
        if record.get("store_password_file") and not user:
            user, password_file = "root", str(record["store_password_file"])
    keys = EtcdKeys(
        etcd=tuple(endpoint.strip() for endpoint in endpoints.split(",")),
        etcd_tls_ca_file=args.etcd_tls_ca_file,
        etcd_tls_cert_file=args.etcd_tls_cert_file,
        etcd_tls_key_file=args.etcd_tls_key_file,
        etcd_user=user,
        etcd_password_file=password_file,
    )
    try:
        etcd = connect(keys, timeout_s=5.0)
    except ConfigError as error:
        raise CliError(f"--{error}", 2) from error
    try:
        yield etcd
    except EtcdError as error:
        raise CliError(f"{error} (at {endpoints}; --etcd names another etcd)") from error
    finally:
        await etcd.close()


def _local_fleet(state_dir: Path) -> dict[str, Any]:
    record = StateDir(state_dir).read_record()
    if record is None:
        raise CliError(
            f"no fleet runs in {state_dir}: start one with `inferfleet up`, or name the etcd of"
            " another fleet with --etcd"
        )
    return record
