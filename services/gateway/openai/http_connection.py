"""One HTTP connection: uvicorn's protocol with bounds on heads and on silent clients.

uvicorn bounds neither the size of a head nor the time that it may take. A refusal is a whole JSON
answer, after which the connection closes.
"""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.common.rpc import MAX_RECEIVE_BYTES
from services.gateway.openai.http_bounds import MAX_HEADERS, HttpLoad


class HttpConnection(HttpToolsProtocol):
    """See uvicorn's own class.

    Args:
        load: shared by all connections of the server.
        args: of uvicorn's class.
    """

    def __init__(self, load: HttpLoad, **args: Any) -> None:
        super().__init__(**args)
        self._load = load
        self._bounds = load.bounds
        self._refused = False
        self._in_body = False
        self._begun = False
        """Whether the parser is inside a head."""
        self._head_begun = False
        """Whether `_head_timer` waits for the end of a head, and not for its first byte."""
        self._plain_bytes = 0
        """Received since the last part of a body, or since the last message."""
        self._body_bytes = 0
        """Of the incomplete body, as counted in `load`."""
        self._body_began_s = self._heard_s = 0.0
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first head."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self._bounds.idle_s, self._end_idle)
        self._load.hold_head(self, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what the connection holds."""
        self._end_head()
        self._end_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request, unless it exceeds a bound."""
        while data and not self._refused and not self.transport.is_closing():
            left = self._bounds.head_bytes - self._plain_bytes
            if left <= 0:
                self._refuse_long()
                return
            # In parts, so that no head escapes its bound; a part may hold many whole requests.
            self._receive(data[:left])
            data = data[left:]
        if self._refused or self.transport.is_closing():
            return
        self._check_head()
        if self._in_body:
            self._heard_s = self.loop.time()
            if self._body_timer is None:
                self._body_began_s = self._heard_s
                self._body_timer = self.loop.call_later(
                    self._bounds.body_silence_s, self._check_body
                )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the head, or a trailer."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS and not self._refused:
            self._refuse(431, f"more than {MAX_HEADERS} headers")

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End a head: a body follows, which may be empty."""
        if self._refused:
            return
        self._begun, self._in_body, self._plain_bytes = False, True, 0
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        if self._refused:
            return
        self._plain_bytes = 0
        # What is beyond is read and discarded (body.py).
        size = min(len(body), MAX_RECEIVE_BYTES - self._body_bytes)
        self._body_bytes += size
        self._load.hold_body(self, self._body_bytes)
        if not self._refused:  # else this was the oldest
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if self._refused:
            return
        self._in_body, self._plain_bytes = False, 0
        self._end_body()
        super().on_message_complete()

    def evict(self) -> None:
        """Refuse the open head or body, because there are too many; see HttpLoad."""
        self._refuse(503, "too many unfinished requests, try again")

    def _receive(self, data: bytes) -> None:
        self._plain_bytes += len(data)
        super().data_received(data)

    def _check_head(self) -> None:
        """Hold a head that is still open."""
        if self._in_body or not (self._begun or self._plain_bytes):
            return
        if not self._head_begun:
            self._end_head()  # the wait for its first byte
            self._head_begun = True
            self._head_timer = self.loop.call_later(self._bounds.head_s, self._end_slow_head)
        self._load.hold_head(self, self._plain_bytes)

    def _end_head(self) -> None:
        self._head_begun = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._load.end_head(self)

    def _end_body(self) -> None:
        self._load.end_body(self)
        self._body_bytes = 0
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _end_idle(self) -> None:
        self._end_head()
        self.transport.close()

    def _refuse_long(self) -> None:
        most = self._bounds.head_bytes
        beside = f"more than {most} bytes beside the body"
        self._refuse(431, beside if self._in_body else f"the head is longer than {most} bytes")

    def _end_slow_head(self) -> None:
        self._refuse(408, f"the head was not complete within {self._bounds.head_s:g} s")

    def _check_body(self) -> None:
        """Refuse a client that is silent, or slow, within its body."""
        self._body_timer = None
        if self._refused or not self._in_body:
            return
        now, bounds = self.loop.time(), self._bounds
        if self.flow.read_paused:  # the gateway lets the client wait
            self._body_began_s = self._heard_s = now
        left_s = min(
            self._heard_s + bounds.body_silence_s - now, self._body_began_s + bounds.body_s - now
        )
        if left_s > 0:
            self._body_timer = self.loop.call_later(left_s, self._check_body)
            return
        limits = f"{bounds.body_silence_s:g} s of silence, {bounds.body_s:g} s in all"
        self._refuse(408, f"the body took too long (at most {limits})")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless another answer is under way, and close the connection."""
        begun = self._begun or self._in_body or self._plain_bytes > 0
        self._refused = True
        self._end_head()
        self._end_body()
        self._load.on_refused(status)
        cycle = self.cycle
        if not begun:
            self.transport.close()
            return
        if self._in_body:
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False  # the request before this one is still being answered
            return
        self._write_error(status, message)
        self.loop.call_later(self._bounds.linger_s, self.transport.close)

    def _write_error(self, status: int, message: str) -> None:
        kind = "server_error" if status == 503 else "invalid_request_error"
        code = {408: "request_timeout", 431: "head_too_large", 503: "overloaded"}[status]
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        retry = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{retry}connection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
