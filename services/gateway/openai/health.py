"""Health over HTTP: whether the gateway runs, and whether it can answer a request now."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.gateway.models.catalog import Catalog
from services.gateway.request.in_flight import InFlight


def make_health_routes(in_flight: InFlight, catalog: Catalog) -> list[Route]:
    """/livez, and the readiness answer under /healthz, /health and /readyz. None needs a key."""

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        problem = _problem(in_flight, catalog)
        return PlainTextResponse(f"{problem or 'ok'}\n", status_code=503 if problem else 200)

    ready = [Route(path, readyz, methods=["GET"]) for path in ("/healthz", "/health", "/readyz")]
    return [Route("/livez", livez, methods=["GET"]), *ready]


def _problem(in_flight: InFlight, catalog: Catalog) -> str | None:
    """Why no request can be answered now; None if one can."""
    if in_flight.draining:
        return "draining"
    if not catalog.has_live_engine:
        return "no engine lives: no request can be answered"
    return None
