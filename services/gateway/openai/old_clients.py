"""Streams for HTTP/1.0 clients, which cannot read chunks: the end of the connection ends them."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EndByClosing:
    """Wraps an ASGI application that runs in uvicorn.

    uvicorn sends an answer without Content-Length in chunks, whatever the client's version. It
    closes the connection after each answer to an HTTP/1.0 client already.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request; only answers to HTTP/1.0 clients are changed."""
        answer: Any = getattr(send, "__self__", None)  # uvicorn's state of this answer
        if scope["http_version"] != "1.0" or not hasattr(answer, "chunked_encoding"):
            await self._app(scope, receive, send)
            return
        unframed = False

        async def send_unframed(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = not any(
                    key.lower() == b"content-length" for key, _ in message["headers"]
                )
                if unframed:
                    answer.chunked_encoding = False
            elif unframed:
                answer.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)
