"""What the `models` commands do, once their arguments are read."""

import argparse
import asyncio
import contextlib
import getpass
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import grpc

from inferfleet_cli.errors import CliError, of_rpc, to_json
from inferfleet_cli.models_store import NOTHING_THERE, Known, change, read, target_of
from inferfleet_cli.placement_group import connected
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.table import table
from inferfleet_proto.admin.v1 import fleet_pb2, fleet_pb2_grpc
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.model_alias import AliasRecord, Target
from services.common.rpc import Membership

_SLACK_S = 10.0
MAX_CANARY_PERCENT = 50.0


def perform(name: str, args: argparse.Namespace) -> int:
    """Run one action; returns the process's exit status."""
    action = {
        "list": _list,
        "set": _set,
        "canary": _canary,
        "promote": _promote,
        "rollback": _rollback,
        "drain": _drain,
    }[name]

    async def run() -> int:
        async with connected(args) as etcd:
            return await action(args, etcd)

    return asyncio.run(run())


async def _list(args: argparse.Namespace, etcd: Etcd) -> int:
    known = await read(etcd)
    if args.json:
        print(to_json(_as_json(known)))
        return 0
    print("\n".join(table(("name", "revision", "engines", "share", "version"), _rows(known))))
    for alias in known.aliases.values():
        if alias.problem:
            print(f"{alias.name}: the record is refused by gateways: {alias.problem}")
    return 0


async def _set(args: argparse.Namespace, etcd: Etcd) -> int:
    if args.delete:
        if args.targets:
            raise CliError("set --delete takes no targets", 2)
        await change(etcd, args.alias, _nothing, author=_author(args), if_version=args.if_version)
        print(f"{args.alias}: the record is gone; load decides among the revisions of a model")
        return 0
    known = await read(etcd)
    targets = [_weighted(known, text) for text in args.targets]
    if not targets:
        raise CliError("set: name at least one MODEL@REVISION, or --delete", 2)
    return await _write(args, etcd, lambda old: targets)


async def _canary(args: argparse.Namespace, etcd: Etcd) -> int:
    if not 0 < args.percent <= MAX_CANARY_PERCENT:
        raise CliError(f"--percent: must be above 0 and at most {MAX_CANARY_PERCENT:g}", 2)
    known = await read(etcd)
    canary = target_of(known, args.target)

    def targets(old: AliasRecord | None) -> Sequence[Target]:
        others = _others(known, args.alias, old, canary)
        if not sum(target.weight for target in others) > 0:
            raise CliError(f"{args.alias}: nobody else would serve it: use `promote`", 2)
        return with_canary(others, canary, args.percent / 100)

    return await _write(args, etcd, targets)


async def _promote(args: argparse.Namespace, etcd: Etcd) -> int:
    known = await read(etcd)
    chosen = target_of(known, args.target, 100.0)
    return await _write(args, etcd, lambda old: [chosen])


async def _rollback(args: argparse.Namespace, etcd: Etcd) -> int:
    def targets(old: AliasRecord | None) -> Sequence[Target]:
        if old is None or not old.previous:
            raise CliError(f"{args.alias}: there is no earlier version", NOTHING_THERE)
        return old.previous

    return await _write(args, etcd, targets)


async def _drain(args: argparse.Namespace, etcd: Etcd) -> int:
    known = await read(etcd)
    target = target_of(known, args.target)
    users = [
        alias.name
        for alias in known.aliases.values()
        if alias.record is not None and alias.record.shares.get(target.key, 0.0) > 0
    ]
    if users and not args.force:
        raise CliError(
            f"{args.target} still gets requests of {', '.join(users)}: promote another revision"
            " first, or --force"
        )
    if not known.admins:
        raise CliError("no balancer is registered", NOTHING_THERE)
    count = len(known.revisions[target.key])
    print(f"draining {count} engines of {args.target}: up to {args.grace:g} s", file=sys.stderr)
    failed = False
    for engine in (await _asked_to_drain(args, known.admins, target)).engines:
        failed = failed or bool(engine.problem)
        ended, cut = engine.result.streams_ended, engine.result.streams_aborted
        said = engine.problem or f"{ended} streams ended, {cut} were cut"
        print(f"{engine.engine_id}: {said}")
    return int(failed)


async def _asked_to_drain(
    args: argparse.Namespace, admins: Sequence[str], target: Target
) -> fleet_pb2.DrainRevisionResponse:
    """One balancer is enough: the engines tell the others that they are draining."""
    membership = _membership(args)
    problem = CliError("no balancer answers")
    for admin in admins:
        async with membership.channel(admin) as channel:
            stub: Any = fleet_pb2_grpc.FleetStub(channel)
            try:
                answer: fleet_pb2.DrainRevisionResponse = await stub.DrainRevision(
                    fleet_pb2.DrainRevisionRequest(
                        model=target.model, model_revision=target.revision, grace_s=args.grace
                    ),
                    timeout=args.grace + _SLACK_S,
                    metadata=membership.metadata,
                )
                return answer
            except grpc.aio.AioRpcError as error:
                problem = of_rpc(error, admin)
    raise problem


def with_canary(others: Sequence[Target], canary: Target, share: float) -> list[Target]:
    """Weights of 100 in all: the canary's share, and the others' in proportion."""
    total = sum(target.weight for target in others)
    rest = [
        replace(target, weight=round(target.weight / total * (1 - share) * 100, 6))
        for target in others
    ]
    return [*rest, replace(canary, weight=round(share * 100, 6))]


def _others(known: Known, name: str, old: AliasRecord | None, canary: Target) -> list[Target]:
    """Whom the canary stands beside: the record's targets, else the model's other revisions."""
    if old is not None:
        return [target for target in old.targets if target.key != canary.key]
    return [
        Target(model, revision, float(len(engines)))
        for (model, revision), engines in known.revisions.items()
        if model == canary.model and revision != canary.revision
    ]


def _weighted(known: Known, text: str) -> Target:
    # Revisions are digests or names: what follows the last "=" is a weight if it is a number.
    name, equals, weight = text.rpartition("=")
    if not equals:
        return target_of(known, text)
    with contextlib.suppress(ValueError):
        return target_of(known, name, float(weight))
    raise CliError(f"{text}: {weight!r} is not a weight", 2)


def _nothing(old: AliasRecord | None) -> Sequence[Target]:
    if old is None:
        raise CliError("there is no record of this name", NOTHING_THERE)
    return ()


def _author(args: argparse.Namespace) -> str:
    return args.author or f"{getpass.getuser()}@{socket.gethostname()}"


async def _write(args: argparse.Namespace, etcd: Etcd, targets: Any) -> int:
    record = await change(
        etcd, args.alias, targets, author=_author(args), if_version=args.if_version
    )
    print(f"{args.alias}, version {record.version}:")
    for (model, revision), share in record.shares.items():
        print(f"  {share:7.2%}  {model}@{revision}")
    return 0


def _membership(args: argparse.Namespace) -> Membership:
    token_file = args.fleet_token_file
    local = StateDir(args.state_dir)
    if not token_file and not args.tls_ca_file and local.read_record() is not None:
        token_file = str(local.token_file)
    shown = ServiceConfig(
        fleet_token_file=token_file,
        tls_ca_file=args.tls_ca_file,
        tls_cert_file=args.tls_cert_file,
        tls_key_file=args.tls_key_file,
    )
    try:
        return Membership.from_config(shown)
    except ConfigError as error:
        raise CliError(str(error), 2) from error


def _rows(known: Known) -> list[tuple[str, str, int, str, str]]:
    rows = []
    for name, alias in known.aliases.items():
        if alias.record is not None and alias.record.deleted:
            continue
        shares = alias.record.shares if alias.record is not None else {}
        for (model, revision), share in shares.items():
            engines = known.revisions.get((model, revision), [])
            version = str(alias.record.version) if alias.record is not None else ""
            target = f"{model}@{revision}"
            rows.append((name, target, _taking(engines), f"{share:.2%}", version))
    for (model, revision), engines in known.revisions.items():
        if model not in known.named:
            rows.append((model, f"{model}@{revision}", _taking(engines), "by load", ""))
    return rows


def _as_json(known: Known) -> dict[str, Any]:
    return {
        "aliases": {
            name: {"problem": alias.problem}
            if alias.record is None
            else {**asdict(alias.record), "problem": ""}
            for name, alias in known.aliases.items()
        },
        "revisions": [
            {"model": model, "revision": revision, "engines": [e.engine_id for e in engines]}
            for (model, revision), engines in known.revisions.items()
        ],
    }


def _taking(engines: Sequence[Any]) -> int:
    return sum(not engine.draining for engine in engines)
