"""Follows the load reports of one engine and reconnects after each break, until cancelled."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from services.balancer.engines.member import Member
from services.common.rpc import Peer, UnprovenPeerError
from services.common.tasks import raise_if_cancelled

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 1.0)
# An engine that accepts the call and sends no report does not count as connected.
_FIRST_REPORT_S = 5.0
_ELSE = "another process answers"


async def watch_load(member: Member, peer: Peer, changed: Callable[[], None]) -> None:
    """Pass the engine's load reports to `member` until cancelled.

    Args:
        peer: what calls to the engine may show.
        changed: called after each report and after each break.
    """
    delay_s = _BACKOFF_S[0]
    while True:
        received, reason = await _read_reports(member, peer, changed)
        peer.forget()  # another process may answer there next
        if received:
            delay_s = _BACKOFF_S[0]
        if member.connected:
            log.warning("engine %s: load reports lost: %s", member.info.engine_id, reason)
        member.mark_disconnected(refused=reason.startswith(_ELSE) or "refused" in reason.lower())
        changed()
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        delay_s = min(delay_s * 2, _BACKOFF_S[1])


async def _read_reports(
    member: Member, peer: Peer, changed: Callable[[], None]
) -> tuple[bool, str]:
    """Read one WatchLoad call to its end; whether a report arrived, and why the call ended."""
    stub: Any = engine_pb2_grpc.EngineStub(member.channel)
    call = None
    received = False
    try:
        call = stub.WatchLoad(engine_pb2.WatchLoadRequest(), metadata=await peer.metadata())
        async with asyncio.timeout(_FIRST_REPORT_S) as limit:
            async for report in call:
                limit.reschedule(None)
                if report.epoch_ms != member.info.epoch_ms:
                    return received, (
                        f"{_ELSE} at {member.info.address}: its epoch is "
                        f"{report.epoch_ms}, the registry says {member.info.epoch_ms}"
                    )
                received = True
                member.apply_report(report)
                changed()
        return received, "the engine ended the call"
    except UnprovenPeerError as error:
        return received, f"{_ELSE} at {member.info.address}: {error.details()}"
    except grpc.RpcError as error:
        raise_if_cancelled()
        return received, f"{error.code().name}: {error.details()}"
    except TimeoutError:
        return received, f"no report within {_FIRST_REPORT_S:g} s"
    finally:
        if call is not None:
            call.cancel()
