"""The fleet token is proven and never sent, whoever registers or passes challenges on."""

import asyncio
import contextlib
import socket
import time
from contextlib import AsyncExitStack

import grpc
import pytest

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc, members_pb2, members_pb2_grpc
from services.common import rpc
from services.common.rpc.carrier import CarrierConnection
from services.common.rpc.metadata import PROOF_KEY, TOKEN_KEY

TOKEN = "a-token-that-is-long-enough"
MEMBER = rpc.Membership(token=TOKEN)


class Engine(engine_pb2_grpc.EngineServicer):
    def __init__(self):
        self.metadata = []

    async def GetInfo(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        return engine_pb2.EngineInfo(engine_id="e")

    async def Run(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        for event in ():
            yield event


class PassesOn(members_pb2_grpc.MembersServicer):
    """A stranger who lets a true member answer the challenges."""

    def __init__(self, member):
        self._stub = members_pb2_grpc.MembersStub(member)

    async def Prove(self, request, context):
        return await self._stub.Prove(request)


class Replays(members_pb2_grpc.MembersServicer):
    """A stranger who once heard a true answer."""

    def __init__(self, answer):
        self._answer = answer

    async def Prove(self, request, context):
        return self._answer


@pytest.fixture
async def serve():
    """Starts a server; returns its engine, its address and a channel to it."""
    async with AsyncExitStack() as stack:

        async def start(membership=None, members=None, at="127.0.0.1:0", registered=None):
            where = ""
            server = rpc.make_server(
                membership=membership, address=lambda: where if registered is None else registered
            )
            engine = Engine()
            engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
            if members is not None:
                members_pb2_grpc.add_MembersServicer_to_server(members, server)
            where = f"127.0.0.1:{MEMBER.bind(server, at)}"
            await server.start()
            stack.push_async_callback(server.stop, None)
            channel = MEMBER.channel(where)
            stack.push_async_callback(channel.close)
            return engine, where, channel, server

        yield start


def get_info(channel, metadata):
    return engine_pb2_grpc.EngineStub(channel).GetInfo(
        engine_pb2.GetInfoRequest(), metadata=metadata
    )


async def test_members_meet_without_the_token(serve):
    engine, address, channel, _ = await serve(MEMBER)
    peer = MEMBER.peer(channel, address, registered=True)
    assert peer.shown is None
    await get_info(channel, await peer.metadata())
    (seen,) = engine.metadata
    assert TOKEN_KEY not in seen
    assert TOKEN not in str(seen)
    assert seen[PROOF_KEY] == dict(peer.shown)[PROOF_KEY]


async def test_the_token_itself_is_still_accepted(serve):
    engine, _, channel, _ = await serve(MEMBER)
    await get_info(channel, MEMBER.metadata)  # operators, and members of 0.2.0
    assert len(engine.metadata) == 1


@pytest.mark.parametrize(
    "stranger",
    [{"membership": None}, {"membership": rpc.Membership(token="another-token-of-its-own")}],
)
async def test_a_stranger_is_refused(serve, stranger):
    _, address, channel, _ = await serve(**stranger)
    with pytest.raises(rpc.UnprovenPeerError) as refused:
        await MEMBER.peer(channel, address, registered=False).metadata()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert address in refused.value.details()


async def test_a_stranger_who_passes_challenges_on_is_refused(serve):
    _, _, member, _ = await serve(MEMBER)
    _, address, channel, _ = await serve(members=PassesOn(member))
    with pytest.raises(rpc.UnprovenPeerError, match="the proof is of the member at 127"):
        await MEMBER.peer(channel, address, registered=True).metadata()


async def test_an_old_answer_proves_nothing(serve):
    _, address, member, server = await serve(MEMBER)
    stub = members_pb2_grpc.MembersStub(member)
    heard = await stub.Prove(members_pb2.ProveRequest(challenge=bytes(32)))
    await server.stop(None)
    _, address, channel, _ = await serve(members=Replays(heard), at=address)
    with pytest.raises(rpc.UnprovenPeerError, match="not made with this fleet's token"):
        await MEMBER.peer(channel, address, registered=True).metadata()


async def test_a_proof_is_worth_nothing_at_another_process(serve):
    _, first, one, _ = await serve(MEMBER)
    engine, _, two, _ = await serve(MEMBER)
    shown = await MEMBER.peer(one, first, registered=True).metadata()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await get_info(two, shown)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "so that callers try again"
    assert engine.metadata == []


@pytest.mark.parametrize("length", [0, 31, 33])
async def test_a_challenge_has_its_length(serve, length):
    _, _, channel, _ = await serve(MEMBER)
    stub = members_pb2_grpc.MembersStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="challenge: must have 32 bytes"):
        await stub.Prove(members_pb2.ProveRequest(challenge=bytes(length)))


async def test_a_member_of_an_older_version_gets_the_token_only_if_allowed(serve):
    engine, address, channel, _ = await serve()
    upgrading = rpc.Membership(token=TOKEN, trust_unproven=True)
    await get_info(channel, await upgrading.peer(channel, address, registered=True).metadata())
    assert engine.metadata[0][TOKEN_KEY] == TOKEN
    with pytest.raises(rpc.UnprovenPeerError, match="set trust_unproven"):
        await MEMBER.peer(channel, address, registered=True).metadata()


async def test_runs_wait_for_the_proof_or_fail(serve):
    engine, address, channel, _ = await serve(MEMBER)
    link = CarrierConnection(MEMBER, address, channel, registered=True)
    call = link.run(b"", metadata=(("a", "b"),), timeout_s=5)
    with contextlib.suppress(grpc.RpcError):
        await call.read()
    assert {PROOF_KEY, "a"} <= set(engine.metadata[0])
    assert TOKEN_KEY not in engine.metadata[0]
    await link.close()
    engine, address, channel, _ = await serve()
    link = CarrierConnection(MEMBER, address, channel, registered=True)
    with pytest.raises(rpc.UnprovenPeerError):
        await link.run(b"", metadata=(), timeout_s=5).read()
    assert engine.metadata == []
    await link.close()


async def test_each_caller_waits_for_a_silent_peer_only_as_long_as_it_said():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with grpc.aio.insecure_channel(address) as channel:
            peer = MEMBER.peer(channel, address, registered=True)
            began = time.monotonic()
            errors = await asyncio.gather(
                *(peer.metadata(0.5) for _ in range(4)), return_exceptions=True
            )
            assert time.monotonic() - began < 1.5
    codes = {error.code() for error in errors}
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}


def test_with_tls_the_certificate_is_the_proof():
    assert rpc.Membership(token=TOKEN, ca=b"pem").shown_unasked == ((TOKEN_KEY, TOKEN),)
    assert rpc.Membership().shown_unasked == ()


async def test_a_short_token_is_warned_of(caplog):
    rpc.make_server(membership=rpc.Membership(token="s3cret"))
    assert "6 characters" in caplog.text
    caplog.clear()
    rpc.make_server(membership=MEMBER)
    assert not caplog.text
