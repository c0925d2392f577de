"""Health answers over HTTP, and the paths of the model listing."""

import asyncio
import contextlib
import json

import httpx
import pytest
from starlette.applications import Starlette

from services.gateway.models.catalog import Catalog
from services.gateway.openai.health import make_health_routes
from services.gateway.request.in_flight import InFlight

READY = ("/healthz", "/health", "/readyz")


class Records:
    """The registry as a dictionary."""

    connected = True

    def __init__(self, **engines):
        self.engines = engines

    def snapshot(self):
        common = {"address": "127.0.0.1:1", "model": "tiny"}
        return {k: json.dumps({**common, **engine}).encode() for k, engine in self.engines.items()}

    async def wait_change(self, version):
        await asyncio.Event().wait()


async def answers(records: Records) -> dict[str, tuple[int, str]]:
    catalog = Catalog(records)
    catalog.refresh()
    app = Starlette(routes=make_health_routes(InFlight(), catalog))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        found = {path: await http.get(path) for path in (*READY, "/livez")}
    return {path: (response.status_code, response.text) for path, response in found.items()}


async def test_with_an_engine(http):
    for path in (*READY, "/livez"):
        response = await http.get(path)
        assert (response.status_code, response.text) == (200, "ok\n"), path


@pytest.mark.parametrize("engines", [{}, {"a": {"draining": True}}])
async def test_without_a_live_engine_it_is_not_ready_but_alive(engines):
    found = await answers(Records(**engines))
    assert found.pop("/livez") == (200, "ok\n")
    for path in READY:
        assert found[path][0] == 503
        assert "no engine lives" in found[path][1]


async def test_an_engine_that_left_is_missed_at_once():
    records = Records(a={}, b={"draining": True})
    catalog = Catalog(records)
    catalog.refresh()
    assert catalog.has_live_engine
    del records.engines["a"]
    catalog.refresh()
    assert not catalog.has_live_engine
    assert catalog.models, "the model is still known for a while"


async def test_listing_with_a_slash(http):
    listed = [(await http.get(path)).json() for path in ("/v1/models", "/v1/models/")]
    assert listed[0] == listed[1]
    assert [model["id"] for model in listed[1]["data"]] == ["tiny"]


async def test_draining_is_named(start_gateway, engine, scripts):
    engine.script = scripts["hold"]
    running = await start_gateway()
    async with httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        body = {"model": "tiny", "prompt": "x"}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await engine.wait_for(lambda: engine.running == 1)
        drain = asyncio.create_task(running.service.drain())
        while (await http.get("/healthz")).status_code == 200:  # noqa: ASYNC110 (its state)
            await asyncio.sleep(0.01)
        assert (await http.get("/healthz")).text == "draining\n"
        assert (await http.get("/livez")).status_code == 200
        for task in (call, drain):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
