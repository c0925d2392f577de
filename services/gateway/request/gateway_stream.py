"""One request at the gateway, from arrival to end, for both faces.

Owns the request's slot in flight, its quota reservation, its span and its upstream stream, and
releases all of them however the request ends.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
from services.gateway.balancers import Metadata
from services.gateway.callers.quota.fit import Need, check_fit
from services.gateway.callers.quota.quotas import QuotaReservation, estimate_tokens
from services.gateway.callers.records.audit import request_summary
from services.gateway.callers.records.usage import record_of
from services.gateway.metrics import Observation
from services.gateway.request.admission import AdmittedRequest, make_resume_request
from services.gateway.request.caller import Caller
from services.gateway.request.checks import refuse, request_id_problem
from services.gateway.request.dependencies import Dependencies
from services.gateway.request.joining import join_deltas
from services.gateway.request.reroute import open_with_fallback
from services.gateway.upstream import BalancerLostError, Upstream

log = logging.getLogger(__name__)

# Of one request, over all balancers that failed while they had it.
MAX_TRIES = 64


class GatewayStream:
    """Use as `async with`: entering admits the request and opens its stream, leaving ends it."""

    def __init__(
        self,
        dependencies: Dependencies,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
    ) -> None:
        self._dependencies = dependencies
        self._request = request
        self._caller = caller
        chosen = request.request_id or caller.request_id
        self._id_problem = request_id_problem(chosen) if chosen else None
        self._id_chosen = bool(request.request_id or caller.id_chosen)
        self.request_id = chosen if chosen and not self._id_problem else new_request_id()
        longest_s = dependencies.request_timeout_s
        own_s = caller.timeout_s
        self._timeout_s = longest_s if own_s is None else min(own_s, longest_s)
        self._deadline_s = 0.0
        """By time.monotonic(); set on arrival."""
        self._slot = contextlib.ExitStack()
        self._upstream: Upstream | None = None
        self._metadata: Metadata = ()
        self._released = False
        self._ended = False
        """Whether the caller's last message has been read."""
        self._interruption = Interruption()
        self._ledger = StreamLedger()
        self._parse: Callable[[bytes], Iterable[bytes]] = _unchanged
        self._admitted: AdmittedRequest | None = None
        self._reservation: QuotaReservation | None = None
        self._observation = Observation(
            dependencies.metrics,
            dependencies.tracer,
            request,
            face=caller.face,
            parent=caller.parent,
            request_id=self.request_id,
        )
        self.trace_id = self._observation.trace_id

    @property
    def engine_id(self) -> str:
        """The engine that runs the request; "" before the stream is open."""
        return self._upstream.engine_id if self._upstream else ""

    @property
    def revision(self) -> str | None:
        """Of the engine that answered; None before its first message."""
        return self._observation.revision

    @property
    def rate_headers(self) -> Mapping[str, str]:
        """x-ratelimit-* for a caller with quotas; empty before admission."""
        return self._reservation.headers if self._reservation else {}

    @property
    def is_open(self) -> bool:
        """Whether the first message has arrived."""
        return self._upstream is not None

    @property
    def admitted(self) -> AdmittedRequest:
        """What was sent; only after entering."""
        assert self._admitted is not None, "the stream is not open"
        return self._admitted

    async def __aenter__(self) -> "GatewayStream":
        token = telemetry.request_id_var.set(self.request_id)
        try:
            async with self._interruption.waiting(self._timeout_s):
                await self._open()
        except TimeoutError:
            error = self._opening_error()
            self._release(error)
            raise error from None
        except BaseException as error:
            self._release(error)
            raise
        finally:
            telemetry.request_id_var.reset(token)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._release(error)

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """The serialised messages for the caller, up to the Summary.

        If a balancer fails, another one resumes the stream; the caller does not notice.

        Raises:
            FleetError: the stream ended with a status, stalled or was aborted.
        """
        self._ledger = StreamLedger(self._request.sampling.n or 1)
        parsing = self.admitted.plan.parsing
        if parsing is not None:
            self._parse = parsing.open_stream().parse
        record = self._observation.record
        while messages := await self._read_messages():
            for message in messages:
                record(message)
                yield message
        if not self._observation.complete:
            raise AbortedError("the stream ended without its summary")

    async def _read_messages(self) -> Sequence[bytes]:
        """The next messages for the caller; none: that was the end. Resumes a broken stream."""
        while not self._ended:
            assert self._upstream is not None, "the stream is not open"
            try:
                received = await self._upstream.read_messages()
                messages = self._accept(received)
            except (BalancerLostError, CancelledError) as error:
                closing = await self._recover(error)
                if closing is None:
                    continue
                self._ended = True
                return closing
            self._ended = not received
            if messages:
                return messages
        return ()

    def _accept(self, received: Sequence[bytes]) -> Sequence[bytes]:
        """The messages that the caller gets for these messages of an engine."""
        messages: list[bytes] = []
        for raw in received:
            accepted = self._ledger.accept(raw)
            # Parsed after the ledger: resumption needs the text as engines write it.
            if accepted is not None:
                messages.extend(self._parse(accepted))
        return join_deltas(messages)

    async def _recover(self, error: FleetError) -> Sequence[bytes] | None:
        """Continue after the upstream was lost or cancelled.

        Returns:
            None: the stream was resumed. Otherwise the caller's last messages, made here because
            the caller already has all tokens.

        Raises:
            FleetError: the stream cannot be resumed.
        """
        assert self._upstream is not None
        self._upstream.cancel()
        if not self._interruption.requested and not isinstance(error, BalancerLostError):
            raise error
        if self._observation.complete:
            return ()
        closing = self._ledger.closing()
        if closing is not None:
            return list(self._parse(closing))
        await self._resume(error)
        return None

    async def _resume(self, lost: FleetError) -> None:
        """Open the stream again, from the last token that the caller has.

        Raises:
            FleetError: `lost` if no balancer accepts it; the shutdown's error if it was aborted.
        """
        assert self._upstream is not None
        if self._interruption.requested:
            raise self._shutdown_error() from None
        if self._upstream.tries >= MAX_TRIES:
            raise lost
        wire, exact = make_resume_request(self.admitted, self._ledger, self.engine_id)
        log.warning("resuming %s: %s", self.request_id, lost.message)
        try:
            async with self._interruption.waiting():
                self._upstream = await self._dependencies.balancers.open(
                    wire, self._metadata, self._deadline_s, tries=self._upstream.tries
                )
        except TimeoutError:
            raise self._shutdown_error() from None
        except FleetError as error:
            raise lost from error
        self._ledger.resume(exact=exact)
        if self._released:  # the caller disconnected meanwhile
            self._upstream.cancel()
            raise CancelledError("the client has disconnected")

    def abandon(self) -> None:
        """Release everything now, because the caller has disconnected."""
        self._release(asyncio.CancelledError())

    def abort(self) -> None:
        """End with a status at the next wait, because the gateway shuts down."""
        if not self._interruption.request() and self._upstream is not None:
            self._upstream.cancel()

    def _opening_error(self) -> FleetError:
        """The error of a request that was aborted, or was late, before its stream was open."""
        if self._interruption.requested:
            return self._shutdown_error()
        waited_s = max(round(self._timeout_s, 3), 0)
        return DeadlineExceededError(f"no answer within {waited_s:g} s")

    def _shutdown_error(self) -> FleetError:
        """UNAVAILABLE, which callers retry, only if the caller has nothing yet."""
        message, reason = "this gateway is shutting down", "DRAINING"
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
        admitted = await self._admit_audited()
        self._observation.set_model(admitted.model.name)
        self._metadata = (
            (rpc.REQUEST_ID_KEY, self.request_id),
            *telemetry.inject(self._observation.context),
        )
        try:
            self._admitted, self._upstream = await open_with_fallback(
                admitted, self._send, self._prepare
            )
        except InvalidArgumentError as error:
            raise admitted.plan.name_callers_field(error) from error

    async def _admit_audited(self) -> AdmittedRequest:
        """Admit the request and record the decision in the audit log."""
        caller, audit = self._caller, self._dependencies.audit
        about: dict[str, Any] = {}
        if audit.enabled:
            summary = request_summary(self._request)
            about = {"model": self._request.model[:128], "summary": summary}
        try:
            self._admitted = await self._admit()
        except BaseException as error:
            audit.record_refused(
                caller.method, caller.who, caller.peer, error, self.request_id, **about
            )
            raise
        audit.record_allowed(caller.method, caller.who, caller.peer, self.request_id, **about)
        return self._admitted

    async def _admit(self) -> AdmittedRequest:
        """Run every check that may refuse the request, the cheapest first."""
        if self._id_problem is not None:
            refuse(self._caller.request_id_field, self._id_problem)
        who, quotas = self._caller.who, self._dependencies.quotas
        tokens = estimate_tokens(self._request)
        check_fit(self._caller.body_need or Need(1, tokens), who, self._request)
        in_flight = self._dependencies.in_flight
        self._slot.enter_context(in_flight.hold_slot(who.tenant, self.request_id, self.abort))
        reservation = await quotas.admit(who, self.request_id, tokens, unique=self._id_chosen)
        if self._released:  # the caller disconnected meanwhile
            quotas.settle(reservation, 0)
            raise CancelledError("the client has disconnected")
        self._reservation = reservation
        return await self._prepare()

    async def _prepare(self, avoid: Collection[tuple[str, str]] = ()) -> AdmittedRequest:
        return await self._dependencies.admission.admit(
            self._request,
            tenant=self._caller.who.tenant,
            request_id=self.request_id,
            context=self._observation.context,
            avoid=avoid,
        )

    async def _send(self, admitted: AdmittedRequest) -> Upstream:
        balancers = self._dependencies.balancers
        return await balancers.open(admitted.wire, self._metadata, self._deadline_s)

    def _release(self, error: BaseException | None) -> None:
        if self._released:
            return
        self._released = True
        if self._upstream is not None:
            self._upstream.cancel()
        self._slot.close()
        if isinstance(error, GeneratorExit):
            error = asyncio.CancelledError()
        self._observation.end(error)
        self._record_usage()

    def _record_usage(self) -> None:
        """Charge the quotas and write the usage record; once per request."""
        model, revision = self._request.model[:128], ""
        if self._admitted is not None:
            # The admitted revision is the more common one where two run side by side.
            admitted = self._admitted.model
            model, revision = admitted.name, self.revision or admitted.revision
        record = record_of(
            self._observation.outcome,
            self._ledger,
            who=self._caller.who,
            face=self._caller.face,
            request_id=self.request_id,
            model=(model, revision),
        )
        if self._reservation is not None:
            self._dependencies.quotas.settle(self._reservation, record.tokens)
        for sink in self._dependencies.usage:
            sink.put(record)


def _unchanged(raw: bytes) -> list[bytes]:
    return [raw]


def new_request_id() -> str:
    """A new id for a request whose caller chose none."""
    return f"req-{uuid.uuid4().hex}"
