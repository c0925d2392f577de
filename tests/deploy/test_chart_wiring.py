"""Selectors find pods, addresses name services, and environments are configurations."""

import pytest

FLEET = ("gateway", "balancer", "kvcache", "engine")
SUPPLIED = {"POD_NAME": "pod-0", "POD_IP": "10.0.0.1"}


def container(item):
    return item["spec"]["template"]["spec"]["containers"][0]


def environ(item):
    """Name → value of a container's variables; what the kubelet fills in is left out."""
    return {e["name"]: e["value"] for e in container(item)["env"] if "value" in e}


def labels_match(selector, labels):
    return selector.items() <= labels.items()


def test_each_environment_is_a_valid_configuration_of_its_service(case, config_of):
    seen = set()
    for item in case.workloads(*FLEET):
        name = item["metadata"]["labels"]["app.kubernetes.io/component"]
        config = config_of(name, environ(item), SUPPLIED)
        ports = {p["name"]: p["containerPort"] for p in container(item)["ports"]}
        assert (config.host, config.port) == ("0.0.0.0", ports["grpc"])
        assert config.metrics_port == ports["metrics"]
        assert config.advertise.endswith(f":{config.port}")
        assert container(item)["env"] == list(
            {e["name"]: e for e in container(item)["env"]}.values()
        )
        seen.add(name)
    assert seen >= {"gateway", "balancer"}


def test_selectors_match_their_pods_and_nothing_else(case):
    pods = {
        item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
        for item in case.workloads()
    }
    for item in case.workloads():
        selector = item["spec"]["selector"]["matchLabels"]
        found = [name for name, labels in pods.items() if labels_match(selector, labels)]
        assert found == [item["metadata"]["name"]]
    for item in case.kind("Service") + case.kind("PodDisruptionBudget"):
        selector = item["spec"]["selector"]
        found = [
            n
            for n, labels in pods.items()
            if labels_match(selector.get("matchLabels", selector), labels)
        ]
        alone = item["metadata"]["name"].endswith("engine-pods") and not case.workloads("engine")
        assert found or alone, item["metadata"]["name"]


def test_services_point_at_ports_that_exist(case):
    for service in case.kind("Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in case.workloads(component):
            ports = {p["name"]: p["containerPort"] for p in container(item)["ports"]}
            for port in service["spec"]["ports"]:
                assert ports[port["targetPort"]] == port["port"]


def test_stateful_sets_have_their_headless_service(case):
    services = {s["metadata"]["name"]: s["spec"] for s in case.kind("Service")}
    for item in case.kind("StatefulSet"):
        assert services[item["spec"]["serviceName"]]["clusterIP"] == "None"


def test_addresses_name_services_of_the_release(render, config_of):
    made = render({"engines": [{"name": "a", "model": "/models/a"}]})
    names = {f"{s['metadata']['name']}.serving.svc" for s in made.kind("Service")}
    engine, balancer = (
        config_of(name, environ(made.workloads(name)[0]), SUPPLIED)
        for name in ("engine", "balancer")
    )
    assert engine.kvcache.rpartition(":")[0] in names
    assert engine.kvcache == balancer.kvcache
    assert [endpoint.rpartition(":")[0] in names for endpoint in balancer.etcd] == [True]
    assert engine.etcd == balancer.etcd
    assert engine.engine_id == "pod-0"
    for config in (engine, balancer):
        host, _, rest = config.advertise.partition(".")
        assert (host, rest.rpartition(":")[0] in names) == ("pod-0", True)


def test_external_stores_replace_the_built_in_ones(render, config_of):
    made = render(
        {"etcd": {"endpoints": ["e1:2379", "e2:2379"]}, "redis": {"url": "rediss://r:6380/1"}}
    )
    assert made.workloads("redis", "etcd") == []
    gateway = config_of("gateway", environ(made.workloads("gateway")[0]), SUPPLIED)
    assert gateway.etcd == ("e1:2379", "e2:2379")
    assert (
        config_of("kvcache", environ(made.workloads("kvcache")[0]), SUPPLIED).redis
        == "rediss://r:6380/1"
    )


def test_redis_secrets_become_files_of_the_kvcache_alone(render, config_of):
    values = {
        "redis": {
            "url": "rediss://fleet@r:6380/0",
            "auth": {"existingSecret": "auth", "key": "pw"},
            "tls": {"existingSecret": "certs", "clientCertificate": True},
        }
    }
    made = render(values)
    config = config_of("kvcache", environ(made.workloads("kvcache")[0]), SUPPLIED)
    assert config.redis_password_file == "/etc/inferfleet/redis-auth/pw"
    assert config.redis_tls_key_file == "/etc/inferfleet/redis-tls/tls.key"
    holders = [w["metadata"]["name"] for w in made.workloads() if "redis-auth" in str(w)]
    assert holders == ["demo-inferfleet-kvcache"]


ETCD = {"endpoints": ["e1:2379", "https://e2:2379"]}


def test_etcd_secrets_become_files_of_those_who_have_a_part_in_it(render, config_of):
    values = {
        "etcd": {
            **ETCD,
            "auth": {"user": "fleet", "existingSecret": "auth", "key": "pw"},
            "tls": {"existingSecret": "certs", "clientCertificate": True},
        },
        "engines": [{"name": "a", "model": "m"}],
    }
    made = render(values)
    for name in ("gateway", "balancer", "engine"):
        item = made.workloads(name)[0]
        config = config_of(name, environ(item), SUPPLIED)
        assert config.etcd == ("e1:2379", "https://e2:2379")
        assert (config.etcd_user, config.etcd_password_file) == (
            "fleet",
            "/etc/inferfleet/etcd-auth/pw",
        )
        folder = "/etc/inferfleet/etcd-tls"
        assert config.etcd_tls_ca_file == f"{folder}/ca.crt"
        assert config.etcd_tls_cert_file == f"{folder}/tls.crt"
        assert config.etcd_tls_key_file == f"{folder}/tls.key"
        volumes = {v["name"]: v for v in item["spec"]["template"]["spec"]["volumes"]}
        assert volumes["etcd-auth"]["secret"]["secretName"] == "auth"
        assert volumes["etcd-tls"]["secret"]["secretName"] == "certs"
    holders = {w["metadata"]["name"] for w in made.workloads() if "etcd-auth" in str(w)}
    assert "demo-inferfleet-kvcache" not in holders


def test_each_file_that_a_service_is_given_is_mounted(case):
    for item in case.workloads(*FLEET):
        folders = tuple(f"{m['mountPath']}/" for m in container(item)["volumeMounts"])
        for name, value in environ(item).items():
            if name.endswith("_FILE"):
                assert value.startswith(folders), name


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({}, set()),
        ({"auth": {"user": "u", "existingSecret": "s"}}, {"ETCD_USER", "ETCD_PASSWORD_FILE"}),
        ({"tls": {"existingSecret": "s"}}, {"ETCD_TLS_CA_FILE"}),
    ],
)
def test_an_etcd_that_asks_for_less_is_shown_less(render, more, keys):
    made = render({"etcd": ETCD | more})
    names = {name.removeprefix("INFERFLEET_") for name in environ(made.workloads("gateway")[0])}
    assert {name for name in names if name.startswith("ETCD_")} == keys


def test_without_kvcache_no_service_is_given_its_address_and_no_redis_runs(render):
    made = render({"kvcache": {"enabled": False}, "engines": [{"name": "a", "model": "m"}]})
    assert made.workloads("kvcache", "redis") == []
    for name in ("balancer", "engine"):
        assert environ(made.workloads(name)[0])["INFERFLEET_KVCACHE"] == ""


def test_config_of_an_engine_is_the_defaults_with_its_own_over_them(render, config_of):
    values = {
        "engineDefaults": {
            "config": {"prefix_cache": True, "max_num_seqs": 8, "dtype": "bfloat16"}
        },
        "engines": [
            {
                "name": "a",
                "model": "/models/a",
                "servedName": "a-1",
                "replicas": 0,
                "config": {"prefix_cache": False, "max_num_batched_tokens": 1000000},
            }
        ],
    }
    item = render(values).workloads("engine")[0]
    config = config_of("engine", environ(item), SUPPLIED)
    assert (config.prefix_cache, config.max_num_seqs, config.dtype) == (False, 8, "bfloat16")
    assert config.max_num_batched_tokens == 1000000
    assert (config.model, config.served_name) == ("/models/a", "a-1")
    assert item["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("engine", "threads"),
    [
        ({"resources": {"limits": {"cpu": 2}}}, "limits.cpu"),
        ({"resources": {"limits": {"cpu": 2}}, "config": {"threads": 3}}, "3"),
        ({}, None),
        ({"device": "cuda", "resources": {"limits": {"cpu": 2}}}, None),
    ],
)
def test_a_cpu_engine_uses_as_many_threads_as_it_may(render, engine, threads):
    made = render({"engines": [{"name": "a", "model": "m", **engine}]})
    found = [
        e
        for e in container(made.workloads("engine")[0])["env"]
        if e["name"] == "INFERFLEET_THREADS"
    ]
    shown = [e.get("value") or e["valueFrom"]["resourceFieldRef"]["resource"] for e in found]
    assert shown == ([threads] if threads else [])


def test_a_cuda_engine_takes_its_image_and_gpus(render):
    made = render({"engines": [{"name": "a", "model": "m", "device": "cuda", "gpus": 4}]})
    made_of = container(made.workloads("engine")[0])
    assert made_of["image"] == "inferfleet-engine-cuda:0.2.0"
    assert made_of["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_every_volume_that_is_mounted_exists(case):
    claims = {c["metadata"]["name"] for c in case.kind("PersistentVolumeClaim")}
    for item in case.workloads():
        spec = item["spec"]["template"]["spec"]
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        made = {t["metadata"]["name"] for t in item["spec"].get("volumeClaimTemplates", [])}
        mounted = {m["name"] for m in container(item)["volumeMounts"]}
        assert mounted == set(volumes) | made
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", "models")
            assert claim in claims | {"models"}


def test_only_the_gateway_is_open_to_everyone(render):
    made = render(name="f")
    policies = {p["metadata"]["name"]: p["spec"] for p in made.kind("NetworkPolicy")}
    inside = policies["f-inferfleet-fleet"]
    everyone = policies["f-inferfleet-gateway"]
    for item in made.workloads():
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert labels_match(inside["podSelector"]["matchLabels"], labels)
        is_gateway = labels["app.kubernetes.io/component"] == "gateway"
        assert labels_match(everyone["podSelector"]["matchLabels"], labels) == is_gateway
    assert [rule.get("from") for rule in everyone["ingress"]] == [None]
    assert {p["port"] for p in everyone["ingress"][0]["ports"]} == {"grpc", "http"}
    assert all(rule["from"] for rule in inside["ingress"])


def test_budgets_are_for_what_has_a_replica_to_spare(render):
    made = render(
        {
            "balancer": {"replicas": 1},
            "engines": [
                {"name": "a", "model": "m", "replicas": 3},
                {"name": "b", "model": "m", "replicas": 1},
            ],
        }
    )
    names = [item["metadata"]["name"] for item in made.kind("PodDisruptionBudget")]
    assert names == ["demo-inferfleet-engine-a", "demo-inferfleet-gateway"]


def test_an_autoscaled_gateway_has_no_replicas_of_its_own(render):
    made = render({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 3}}})
    assert "replicas" not in made.workloads("gateway")[0]["spec"]
    scaler = made.kind("HorizontalPodAutoscaler")[0]["spec"]
    assert scaler["scaleTargetRef"]["name"] == made.workloads("gateway")[0]["metadata"]["name"]


def test_gateways_with_keys_count_quotas_in_the_redis_of_the_index(render, config_of):
    keys = {"gateway": {"apiKeys": {"existingSecret": "keys"}}}
    gateway = render(keys).workloads("gateway")[0]
    index = render(keys).workloads("kvcache")[0]
    assert (
        config_of("gateway", environ(gateway), SUPPLIED).redis
        == config_of("kvcache", environ(index), SUPPLIED).redis
    )
    own = {
        "url": "rediss://fleet@r:6380/0",
        "auth": {"existingSecret": "auth", "key": "pw"},
        "tls": {"existingSecret": "certs", "clientCertificate": True},
    }
    gateway = render({**keys, "redis": own}).workloads("gateway")[0]
    config = config_of("gateway", environ(gateway), SUPPLIED)
    assert config.redis == own["url"]
    assert config.redis_password_file == "/etc/inferfleet/redis-auth/pw"
    assert config.redis_tls_key_file == "/etc/inferfleet/redis-tls/tls.key"
    mounts = {mount["name"] for mount in container(gateway)["volumeMounts"]}
    assert {"redis-auth", "redis-tls", "api-keys"} <= mounts


def test_several_servers_are_for_the_index_alone(render, config_of):
    values = {
        "gateway": {"apiKeys": {"existingSecret": "keys"}},
        "redis": {"url": "redis://a:1,redis://b:1"},
    }
    gateway = render(values).workloads("gateway")[0]
    assert config_of("gateway", environ(gateway), SUPPLIED).redis == ""
