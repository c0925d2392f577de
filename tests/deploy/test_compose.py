"""docker-compose.yml against the services it starts."""

import importlib.util
import re

import pytest

OWN = {
    "kvcache": "kvcache",
    "balancer-1": "balancer",
    "balancer-2": "balancer",
    "engine-1": "engine",
    "engine-2": "engine",
    "gateway": "gateway",
}
STORES = {"redis", "etcd", "jaeger"}


def seconds(text):
    return int(re.fullmatch(r"(\d+)s", text)[1])


def test_the_whole_fleet_is_there(compose):
    assert set(compose["services"]) == set(OWN) | STORES


@pytest.mark.parametrize(("name", "service"), OWN.items())
def test_each_environment_is_a_valid_configuration_of_its_service(
    compose, config_of, name, service
):
    entry = compose["services"][name]
    config = config_of(service, entry["environment"])
    assert config.host == "0.0.0.0"
    assert config.fleet_token_file == "/run/secrets/fleet_token"
    assert seconds(entry["stop_grace_period"]) >= config.drain_grace_s + 10
    if service != "gateway":
        assert config.advertise == f"{name}:{config.port}"
    if service in ("balancer", "engine"):
        # An id made from 0.0.0.0 would be the same for all of them.
        assert getattr(config, f"{service}_id") == name
    assert importlib.util.find_spec(f"services.{service}.__main__")


def test_addresses_name_services_and_their_ports(compose, config_of):
    ports = {"redis": 6379, "etcd": 2379, "jaeger": 4317}
    for name, service in OWN.items():
        ports[name] = config_of(service, compose["services"][name]["environment"]).port
    for name in OWN:
        for key, value in compose["services"][name]["environment"].items():
            if key not in ("INFERFLEET_HOST", "INFERFLEET_ADVERTISE"):
                for host, port in re.findall(r"\b([a-z][a-z0-9-]*):(\d+)", value):
                    assert ports[host] == int(port), f"{name}: {key}"


def test_dependencies_exist_and_have_what_is_waited_for(compose):
    for name, entry in compose["services"].items():
        for other, wanted in entry.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert "healthcheck" in compose["services"][other], f"{name} waits for {other}"
            assert not compose["services"][other].get("profiles"), f"{name} waits for {other}"


def test_only_loopback_is_published_and_no_port_twice(compose):
    published = [p for entry in compose["services"].values() for p in entry.get("ports", [])]
    assert sorted(published) == [
        "127.0.0.1:16686:16686",
        "127.0.0.1:50051:50051",
        "127.0.0.1:8080:8080",
    ]


@pytest.mark.parametrize("name", OWN)
def test_the_fleets_containers_have_no_rights(compose, name):
    entry = compose["services"][name]
    assert entry["read_only"] is True
    assert entry["cap_drop"] == ["ALL"]
    assert entry["security_opt"] == ["no-new-privileges:true"]
    assert entry["healthcheck"]["test"] == ["CMD", "python", "-m", "services.common.service.probe"]


def test_every_container_has_limits(compose):
    for name, entry in compose["services"].items():
        assert set(entry["deploy"]["resources"]["limits"]) == {"cpus", "memory"}, name


def test_engines_are_given_the_time_to_load(compose):
    for name in ("engine-1", "engine-2"):
        assert seconds(compose["services"][name]["healthcheck"]["start_period"]) >= 300


def test_secrets_and_volumes_are_declared(compose):
    for entry in compose["services"].values():
        assert set(entry.get("secrets", [])) <= set(compose["secrets"])
        for volume in entry.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("./") or source in compose["volumes"]


def test_with_an_etcd_of_ones_own_each_file_is_a_secret_that_is_there(
    compose, compose_etcd_tls, config_of
):
    """As Compose lays one file over the other: environments by name, secrets one after another."""
    more = compose_etcd_tls["services"]
    assert set(more) == {name for name, service in OWN.items() if service != "kvcache"}
    files = compose["secrets"] | compose_etcd_tls["secrets"]
    for name, entry in more.items():
        base = compose["services"][name]
        config = config_of(OWN[name], base["environment"] | entry["environment"])
        given = {f"/run/secrets/{secret}" for secret in base["secrets"] + entry["secrets"]}
        named = {value for key, value in vars(config).items() if key.endswith("_file") and value}
        assert named == given
        assert {path.rpartition("/")[2] for path in named} <= set(files)
        assert config.etcd != config_of(OWN[name], base["environment"]).etcd
        assert config.etcd_user
