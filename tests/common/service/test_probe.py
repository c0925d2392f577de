"""The probe as a container runs it: a process of its own against a real server."""

import asyncio
import datetime
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common import rpc
from services.common.service.probe import ProbeConfig, target

NAME = "inferfleet.internal.v1.Engine"


async def probe(*arguments, **environ):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.common.service.probe",
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
    # A socket file without a listener: no port that another process might take meanwhile.
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


def certificate_files(folder):
    """A certificate for localhost that is its own CA, as the three keys of a service."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "tls.crt").write_bytes(cert.public_bytes(pem))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "tls.key").write_bytes(key.private_bytes(pem, *private))
    crt = str(folder / "tls.crt")
    return {"tls_ca_file": crt, "tls_cert_file": crt, "tls_key_file": str(folder / "tls.key")}


async def test_with_mutual_tls_the_probe_shows_the_services_own_certificate(tmp_path):
    files = certificate_files(tmp_path)
    membership = rpc.Membership.from_config(ProbeConfig(**files))
    server = rpc.make_server(membership=membership)
    health = rpc.add_health_and_reflection(server, [NAME])
    port = str(membership.bind(server, "127.0.0.1:0"))
    await server.start()
    await rpc.set_health(health, [NAME], serving=True)
    environ = {f"INFERFLEET_{key.upper()}": path for key, path in files.items()}
    try:
        code, out, _ = await probe(INFERFLEET_PORT=port, INFERFLEET_HOST="0.0.0.0", **environ)
        assert (code, out) == (0, f"localhost:{port} SERVING\n")
        code, _, err = await probe(INFERFLEET_PORT=port)
        assert (code, "UNAVAILABLE" in err) == (1, True)
    finally:
        await server.stop(None)
