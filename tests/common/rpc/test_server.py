"""The edge of every gRPC server: parsing, statuses, membership, TLS, health, endings."""

import asyncio
import datetime
from contextlib import AsyncExitStack

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from services.common import errors, rpc
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.rpc.error_edge import abort_call

NAME = "inferfleet.internal.v1.Engine"


class Servicer(engine_pb2_grpc.EngineServicer):
    """Does what the tenant field says."""

    def __init__(self):
        self.ended = asyncio.Event()
        self.remaining_s = None

    async def Run(self, request, context):
        self.remaining_s = rpc.remaining_s(context)
        try:
            yield _response("first")
            if request.tenant == "bug":
                raise ZeroDivisionError("secret detail")
            if request.tenant == "wait":
                await asyncio.Event().wait()
            while request.tenant == "flood":
                yield _response("x" * 10_000)
            yield _response("last")
        finally:
            self.ended.set()

    async def GetInfo(self, request, context):
        raise errors.NotFoundError("no info", reason="NO_INFO", metadata={"a": "b"})

    async def Abort(self, request, context):
        many = [errors.Violation(f"field[{i}]" * 20, "bad " * 200) for i in range(500)]
        raise errors.InvalidArgumentError("m" * 50_000, violations=many, retry_after_s=1.5)

    async def Drain(self, request, context):
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "by the handler itself")

    def WatchLoad(self, request, context):
        return _Plain([engine_pb2.LoadReport(sequence=n) for n in range(3)])

    async def GetTokenizer(self, request, context):
        await context.write(engine_pb2.TokenizerChunk(digest="written"))


class _Plain:
    """An asynchronous iterator that is no generator."""

    def __init__(self, items):
        self._items = list(items)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._items:
            raise StopAsyncIteration
        return self._items.pop(0)


def _response(text):
    response = engine_pb2.inferfleet_dot_v1_dot_inference__pb2.GenerateResponse()
    response.delta.text = text
    return response


class Served:
    def __init__(self, servicer, health, channel, address):
        self.servicer = servicer
        self.health = health
        self.channel = channel
        self.stub = engine_pb2_grpc.EngineStub(channel)
        self.address = address


@pytest.fixture
async def serve():
    async with AsyncExitStack() as stack:

        async def start(membership=None, client=None):
            server = rpc.make_server(membership=membership)
            servicer = Servicer()
            engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
            health = rpc.add_health_and_reflection(server, [NAME])
            address = "localhost:0"
            port = (membership or rpc.Membership()).bind(server, address)
            await server.start()
            stack.push_async_callback(server.stop, None)
            target = f"localhost:{port}"
            channel = (client or membership or rpc.Membership()).channel(target)
            stack.push_async_callback(channel.close)
            return Served(servicer, health, channel, target)

        yield start


async def failure(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return errors.error_of(caught.value)


async def failure_of_stream(call):
    async def read():
        async for _ in call:
            pass

    return await failure(read())


async def test_a_fleet_error_arrives_as_it_was_raised(serve):
    served = await serve()
    error = await failure(served.stub.GetInfo(engine_pb2.GetInfoRequest()))
    assert isinstance(error, errors.NotFoundError)
    assert (error.message, error.reason, error.metadata) == ("no info", "NO_INFO", {"a": "b"})


async def test_a_bug_is_internal_and_tells_no_secrets(serve):
    served = await serve()
    call = served.stub.Run(engine_pb2.EngineRequest(tenant="bug"))
    error = await failure_of_stream(call)
    assert isinstance(error, errors.InternalError)
    assert "secret" not in error.message


async def test_a_handler_may_abort_by_itself(serve):
    served = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Drain(engine_pb2.DrainRequest())
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_handlers_of_each_streaming_kind(serve):
    served = await serve()
    run = [m.delta.text async for m in served.stub.Run(engine_pb2.EngineRequest())]
    assert run == ["first", "last"]
    watch = served.stub.WatchLoad(engine_pb2.WatchLoadRequest())
    assert [m.sequence async for m in watch] == [0, 1, 2]
    chunks = served.stub.GetTokenizer(engine_pb2.GetTokenizerRequest())
    assert [m.digest async for m in chunks] == ["written"]


async def test_large_details_are_cut_to_what_trailers_bear(serve):
    served = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Abort(engine_pb2.AbortRequest())
    raw = dict(caught.value.trailing_metadata())[errors.DETAILS_KEY]
    assert len(raw) <= errors.MAX_DETAILS_BYTES
    error = errors.error_of(caught.value)
    assert isinstance(error, errors.InvalidArgumentError)
    assert len(error.message) <= errors.MAX_MESSAGE_CHARS
    assert error.retry_after_s == 1.5


@pytest.mark.parametrize("method", ["GetInfo", "Run"])
async def test_malformed_bytes(serve, method):
    served = await serve()
    path = f"/{NAME}/{method}"
    if method == "Run":
        error = await failure_of_stream(served.channel.unary_stream(path)(b"\xff\xff"))
    else:
        error = await failure(served.channel.unary_unary(path)(b"\xff\xff"))
    assert isinstance(error, errors.InvalidArgumentError)
    assert error.reason == "MALFORMED_MESSAGE"


async def test_a_message_over_the_limit(serve):
    served = await serve()
    big = b"\0" * (rpc.MAX_RECEIVE_BYTES + 1)
    error = await failure(served.channel.unary_unary(f"/{NAME}/GetInfo")(big))
    assert isinstance(error, errors.ResourceExhaustedError)


async def test_an_unknown_method(serve):
    served = await serve()
    error = await failure(served.channel.unary_unary(f"/{NAME}/Nothing")(b""))
    assert isinstance(error, errors.UnimplementedError)


@pytest.mark.parametrize("tenant", ["wait", "flood"])
async def test_a_caller_that_leaves_ends_the_handler_at_once(serve, tenant):
    served = await serve()
    call = served.stub.Run(engine_pb2.EngineRequest(tenant=tenant))
    await call.read()
    call.cancel()
    async with asyncio.timeout(10):
        await served.servicer.ended.wait()


async def test_the_deadline_as_the_handler_sees_it(serve):
    served = await serve()
    async for _ in served.stub.Run(engine_pb2.EngineRequest(), timeout=50):
        pass
    assert 40 < served.servicer.remaining_s < 51
    async for _ in served.stub.Run(engine_pb2.EngineRequest()):
        pass
    assert served.servicer.remaining_s is None


async def test_only_members_may_call(serve):
    served = await serve(rpc.Membership(token="the-token"))
    request = engine_pb2.GetInfoRequest()
    for metadata in ((), ((rpc.TOKEN_KEY, "other"),), ((rpc.TOKEN_KEY, ""),)):
        error = await failure(served.stub.GetInfo(request, metadata=metadata))
        assert isinstance(error, errors.PermissionDeniedError)
        call = served.stub.Run(engine_pb2.EngineRequest(), metadata=metadata)
        assert isinstance(await failure_of_stream(call), errors.PermissionDeniedError)
    member = rpc.Membership(token="the-token").metadata
    assert isinstance(
        await failure(served.stub.GetInfo(request, metadata=member)), errors.NotFoundError
    )
    health = health_pb2_grpc.HealthStub(served.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status


async def test_health_follows_what_it_is_told(serve):
    served = await serve()
    stub = health_pb2_grpc.HealthStub(served.channel)
    kinds = health_pb2.HealthCheckResponse
    for serving, wanted in ((True, kinds.SERVING), (False, kinds.NOT_SERVING)):
        await rpc.set_health(served.health, [NAME], serving=serving)
        for name in ("", NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == wanted


def test_a_port_in_use_is_a_configuration_error():
    async def run():
        first, second = rpc.make_server(), rpc.make_server()
        port = rpc.Membership().bind(first, "127.0.0.1:0")
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            rpc.Membership().bind(second, f"127.0.0.1:{port}")
        await first.stop(None)

    asyncio.run(run())


def test_membership_from_files(tmp_path):
    (tmp_path / "token").write_text("abc\n")
    config = ServiceConfig(fleet_token_file=str(tmp_path / "token"))
    assert rpc.Membership.from_config(config).metadata == ((rpc.TOKEN_KEY, "abc"),)
    assert rpc.Membership.from_config(ServiceConfig()).metadata == ()
    with pytest.raises(ConfigError, match="tls_ca_file: needed"):
        rpc.Membership.from_config(ServiceConfig(tls_cert_file="x", tls_key_file="y"))
    with pytest.raises(ConfigError, match="tls_ca_file: cannot read"):
        rpc.Membership.from_config(
            ServiceConfig(tls_ca_file="/none", tls_cert_file="x", tls_key_file="y")
        )
    with pytest.raises(ConfigError, match="fleet_token_file"):
        rpc.Membership.from_config(ServiceConfig(fleet_token_file="/none"))


def _certificates():
    """A CA and a certificate for localhost signed by it; another CA's for a stranger."""

    def make(subject, issuer=None, issuer_key=None, ca=False):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer.subject if issuer else name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        )
        return builder.sign(issuer_key or key, hashes.SHA256()), key

    def pem(cert, key):
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cert.public_bytes(serialization.Encoding.PEM), private

    ca, ca_key = make("fleet ca", ca=True)
    member = pem(*make("localhost", ca, ca_key))
    stranger = pem(*make("localhost"))
    ca_pem = pem(ca, ca_key)[0]
    return (
        rpc.Membership(ca=ca_pem, cert=member[0], key=member[1]),
        rpc.Membership(ca=ca_pem, cert=stranger[0], key=stranger[1]),
    )


async def test_mutual_tls(serve):
    member, stranger = _certificates()
    served = await serve(member)
    run = [m.delta.text async for m in served.stub.Run(engine_pb2.EngineRequest())]
    assert run == ["first", "last"]
    for outsider in (stranger, rpc.Membership()):
        async with outsider.channel(served.address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            error = await failure(stub.GetInfo(engine_pb2.GetInfoRequest(), timeout=10))
            assert isinstance(error, errors.UnavailableError | errors.DeadlineExceededError)


async def test_tls_for_callers_without_a_certificate():
    member, _ = _certificates()
    server = rpc.make_server()
    engine_pb2_grpc.add_EngineServicer_to_server(Servicer(), server)
    port = member.bind(server, "localhost:0", members_only=False)
    await server.start()
    credentials = grpc.ssl_channel_credentials(member.ca)
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        run = engine_pb2_grpc.EngineStub(channel).Run(engine_pb2.EngineRequest())
        assert [m.delta.text async for m in run] == ["first", "last"]
    await server.stop(None)


@pytest.mark.parametrize(
    "error", [errors.NotFoundError("late"), grpc.aio.InternalError("batch failed")]
)
async def test_a_call_that_has_just_ended_is_no_fault_of_the_server(error, caplog):
    """gRPC raises from `abort` then, and would log a traceback for each client that left."""

    class Ended:
        async def abort(self, *_):
            raise grpc.aio.InternalError("batch failed")

    with pytest.raises(asyncio.CancelledError):
        await abort_call(Ended(), error, "Run")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
