"""A client of etcd for asyncio: keys, transactions, leases and watches.

It drives the generated stubs of the package `etcd3` over grpc.aio, and handles several endpoints,
TLS, deadlines and reconnection. Every call is bounded in time. A transaction that may have been
applied is not repeated.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from etcd3 import etcdrpc

from services.common.etcd.types import (
    Change,
    Changes,
    Compare,
    Delete,
    EtcdError,
    EtcdRefusedError,
    EtcdUnavailableError,
    KeyValue,
    LeaseNotFoundError,
    Listing,
    Lost,
    Put,
    Tls,
    parse_endpoint,
)
from services.common.etcd.wire import (
    changes_of,
    compare_of,
    end_of,
    key_value,
    listing_of,
    operation_of,
    prefix_request,
)
from services.common.rpc.fresh_channel import FreshChannel
from services.common.rpc.tls_files import TlsFiles
from services.common.tasks import cancel_requested

__all__ = [
    "Change",
    "Changes",
    "Compare",
    "Delete",
    "Etcd",
    "EtcdError",
    "EtcdRefusedError",
    "EtcdUnavailableError",
    "KeyValue",
    "LeaseNotFoundError",
    "Listing",
    "Lost",
    "Put",
    "Tls",
    "parse_endpoint",
]

DEFAULT_TIMEOUT_S = 2.0
WATCH_PROBE_S = 1.5
"""After this silence a watch requests a progress report; after as long again it is given up."""
_BACKOFF_S = (0.1, 2.0)
_OPTIONS: list[tuple[str, Any]] = [
    # Placement maps are large; etcd limits a request to 1.5 MiB and a listing not at all.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # etcd closes connections that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
    }
)


class Etcd:
    """A connection to a cluster; it sends nothing before the first call.

    Calls raise EtcdUnavailableError if no endpoint answers, and EtcdRefusedError if etcd refuses.

    Args:
        endpoints: host:port of one or more members; if one does not answer, the next is tried.
        tls: certificates for https:// endpoints; if given, also used for those without a scheme.
        user, password: for etcd's own authentication; empty for none.
        timeout_s: limit of one call over all endpoints.
        files: the files of `tls`; new connections use their newest content.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        user: str = "",
        password: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        files: TlsFiles | None = None,
    ) -> None:
        if not endpoints:
            raise ValueError("etcd needs at least one endpoint")
        self._endpoints = [parse_endpoint(endpoint) for endpoint in endpoints]
        self._tls = tls
        self._files = files
        self._user = user
        self._password = password
        self._timeout_s = timeout_s
        self._preferred = random.randrange(len(endpoints))
        self._members: dict[int, _Member] = {}
        self._closed = False

    async def close(self) -> None:
        """Abandon all running calls; idempotent, and quick even if etcd is unavailable."""
        self._closed = True
        members, self._members = list(self._members.values()), {}
        for member in members:
            await member.channel.close(None)

    async def get(self, key: str) -> KeyValue | None:
        """Read a key; None if it does not exist."""
        reply = await self._call("kv.Range", etcdrpc.RangeRequest(key=key.encode()))
        return key_value(reply.kvs[0]) if reply.kvs else None

    async def get_prefix(self, prefix: str) -> Listing:
        """Read all keys that start with `prefix`, at one revision."""
        return listing_of(await self._call("kv.Range", prefix_request(prefix)))

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write a key; returns the revision of the store.

        Args:
            lease: id of the lease that the key depends on; 0 for none.

        Raises:
            LeaseNotFoundError: the lease does not exist; nothing was written.
        """
        request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease)
        reply = await self._call("kv.Put", request)
        return int(reply.header.revision)

    async def delete(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        reply = await self._call("kv.DeleteRange", etcdrpc.DeleteRangeRequest(key=key.encode()))
        return bool(reply.deleted)

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease: int = 0
    ) -> int | None:
        """Write a key only if it was last changed at `mod_revision` (0: does not exist).

        Returns:
            The key's new revision; None if the key has changed since.

        Raises:
            EtcdUnavailableError: the write may have been applied; read the key before a retry.
        """
        return await self.transaction([Compare(key, "mod", mod_revision)], [Put(key, value, lease)])

    async def transaction(
        self, compares: Sequence[Compare], then: Sequence[Put | Delete]
    ) -> int | None:
        """Apply all of `then` at one revision if all of `compares` hold.

        Returns:
            The revision; None if a comparison failed and nothing was done.

        Raises:
            EtcdUnavailableError: the transaction may have been applied.
        """
        request = etcdrpc.TxnRequest(
            compare=[compare_of(compare) for compare in compares],
            success=[operation_of(operation) for operation in then],
        )
        reply = await self._call("kv.Txn", request, repeatable=False)
        return int(reply.header.revision) if reply.succeeded else None

    async def grant_lease(self, ttl_s: int) -> int:
        """Create a lease and return its id; it expires `ttl_s` seconds after the last renewal."""
        return int((await self._call("lease.LeaseGrant", etcdrpc.LeaseGrantRequest(TTL=ttl_s))).ID)

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease; returns its time to live in seconds.

        Raises:
            LeaseNotFoundError: the lease does not exist; grant another one.
        """
        reply = await self._call(
            "lease.LeaseKeepAlive", etcdrpc.LeaseKeepAliveRequest(ID=lease), streamed=True
        )
        if reply.TTL <= 0:
            raise LeaseNotFoundError("the lease has expired")
        return int(reply.TTL)

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys; no error if the lease does not exist."""
        try:
            await self._call("lease.LeaseRevoke", etcdrpc.LeaseRevokeRequest(ID=lease))
        except LeaseNotFoundError:
            return

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[Listing | Changes | Lost, None]:
        """List all keys below `prefix`, then follow their changes until the caller closes it.

        It yields a Listing as soon as etcd answers, then Changes. If the watch breaks (a dead or
        paused etcd, a compaction, a store restored to an older state), it yields one Lost and a new
        Listing when etcd answers again. A reader that applies both keeps no deleted key.
        """
        delay_s, reported = _BACKOFF_S[0], False
        while not self._closed:
            try:
                async with aclosing(self._watch_once(prefix)) as items:
                    async for item in items:
                        delay_s, reported = _BACKOFF_S[0], False
                        yield item
            except EtcdError as error:
                if not reported:
                    reported = True
                    yield Lost(str(error))
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, _BACKOFF_S[1])

    async def _watch_once(self, prefix: str) -> AsyncGenerator[Listing | Changes, None]:
        listing = await self.get_prefix(prefix)
        yield listing
        member = await self._member(self._preferred, self._timeout_s)
        call = member.watch.Watch(metadata=member.metadata)
        reading: asyncio.Future[Any] | None = None
        try:
            create = etcdrpc.WatchCreateRequest(
                key=prefix.encode(),
                range_end=end_of(prefix),
                start_revision=listing.revision + 1,
                progress_notify=True,
            )
            await _write_request(call, etcdrpc.WatchRequest(create_request=create))
            while True:
                reading = asyncio.ensure_future(call.read())
                changes = changes_of(await _read_answer(call, reading), listing.revision)
                if changes.changes:
                    yield changes
        except grpc.RpcError as error:
            if _token_is_void(error):
                member.metadata = None
            self._rotate()
            raise EtcdUnavailableError(f"the watch broke: {_text(error)}") from error
        except EtcdUnavailableError:
            self._rotate()
            raise
        finally:
            call.cancel()
            if reading is not None:
                await asyncio.wait({reading})
                _ = reading.cancelled() or reading.exception()

    def _drop_token(self, index: int) -> None:
        """Forget the token of an endpoint; the next call authenticates again."""
        if index in self._members:
            self._members[index].metadata = None

    def _rotate(self) -> None:
        self._preferred = (self._preferred + 1) % len(self._endpoints)

    async def _call(
        self, method: str, request: Any, *, repeatable: bool = True, streamed: bool = False
    ) -> Any:
        """Try the endpoints in turn until one answers."""
        attempt_s = max(self._timeout_s / len(self._endpoints), 0.25)
        reason = "the connection is closed"
        for _ in range(len(self._endpoints) + bool(self._user)):
            if self._closed:
                break
            index = self._preferred
            try:
                member = await self._member(index, attempt_s)
                return await member.call(method, request, attempt_s, streamed)
            except grpc.RpcError as error:
                reason = _text(error)
                if self._user and _token_is_void(error):
                    self._drop_token(index)
                    continue
                if error.code() not in _AWAY:
                    raise _refusal(error) from error
            if index == self._preferred:
                self._rotate()
            if not repeatable and "failed to connect" not in reason.lower():
                break
        raise EtcdUnavailableError(f"etcd does not answer: {reason}")

    async def _member(self, index: int, timeout_s: float) -> "_Member":
        member = self._members.get(index)
        if member is None:
            target, wants_tls = self._endpoints[index]
            tls = self._tls or (Tls() if wants_tls else None)
            member = self._members[index] = _Member(target, tls, self._files)
        if member.metadata is None:
            member.metadata = ()
            if self._user:
                credentials = etcdrpc.AuthenticateRequest(name=self._user, password=self._password)
                member.metadata = None
                reply = await member.call("auth.Authenticate", credentials, timeout_s, False)
                member.metadata = (("token", reply.token),)
        return member


class _Member:
    """The channel and the stubs of one endpoint."""

    def __init__(self, target: str, tls: Tls | None, files: TlsFiles | None) -> None:
        self.channel: grpc.aio.Channel
        if tls is None:
            self.channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        elif files is not None:
            self.channel = FreshChannel(target, files, _OPTIONS)
        else:
            pair = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            self.channel = grpc.aio.secure_channel(target, pair, options=_OPTIONS)
        self.kv = etcdrpc.KVStub(self.channel)
        self.lease = etcdrpc.LeaseStub(self.channel)
        self.auth = etcdrpc.AuthStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)
        self.metadata: tuple[tuple[str, str], ...] | None = None

    async def call(self, method: str, request: Any, timeout_s: float, streamed: bool) -> Any:
        stub, _, name = method.partition(".")
        rpc = getattr(getattr(self, stub), name)
        sent = iter((request,)) if streamed else request
        call = rpc(sent, timeout=timeout_s, metadata=self.metadata)
        try:
            reply = await (call.read() if streamed else call)
        except asyncio.CancelledError:
            if cancel_requested():  # else grpc.aio raised it for a closed channel
                raise
            raise EtcdUnavailableError("the connection was closed") from None
        finally:
            call.cancel()
        if reply is grpc.aio.EOF:
            raise EtcdUnavailableError("etcd ended the stream without an answer")
        return reply


async def _write_request(call: Any, request: Any) -> None:
    try:
        async with asyncio.timeout(WATCH_PROBE_S):
            await call.write(request)
    except (TimeoutError, asyncio.InvalidStateError) as error:
        raise EtcdUnavailableError("etcd does not accept requests of the watch") from error


async def _read_answer(call: Any, reading: "asyncio.Future[Any]") -> Any:
    """The watch's next message; a silent etcd gets one progress request, then is given up."""
    for _ in range(2):
        await asyncio.wait({reading}, timeout=WATCH_PROBE_S)
        if reading.cancelled():
            raise EtcdUnavailableError("the connection was closed")
        if reading.done():
            reply = reading.result()
            if reply is grpc.aio.EOF:
                raise EtcdUnavailableError("etcd ended the watch")
            return reply
        progress = etcdrpc.WatchRequest(progress_request=etcdrpc.WatchProgressRequest())
        await _write_request(call, progress)
    raise EtcdUnavailableError("the watch is silent")


def _refusal(error: grpc.RpcError) -> EtcdRefusedError:
    text = _text(error)
    return LeaseNotFoundError(text) if "lease not found" in text else EtcdRefusedError(text)


def _token_is_void(error: grpc.RpcError) -> bool:
    """Whether etcd refused the token, so that another one may be accepted.

    A JWT token becomes void with every change of users or roles: etcd then answers
    INVALID_ARGUMENT, "revision in header is old".
    """
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return True
    return "auth: revision in header is old" in _text(error)


def _text(error: grpc.RpcError) -> str:
    return str(error.details() or error.code().name)
