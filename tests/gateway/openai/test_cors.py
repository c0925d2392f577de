"""Requests of web pages: refused with a clear answer, or allowed by `cors_origins`."""

import contextlib

import httpx
import pytest

from services.common.config.settings import ConfigError, load
from services.gateway.config import GatewayConfig

MODEL = "tiny"
PAGE = "https://chat.example.com"
PATH = "/v1/chat/completions"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def opened(start_gateway):
    @contextlib.asynccontextmanager
    async def opened(**keys):
        running = await start_gateway(**keys)
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as http:
            yield http

    return opened


class TestOff:
    async def test_a_preflight_is_answered_clearly(self, http):
        response = await http.options(PATH, headers=ASKS)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "cors_off")
        assert "cors_origins" in error["message"]
        assert "access-control-allow-origin" not in response.headers

    async def test_other_options_are_not_a_preflight(self, http):
        response = await http.options(PATH)
        assert response.status_code == 405

    async def test_answers_have_no_header_of_cors(self, http):
        response = await http.post(PATH, json=BODY, headers={"Origin": PAGE})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]


class TestOn:
    async def test_a_preflight_of_an_allowed_page(self, opened):
        async with opened(cors_origins=("http://other", PAGE)) as http:
            response = await http.options(PATH, headers=ASKS)
        assert response.status_code == 204
        headers = response.headers
        assert headers["access-control-allow-origin"] == PAGE
        assert "POST" in headers["access-control-allow-methods"]
        asked = ASKS["Access-Control-Request-Headers"]
        assert headers["access-control-allow-headers"] == asked
        assert int(headers["access-control-max-age"]) > 0
        assert "access-control-allow-credentials" not in headers
        assert "Origin" in headers["vary"]

    async def test_a_preflight_of_another_page_names_it(self, opened):
        async with opened(cors_origins=(PAGE,)) as http:
            response = await http.options(PATH, headers={**ASKS, "Origin": "https://evil.example"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "origin_not_allowed")
        assert "https://evil.example" in error["message"]
        assert "access-control-allow-origin" not in response.headers

    @pytest.mark.parametrize("stream", [False, True])
    async def test_answers_can_be_read_by_an_allowed_page_only(self, opened, stream):
        async with opened(cors_origins=(PAGE,)) as http:
            body = {**BODY, "stream": stream}
            response = await http.post(PATH, json=body, headers={"Origin": PAGE})
            other = await http.post(PATH, json=body, headers={"Origin": "https://evil.example"})
            plain = await http.post(PATH, json=body)
        assert response.status_code == other.status_code == plain.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-origin" not in plain.headers
        assert (
            response.headers["vary"] == other.headers["vary"] == plain.headers["vary"] == "Origin"
        )

    async def test_errors_can_be_read_too(self, opened):
        async with opened(cors_origins=(PAGE,)) as http:
            for path, status in ((PATH, 400), ("/v1/nothing", 404)):
                response = await http.post(path, json={}, headers={"Origin": PAGE})
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == PAGE

    async def test_a_star_allows_every_page(self, opened):
        async with opened(cors_origins=("*",)) as http:
            preflight = await http.options(PATH, headers=ASKS)
            response = await http.post(PATH, json=BODY, headers={"Origin": "null"})
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert response.headers["access-control-allow-origin"] == "*"

    async def test_a_header_that_is_no_name_is_not_repeated(self, opened):
        async with opened(cors_origins=("*",)) as http:
            asks = {**ASKS, "Access-Control-Request-Headers": "authorization, <script>"}
            response = await http.options(PATH, headers=asks)
        assert response.status_code == 403
        assert response.json()["error"]["param"] == "Access-Control-Request-Headers"


@pytest.mark.parametrize(
    "origin", ["chat.example.com", f"{PAGE}/", f"{PAGE}/a", "null", "https://"]
)
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match=r"cors_origins"):
        load(GatewayConfig, ["--cors-origins", origin], prog="x", description="", environ={})


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("https://Chat.Example.com", "https://chat.example.com"),
        ("https://a.com:443", "https://a.com"),
        ("http://A.com:80", "http://a.com"),
        ("https://bücher.example", "xn--"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_with_the_right_one(origin, sent):
    with pytest.raises(ConfigError, match=r"cors_origins.*never matches.*" + sent):
        load(GatewayConfig, ["--cors-origins", origin], prog="x", description="", environ={})


@pytest.mark.parametrize("origin", ["http://a.com:443", "https://a.com:80", "https://a.com:4443"])
def test_a_port_of_another_scheme_is_written_out(origin):
    loaded = load(GatewayConfig, ["--cors-origins", origin], prog="x", description="", environ={})
    assert loaded.config.cors_origins == (origin,)
