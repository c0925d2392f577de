import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.config import ConfigError
from services.common.metrics import MetricsServer


class Health:
    def __init__(self):
        self.well = True

    def __call__(self):
        return self.well


@pytest.fixture
def served():
    registry = CollectorRegistry()
    health = Health()
    server = MetricsServer(registry, health)
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
        MetricsServer(CollectorRegistry(), lambda: True).start("127.0.0.1", port)
