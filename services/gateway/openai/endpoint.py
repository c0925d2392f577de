"""One generation over HTTP: body in, JSON or server-sent events out.

Nothing is sent before the first message is here, so that whatever fails until then has its proper
status; what fails later is an event of the stream, which then closes without its [DONE].
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError, InternalError
from services.common.service import telemetry
from services.gateway.callers.access import Access
from services.gateway.openai.answer import Format, Header, usage_of
from services.gateway.openai.body import read_json, until_gone
from services.gateway.openai.errors import body_of, headers_of, status_of
from services.gateway.openai.group import Group
from services.gateway.openai.plan import Plan
from services.gateway.request.exchange import Caller, Rooms, new_request_id

log = logging.getLogger(__name__)

MakeFormat = Callable[[Plan, Header, frozenset[int]], Format]


class GenerationEndpoint:
    """An ASGI application for one path.

    Args:
        prefix: of the answer's id.
        read: understands the body.
        make_format: writes the answer.
    """

    def __init__(
        self,
        rooms: Rooms,
        access: Access,
        *,
        prefix: str,
        read: Callable[[Any], Plan],
        make_format: MakeFormat,
    ) -> None:
        self._rooms = rooms
        self._access = access
        self._prefix = prefix
        self._read = read
        self._make_format = make_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_json(scope, receive)
        except FleetError as error:
            await error_response(error)(scope, receive, send)
            return
        work = asyncio.ensure_future(self._answer(body, scope, receive, send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _answer(self, body: Any, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[str, str] = {}
        try:
            caller = caller_of(scope, self._access)
            plan = self._read(body)
            group = Group(self._rooms, plan.requests, replace(caller, streams=plan.stream))
            headers.update({"x-request-id": group.request_id, "x-trace-id": group.trace_id})
            async with aclosing(group.events()) as events:
                if plan.stream:
                    await self._stream(plan, group, events, send, headers)
                    return
                response = await self._whole(plan, group, events, headers)
        except FleetError as error:
            response = error_response(error, headers)
        except Exception as error:
            log.exception("unhandled error")
            internal = InternalError(f"internal error: {type(error).__name__}")
            response = error_response(internal, headers)
        await response(scope, receive, send)

    def _format(self, plan: Plan, group: Group) -> Format:
        model = group.model
        header = Header(
            id=f"{self._prefix}-{group.request_id}",
            created=int(time.time()),
            model=plan.model,
            fingerprint=group.revision or None,
        )
        stop = plan.requests[0].stop
        ends = frozenset() if stop.ignore_eos else model.eos_token_ids
        return self._make_format(plan, header, ends | frozenset(stop.stop_token_ids))

    async def _whole(
        self,
        plan: Plan,
        group: Group,
        events: AsyncGenerator[tuple[int, bytes], None],
        headers: dict[str, str],
    ) -> Response:
        answers = await group.collected(events)
        headers.update({"x-engine-id": group.engine_id, **group.rate_headers})
        usage = usage_of(answer.summary.usage for answer in answers)
        whole = self._format(plan, group).whole(answers, usage)
        return json_response(200, whole, headers)

    async def _stream(
        self,
        plan: Plan,
        group: Group,
        events: AsyncGenerator[tuple[int, bytes], None],
        send: Send,
        headers: dict[str, str],
    ) -> None:
        first = await anext(events)
        writer = _SseWriter(send, self._format(plan, group))
        await writer.start({**headers, "x-engine-id": group.engine_id, **group.rate_headers})
        try:
            await writer.event(*first)
            async for prompt, raw in events:
                await writer.event(prompt, raw)
        except FleetError as error:
            await writer.fail(error)
        except Exception as error:
            log.exception("unhandled error in a stream")
            await writer.fail(InternalError(f"internal error: {type(error).__name__}"))
        else:
            await writer.done(plan.include_usage)


class _SseWriter:
    """Writes events of one stream."""

    def __init__(self, send: Send, form: Format) -> None:
        self._send = send
        self._form = form
        self._usages: list[inference_pb2.Usage] = []

    async def start(self, headers: dict[str, str]) -> None:
        headers = {
            **headers,
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def event(self, prompt: int, raw: bytes) -> None:
        message = inference_pb2.GenerateResponse.FromString(raw)
        event = message.WhichOneof("event")
        chunk: dict[str, Any] | None = None
        if event == "delta":
            chunk = self._form.delta(prompt, message.delta)
        elif event == "started":
            chunk = self._form.started(prompt, message.started)
        elif event == "finished":
            chunk = self._form.finished(prompt, message.finished)
        elif event == "summary":
            self._usages.append(message.summary.usage)
        if chunk is not None:
            await self._data(msgspec.json.encode(chunk))

    async def fail(self, error: FleetError) -> None:
        await self._data(msgspec.json.encode(body_of(error)))
        await self._send({"type": "http.response.body", "body": b""})

    async def done(self, include_usage: bool) -> None:
        if include_usage:
            await self._data(msgspec.json.encode(self._form.last(usage_of(self._usages))))
        await self._data(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def _data(self, data: bytes) -> None:
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def caller_of(scope: Scope, access: Access) -> Caller:
    """Who asks.

    Raises:
        UnauthenticatedError: a key is needed and there is none, or nobody's.
    """
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    method = f"{scope['method']} {scope['path'][:128]}"
    peer = ":".join(map(str, scope.get("client") or ()))
    chosen = headers.get("x-request-id", "")
    shown = headers.get("authorization")
    return Caller(
        face="http",
        who=access.identify(shown, method=method, peer=peer),
        peer=peer,
        method=method,
        request_id=chosen or new_request_id(),
        id_chosen=bool(chosen),
        request_id_field="X-Request-Id",
        parent=telemetry.extract(headers.items()),
    )


def enter(scope: Scope, access: Access) -> None:
    """Let a caller in to what needs no request.

    Raises:
        UnauthenticatedError: as above.
    """
    caller = caller_of(scope, access)
    access.entered(caller.who, method=caller.method, peer=caller.peer)


def json_response(status: int, content: Any, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer; never holds NaN or Infinity."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_response(error: FleetError, headers: dict[str, str] | None = None) -> Response:
    """An error as an answer of its own."""
    return json_response(status_of(error), body_of(error), {**(headers or {}), **headers_of(error)})
