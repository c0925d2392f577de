import pytest

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError, resolve


def test_defaults_listen_locally_and_ask_for_nothing():
    config = resolve(ServiceConfig, {}, {}).config
    assert config == ServiceConfig()
    assert (config.host, config.port, config.metrics_port) == ("127.0.0.1", 0, 0)
    assert not config.fleet_token_file


def test_flag_over_environment_over_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('host = "0.0.0.0"\nport = 1\nmetrics_port = 1\n')
    environ = {"INFERFLEET_PORT": "2", "INFERFLEET_METRICS_PORT": "2"}
    loaded = resolve(ServiceConfig, {"config": str(file), "port": "3"}, environ)
    config = loaded.config
    assert (config.host, config.metrics_port, config.port) == ("0.0.0.0", 2, 3)
    assert loaded.sources["port"] == "flag --port"
    assert loaded.sources["metrics_port"] == "environment INFERFLEET_METRICS_PORT"


@pytest.mark.parametrize(
    ("key", "value"),
    [("port", "65536"), ("port", "x"), ("log_level", "loud"), ("drain_grace_s", "-1")],
)
def test_a_bad_value_is_refused_by_its_name(key, value):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        resolve(ServiceConfig, {key: value}, {})
