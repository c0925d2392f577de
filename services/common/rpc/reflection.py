"""gRPC reflection under both of its names: grpc.reflection.v1 and the older v1alpha.

The messages of both are the same, field by field. The package grpcio-reflection has v1alpha only,
so its servicer also answers under the newer name, whose descriptor is made from the older one.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLDER: str = reflection.SERVICE_NAME
SERVICE_NAME = "grpc.reflection.v1.ServerReflection"
NAMES = (SERVICE_NAME, OLDER)
_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection of the named services and of itself, under both names."""
    _add_descriptor()
    names = (*service_names, *NAMES)
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers: dict[str, Any] = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _add_descriptor() -> None:
    """Describe the newer service, for clients that ask for it; once per process."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        older = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(older)
        _rename(older)
        pool.Add(older)


def _rename(file: descriptor_pb2.FileDescriptorProto) -> None:
    package = file.package
    file.name, file.package = _FILE, package.removesuffix("alpha")
    file.ClearField("options")
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # a scalar has none, and must not have an empty one
                field.type_name = _newer(field.type_name, package)
    for service in file.service:
        for method in service.method:
            method.input_type = _newer(method.input_type, package)
            method.output_type = _newer(method.output_type, package)


def _newer(name: str, package: str) -> str:
    return name.replace(f".{package}.", f".{package.removesuffix('alpha')}.")
