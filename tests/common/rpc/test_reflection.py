"""Reflection: tools of both generations find every service and its descriptors."""

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from services.common import rpc
from services.common.rpc.reflection import NAMES, OLDER, SERVICE_NAME

PUBLIC = "inferfleet.v1.Inference"


@pytest.fixture
async def ask():
    server = rpc.make_server(membership=rpc.Membership(token="secret"))
    rpc.add_health_and_reflection(server, [PUBLIC])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def ask(service, **question):
            call = channel.stream_stream(
                f"/{service}/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )(iter([reflection_pb2.ServerReflectionRequest(**question)]))
            return await call.read()

        yield ask
    await server.stop(None)


@pytest.mark.parametrize("service", NAMES)
async def test_both_names_list_all_services_without_a_token(ask, service):
    answer = await ask(service, list_services="")
    names = {found.name for found in answer.list_services_response.service}
    assert names == {PUBLIC, "grpc.health.v1.Health", *NAMES}


@pytest.mark.parametrize("service", NAMES)
@pytest.mark.parametrize("wanted", [PUBLIC, *NAMES])
async def test_each_service_is_described(ask, service, wanted):
    answer = await ask(service, file_containing_symbol=wanted)
    pool = descriptor_pool.DescriptorPool()
    for raw in reversed(answer.file_descriptor_response.file_descriptor_proto):
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
    described = pool.FindServiceByName(wanted)
    for method in described.methods:
        assert method.input_type.full_name.startswith(wanted.rpartition(".")[0])


async def test_the_newer_messages_are_those_of_the_newer_package(ask):
    answer = await ask(SERVICE_NAME, file_containing_symbol=SERVICE_NAME)
    (raw,) = answer.file_descriptor_response.file_descriptor_proto
    assert b"v1alpha" not in raw
    older = await ask(OLDER, file_containing_symbol=OLDER)
    assert b"v1alpha" in older.file_descriptor_response.file_descriptor_proto[0]


async def test_what_is_not_there_is_not_found(ask):
    answer = await ask(SERVICE_NAME, file_containing_symbol="no.Such")
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
