"""Proofs that members of a fleet know its token: HMACs, so that the token is never sent.

A member asks its peer for a proof first (`Peer`), and shows its own with each call. That one is
made of the peer's `life`: it is worth nothing at any other process. See docs/adr/0014.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from inferfleet_proto.internal.v1 import members_pb2, members_pb2_grpc
from services.common import errors
from services.common.rpc.metadata import PROOF_KEY

if TYPE_CHECKING:
    from services.common.rpc.membership import Membership

log = logging.getLogger(__name__)

SERVICE_NAME = "inferfleet.internal.v1.Members"
BYTES = 32
"""Length of challenges and lives."""
TIMEOUT_S = 5.0

Metadata = tuple[tuple[str, str], ...]


class UnprovenPeerError(grpc.aio.AioRpcError):
    """The peer did not prove that it belongs to the fleet, so nothing was sent to it."""

    def __init__(self, address: str, problem: str) -> None:
        nothing = grpc.aio.Metadata()
        details = f"{address} did not prove that it belongs to this fleet: {problem}"
        super().__init__(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=details)


def deadline_error() -> grpc.aio.AioRpcError:
    """What a call that ran out of time raises, for what waits before the call."""
    nothing = grpc.aio.Metadata()
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.aio.AioRpcError(code, nothing, nothing, details="Deadline Exceeded")


def server_proof(token: str, challenge: bytes, life: bytes, address: str) -> bytes:
    """What a server answers to a challenge."""
    signed = b"inferfleet server 1" + challenge + life + address.encode()
    return hmac.digest(token.encode(), signed, "sha256")


def member_proof(token: str, life: bytes) -> str:
    """What a member shows to the server of this life."""
    return hmac.digest(token.encode(), b"inferfleet member 1" + life, "sha256").hex()


class MembersServicer(members_pb2_grpc.MembersServicer):
    """Answers challenges of one server.

    Args:
        address: returns the host:port under which the server is registered; "" for none.
    """

    def __init__(self, token: str, address: Callable[[], str]) -> None:
        self._token = token
        self._address = address
        self.life = secrets.token_bytes(BYTES)

    async def Prove(
        self, request: members_pb2.ProveRequest, context: Any
    ) -> members_pb2.ProveResponse:
        """Prove to the caller that this server knows the token."""
        if len(request.challenge) != BYTES:
            raise errors.InvalidArgumentError.for_field(
                "challenge", f"must have {BYTES} bytes, got {len(request.challenge)}"
            )
        address = self._address()
        return members_pb2.ProveResponse(
            life=self.life,
            address=address,
            proof=server_proof(self._token, request.challenge, self.life, address),
        )


class Peer:
    """What a member may show to one peer: nothing before the peer has proven itself.

    Args:
        channel: to the peer.
        address: host:port that the channel connects to.
        registered: whether the address comes from the registry. Then the peer must prove that it
            is the one that registers under it: whoever writes the registry could name an address
            where each challenge is passed on to a true member.
    """

    def __init__(
        self, membership: "Membership", channel: grpc.aio.Channel, address: str, *, registered: bool
    ) -> None:
        self._membership = membership
        self._channel = channel
        self._address = address
        self._registered = registered
        self._lock = asyncio.Lock()
        self._shown = membership.shown_unasked

    @property
    def shown(self) -> Metadata | None:
        """Metadata for the next call; None: the peer has not proven itself yet."""
        return self._shown

    def forget(self) -> None:
        """Demand a new proof before the next call: another process may answer there now."""
        self._shown = self._membership.shown_unasked

    async def metadata(self, timeout_s: float = TIMEOUT_S) -> Metadata:
        """Metadata for the next call; asks the peer for a proof if there is none.

        Args:
            timeout_s: how long this caller waits, also for a proof that another one asked for.

        Raises:
            grpc.aio.AioRpcError: the peer did not answer, or is an UnprovenPeerError.
        """
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                if self._shown is None:
                    self._shown = await self._prove(timeout_s)
                return self._shown
        except TimeoutError:
            raise deadline_error() from None

    async def _prove(self, timeout_s: float) -> Metadata:
        token = self._membership.token
        assert token is not None, "without a token nothing needs a proof"
        challenge = secrets.token_bytes(BYTES)
        stub: Any = members_pb2_grpc.MembersStub(self._channel)
        try:
            answer = await stub.Prove(
                members_pb2.ProveRequest(challenge=challenge), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return self._show_unproven()
        expected = server_proof(token, challenge, answer.life, answer.address)
        if len(answer.life) != BYTES or not hmac.compare_digest(expected, answer.proof):
            raise UnprovenPeerError(self._address, "its proof is not made with this fleet's token")
        if self._registered and answer.address != self._address:
            raise UnprovenPeerError(
                self._address, f"the proof is of the member at {answer.address[:128] or 'nowhere'}"
            )
        return ((PROOF_KEY, member_proof(token, answer.life)),)

    def _show_unproven(self) -> Metadata:
        """For a peer that knows no proofs: the token, if the configuration allows that."""
        if self._membership.trust_unproven:
            log.warning("%s knows no proofs: it gets the fleet token", self._address)
            return self._membership.metadata
        raise UnprovenPeerError(
            self._address,
            "it knows no proofs; it has no fleet_token_file, or is of 0.2.0 or before: set "
            "trust_unproven while such members are upgraded",
        )
