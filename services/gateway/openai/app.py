"""The routes of the HTTP face."""

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.common.errors import FleetError, InvalidArgumentError, NotFoundError
from services.gateway.callers.access import Access
from services.gateway.models.catalog import Catalog, ModelView
from services.gateway.openai.chat_format import ChatFormat
from services.gateway.openai.chat_request import parse_chat
from services.gateway.openai.completion_format import CompletionFormat
from services.gateway.openai.completion_request import parse_completion
from services.gateway.openai.cors import Cors
from services.gateway.openai.endpoint import (
    GenerationEndpoint,
    enter,
    error_response,
    json_response,
)
from services.gateway.openai.health import make_health_routes
from services.gateway.request.dependencies import Dependencies

# First parts of OpenAI's other paths: their error names the path and what is served instead.
UNSERVED = (
    "embeddings",
    "responses",
    "conversations",
    "moderations",
    "images",
    "videos",
    "audio",
    "realtime",
    "files",
    "uploads",
    "batches",
    "fine_tuning",
    "assistants",
    "threads",
    "vector_stores",
    "containers",
    "evals",
    "rerank",
    "score",
)
_ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def make_app(
    dependencies: Dependencies,
    access: Access,
    catalog: Catalog,
    *,
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """The ASGI application of one gateway.

    Args:
        cors_origins: whose pages may call it; see `Cors`.
    """
    chat = GenerationEndpoint(
        dependencies, access, prefix="chatcmpl", parse=parse_chat, make_format=ChatFormat
    )
    completions = GenerationEndpoint(
        dependencies, access, prefix="cmpl", parse=parse_completion, make_format=CompletionFormat
    )
    models = _Models(catalog, access)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models.listing, methods=["GET"]),
        Route("/v1/models/", models.listing, methods=["GET"]),
        Route("/v1/models/{name:path}", models.single, methods=["GET"]),
        *make_health_routes(dependencies.in_flight, catalog),
        *(
            Route(f"/v1/{name}{rest}", _unserved, methods=_ALL_METHODS)
            for name in UNSERVED
            for rest in ("", "/{rest:path}")
        ),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, FleetError: _fleet_error}
    return Cors(Starlette(routes=routes, exception_handlers=handlers), cors_origins)


class _Models:
    def __init__(self, catalog: Catalog, access: Access) -> None:
        self._catalog = catalog
        self._access = access

    async def listing(self, request: Request) -> Response:
        enter(request.scope, self._access)
        models = [_model(listed.view, listed.name) for listed in self._catalog.listed]
        return json_response(200, {"object": "list", "data": models})

    async def single(self, request: Request) -> Response:
        enter(request.scope, self._access)
        name = request.path_params["name"]
        return json_response(200, _model(self._catalog.find(name), name))


def _model(model: ModelView, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "inferfleet",
        "revision": model.revision,
        "max_model_len": model.max_model_len,
    }


async def _unserved(request: Request) -> Response:
    return error_response(
        NotFoundError(
            f"{request.url.path} is not supported; use /v1/chat/completions, /v1/completions or "
            "/v1/models",
            reason="UNSUPPORTED_ENDPOINT",
        )
    )


async def _fleet_error(request: Request, error: FleetError) -> Response:
    del request
    return error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(NotFoundError(f"{where}: no such path", reason="UNKNOWN_URL"))
    wrong = InvalidArgumentError(f"{where}: {error.detail}", reason="METHOD_NOT_ALLOWED")
    response = error_response(wrong, dict(error.headers or {}))
    response.status_code = error.status_code
    return response
