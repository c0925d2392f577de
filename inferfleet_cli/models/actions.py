"""What the `models` commands do, once their arguments are read."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import grpc

from inferfleet_cli.errors import NOTHING_THERE, CliError, from_rpc, to_json
from inferfleet_cli.etcd_action import author_of, run_connected
from inferfleet_cli.models.store import Listing, TargetsOf, change_record, read_listing, target_of
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
    """Run one action and return the exit status of the process."""
    action = {
        "list": _list,
        "set": _set,
        "canary": _canary,
        "promote": _promote,
        "rollback": _rollback,
        "drain": _drain,
    }[name]

    return run_connected(args, lambda etcd: action(args, etcd))


async def _list(args: argparse.Namespace, etcd: Etcd) -> int:
    listing = await read_listing(etcd)
    if args.json:
        print(to_json(_listing_json(listing)))
        return 0
    print("\n".join(table(("name", "revision", "engines", "share", "version"), _rows(listing))))
    for alias in listing.aliases.values():
        if alias.problem:
            print(f"{alias.name}: gateways ignore the record: {alias.problem}")
    return 0


async def _set(args: argparse.Namespace, etcd: Etcd) -> int:
    if args.delete:
        if args.targets:
            raise CliError("set --delete: remove the targets from the command line", 2)
        await _change(args, etcd, _no_targets)
        print(f"{args.alias}: record deleted; the balancer chooses among revisions by load")
        return 0
    listing = await read_listing(etcd)
    targets = [_weighted(listing, text) for text in args.targets]
    if not targets:
        raise CliError("set: give at least one MODEL@REVISION, or --delete", 2)
    return await _write(args, etcd, lambda old: targets)


async def _canary(args: argparse.Namespace, etcd: Etcd) -> int:
    if not 0 < args.percent <= MAX_CANARY_PERCENT:
        raise CliError(
            f"--percent: must be above 0 and at most {MAX_CANARY_PERCENT:g}, got {args.percent:g}",
            2,
        )
    listing = await read_listing(etcd)
    canary = target_of(listing, args.target)

    def targets(old: AliasRecord | None) -> Sequence[Target]:
        others = _others(listing, args.alias, old, canary)
        if not sum(target.weight for target in others) > 0:
            raise CliError(f"{args.alias}: no other revision serves it; use `promote`", 2)
        return with_canary(others, canary, args.percent / 100)

    return await _write(args, etcd, targets)


async def _promote(args: argparse.Namespace, etcd: Etcd) -> int:
    listing = await read_listing(etcd)
    chosen = target_of(listing, args.target, 100.0)
    return await _write(args, etcd, lambda old: [chosen])


async def _rollback(args: argparse.Namespace, etcd: Etcd) -> int:
    def targets(old: AliasRecord | None) -> Sequence[Target]:
        if old is None or not old.previous:
            raise CliError(f"{args.alias} has no earlier version", NOTHING_THERE)
        return old.previous

    return await _write(args, etcd, targets)


async def _drain(args: argparse.Namespace, etcd: Etcd) -> int:
    listing = await read_listing(etcd)
    target = target_of(listing, args.target)
    users = [
        alias.name
        for alias in listing.aliases.values()
        if alias.record is not None and alias.record.shares.get(target.key, 0.0) > 0
    ]
    if users and not args.force:
        raise CliError(
            f"{args.target} still gets requests for {', '.join(users)}: promote another revision"
            " first, or give --force"
        )
    if not listing.admins:
        raise CliError("no balancer is registered in etcd: start one", NOTHING_THERE)
    count = len(listing.revisions[target.key])
    print(
        f"draining {count} engines of {args.target}, for at most {args.grace:g} s", file=sys.stderr
    )
    failed = False
    for engine in (await _drain_revision(args, listing.admins, target)).engines:
        failed = failed or bool(engine.problem)
        ended, cut = engine.result.streams_ended, engine.result.streams_aborted
        outcome = engine.problem or f"{ended} streams ended, {cut} were aborted"
        print(f"{engine.engine_id}: {outcome}")
    return int(failed)


async def _drain_revision(
    args: argparse.Namespace, admins: Sequence[str], target: Target
) -> fleet_pb2.DrainRevisionResponse:
    """Drain through the first balancer that answers; the others learn it from the engines."""
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
                    metadata=await membership.peer(channel, admin, registered=True).metadata(),
                )
                return answer
            except grpc.aio.AioRpcError as error:
                problem = from_rpc(error, admin)
    raise problem


def with_canary(others: Sequence[Target], canary: Target, share: float) -> list[Target]:
    """Targets with weights that sum to 100: the canary has its share, the others the rest in
    proportion to their weights."""
    total = sum(target.weight for target in others)
    rest = [
        replace(target, weight=round(target.weight / total * (1 - share) * 100, 6))
        for target in others
    ]
    return [*rest, replace(canary, weight=round(share * 100, 6))]


def _others(listing: Listing, name: str, old: AliasRecord | None, canary: Target) -> list[Target]:
    """The targets besides the canary: the record's, else the other revisions of the model."""
    if old is not None:
        return [target for target in old.targets if target.key != canary.key]
    return [
        Target(model, revision, float(len(engines)))
        for (model, revision), engines in listing.revisions.items()
        if model == canary.model and revision != canary.revision
    ]


def _weighted(listing: Listing, text: str) -> Target:
    # A revision may contain "="; what follows the last "=" is the weight.
    name, equals, weight = text.rpartition("=")
    if not equals:
        return target_of(listing, text)
    with contextlib.suppress(ValueError):
        return target_of(listing, name, float(weight))
    raise CliError(f"{text}: {weight!r} is not a number", 2)


def _no_targets(old: AliasRecord | None) -> Sequence[Target]:
    if old is None:
        raise CliError("this name has no record", NOTHING_THERE)
    return ()


async def _write(args: argparse.Namespace, etcd: Etcd, targets: TargetsOf) -> int:
    record = await _change(args, etcd, targets)
    print(f"{args.alias}, version {record.version}:")
    for (model, revision), share in record.shares.items():
        print(f"  {share:7.2%}  {model}@{revision}")
    return 0


async def _change(args: argparse.Namespace, etcd: Etcd, targets: TargetsOf) -> AliasRecord:
    return await change_record(
        etcd, args.alias, targets, author=author_of(args), if_version=args.if_version
    )


def _membership(args: argparse.Namespace) -> Membership:
    token_file = args.fleet_token_file
    local = StateDir(args.state_dir)
    if not token_file and not args.tls_ca_file and local.read_record() is not None:
        token_file = str(local.token_file)
    config = ServiceConfig(
        fleet_token_file=token_file,
        tls_ca_file=args.tls_ca_file,
        tls_cert_file=args.tls_cert_file,
        tls_key_file=args.tls_key_file,
    )
    try:
        return Membership.from_config(config)
    except ConfigError as error:
        raise CliError(str(error), 2) from error


def _rows(listing: Listing) -> list[tuple[str, str, int, str, str]]:
    rows = []
    for name, alias in listing.aliases.items():
        if alias.record is not None and alias.record.deleted:
            continue
        shares = alias.record.shares if alias.record is not None else {}
        for (model, revision), share in shares.items():
            engines = listing.revisions.get((model, revision), [])
            version = str(alias.record.version) if alias.record is not None else ""
            target = f"{model}@{revision}"
            rows.append((name, target, _num_serving(engines), f"{share:.2%}", version))
    for (model, revision), engines in listing.revisions.items():
        if model not in listing.named:
            rows.append((model, f"{model}@{revision}", _num_serving(engines), "by load", ""))
    return rows


def _listing_json(listing: Listing) -> dict[str, Any]:
    return {
        "aliases": {
            name: {"problem": alias.problem}
            if alias.record is None
            else {**asdict(alias.record), "problem": ""}
            for name, alias in listing.aliases.items()
        },
        "revisions": [
            {"model": model, "revision": revision, "engines": [e.engine_id for e in engines]}
            for (model, revision), engines in listing.revisions.items()
        ],
    }


def _num_serving(engines: Sequence[Any]) -> int:
    return sum(not engine.draining for engine in engines)
