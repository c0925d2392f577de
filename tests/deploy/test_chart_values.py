"""What every chart takes: placement, extra volumes, an update strategy, routes, and null."""

import copy

import helm_python
import pytest
import yaml

from tests.deploy.conftest import CASES, CHART, EVERY_VALUE, PLACED

FLEET = ("gateway", "balancer", "kvcache", "engine")


def template(item):
    return item["spec"]["template"]


def test_each_component_takes_the_values_of_pods(render):
    for item in render(CASES["every-value"]).workloads(*FLEET):
        meta, spec = template(item)["metadata"], template(item)["spec"]
        (container,) = spec["containers"]
        assert meta["labels"]["team"] == "ml"
        assert meta["annotations"]["example.com/note"] == "yes"
        assert spec["priorityClassName"] == "serving"
        assert PLACED["extraVolumes"][0] in spec["volumes"]
        assert PLACED["extraVolumeMounts"][0] in container["volumeMounts"]
        assert PLACED["extraEnv"][0] in container["env"]
        (spread,) = spec["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        assert spread["labelSelector"] == item["spec"]["selector"]


def test_labels_of_the_operator_never_replace_those_of_selectors(render):
    labels = {"app.kubernetes.io/component": "other", "team": "ml"}
    item = render({"gateway": {"podLabels": labels}}).workloads("gateway")[0]
    selector = item["spec"]["selector"]["matchLabels"]
    assert selector.items() <= template(item)["metadata"]["labels"].items()


def test_a_strategy_is_that_of_the_kind_of_workload(render):
    made = render(CASES["every-value"])
    assert made.workloads("gateway")[0]["spec"]["strategy"] == EVERY_VALUE["gateway"]["strategy"]
    assert made.workloads("balancer")[0]["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_the_gateway_has_its_routes(render):
    made = render(CASES["every-value"])
    service = next(
        s["spec"] for s in made.kind("Service") if s["spec"].get("type") == "LoadBalancer"
    )
    assert service["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    (rule,) = made.kind("Ingress")[0]["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "demo-inferfleet-gateway", "port": {"name": "http"}}
    route = made.kind("HTTPRoute")[0]["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": "demo-inferfleet-gateway", "port": 8080}]
    assert render().kind("Ingress") + render().kind("HTTPRoute") == []


VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
NAMED = {"engines": [{"name": "a", "model": "m"}], "fleetToken": {"existingSecret": "s"}}


def split(values, path=()):
    """(path, whether null may leave it out) of each value; a section that has keys is needed."""
    for key, value in values.items():
        inner = (*path, key)
        left_out = not value or key in ("resources", "config")
        if inner not in (("engines",), ("fleetToken", "existingSecret"), ("redis", "url")):
            yield inner, left_out
        if isinstance(value, dict) and not left_out:
            yield from split(value, inner)


def with_null(*paths):
    values = copy.deepcopy(NAMED)
    for path in paths:
        at = values
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = None
    return values


def test_null_leaves_out_what_is_empty_or_optional(render):
    made = render(with_null(*(path for path, left_out in split(VALUES) if left_out)))
    for item in made.workloads(*FLEET):
        (container,) = template(item)["spec"]["containers"]
        assert container["resources"] == {}


@pytest.mark.parametrize("path", [p for p, left_out in split(VALUES) if not left_out], ids=".".join)
def test_null_for_what_is_needed_is_refused_by_its_name(render, path):
    with pytest.raises(helm_python.HelmError, match=f"missing propert.*'{path[-1]}'"):
        render(with_null(path))


def test_null_in_an_entry_of_engines_leaves_the_defaults_out(render):
    engine = {"name": "a", "model": "m", "resources": None}
    for device in ("cpu", "cuda"):
        item = render({"engines": [engine | {"device": device}]}).workloads("engine")[0]
        resources = template(item)["spec"]["containers"][0]["resources"]
        assert resources == ({} if device == "cpu" else {"limits": {"nvidia.com/gpu": 1}})
