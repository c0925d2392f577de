"""The command over TLS: by its flags, and by what a local fleet's record says."""

from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest

from inferfleet_cli.main import main
from inferfleet_cli.supervisor import tls
from inferfleet_cli.supervisor.engine_list import list_engines
from inferfleet_cli.supervisor.fleet import Fleet
from inferfleet_cli.supervisor.options import Options
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_proto.admin.v1 import fleet_pb2, fleet_pb2_grpc
from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2_grpc
from tests.chaos.certificates import write_certificates
from tests.cli.conftest import FakeGateway


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return write_certificates(tmp_path_factory.mktemp("tls"))


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    def ListEngines(self, request, context):
        view = fleet_pb2.EngineView(info=engine_pb2.EngineInfo(engine_id="e-1"))
        return fleet_pb2.ListEnginesResponse(engines=[view])


@pytest.fixture
def start(certificates):
    """Starts a server with TLS; `members` makes it demand a client's certificate."""
    servers = []

    def started(add, servicer, *, members=False):
        server = grpc.server(futures.ThreadPoolExecutor(2))
        add(servicer, server)
        pair = [(certificates.key.read_bytes(), certificates.cert.read_bytes())]
        roots = certificates.ca.read_bytes() if members else None
        credentials = grpc.ssl_server_credentials(pair, roots, members)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield started
    for server in servers:
        server.stop(None).wait()


@pytest.mark.parametrize("members", [False, True])
def test_generate_with_a_ca_and_a_client_certificate(start, certificates, capsys, members):
    address = start(
        inference_pb2_grpc.add_InferenceServicer_to_server, FakeGateway(), members=members
    )
    flags = ["--ca-file", str(certificates.ca)]
    if members:
        flags += ["--cert-file", str(certificates.cert), "--key-file", str(certificates.key)]
    assert main(["generate", "Hi", "--address", address, *flags]) == 0
    assert capsys.readouterr().out == "Paris.\n"


def test_a_local_fleets_tls_is_known(start, certificates, tmp_path, capsys):
    address = start(inference_pb2_grpc.add_InferenceServicer_to_server, FakeGateway())
    state = StateDir(tmp_path)
    state.claim()
    used = tls.ClientTls(True, str(certificates.ca))
    state.write_record({"gateway": address, "tls": used.to_json()})
    try:
        assert main(["generate", "Hi", "--state-dir", str(tmp_path)]) == 0
    finally:
        state.release()
    assert capsys.readouterr().out == "Paris.\n"


def test_without_tls_the_message_says_what_to_give(start, capsys):
    address = start(inference_pb2_grpc.add_InferenceServicer_to_server, FakeGateway())
    assert main(["generate", "Hi", "--address", address]) == 1
    assert "--tls with --ca-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ca-file", "/no/such"], "--ca-file: cannot read /no/such"),
        (["--cert-file", __file__], "--key-file: needed"),
    ],
)
def test_files_that_cannot_be_used_are_named(capsys, flags, message):
    assert main(["generate", "Hi", "--address", "127.0.0.1:1", *flags]) == 2
    assert message in capsys.readouterr().err


def of_a_fleet(certificates):
    files = {"ca": certificates.ca, "cert": certificates.cert, "key": certificates.key}
    return tuple(
        (service, f"tls_{name}_file", str(path))
        for service in ("gateway", "balancer")
        for name, path in files.items()
    )


async def test_status_reaches_a_balancer_with_mutual_tls(start, certificates, tmp_path):
    address = start(fleet_pb2_grpc.add_FleetServicer_to_server, FakeFleet(), members=True)
    settings = (*of_a_fleet(certificates), ("engine", "simulate", "yes"))
    fleet = Fleet(Options(tmp_path, settings=settings), lambda _: None)
    fleet.claim()
    fleet.addresses = SimpleNamespace(admin=address, gateway="", http="")
    try:
        status = await fleet._on_status({})
    finally:
        await fleet.stop()
    assert [engine["engine_id"] for engine in status["engines"]] == ["e-1"]
    assert "engines_error" in await list_engines(address, "token")


async def test_a_fleet_with_tls_names_https(certificates, tmp_path, stand_ins):
    options = Options(tmp_path, port=0, http_port=0, settings=of_a_fleet(certificates))
    fleet = Fleet(options, lambda _: None, stand_ins())
    try:
        await fleet.start()
        assert fleet.http_url.startswith("https://")
        record = StateDir(tmp_path).read_record()
        assert record["http"] == fleet.http_url == fleet.status()["gateway"]["http"]
        assert tls.ClientTls.of_record(record) == tls.ClientTls(True, str(certificates.ca))
    finally:
        await fleet.stop()
