"""Which web pages may call the HTTP face (CORS).

A browser sends `Origin`, and before most requests a preflight: OPTIONS with
Access-Control-Request-Method. Without `cors_origins` a preflight is refused, and answers have no
Access-Control header. Cookies are never used, so credentials are never allowed; an API key in
`Authorization` needs none.
"""

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import FleetError, InvalidArgumentError
from services.gateway.openai.endpoint import error_response
from services.gateway.openai.errors import CrossOriginError

METHODS = "GET, POST, OPTIONS"
MAX_AGE_S = 600
EXPOSED = (
    "x-request-id, x-trace-id, x-engine-id, retry-after, x-should-retry, "
    "x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_VARY = (b"vary", b"Origin")


class Cors:
    """Wraps an ASGI application.

    Args:
        origins: that may call it, as scheme://host[:port]; "*" for all, empty for none.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in origins
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer preflights; add the headers to other answers."""
        if scope["method"] == "OPTIONS":
            headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
            if "origin" in headers and "access-control-request-method" in headers:
                await self._preflight(headers)(scope, receive, send)
                return
        if not self._origins:
            await self._app(scope, receive, send)
            return
        added = self._headers(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = dict(scope["headers"]).get(b"origin")
        allowed = self._allowed(origin.decode("latin-1")) if origin is not None else None
        added = [] if self._any else [_VARY]
        if allowed is not None:
            added.append((b"access-control-allow-origin", allowed.encode("latin-1")))
            added.append((b"access-control-expose-headers", EXPOSED.encode()))
        return added

    def _allowed(self, origin: str) -> str | None:
        """The value of Access-Control-Allow-Origin; None if the page may not call."""
        if self._any:
            return "*"
        return origin if origin in self._origins else None

    def _preflight(self, headers: dict[str, str]) -> Response:
        allowed = self._allowed(headers["origin"])
        asked = headers.get("access-control-request-headers", "").strip()
        if allowed is None:
            return error_response(self._refusal(headers["origin"]), self._vary)
        if asked and not _HEADER_NAMES.fullmatch(asked):
            return error_response(_bad_names(asked), self._vary)
        answer = {
            **self._vary,
            "access-control-allow-origin": allowed,
            "access-control-allow-methods": METHODS,
            "access-control-max-age": str(MAX_AGE_S),
        }
        if asked:  # every header may be sent: unknown ones are not read
            answer["access-control-allow-headers"] = asked
        return Response(status_code=204, headers=answer)

    @property
    def _vary(self) -> dict[str, str]:
        if self._any:
            return {}
        return {"vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"}

    def _refusal(self, origin: str) -> FleetError:
        if not self._origins:
            return CrossOriginError(
                f"pages of other origins may not call this server: {origin[:128]} asked; the "
                "gateway's option cors_origins allows them",
                reason="CORS_OFF",
            )
        return CrossOriginError(
            f"{origin[:128]} is not one of the gateway's cors_origins", reason="ORIGIN_NOT_ALLOWED"
        )


def _bad_names(asked: str) -> FleetError:
    error = InvalidArgumentError.for_field(
        "Access-Control-Request-Headers", f"{asked[:128]!r} is not a list of header names"
    )
    return CrossOriginError(error.message, reason="INVALID_ARGUMENT", violations=error.violations)
