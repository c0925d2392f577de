"""Follows one engine's load reports and connects again by itself for as long as it runs."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from services.balancer.engines.member import Member
from services.common.rpc import raise_if_cancelled

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 1.0)
# An engine that takes the call and says nothing is not connected.
_FIRST_REPORT_S = 5.0


async def watch_load(
    member: Member, metadata: tuple[tuple[str, str], ...], changed: Callable[[], None]
) -> None:
    """Feed `member` with its engine's reports until cancelled.

    Args:
        metadata: what shows our membership.
        changed: called after each report and each break.
    """
    stub: Any = engine_pb2_grpc.EngineStub(member.channel)
    delay_s = _BACKOFF_S[0]
    while True:
        call = stub.WatchLoad(engine_pb2.WatchLoadRequest(), metadata=metadata)
        reason = "ended by the engine"
        try:
            async with asyncio.timeout(_FIRST_REPORT_S) as limit:
                async for report in call:
                    limit.reschedule(None)
                    if report.epoch_ms != member.info.epoch_ms:
                        reason = f"another process (epoch {report.epoch_ms}) answers there"
                        break
                    member.report(report)
                    changed()
                    delay_s = _BACKOFF_S[0]
        except grpc.RpcError as error:
            raise_if_cancelled()
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = f"no report within {_FIRST_REPORT_S:g} s"
        finally:
            call.cancel()
        if member.connected:
            log.warning("engine %s: load reports lost: %s", member.info.engine_id, reason)
        member.connected = False
        changed()
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        delay_s = min(delay_s * 2, _BACKOFF_S[1])
