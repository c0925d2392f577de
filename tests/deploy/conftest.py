"""The chart as Helm itself renders it, and the compose file as its defaults make it."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import helm_python
import pytest
import yaml

from scripts.gen_helm_schema import SERVICES, config_class
from services.common.config.settings import ENV_PREFIX, resolve

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm" / "inferfleet"


class Manifests(NamedTuple):
    """What one rendering made."""

    objects: list[dict[str, Any]]
    notes: str

    def kind(self, kind: str, component: str | None = None) -> list[dict[str, Any]]:
        """The objects of a kind, in order of their names."""
        return sorted(
            (
                item
                for item in self.objects
                if item["kind"] == kind
                and component in (None, item["metadata"]["labels"]["app.kubernetes.io/component"])
            ),
            key=lambda item: item["metadata"]["name"],
        )

    def workloads(self, *components: str) -> list[dict[str, Any]]:
        """Deployments and StatefulSets, of the named components or of all."""
        found = self.kind("Deployment") + self.kind("StatefulSet")
        return [item for item in found if not components or component_of(item) in components]


def component_of(item: Mapping[str, Any]) -> str:
    return item["metadata"]["labels"]["app.kubernetes.io/component"]


def examples(*names: str) -> dict[str, Any]:
    """Values of presets laid over one another as `helm -f A -f B` does (top level only)."""
    values: dict[str, Any] = {}
    for name in names:
        for key, value in yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text()).items():
            both = isinstance(value, dict) and isinstance(values.get(key), dict)
            values[key] = {**values[key], **value} if both else value
    return values


def _parsed(files: Mapping[str, str]) -> Manifests:
    notes = next(text for path, text in files.items() if path.endswith("NOTES.txt"))
    texts = [text for path, text in files.items() if not path.endswith(".txt")]
    found = [item for text in texts for item in yaml.load_all(text, yaml.CSafeLoader) if item]
    return Manifests(found, notes)


@pytest.fixture(scope="session")
def render() -> Callable[..., Manifests]:
    chart = helm_python.Chart.load(CHART)
    made: dict[str, Manifests] = {}

    def rendered(values: Mapping[str, Any] | None = None, name: str = "demo") -> Manifests:
        """Render; the token is generated unless the values say something about it."""
        given = {"fleetToken": {"generate": True}, **(values or {})}
        key = json.dumps([given, name], sort_keys=True)
        if key not in made:
            made[key] = _parsed(chart.render(given, name=name, namespace="serving"))
        return made[key]

    return rendered


PLACED: dict[str, Any] = {
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "extra", "configMap": {"name": "certs"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra", "readOnly": True}],
    "podAnnotations": {"example.com/note": "yes"},
    "podLabels": {"team": "ml"},
    "priorityClassName": "serving",
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
        }
    ],
}
EVERY_VALUE: dict[str, Any] = {
    "gateway": {
        **PLACED,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "service": {
            "type": "LoadBalancer",
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
            "externalTrafficPolicy": "Local",
        },
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["llm.example.com"],
            "tls": [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}],
        },
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "hostnames": ["llm.example.com"],
        },
    },
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cpu-demo": examples("cpu-demo"),
    "gpu": examples("gpu", "external-stores"),
    "external-stores": examples("external-stores"),
    "tls": examples("tls"),
    "no-kvcache": {"kvcache": {"enabled": False}, **examples("tls")},
    "own-token": {"fleetToken": {"existingSecret": "mine", "key": "fleet"}},
    "own-account": {"serviceAccount": {"create": False, "name": "runner"}},
    "no-policies": {
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "every-value": {
        **EVERY_VALUE,
        "kvcache": {**PLACED, "strategy": {"type": "Recreate"}},
        "balancer": {**PLACED, "strategy": {"type": "OnDelete"}},
        "engines": [{"name": "a", "model": "m", **PLACED}],
    },
    "kept-etcd": {"etcd": {"storageSize": "1Gi", "storageClass": "fast"}},
    "volumes": {
        "engines": [
            {"name": "a", "model": "/models/a", "modelVolume": {"hostPath": "/srv/models"}},
            {"name": "b", "model": "/models/b", "modelVolume": {"pvc": {"size": "50Gi"}}},
            {"name": "c", "model": "/models/c", "modelVolume": {"existingClaim": "models"}},
        ]
    },
    "edges": {
        "drainGraceSeconds": 0,
        "image": {"registry": "registry.example", "repository": "llm/fleet", "tag": "1.2"},
        "imagePullSecrets": [{"name": "pull"}],
        "gateway": {
            "image": {"digest": "sha256:" + "0" * 64},
            "extraEnv": [{"name": "A", "value": "b"}],
        },
        "engineDefaults": {"loadSeconds": 7, "config": {"prefix_cache": True, "max_num_seqs": 8}},
        "engines": [
            {
                "name": "big",
                "model": "m",
                "replicas": 0,
                "config": {"prefix_cache": False, "max_num_batched_tokens": 1000000},
                "resources": {"limits": {"cpu": 2}},
            }
        ],
    },
}  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, render: Callable[..., Manifests]) -> Manifests:
    """Each row of the table of values, rendered."""
    return render(CASES[request.param])


def configured(service: str, environ: Mapping[str, str], supplied: Mapping[str, str] = {}) -> Any:
    """The service's own configuration from a container's environment.

    Fails on an INFERFLEET_ variable that is no key of the service, and on a bad value.
    """
    cls = config_class(service)
    keys = {
        name.removeprefix(ENV_PREFIX).lower() for name in environ if name.startswith(ENV_PREFIX)
    }
    unknown = keys - set(cls.__dataclass_fields__)
    assert not unknown, f"{service} has no such key: {sorted(unknown)}"
    expanded = {
        name: re.sub(r"\$\((\w+)\)", lambda found: {**supplied, **environ}[found[1]], value)
        for name, value in environ.items()
    }
    return resolve(cls, {}, expanded).config


@pytest.fixture
def config_of() -> Callable[..., Any]:
    return configured


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    """docker-compose.yml with every ${NAME:-default} at its default."""
    return _compose_file("docker-compose.yml")


@pytest.fixture(scope="session")
def compose_etcd_tls() -> dict[str, Any]:
    """What is laid over it for an etcd with TLS and a user."""
    return _compose_file("docker-compose.etcd-tls.yml")


def _compose_file(name: str) -> dict[str, Any]:
    text = (ROOT / name).read_text()
    plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert "${" not in plain, "a variable without a default"
    return yaml.safe_load(plain)


@pytest.fixture(scope="session")
def services() -> list[str]:
    return list(SERVICES)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


@pytest.fixture(autouse=True)
def _no_keys_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
