"""Every row of the values table lints, and every manifest is valid for the Kubernetes API."""

import ast
import re

import helm_python
import kubernetes_validate
import pytest
import yaml

KUBERNETES = ("1.27", "1.37")
KINDS = {
    "ConfigMap",
    "Deployment",
    "HTTPRoute",
    "HorizontalPodAutoscaler",
    "Ingress",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Pod",
    "PodDisruptionBudget",
    "PodMonitor",
    "Secret",
    "Service",
    "ServiceAccount",
    "StatefulSet",
}


@pytest.mark.parametrize("name", ["", "cpu-demo", "gpu", "external-stores", "tls"])
def test_the_chart_lints(chart, name):
    values = yaml.safe_load((chart / "examples" / f"{name}.yaml").read_text()) if name else {}
    report = helm_python.lint(chart, values, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] >= 2] == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid(case, version):
    assert len(case.objects) > 8
    for item in case.objects:
        assert item["kind"] in KINDS
        if item["kind"] not in ("PodMonitor", "HTTPRoute"):  # their schemas are not Kubernetes' own
            kubernetes_validate.validate(item, version, strict=True)


def test_names_are_unique_and_dns_labels(case):
    names = [(item["kind"], item["metadata"]["name"]) for item in case.objects]
    assert len(names) == len(set(names))
    for kind, name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
        # A StatefulSet's name comes back in a label with its revision's hash.
        assert len(name) <= (52 if kind == "StatefulSet" else 63), name


def test_the_longest_names_still_fit(render):
    made = render({"engines": [{"name": "e" * 18, "model": "m"}]}, name="r" * 53)
    assert all(len(item["metadata"]["name"]) <= 52 for item in made.kind("StatefulSet"))


def test_a_release_named_like_the_chart_is_not_named_twice(render):
    made = render(name="inferfleet")
    assert made.kind("Service", "gateway")[0]["metadata"]["name"] == "inferfleet-gateway"


def test_templates_and_values_are_short(chart):
    for path in chart.rglob("*"):
        if path.is_file() and path.name != "values.schema.json":
            assert len(path.read_text().splitlines()) <= 250, path
    for path in (chart / "templates").iterdir():
        if path.is_file():
            assert len(path.read_text().splitlines()) <= 200, path


def test_the_chart_says_the_projects_version(chart, root):
    meta = yaml.safe_load((chart / "Chart.yaml").read_text())
    version = re.search(r'^version = (".*")$', (root / "pyproject.toml").read_text(), re.M)
    assert meta["appVersion"] == ast.literal_eval(version[1])
