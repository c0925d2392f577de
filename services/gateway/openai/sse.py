"""Writes the server-sent events of one answer."""

from typing import Any

import msgspec
from starlette.types import Send

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError
from services.gateway.openai.answer_format import AnswerFormat, usage_of
from services.gateway.openai.errors import body_of


class SseWriter:
    """One HTTP response: `start`, then `write_event` per message, then `finish` or `fail`."""

    def __init__(self, send: Send, form: AnswerFormat) -> None:
        self._send = send
        self._form = form
        self._usages: list[inference_pb2.Usage] = []

    async def start(self, headers: dict[str, str]) -> None:
        """Send status 200 and the headers."""
        headers = {
            **headers,
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def write_event(self, prompt: int, raw: bytes) -> None:
        """Write a serialised GenerateResponse of a prompt."""
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
            await self._write_data(msgspec.json.encode(chunk))

    async def fail(self, error: FleetError) -> None:
        """Write the error as an event and close without [DONE]."""
        await self._write_data(msgspec.json.encode(body_of(error)))
        await self._send({"type": "http.response.body", "body": b""})

    async def finish(self, include_usage: bool) -> None:
        """Write the usage if it was requested, then [DONE]."""
        if include_usage:
            await self._write_data(msgspec.json.encode(self._form.last(usage_of(self._usages))))
        await self._write_data(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def _write_data(self, data: bytes) -> None:
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
