"""The door of the quotas: admits a request and takes its real usage in the end.

Counts in Redis if it answers, else in this process; no request fails or waits long because of
Redis. Every admitted request holds a `Grant` until it has ended, whatever ended it.
"""

import asyncio
import contextlib
import logging
from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Gauge

from inferfleet_proto.v1 import inference_pb2
from services.common.tasks import cancel_and_wait
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.quota.local import LocalCounts
from services.gateway.callers.quota.shared import BEAT_S, CountsAwayError, Running, SharedCounts
from services.gateway.callers.quota.verdict import Scope, Verdict, headers_of, refusal, scopes_of

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
STOP_S = 1.0
# Of the mean request's seconds, from which a caller with too many at once is told when to return.
_SMOOTHING = 0.1


@dataclass(frozen=True)
class Grant:
    """One admitted request."""

    who: Identity
    scopes: tuple[Scope, ...]
    request_id: str
    reserved: int
    shared: bool
    """Whether Redis knows of it."""
    counted: bool
    """Whether there is anything to settle."""
    headers: Mapping[str, str]
    """x-ratelimit-*."""
    began_s: float


class Quotas:
    """Owned by the gateway's loop.

    Args:
        shared: None: this gateway counts alone.
    """

    def __init__(self, shared: SharedCounts | None, registry: CollectorRegistry) -> None:
        self._shared = shared
        self._local = LocalCounts()
        self._running: dict[tuple[str, str], Grant] = {}
        self._tally: Tally[tuple[str, str]] = Tally()
        self._settling: dict[str, set[asyncio.Task[None]]] = {}
        self._beats: asyncio.Task[None] | None = None
        self._mean_s = 1.0
        self._refused = Counter(
            "inferfleet_gateway_quota_refusals",
            "Requests refused for a quota",
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
            "Ended requests whose tokens Redis was not told, because it was away",
            registry=registry,
        )
        up = Gauge(
            "inferfleet_gateway_quota_shared",
            "1 while quotas are counted in Redis, 0 while this gateway counts alone",
            registry=registry,
        )
        up.set_function(lambda: float(shared is not None and shared.available))

    async def start(self) -> None:
        """Look for Redis once, then keep looking and renewing in the background."""
        if self._shared is not None:
            await self._beat(self._shared)
            self._beats = asyncio.create_task(self._keep_beating(self._shared), name="quotas")

    async def stop(self) -> None:
        """Settle what is to be settled, within a second; idempotent."""
        pending = {task for tasks in self._settling.values() for task in tasks}
        if pending:
            await asyncio.wait(pending, timeout=STOP_S)
        beats, self._beats = self._beats, None
        if beats is not None:
            await cancel_and_wait(beats)
        if self._shared is not None:
            await self._shared.close()

    async def admit(
        self, who: Identity, request_id: str, tokens: int, *, unique: bool = False
    ) -> Grant:
        """Let a request in.

        Args:
            tokens: what it may use, as far as that can be known; the real number is charged
                in the end.
            unique: also refuse an id that is in flight at another gateway.

        Raises:
            ResourceExhaustedError: a quota is used up; its name is in the message.
            AlreadyExistsError: the id is in flight elsewhere.
        """
        scopes = scopes_of(who)
        limited = any(scope.limits.any for scope in scopes)
        now_s = asyncio.get_running_loop().time()
        grant = Grant(who, scopes, request_id, max(tokens, 1), False, False, {}, now_s)
        if not limited and not (unique and self._shared is not None):
            return grant
        verdict, shared = await self._decide(grant, unique=unique)
        if verdict.refused is not None:
            if limited:
                scope = scopes[verdict.scope].kind
                self._refused.labels(verdict.refused, scope).inc()
            if verdict.refused == "concurrency":
                limit = scopes[verdict.scope].limits.concurrency or 1
                verdict = replace(verdict, wait_s=self._mean_s / limit)
            raise refusal(verdict, who, request_id, grant.reserved)
        headers = headers_of(who, verdict.left)
        grant = replace(grant, shared=shared, counted=True, headers=headers)
        self._running[who.tenant, request_id] = grant
        self._tally.update((who.tenant, scope.name) for scope in scopes)
        return grant

    def settle(self, grant: Grant, used: int) -> None:
        """The request has ended and used so many tokens; to be called once. Never waits."""
        if not grant.counted:
            return
        tenant = grant.who.tenant
        self._running.pop((tenant, grant.request_id), None)
        self._tally.subtract((tenant, scope.name) for scope in grant.scopes)
        for scope in grant.scopes:
            if self._tally[tenant, scope.name] <= 0:
                del self._tally[tenant, scope.name]
        took_s = asyncio.get_running_loop().time() - grant.began_s
        self._mean_s += _SMOOTHING * (took_s - self._mean_s)
        self._local.settle(tenant, grant.scopes, grant.reserved, used)
        self._tell(grant, grant.reserved if grant.shared else 0, used)

    async def _decide(self, grant: Grant, *, unique: bool) -> tuple[Verdict, bool]:
        """The verdict, and whether it is Redis's."""
        tenant, scopes = grant.who.tenant, grant.scopes
        shared = self._shared
        if shared is not None and shared.available:
            await self._settled(tenant)
            try:
                verdict = await shared.admit(
                    tenant, scopes, grant.request_id, grant.reserved, unique=unique
                )
            except CountsAwayError:
                log.debug("deciding on %s without Redis", grant.request_id)
            except asyncio.CancelledError:
                self._tell(grant, grant.reserved, 0)  # the script may have run all the same
                raise
            else:
                self._share()
                self._local.mirror(tenant, scopes, verdict.left)
                return verdict, True
        if shared is not None:
            self._alone.inc()
        self._share()
        running = [self._tally[tenant, scope.name] for scope in scopes]
        return self._local.admit(tenant, scopes, running, grant.reserved), False

    def _share(self) -> None:
        self._local.share = 1.0 / self._shared.gateways if self._shared is not None else 1.0

    def _tell(self, grant: Grant, reserved: int, used: int) -> None:
        if self._shared is None:
            return
        tenant = grant.who.tenant
        task = asyncio.ensure_future(self._settle_shared(self._shared, grant, reserved, used))
        self._settling.setdefault(tenant, set()).add(task)
        task.add_done_callback(lambda done: self._told(tenant, done))

    def _told(self, tenant: str, task: "asyncio.Task[None]") -> None:
        tasks = self._settling[tenant]
        tasks.discard(task)
        if not tasks:
            del self._settling[tenant]

    async def _settle_shared(
        self, shared: SharedCounts, grant: Grant, reserved: int, used: int
    ) -> None:
        try:
            await shared.settle(
                grant.who.tenant, grant.scopes, grant.request_id, reserved=reserved, used=used
            )
        except CountsAwayError:
            self._unsettled.inc()

    async def _settled(self, tenant: str) -> None:
        """A caller that has one answer may ask at once again: what it held must be free first."""
        pending = self._settling.get(tenant)
        if pending:
            await asyncio.wait(set(pending))

    async def _keep_beating(self, shared: SharedCounts) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self._beat(shared)
            except Exception:  # the edge of a task that must not end: quotas would stay local
                log.exception("unhandled error while renewing quotas")

    async def _beat(self, shared: SharedCounts) -> None:
        held: dict[tuple[str, tuple[Scope, ...]], deque[str]] = {}
        for (tenant, request_id), grant in self._running.items():
            held.setdefault((tenant, grant.scopes), deque()).append(request_id)
        running: Running = {key: list(ids) for key, ids in held.items()}
        with contextlib.suppress(CountsAwayError):
            await shared.beat(running)


def tokens_wanted(request: inference_pb2.GenerateRequest) -> int:
    """What a request may use, guessed without costly work: prompt plus all answers it asks for."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        prompt = len(request.token_ids.ids)
    elif kind == "chat":
        size = sum(len(message.content) for message in request.chat.messages)
        prompt = size // BYTES_PER_TOKEN
    else:
        prompt = len(request.text) // BYTES_PER_TOKEN
    choices = request.sampling.n if request.sampling.HasField("n") else 1
    answers = request.stop.max_tokens * choices if request.stop.HasField("max_tokens") else 0
    return int(prompt + answers)
