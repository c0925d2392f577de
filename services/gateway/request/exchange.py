"""One request at the gateway, from arrival to end, whichever face it came in by.

Owns the request's place in flight, its span and its upstream stream, and frees all three however
the request ends.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context

from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FleetError,
    InvalidArgumentError,
    UnavailableError,
)
from services.common.rpc.continuation import StreamLedger
from services.common.service import telemetry
from services.common.tasks import Interruption
from services.gateway.balancers import BalancerLostError, Balancers, Metadata, Upstream
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.quota.fit import Need, check_fit
from services.gateway.callers.quota.quotas import Grant, Quotas, tokens_wanted
from services.gateway.callers.records.audit import Audit, asked_of
from services.gateway.callers.records.line_log import Sink
from services.gateway.callers.records.usage import record_of
from services.gateway.metrics import Metrics, Observation
from services.gateway.request.admission import Admitted, Door, resumed
from services.gateway.request.checks import refuse, request_id_problem
from services.gateway.request.in_flight import InFlight
from services.gateway.request.joining import joined
from services.gateway.request.reroute import open_somewhere

log = logging.getLogger(__name__)

# Of one request, over all balancers that died under it.
MAX_TRIES = 64


@dataclass(frozen=True)
class Caller:
    """What a face knows of the one who asks."""

    face: str
    """"grpc" or "http"."""
    who: Identity = field(default_factory=Identity)
    peer: str = ""
    """Address of the connection's other end."""
    method: str = ""
    request_id: str = ""
    """Chosen outside the message; "" if none was."""
    id_chosen: bool = False
    """Whether that was the caller's own choice, which may be another request's too."""
    request_id_field: str = "request_id"
    """What an error about it should name."""
    parent: Context = field(default_factory=Context)
    timeout_s: float | None = None
    """Left of the caller's own deadline."""
    together: Need | None = None
    """What the prompts of its body need, if they are several."""
    streams: bool = True
    """Whether it gets each message at once; otherwise it has nothing before the end."""


@dataclass(frozen=True)
class Rooms:
    """The gateway's parts that an exchange passes through."""

    door: Door
    balancers: Balancers
    in_flight: InFlight
    metrics: Metrics
    tracer: trace.Tracer
    request_timeout_s: float
    quotas: Quotas
    audit: Audit
    usage: Sequence[Sink] = ()


class Exchange:
    """Use as `async with`: entering admits and opens the stream, leaving frees everything."""

    def __init__(
        self, rooms: Rooms, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> None:
        self._rooms = rooms
        self._request = request
        self._caller = caller
        chosen = request.request_id or caller.request_id
        self._id_problem = request_id_problem(chosen) if chosen else ""
        self._id_chosen = bool(request.request_id or caller.id_chosen)
        self.request_id = chosen if chosen and not self._id_problem else new_request_id()
        own = rooms.request_timeout_s
        self._timeout_s = own if caller.timeout_s is None else min(caller.timeout_s, own)
        self._place = contextlib.ExitStack()
        self._upstream: Upstream | None = None
        self._metadata: Metadata = ()
        self._deadline_s = 0.0
        self._freed = False
        self._interruption = Interruption()
        self._ledger = StreamLedger()
        self._admitted: Admitted | None = None
        self._grant: Grant | None = None
        self._observed = Observation(
            rooms.metrics,
            rooms.tracer,
            request,
            face=caller.face,
            parent=caller.parent,
            request_id=self.request_id,
        )
        self.trace_id = self._observed.trace_id

    @property
    def engine_id(self) -> str:
        """Which engine runs it; "" before the stream is open."""
        return self._upstream.engine_id if self._upstream else ""

    @property
    def revision(self) -> str:
        """Of the engine that answered; "" before it has."""
        return self._observed.revision

    @property
    def rate_headers(self) -> Mapping[str, str]:
        """x-ratelimit-* of a caller with quotas; empty before it is admitted."""
        return self._grant.headers if self._grant else {}

    @property
    def is_open(self) -> bool:
        """Whether the first message is here."""
        return self._upstream is not None

    @property
    def admitted(self) -> Admitted:
        """What was sent; only once entered."""
        assert self._admitted is not None, "the exchange is not open"
        return self._admitted

    async def __aenter__(self) -> "Exchange":
        token = telemetry.request_id_var.set(self.request_id)
        try:
            async with self._interruption.waiting(self._timeout_s):
                await self._open()
        except TimeoutError:
            if self._interruption.requested:
                cut = self._going_down()
                self._free(cut)
                raise cut from None
            waited_s = max(round(self._timeout_s, 3), 0)
            late = DeadlineExceededError(f"no answer within {waited_s:g} s")
            self._free(late)
            raise late from None
        except BaseException as error:
            self._free(error)
            raise
        finally:
            telemetry.request_id_var.reset(token)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._free(error)

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """The stream's messages as raw bytes, up to its proper end.

        A balancer that dies on the way is replaced by another, unseen by the caller.

        Raises:
            FleetError: the stream ended with a status, fell silent or was cut.
        """
        ledger = self._ledger = StreamLedger(self._request.sampling.n or 1)
        saw = self._observed.saw
        parsing = self.admitted.plan.parsing
        # After the ledger: what carries a stream on must know the text as engines give it.
        read = parsing.open_stream().parse if parsing is not None else _unread
        lost = True
        while lost:
            lost = False
            assert self._upstream is not None, "the exchange is not open"
            try:
                while messages := await self._upstream.take():
                    for said in self._said(messages, read):
                        saw(said)
                        yield said
            except (BalancerLostError, CancelledError) as error:
                self._upstream.cancel()
                if not self._interruption.requested and not isinstance(error, BalancerLostError):
                    raise
                if self._observed.complete:
                    return
                closing = ledger.closing()
                if closing is None:
                    await self._carry_on(ledger, error)
                    lost = True
                else:
                    for said in read(closing):
                        saw(said)
                        yield said
        if not self._observed.complete:
            raise AbortedError("the stream ended without its summary")

    def _said(
        self, messages: Sequence[bytes], read: Callable[[bytes], Iterable[bytes]]
    ) -> Sequence[bytes]:
        """What the caller gets of these."""
        accept = self._ledger.accept
        news = [out for raw in messages if (out := accept(raw)) is not None]
        return joined([said for out in news for said in read(out)])

    async def _carry_on(self, ledger: StreamLedger, lost: FleetError) -> None:
        """Open the stream once more, from where the caller has it.

        Raises:
            FleetError: `lost`, if nobody takes it; what a cut stream ends with.
        """
        assert self._upstream is not None
        if self._interruption.requested:
            raise self._going_down() from None
        if self._upstream.tries >= MAX_TRIES:
            raise lost
        wire, exact = resumed(self.admitted, ledger, self.engine_id)
        log.warning("carrying %s on: %s", self.request_id, lost.message)
        try:
            async with self._interruption.waiting():
                self._upstream = await self._rooms.balancers.open(
                    wire, self._metadata, self._deadline_s, tries=self._upstream.tries
                )
        except TimeoutError:
            raise self._going_down() from None
        except FleetError as error:
            raise lost from error
        ledger.resume(exact=exact)
        if self._freed:  # the caller left meanwhile
            self._upstream.cancel()
            raise CancelledError("the client has left")

    def abandon(self) -> None:
        """The caller is gone: free everything now, whoever still waits for a message."""
        self._free(asyncio.CancelledError())

    def cut(self) -> None:
        """The gateway goes down: end with a status, whatever is waited for."""
        if not self._interruption.request() and self._upstream is not None:
            self._upstream.cancel()

    def _going_down(self) -> FleetError:
        """A repeat is right only if the caller has nothing yet."""
        message, reason = "this gateway is going down", "DRAINING"
        started = self._ledger.started
        if started is None or not self._caller.streams:
            return UnavailableError(message, reason=reason, retry_after_s=1)
        counts = {
            "prompt_tokens": str(started.prompt_tokens),
            "completion_tokens": str(self._ledger.num_tokens),
        }
        return AbortedError(message, reason=reason, metadata=counts)

    async def _open(self) -> None:
        self._deadline_s = time.monotonic() + self._timeout_s
        caller, audit = self._caller, self._rooms.audit
        about: dict[str, Any] = {}
        if audit.on:
            about = {"model": self._request.model[:128], "asked": asked_of(self._request)}
        try:
            self._admitted = await self._let_in()
        except BaseException as error:
            audit.refused(caller.method, caller.who, caller.peer, error, self.request_id, **about)
            raise
        audit.allowed(caller.method, caller.who, caller.peer, self.request_id, **about)
        self._observed.known_model(self._admitted.model.name)
        self._metadata = (
            (rpc.REQUEST_ID_KEY, self.request_id),
            *telemetry.inject(self._observed.context),
        )
        try:
            self._admitted, self._upstream = await open_somewhere(
                self._admitted, self._send, self._admit
            )
        except InvalidArgumentError as error:
            raise self._admitted.plan.name_callers_field(error) from error

    async def _let_in(self) -> Admitted:
        """All that may refuse a request, the cheapest first."""
        if self._id_problem:
            refuse(self._caller.request_id_field, self._id_problem)
        who, rooms, tokens = self._caller.who, self._rooms, tokens_wanted(self._request)
        check_fit(self._caller.together or Need(1, tokens), who, self._request)
        self._place.enter_context(rooms.in_flight.holding(who.tenant, self.request_id, self.cut))
        grant = await rooms.quotas.admit(who, self.request_id, tokens, unique=self._id_chosen)
        if self._freed:  # the caller left meanwhile
            rooms.quotas.settle(grant, 0)
            raise CancelledError("the client has left")
        self._grant = grant
        return await self._admit()

    async def _admit(self, avoid: Collection[tuple[str, str]] = ()) -> Admitted:
        return await self._rooms.door.admit(
            self._request,
            tenant=self._caller.who.tenant,
            request_id=self.request_id,
            context=self._observed.context,
            avoid=avoid,
        )

    async def _send(self, admitted: Admitted) -> Upstream:
        return await self._rooms.balancers.open(admitted.wire, self._metadata, self._deadline_s)

    def _free(self, error: BaseException | None) -> None:
        if self._freed:
            return
        self._freed = True
        if self._upstream is not None:
            self._upstream.cancel()
        self._place.close()
        if isinstance(error, GeneratorExit):
            error = asyncio.CancelledError()
        self._observed.end(error)
        self._account()

    def _account(self) -> None:
        """Once per request, however it ended: what it used is charged and written down."""
        caller, asked = self._caller, (self._request.model[:128], "")
        if self._admitted is not None:
            model = self._admitted.model  # its revision is the commoner of two that run
            asked = (model.name, self.revision or model.revision)
        record = record_of(
            self._observed.facts,
            self._ledger,
            who=caller.who,
            face=caller.face,
            request_id=self.request_id,
            model=asked,
        )
        if self._grant is not None:
            self._rooms.quotas.settle(self._grant, record.tokens)
        for sink in self._rooms.usage:
            sink.put(record)


def _unread(raw: bytes) -> list[bytes]:
    return [raw]


def new_request_id() -> str:
    """A fresh id for a caller that chose none."""
    return f"req-{uuid.uuid4().hex}"
