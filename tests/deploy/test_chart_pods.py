"""How pods are started, probed, ended and locked down."""

import helm_python
import pytest

from services.common.rpc.server import LIVENESS

FLEET = ("gateway", "balancer", "kvcache", "engine")


def pod(item):
    return item["spec"]["template"]["spec"]


def probes(item):
    return pod(item)["containers"][0]


def span_s(probe):
    """How long a probe may go on failing before it acts."""
    return probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("seconds", [5, 7, 600, 3600])
def test_the_startup_probe_covers_the_load_and_liveness_waits_for_it(render, seconds):
    made = render({"engines": [{"name": "a", "model": "m", "loadSeconds": seconds}]})
    engine = probes(made.workloads("engine")[0])
    assert seconds <= span_s(engine["startupProbe"]) <= seconds + 10
    assert "initialDelaySeconds" not in engine["livenessProbe"]


def test_readiness_is_the_services_own_health(case):
    for item in case.workloads(*FLEET):
        spec = probes(item)
        ask = spec["readinessProbe"].get("grpc") or spec["readinessProbe"]["exec"]
        port = next(p["containerPort"] for p in spec["ports"] if p["name"] == "grpc")
        assert ask in (
            {"port": port},
            {"command": ["python", "-m", "services.common.service.probe"]},
        )
        assert ask == spec["startupProbe"].get("grpc", spec["startupProbe"].get("exec"))


def test_liveness_is_answered_by_the_event_loop_also_during_a_drain(case):
    for item in case.workloads("gateway", "balancer", "kvcache"):
        spec = probes(item)
        probe = ["python", "-m", "services.common.service.probe", "--service=liveness"]
        ask = spec["livenessProbe"].get("grpc") or spec["livenessProbe"]["exec"]
        port = next(p["containerPort"] for p in spec["ports"] if p["name"] == "grpc")
        assert ask in ({"port": port, "service": LIVENESS}, {"command": probe})
        assert span_s(spec["livenessProbe"]) == 60


def test_with_tls_the_kubelet_does_not_ask_itself(render):
    values = {"tls": {"existingSecret": "certs"}, "engines": [{"name": "a", "model": "m"}]}
    for item in render(values).workloads(*FLEET):
        for name in ("startupProbe", "readinessProbe"):
            assert "grpc" not in probes(item)[name]
        env = {e["name"]: e.get("value") for e in probes(item)["env"]}
        for key, file in {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}.items():
            assert env[f"INFERFLEET_TLS_{key}_FILE"] == f"/etc/inferfleet/tls/{file}"


@pytest.mark.parametrize("grace", [0, 30, 600])
def test_a_drain_is_never_cut_short(render, grace):
    values = {"drainGraceSeconds": grace, "engines": [{"name": "a", "model": "m"}]}
    for item in render(values).workloads(*FLEET):
        env = {e["name"]: e.get("value") for e in probes(item)["env"]}
        assert env["INFERFLEET_DRAIN_GRACE_S"] == str(grace)
        before = probes(item).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        delay = int(before[1]) if before else 0
        assert pod(item)["terminationGracePeriodSeconds"] >= grace + delay + 10
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == "engine":
            assert span_s(probes(item)["livenessProbe"]) > grace + 60
            assert "grpc" in probes(item)["livenessProbe"]


def test_no_container_has_rights_or_a_writable_root(case):
    tests = [{"spec": {"template": {"spec": item["spec"]}}} for item in case.kind("Pod")]
    assert tests
    for item in case.workloads() + tests:
        spec = pod(item)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} & set(container["resources"]["limits"])


def test_service_links_never_become_configuration(case):
    """A Service called inferfleet would set INFERFLEET_PORT=tcp://… in every pod."""
    for item in case.workloads():
        assert pod(item)["enableServiceLinks"] is False


def test_secrets_reach_containers_as_files_alone(case):
    for item in case.workloads(*FLEET):
        for variable in probes(item)["env"]:
            assert "secretKeyRef" not in variable.get("valueFrom", {}), variable["name"]
        mounts = {m["name"]: m for m in probes(item)["volumeMounts"]}
        secrets = [v for v in pod(item)["volumes"] if "secret" in v]
        assert {v["name"] for v in secrets} >= {"fleet-token"}
        assert all(mounts[v["name"]]["readOnly"] for v in secrets)


def test_a_fleet_token_is_made_where_that_is_asked_for(render):
    made = render({"fleetToken": {"generate": True}})
    secret = made.kind("Secret")[0]
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert len(secret["data"]["token"]) >= 48
    named = render({"fleetToken": {"existingSecret": "mine", "key": "fleet"}})
    assert named.kind("Secret") == []
    for item in named.workloads(*FLEET):
        volume = next(v for v in pod(item)["volumes"] if v["name"] == "fleet-token")
        assert volume["secret"]["secretName"] == "mine"
        env = {e["name"]: e.get("value") for e in probes(item)["env"]}
        assert env["INFERFLEET_FLEET_TOKEN_FILE"].endswith("/fleet")


def test_rendered_twice_without_a_cluster_the_chart_is_the_same(chart):
    loaded = helm_python.Chart.load(chart)
    values = {"fleetToken": {"existingSecret": "mine"}, "engines": [{"name": "a", "model": "m"}]}
    one, two = (loaded.render(values, name="f", namespace="n") for _ in range(2))
    assert one == two
    with pytest.raises(helm_python.HelmError, match=r"fleetToken\.existingSecret: needed"):
        loaded.render({}, name="f", namespace="n")


def checksums(manifests):
    templates = [item["spec"]["template"]["metadata"] for item in manifests.workloads(*FLEET)]
    return {template["annotations"]["checksum/secrets"] for template in templates}


def test_a_changed_token_rolls_every_pod(render):
    (one,) = checksums(render(name="a"))
    (two,) = checksums(render(name="b"))  # another name, so another token
    (mine,) = checksums(render({"fleetToken": {"existingSecret": "mine"}}))
    (other,) = checksums(render({"fleetToken": {"existingSecret": "other"}}))
    assert len({one, two, mine, other}) == 4


def test_notes_say_what_is_missing(render):
    assert "NO ENGINE" in render().notes
    notes = render({"tls": {"existingSecret": "c"}, "engines": [{"name": "a", "model": "m"}]}).notes
    assert "NO ENGINE" not in notes
    assert "*.demo-inferfleet-engine-pods.serving.svc" in notes
