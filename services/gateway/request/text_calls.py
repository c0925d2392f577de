"""Tokenize and Detokenize: counted in quotas, metrics and the audit log, and bounded in time.

They cost processor time like a prompt does, so a key's limits hold for them as well.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator

from services.common.errors import (
    CancelledError,
    DeadlineExceededError,
    FleetError,
    InternalError,
    UnavailableError,
)
from services.gateway.callers.quota.quotas import Quotas
from services.gateway.callers.records.audit import Audit
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.caller import Caller

TIMEOUT_S = 30.0
MAX_OPEN = 256


class TextCalls:
    """Owned by the gateway's loop."""

    def __init__(self, quotas: Quotas, audit: Audit, metrics: GatewayMetrics) -> None:
        self._quotas = quotas
        self._audit = audit
        self._metrics = metrics
        self._open = 0

    @contextlib.asynccontextmanager
    async def run(self, caller: Caller) -> AsyncIterator[None]:
        """Admit one call, and count it however it ends.

        Raises:
            FleetError: the call is refused, because a quota is used up or too many calls are
                open; or it takes too long.
        """
        began, status = time.monotonic(), "OK"
        method = caller.method.rpartition("/")[2]
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._admit(caller, stack)
                async with asyncio.timeout(TIMEOUT_S):
                    yield
        except TimeoutError:
            error = DeadlineExceededError(f"not done within {TIMEOUT_S:g} s; send less text")
            status = error.code.name
            raise error from None
        except FleetError as error:
            status = str(error.code.name)
            raise
        except asyncio.CancelledError:
            status = CancelledError.code.name
            raise
        except Exception:
            status = InternalError.code.name
            raise
        finally:
            self._metrics.text_calls.labels(method, status).inc()
            self._metrics.text_seconds.labels(method).observe(time.monotonic() - began)

    async def _admit(self, caller: Caller, stack: contextlib.AsyncExitStack) -> None:
        request_id = f"text-{uuid.uuid4().hex}"
        try:
            if self._open >= MAX_OPEN:
                problem = f"{self._open} calls of Tokenize and Detokenize are open already"
                raise UnavailableError(problem, reason="OVERLOADED", retry_after_s=1)
            reservation = await self._quotas.admit(caller.who, request_id, 1)
        except BaseException as error:
            self._audit.record_refused(caller.method, caller.who, caller.peer, error, request_id)
            raise
        # They use no tokens of a model.
        stack.callback(self._quotas.settle, reservation, 0)
        self._audit.record_allowed(caller.method, caller.who, caller.peer, request_id)
        self._open += 1
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._open -= 1
