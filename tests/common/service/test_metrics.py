"""The HTTP port for operators."""

import logging
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.config.settings import ConfigError
from services.common.service.log_level import LogLevel
from services.common.service.metrics import MetricsServer


class Health:
    def __init__(self):
        self.well = True

    def __call__(self):
        return self.well


@pytest.fixture
def log_level():
    return LogLevel()


@pytest.fixture
def served(log_level):
    registry = CollectorRegistry()
    health = Health()
    server = MetricsServer(registry, health, log_level)
    address = server.start("127.0.0.1", 0)
    yield registry, health, address
    server.stop()
    server.stop()


def get(address, path):
    try:
        with urllib.request.urlopen(f"http://{address}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_of_one_registry(served):
    registry, _, address = served
    Counter("things", "Things", registry=registry).inc(3)
    status, text = get(address, "/metrics")
    assert status == 200
    assert "things_total 3.0" in text
    assert "python_info" not in text


def test_healthz_follows(served):
    _, health, address = served
    assert get(address, "/healthz") == (200, "ok\n")
    health.well = False
    assert get(address, "/healthz") == (503, "not serving\n")


def test_other_paths(served):
    assert get(served[2], "/")[0] == 404


def test_a_taken_port(served):
    port = int(served[2].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"):
        MetricsServer(CollectorRegistry(), lambda: True, LogLevel()).start("127.0.0.1", port)


@pytest.fixture
def level():
    """The root logger's, which comes back afterwards."""
    root = logging.getLogger()
    before = root.level
    root.setLevel("INFO")
    yield lambda: logging.getLevelName(root.level)
    root.setLevel(before)


def put(address, body, **headers):
    request = urllib.request.Request(
        f"http://{address}/log-level", data=body.encode(), method="PUT", headers=headers
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_log_level_is_read_and_set(served, level, log_level):
    levels = []
    unfollow = log_level.follow(levels.append)
    assert get(served[2], "/log-level") == (200, "info\n")
    assert put(served[2], "debug\n") == (200, "debug\n")
    assert get(served[2], "/log-level") == (200, "debug\n")
    assert level() == "DEBUG"
    unfollow()
    assert put(served[2], "ERROR")[0] == 200
    assert levels == ["debug"]


@pytest.mark.parametrize("body", ["", "loud", "debug " * 1000, "\x00"])
def test_a_wrong_level_changes_nothing(served, level, body):
    status, text = put(served[2], body)
    assert (status, level()) == (400, "INFO")
    assert text == "the body must be one of debug, info, warning, error\n"


def test_a_caller_that_changes_the_level_must_show_the_fleets_token(level):
    server = MetricsServer(CollectorRegistry(), lambda: True, LogLevel(), "the-token")
    address = server.start("127.0.0.1", 0)
    assert put(address, "debug")[0] == 403
    assert put(address, "debug", **{"inferfleet-fleet-token": "another"})[0] == 403
    assert level() == "INFO"
    assert put(address, "debug", **{"inferfleet-fleet-token": "the-token"})[0] == 200
    server.stop()


def test_a_client_that_sends_nothing_keeps_no_scrape_out(served, monkeypatch):
    monkeypatch.setattr("services.common.service.metrics._Quiet.timeout", 0.1)
    host, port = served[2].split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"PUT /log-level HTTP/1.0\r\ncontent-length: 5\r\n\r\n")
        assert get(served[2], "/healthz")[0] == 200
