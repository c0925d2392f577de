"""From options to command lines, and that the services understand them."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from inferfleet_cli.supervisor.options import (
    Addresses,
    Options,
    kv_memory,
    plan,
    service_names,
    threads_per_engine,
)

AT = Addresses(
    gateway="127.0.0.1:50051",
    http="127.0.0.1:8080",
    redis="127.0.0.1:20001",
    etcd="127.0.0.1:20002",
    kvcache="127.0.0.1:20003",
    balancer="127.0.0.1:20004",
    admin="127.0.0.1:20005",
    engines=("127.0.0.1:20006", "127.0.0.1:20007"),
    otlp="127.0.0.1:20008",
)


def planned(tmp_path: Path, **changes):
    options = Options(state_dir=tmp_path, **changes)
    token, password = tmp_path / "token", tmp_path / "stores.password"
    for file in (token, password):
        file.write_text("secret")
    at = dataclasses.replace(AT, store_password_file=str(password))
    ready = {name: tmp_path / f"{name}.json" for name in service_names(options.engines)}
    return {service.name: service for service in plan(options, at, token, ready)}


def test_services_start_in_the_order_of_their_needs(tmp_path):
    assert list(planned(tmp_path)) == ["kvcache", "balancer", "engine-1", "engine-2", "gateway"]


def test_the_limit_for_a_stall_is_the_balancers_own_default(tmp_path):
    assert not any("stall-limit" in flag for flag in planned(tmp_path)["balancer"].argv)
    settings = (("balancer", "stall_limit_s", "60"),)
    assert "--stall-limit-s=60" in planned(tmp_path, settings=settings)["balancer"].argv


def test_cores_are_divided_among_engines_and_never_shared(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert [threads_per_engine(n) for n in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


def test_engines_of_another_model_share_the_memory(tmp_path):
    assert kv_memory(Options(tmp_path)) == "1GiB"
    assert kv_memory(Options(tmp_path, model="/m", engines=4)) == "0.125"


def test_a_setting_reaches_its_service_alone_and_wins(tmp_path):
    services = planned(
        tmp_path, settings=(("engine", "max_num_seqs", "8"), ("engine-2", "threads", "7"))
    )
    assert "--max-num-seqs=8" in services["engine-1"].argv
    assert "--threads=7" in services["engine-2"].argv
    assert "--threads=7" not in services["engine-1"].argv
    assert not any("max-num-seqs" in argument for argument in services["gateway"].argv)


@pytest.mark.parametrize("name", ["kvcache", "balancer", "engine-1", "gateway"])
def test_each_service_accepts_its_keys(tmp_path, name):
    argv = planned(tmp_path)[name].argv
    done = subprocess.run([*argv, "--check-config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "configuration is valid" in done.stdout


def keys(service):
    return dict(flag.removeprefix("--").split("=", 1) for flag in service.argv if "=" in flag)


SEVERAL = {
    "more_gateways": (("127.0.0.1:50052", "127.0.0.1:8081"),),
    "more_balancers": (("127.0.0.1:20010", "127.0.0.1:20011"),),
}


def test_several_gateways_and_balancers_know_one_another(tmp_path):
    options = Options(tmp_path, engines=1, gateways=2, balancers=2)
    names = service_names(1, 2, 2)
    assert names == ["kvcache", "balancer-1", "balancer-2", "engine-1", "gateway-1", "gateway-2"]
    at = dataclasses.replace(AT, engines=AT.engines[:1], **SEVERAL)
    ready = {name: tmp_path / name for name in names}
    found = {one.name: keys(one) for one in plan(options, at, tmp_path / "token", ready)}
    assert list(found) == names
    assert found["gateway-2"]["http-port"] == "8081"
    assert found["gateway-2"]["balancers"] == "127.0.0.1:20004,127.0.0.1:20010"
    assert found["gateway-1"]["redis"] == "redis://127.0.0.1:20001/0", "quotas count together"
    assert (found["balancer-2"]["admin-port"], found["balancer-2"]["balancer-id"]) == (
        "20011",
        "balancer-2",
    )


def test_stores_that_a_team_has_are_used(tmp_path):
    services = planned(tmp_path, redis="rediss://u@cache:6380/1", etcd="https://e1:2379,e2:2379")
    assert keys(services["kvcache"])["redis"] == "rediss://u@cache:6380/1"
    for name in ("balancer", "engine-1", "gateway"):
        assert keys(services[name])["etcd"] == "https://e1:2379,e2:2379"
    assert "redis" not in keys(services["gateway"]), "one gateway counts alone, as without --redis"


def test_only_the_fleets_own_stores_get_its_password(tmp_path):
    services = planned(tmp_path)
    assert keys(services["kvcache"])["redis-password-file"] == str(tmp_path / "stores.password")
    for name in ("balancer", "engine-2", "gateway"):
        assert keys(services[name])["etcd-user"] == "root"
        assert keys(services[name])["etcd-password-file"] == str(tmp_path / "stores.password")
    given = (
        ("kvcache", "redis", "redis://cache:1/0"),
        ("kvcache", "redis_password_file", "/p"),
        ("balancer", "etcd", "e:1"),
    )
    services = planned(tmp_path, settings=given)
    assert keys(services["kvcache"])["redis-password-file"] == "/p"
    assert "etcd-user" not in keys(services["balancer"])
    services = planned(tmp_path, redis="redis://cache:1/0", etcd="e:1")
    flags = {flag for service in services.values() for flag in keys(service)}
    assert not any("password" in flag or "user" in flag for flag in flags)


def test_spares_wait_for_a_file_and_share_the_memory(tmp_path):
    assert "standby-file" not in keys(planned(tmp_path)["engine-1"])
    options = Options(tmp_path, engines=1, spare_engines=1, model="/m")
    ready = {name: tmp_path / f"{name}.json" for name in options.names}
    found = {one.name: keys(one) for one in plan(options, AT, tmp_path / "token", ready)}
    assert found["engine-2"]["standby-file"] == str(tmp_path / "engine-2.in-use")
    assert found["engine-2"]["kv-memory"] == "0.250"


@pytest.mark.parametrize(
    ("url", "shared"),
    [
        ("redis://cache:1/0", True),
        ("redis://sentinel-db:1/0", True),
        ("redis+sentinel://cache:1/main", False),
        ("redis://cache:1,redis://cache:2", False),
    ],
)
def test_gateways_count_in_the_redis_that_was_set_for_the_index(tmp_path, url, shared):
    settings = (("kvcache", "redis", url),)
    options = Options(tmp_path, engines=2, gateways=2, settings=settings)
    at = dataclasses.replace(AT, more_gateways=SEVERAL["more_gateways"])
    ready = {name: tmp_path / name for name in service_names(2, 2)}
    found = {one.name: keys(one) for one in plan(options, at, tmp_path / "token", ready)}
    assert found["kvcache"]["redis"] == url
    for name in ("gateway-1", "gateway-2"):
        assert found[name].get("redis") == (url if shared else None)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, (True, True)),
        ({"redis": "redis://h/0"}, (False, True)),
        ({"etcd": "h:1"}, (True, False)),
        ({"settings": (("kvcache", "redis", "redis://h/0"),)}, (False, True)),
        ({"settings": (("gateway", "redis", "redis://h/0"),)}, (True, True)),
        ({"settings": (("engine", "etcd", "h:1"),)}, (True, True)),
        (
            {
                "settings": tuple(
                    (name, "etcd", "h:1") for name in ("engine", "balancer", "gateway")
                )
            },
            (True, False),
        ),
    ],
)
def test_a_store_is_started_unless_another_is_named(tmp_path, changes, own):
    options = Options(tmp_path, **changes)
    assert (options.own_redis, options.own_etcd) == own
