"""One generation over HTTP: JSON body in, JSON or server-sent events out.

Nothing is sent before the first message has arrived, so that earlier failures have their own HTTP
status. A later failure is an event of the stream, which then closes without [DONE].
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

from services.common.errors import FleetError, InternalError
from services.common.service import telemetry
from services.gateway.callers.access import Access
from services.gateway.openai.answer_format import AnswerFormat, Header, usage_of
from services.gateway.openai.body import SentBody, decode, read_body, wait_disconnect
from services.gateway.openai.errors import body_of, headers_of, status_of
from services.gateway.openai.parsed_body import ParsedBody
from services.gateway.openai.sse import SseWriter
from services.gateway.openai.stream_group import StreamGroup
from services.gateway.request.caller import Caller
from services.gateway.request.dependencies import Dependencies
from services.gateway.request.gateway_stream import new_request_id

log = logging.getLogger(__name__)

MakeFormat = Callable[[ParsedBody, Header, frozenset[int]], AnswerFormat]


class GenerationEndpoint:
    """The ASGI application of one path.

    Args:
        prefix: of the answer's id.
        parse: parses the JSON body.
        make_format: makes the format of the answer; its last argument are the hidden token ids.
    """

    def __init__(
        self,
        dependencies: Dependencies,
        access: Access,
        *,
        prefix: str,
        parse: Callable[[Any], ParsedBody],
        make_format: MakeFormat,
    ) -> None:
        self._dependencies = dependencies
        self._access = access
        self._prefix = prefix
        self._parse = parse
        self._make_format = make_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sent = await read_body(scope, receive)
        except FleetError as error:
            await error_response(error)(scope, receive, send)
            return
        work = asyncio.ensure_future(self._answer(sent, scope, receive, send))
        disconnect = asyncio.ensure_future(wait_disconnect(receive))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, disconnect):
                task.cancel()
            await asyncio.wait({work, disconnect})
        if not work.cancelled():
            work.result()

    async def _answer(self, sent: SentBody, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[str, str] = {}
        body: Any = None
        try:
            caller = caller_of(scope, self._access)
            body = await decode(sent)
            parsed = self._parse(body)
            group = StreamGroup(
                self._dependencies,
                parsed.requests,
                replace(caller, streams=parsed.stream),
                caller.request_id or new_request_id(),
            )
            headers.update({"x-request-id": group.request_id, "x-trace-id": group.trace_id})
            async with aclosing(group.events()) as events:
                if parsed.stream:
                    await self._stream(parsed, group, events, send, headers)
                    return
                response = await self._respond(parsed, group, events, headers)
        except FleetError as error:
            structured = isinstance(body, dict) and body.get("structured_outputs") is not None
            response = error_response(error, headers, structured)
        except Exception as error:
            log.exception("unhandled error")
            internal = InternalError(f"internal error: {type(error).__name__}")
            response = error_response(internal, headers)
        await response(scope, receive, send)

    def _format(self, parsed: ParsedBody, group: StreamGroup) -> AnswerFormat:
        model = group.model
        header = Header(
            id=f"{self._prefix}-{group.request_id}",
            created=int(time.time()),
            model=parsed.model,
            fingerprint=group.revision or None,
        )
        stop = parsed.requests[0].stop
        ends = frozenset() if stop.ignore_eos else model.eos_token_ids
        return self._make_format(parsed, header, ends | frozenset(stop.stop_token_ids))

    async def _respond(
        self,
        parsed: ParsedBody,
        group: StreamGroup,
        events: AsyncGenerator[tuple[int, bytes], None],
        headers: dict[str, str],
    ) -> Response:
        answers = await group.collect(events)
        headers.update({"x-engine-id": group.engine_id, **group.rate_headers})
        usage = usage_of(answer.summary.usage for answer in answers)
        whole = self._format(parsed, group).whole(answers, usage)
        return json_response(200, whole, headers)

    async def _stream(
        self,
        parsed: ParsedBody,
        group: StreamGroup,
        events: AsyncGenerator[tuple[int, bytes], None],
        send: Send,
        headers: dict[str, str],
    ) -> None:
        first = await anext(events)
        writer = SseWriter(send, self._format(parsed, group))
        await writer.start({**headers, "x-engine-id": group.engine_id, **group.rate_headers})
        try:
            await writer.write_event(*first)
            async for prompt, raw in events:
                await writer.write_event(prompt, raw)
        except FleetError as error:
            await writer.fail(error)
        except Exception as error:
            log.exception("unhandled error in a stream")
            await writer.fail(InternalError(f"internal error: {type(error).__name__}"))
        else:
            await writer.finish(parsed.include_usage)


def caller_of(scope: Scope, access: Access) -> Caller:
    """Identify the caller of an HTTP request.

    Raises:
        UnauthenticatedError: a key is required, and it is missing or not valid.
    """
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    method = f"{scope['method']} {scope['path'][:128]}"
    peer = ":".join(map(str, scope.get("client") or ()))
    request_id = headers.get("x-request-id") or None
    return Caller(
        face="http",
        who=access.identify(headers.get("authorization"), face="http", method=method, peer=peer),
        peer=peer,
        method=method,
        request_id=request_id,
        id_chosen=request_id is not None,
        request_id_field="X-Request-Id",
        parent=telemetry.extract(headers.items()),
    )


def enter(scope: Scope, access: Access) -> None:
    """Authenticate the caller of a path that generates nothing.

    Raises:
        UnauthenticatedError: as `caller_of`.
    """
    caller = caller_of(scope, access)
    access.record_entry(caller.who, method=caller.method, peer=caller.peer)


def json_response(status: int, content: Any, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer; `content` must not hold NaN or Infinity."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_response(
    error: FleetError, headers: dict[str, str] | None = None, structured: bool = False
) -> Response:
    """An error as a whole HTTP answer; `structured`: the body has `structured_outputs`."""
    content = body_of(error, structured)
    return json_response(status_of(error), content, {**(headers or {}), **headers_of(error)})
