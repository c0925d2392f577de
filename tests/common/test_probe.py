"""The probe as a container runs it: a process of its own against a real server."""

import asyncio
import sys

import pytest

from services.common import rpc
from services.common.probe import ProbeConfig, target

NAME = "inferfleet.internal.v1.Engine"


async def probe(*arguments, **environ):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.common.probe",
        *arguments,
        env={"PATH": "/usr/bin:/bin", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def served():
    server = rpc.make_server(membership=rpc.Membership(token="secret"))
    health = rpc.add_health_and_reflection(server, [NAME])
    port = rpc.Membership().bind(server, "127.0.0.1:0")
    await server.start()
    await rpc.set_health(health, [NAME], serving=True)
    yield str(port), health
    await server.stop(None)


async def test_a_serving_service_gives_0_and_a_draining_one_1(served):
    port, health = served
    assert await probe(INFERFLEET_PORT=port) == (0, f"127.0.0.1:{port} SERVING\n", "")
    await rpc.set_health(health, [NAME], serving=False)
    code, _, err = await probe("--port", port, "--service", NAME)
    assert code == 1
    assert "NOT_SERVING" in err


async def test_an_unknown_service_is_not_healthy(served):
    code, _, err = await probe("--port", served[0], "--service", "no.such.Service")
    assert code == 1
    assert "NOT_FOUND" in err


async def test_nobody_there_is_1_within_the_timeout(tmp_path):
    # A socket file that nobody listens on: no port that another process might take meanwhile.
    code, _, err = await probe("--address", f"unix:{tmp_path}/none", "--timeout-s", "1")
    assert code == 1
    assert "UNAVAILABLE" in err or "DEADLINE_EXCEEDED" in err


async def test_a_bad_configuration_is_2_and_names_the_key():
    code, _, err = await probe()
    assert (code, "port" in err) == (2, True)
    code, _, err = await probe("--port", "1", "--tls-ca-file", "/none/ca.crt")
    assert (code, "tls_cert_file" in err) == (2, True)


def test_the_target_is_a_name_when_certificates_are_checked():
    assert target(ProbeConfig(host="0.0.0.0", port=5)) == "127.0.0.1:5"
    assert target(ProbeConfig(host="0.0.0.0", port=5, tls_ca_file="ca")) == "localhost:5"
    assert target(ProbeConfig(host="10.0.0.9", port=5)) == "10.0.0.9:5"
    assert target(ProbeConfig(address="gateway:50051", port=5)) == "gateway:50051"
