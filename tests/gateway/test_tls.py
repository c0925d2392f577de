"""With certificates both public faces are encrypted, and ask their callers for none."""

import asyncio
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
from inferfleet_proto.v1 import inference_pb2
from services.common.config.settings import ConfigError
from services.common.rpc import Membership
from services.gateway.config import GatewayConfig
from tests.doubles.gateway import running_gateway, text_engine
from tests.doubles.scripts import say_hello


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
    double = text_engine()
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


async def test_new_certificates_are_used_without_dropping_streams(
    make_authority, tmp_path, monkeypatch
):
    """Both faces and the way inside, all with one certificate that is replaced."""
    monkeypatch.setattr("services.common.rpc.tls_files.CHECK_INTERVAL_S", 0.0)
    old, new = make_authority("old"), make_authority("new")
    made = old.issue(tmp_path)
    keys = {f"tls_{name}_file": str(path) for name, path in made._asdict().items()}
    resume = asyncio.Event()

    async def paused(request, double):
        yield double.started(request)
        yield double.delta(request, 0, "a", [97])
        await resume.wait()
        yield double.delta(request, 0, "b", [98])
        yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_EOS"})
        yield double.summary(request, 2)

    double = text_engine()
    await double.start(Membership.from_config(GatewayConfig(**keys)))
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with running_gateway(double, **keys) as gateway:
        http, port = (address.split(":")[1] for address in (gateway.http, gateway.address))
        trust = ssl.create_default_context(cafile=str(made.ca))
        async with (
            httpx.AsyncClient(verify=trust, base_url=f"https://localhost:{http}") as client,
            AsyncClient(f"localhost:{port}", ca_file=str(made.ca)) as fleet,
        ):
            double.script = paused
            stream = aiter(await fleet.generate("x"))
            await anext(stream)
            async with client.stream("POST", "/v1/completions", json=body) as lines:
                text = lines.aiter_text()
                first = await anext(text)
                new.issue(tmp_path)
                serial = x509.load_pem_x509_certificate(made.cert.read_bytes()).serial_number
                for face in (http, port):
                    assert await shown_by(face) == serial
                # Who trusts the new CA is answered, over all hops, by new connections.
                double.script = say_hello
                async with AsyncClient(f"localhost:{port}", ca_file=str(made.ca)) as later:
                    assert (await later.complete("x")).text == double.reply
                resume.set()
                assert "[DONE]" in first + "".join([part async for part in text])
            assert [part async for part in stream]
    await double.stop()


async def shown_by(port: str) -> int:
    """Serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(der).serial_number
