"""Admits requests within quotas and charges their real usage at the end.

Counts in Redis if it answers, else in this process. No request fails or waits long because of
Redis. Each admitted request holds a QuotaReservation until it ends, however it ends.
"""

import asyncio
import contextlib
import logging
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Gauge

from inferfleet_proto.v1 import inference_pb2
from services.common.tasks import cancel_and_wait
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.quota.local import LocalCounts
from services.gateway.callers.quota.shared import (
    HEARTBEAT_S,
    CountsAwayError,
    SharedCounts,
)
from services.gateway.callers.quota.verdict import Scope, Verdict, headers_of, refusal, scopes_of

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
STOP_S = 1.0
# Weight of one request in the mean duration, from which retry hints for `concurrency` are made.
_SMOOTHING = 0.1


@dataclass(frozen=True)
class QuotaReservation:
    """What one admitted request has taken from its quotas."""

    who: Identity
    scopes: tuple[Scope, ...]
    request_id: str
    reserved: int
    """Tokens."""
    shared: bool
    """Whether it is counted in Redis."""
    counted: bool
    """Whether it is counted at all."""
    headers: Mapping[str, str]
    """x-ratelimit-* for the caller."""
    began_s: float
    """By the event loop's clock."""


class Quotas:
    """Owned by the gateway's loop.

    Args:
        shared: None: this gateway counts alone.
    """

    def __init__(self, shared: SharedCounts | None, registry: CollectorRegistry) -> None:
        self._shared = shared
        self._local = LocalCounts()
        self._running: dict[tuple[str, str], QuotaReservation] = {}
        """By tenant and request id."""
        self._tally: Tally[tuple[str, str]] = Tally()
        """Running requests by tenant and scope."""
        self._settling: dict[str, set[asyncio.Task[None]]] = {}
        """Settlements on their way to Redis, by tenant."""
        self._heartbeats: asyncio.Task[None] | None = None
        self._mean_s = 1.0
        self._refused = Counter(
            "inferfleet_gateway_quota_refusals",
            "Requests refused because a quota is used up",
            ("quota", "scope"),
            registry=registry,
        )
        self._alone = Counter(
            "inferfleet_gateway_quota_local_decisions",
            "Requests of limited callers decided without Redis",
            registry=registry,
        )
        self._unsettled = Counter(
            "inferfleet_gateway_quota_unsettled",
            "Ended requests whose tokens were not charged in Redis, because it was away",
            registry=registry,
        )
        up = Gauge(
            "inferfleet_gateway_quota_shared",
            "1 while quotas are counted in Redis, 0 while this gateway counts alone",
            registry=registry,
        )
        up.set_function(lambda: float(shared is not None and shared.available))

    async def start(self) -> None:
        """Try Redis once, then send heartbeats in the background."""
        if self._shared is not None:
            await self._send_heartbeat(self._shared)
            work = self._keep_sending_heartbeats(self._shared)
            self._heartbeats = asyncio.create_task(work, name="quotas")

    async def stop(self) -> None:
        """Finish settlements, for at most a second; idempotent."""
        pending = {task for tasks in self._settling.values() for task in tasks}
        if pending:
            await asyncio.wait(pending, timeout=STOP_S)
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None:
            await cancel_and_wait(heartbeats)
        if self._shared is not None:
            await self._shared.close()

    async def admit(
        self, who: Identity, request_id: str, tokens: int, *, unique: bool = False
    ) -> QuotaReservation:
        """Admit a request and reserve its tokens.

        Args:
            tokens: estimated usage; `settle` replaces it by the real number.
            unique: also refuse an id that is in flight at another gateway.

        Raises:
            ResourceExhaustedError: a quota is used up; the message names it.
            AlreadyExistsError: the id is in flight at another gateway.
        """
        scopes = scopes_of(who)
        limited = any(scope.limits.any for scope in scopes)
        now_s = asyncio.get_running_loop().time()
        reservation = QuotaReservation(
            who, scopes, request_id, max(tokens, 1), False, False, {}, now_s
        )
        if not limited and not (unique and self._shared is not None):
            return reservation
        verdict, shared = await self._decide(reservation, unique=unique)
        if verdict.refused is not None:
            if limited:
                scope = scopes[verdict.scope].kind
                self._refused.labels(verdict.refused, scope).inc()
            if verdict.refused == "concurrency":
                limit = scopes[verdict.scope].limits.concurrency or 1
                verdict = replace(verdict, wait_s=self._mean_s / limit)
            raise refusal(verdict, who, request_id, reservation.reserved)
        headers = headers_of(who, verdict.left)
        reservation = replace(reservation, shared=shared, counted=True, headers=headers)
        self._running[who.tenant, request_id] = reservation
        self._tally.update((who.tenant, scope.name) for scope in scopes)
        return reservation

    def settle(self, reservation: QuotaReservation, used: int) -> None:
        """End a request: charge the tokens that it used. Call it once; never waits."""
        if not reservation.counted:
            return
        tenant = reservation.who.tenant
        self._running.pop((tenant, reservation.request_id), None)
        self._tally.subtract((tenant, scope.name) for scope in reservation.scopes)
        for scope in reservation.scopes:
            if self._tally[tenant, scope.name] <= 0:
                del self._tally[tenant, scope.name]
        took_s = asyncio.get_running_loop().time() - reservation.began_s
        self._mean_s += _SMOOTHING * (took_s - self._mean_s)
        self._local.settle(tenant, reservation.scopes, reservation.reserved, used)
        reserved = reservation.reserved if reservation.shared else 0
        self._settle_in_background(reservation, reserved, used)

    async def _decide(self, reservation: QuotaReservation, *, unique: bool) -> tuple[Verdict, bool]:
        """The verdict, and whether it was made in Redis."""
        tenant, scopes = reservation.who.tenant, reservation.scopes
        request_id, tokens = reservation.request_id, reservation.reserved
        shared = self._shared
        if shared is not None and shared.available:
            await self._wait_settled(tenant)
            try:
                verdict = await shared.admit(tenant, scopes, request_id, tokens, unique=unique)
            except CountsAwayError:
                log.debug("deciding on %s without Redis", request_id)
            except asyncio.CancelledError:
                # Redis may have run the script all the same.
                self._settle_in_background(reservation, tokens, 0)
                raise
            else:
                self._update_share()
                self._local.mirror(tenant, scopes, verdict.left)
                return verdict, True
        if shared is not None:
            self._alone.inc()
        self._update_share()
        running = [self._tally[tenant, scope.name] for scope in scopes]
        return self._local.admit(tenant, scopes, running, tokens), False

    def _update_share(self) -> None:
        self._local.share = 1.0 / self._shared.gateways if self._shared is not None else 1.0

    def _settle_in_background(
        self, reservation: QuotaReservation, reserved: int, used: int
    ) -> None:
        if self._shared is None:
            return
        tenant = reservation.who.tenant
        work = self._settle_shared(self._shared, reservation, reserved, used)
        task = asyncio.ensure_future(work)
        self._settling.setdefault(tenant, set()).add(task)
        task.add_done_callback(lambda done: self._forget_settled(tenant, done))

    def _forget_settled(self, tenant: str, task: "asyncio.Task[None]") -> None:
        tasks = self._settling[tenant]
        tasks.discard(task)
        if not tasks:
            del self._settling[tenant]

    async def _settle_shared(
        self, shared: SharedCounts, reservation: QuotaReservation, reserved: int, used: int
    ) -> None:
        try:
            await shared.settle(
                reservation.who.tenant,
                reservation.scopes,
                reservation.request_id,
                reserved=reserved,
                used=used,
            )
        except CountsAwayError:
            self._unsettled.inc()

    async def _wait_settled(self, tenant: str) -> None:
        """Wait for settlements: a caller may send its next request right after an answer."""
        pending = self._settling.get(tenant)
        if pending:
            await asyncio.wait(set(pending))

    async def _keep_sending_heartbeats(self, shared: SharedCounts) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._send_heartbeat(shared)
            except Exception:  # this task must not end: quotas would stay local
                log.exception("unhandled error in a heartbeat of the quotas")

    async def _send_heartbeat(self, shared: SharedCounts) -> None:
        running: dict[tuple[str, Sequence[Scope]], list[str]] = {}
        for (tenant, request_id), reservation in self._running.items():
            running.setdefault((tenant, reservation.scopes), []).append(request_id)
        with contextlib.suppress(CountsAwayError):
            await shared.send_heartbeat(running)


def estimate_tokens(request: inference_pb2.GenerateRequest) -> int:
    """Estimate the prompt and output tokens of a request from sizes alone."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        prompt = len(request.token_ids.ids)
    elif kind == "chat":
        size = sum(len(message.content) for message in request.chat.messages)
        prompt = size // BYTES_PER_TOKEN
    else:
        prompt = len(request.text) // BYTES_PER_TOKEN
    choices = request.sampling.n if request.sampling.HasField("n") else 1
    output = request.stop.max_tokens * choices if request.stop.HasField("max_tokens") else 0
    return int(prompt + output)
