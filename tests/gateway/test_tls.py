"""With certificates both public faces are encrypted, and ask their callers for none."""

import datetime
import ssl

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from inferfleet import AsyncClient
from services.common.config import ConfigError
from services.common.rpc import Membership
from services.gateway.config import GatewayConfig
from services.gateway.testing import EngineDouble, running_gateway


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
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
    (tmp_path / "crt").write_bytes(cert.public_bytes(pem))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "key").write_bytes(key.private_bytes(pem, *private))
    crt = str(tmp_path / "crt")
    return {"tls_ca_file": crt, "tls_cert_file": crt, "tls_key_file": str(tmp_path / "key")}


async def test_both_faces_and_the_way_inside(files):
    double = EngineDouble()
    membership = Membership.from_config(GatewayConfig(**files))
    await double.start(membership)
    async with running_gateway(double, **files) as gateway:
        port = gateway.address.split(":")[1]
        ca = files["tls_ca_file"]
        async with AsyncClient(f"localhost:{port}", ca_file=ca) as client:
            assert (await client.complete("x")).text == double.reply
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            call = channel.unary_unary("/inferfleet.v1.Inference/ListModels")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=2)
        base = f"https://localhost:{gateway.http.split(':')[1]}"
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=ca)) as http:
            answer = await http.get(f"{base}/v1/models")
            assert answer.json()["data"][0]["id"] == "tiny"
            with pytest.raises(httpx.HTTPError):
                await http.get(f"http://{gateway.http}/v1/models")
    await double.stop()


async def test_a_bad_certificate_is_named(files, engine, tmp_path):
    bad = tmp_path / "bad"
    bad.write_text("no certificate")
    keys = {**files, "tls_cert_file": str(bad)}
    with pytest.raises(ConfigError, match="tls_cert_file"):
        async with running_gateway(engine, **keys):
            pass
