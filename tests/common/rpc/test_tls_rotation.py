"""Certificates are replaced under running streams, at both ends of a hop."""

import asyncio
import contextlib
import ssl

import grpc
import pytest
from cryptography import x509

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.rpc import fresh_channel, tls_files
from services.common.rpc.tls_files import TlsFiles


class Servicer(engine_pb2_grpc.EngineServicer):
    """Counts on demand, and remembers the certificates that it was shown."""

    def __init__(self):
        self.go_on = asyncio.Queue()
        self.shown = []

    async def GetInfo(self, request, context):
        pem = context.auth_context()["x509_pem_cert"][0]
        self.shown.append(x509.load_pem_x509_certificate(pem).serial_number)
        return engine_pb2.EngineInfo()

    async def Run(self, request, context):
        for number in range(100):
            yield inference_pb2.GenerateResponse(delta={"choice": number})
            await self.go_on.get()


def config_of(files):
    return ServiceConfig(
        tls_ca_file=str(files.ca), tls_cert_file=str(files.cert), tls_key_file=str(files.key)
    )


def serial(files):
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number


async def serial_of_server(port):
    """What a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    del reader
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(der).serial_number


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    monkeypatch.setattr(tls_files, "CHECK_INTERVAL_S", 0.0)


@contextlib.asynccontextmanager
async def serving(membership):
    servicer, server = Servicer(), rpc.make_server()
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    port = membership.bind(server, "127.0.0.1:0")
    await server.start()
    yield servicer, port
    await server.stop(None)


async def test_a_new_ca_and_new_certificates_under_a_running_stream(make_authority, tmp_path):
    old, new = make_authority("old"), make_authority("new")
    files = old.issue(tmp_path)
    membership = rpc.Membership.from_config(config_of(files))
    first = serial(files)
    async with (
        serving(membership) as (servicer, port),
        membership.channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = engine_pb2_grpc.EngineStub(channel)
        stream = stub.Run(engine_pb2.EngineRequest())
        assert (await stream.read()).delta.choice == 0
        await stub.GetInfo(engine_pb2.GetInfoRequest())
        new.issue(tmp_path, old.pem)
        second = serial(files)
        await stub.GetInfo(engine_pb2.GetInfoRequest())
        assert servicer.shown == [first, second]
        assert await serial_of_server(port) == second
        # The old CA goes; whoever still has its certificate is no member any more.
        new.issue(tmp_path)
        await stub.GetInfo(engine_pb2.GetInfoRequest())
        assert servicer.shown[-1] == serial(files)
        late = old.issue(tmp_path / "late", new.pem)
        outsider = rpc.Membership.from_config(config_of(late))
        async with outsider.channel(f"127.0.0.1:{port}") as other:
            with pytest.raises(grpc.aio.AioRpcError):
                await engine_pb2_grpc.EngineStub(other).GetInfo(
                    engine_pb2.GetInfoRequest(), timeout=20
                )
        # All the while the first stream went on, on the connection that it began with.
        for number in range(1, 4):
            servicer.go_on.put_nowait(None)
            assert (await stream.read()).delta.choice == number
        stream.cancel()


async def test_a_half_replaced_pair_is_left_alone_until_it_fits(make_authority, tmp_path):
    authority = make_authority()
    files = authority.issue(tmp_path)
    watched = TlsFiles(*map(str, files))
    version, before = watched.newest()
    other = authority.issue(tmp_path / "other")
    files.cert.write_bytes(other.cert.read_bytes())
    assert watched.newest() == (version, before)
    files.key.unlink()
    assert watched.newest() == (version, before)
    files.key.write_bytes(other.key.read_bytes())
    later, after = watched.newest()
    assert later == version + 1
    assert after.cert == other.cert.read_bytes()


async def test_what_is_under_way_is_cancelled_when_the_channel_is_closed(make_authority, tmp_path):
    authority = make_authority()
    files = authority.issue(tmp_path)
    membership = rpc.Membership.from_config(config_of(files))
    async with serving(membership) as (_, port):
        channel = membership.channel(f"127.0.0.1:{port}")
        stub = engine_pb2_grpc.EngineStub(channel)
        streams = []
        for _ in range(2):
            streams.append(stub.Run(engine_pb2.EngineRequest()))
            await streams[-1].read()
            authority.issue(tmp_path)
        await channel.close()
        for stream in streams:
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await stream.read()


async def test_a_plain_hop_has_a_plain_channel():
    async with rpc.Membership().channel("127.0.0.1:1") as channel:
        assert not isinstance(channel, fresh_channel.FreshChannel)


def test_a_pair_that_does_not_fit_is_refused_at_start(make_authority, tmp_path):
    authority = make_authority()
    files = authority.issue(tmp_path)
    files.key.write_bytes(authority.issue(tmp_path / "other").key.read_bytes())
    with pytest.raises(ConfigError, match=r"tls_cert_file: .* is no certificate in PEM"):
        rpc.Membership.from_config(config_of(files))
