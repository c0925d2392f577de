"""Bad input: its status and its field, and every other stream undisturbed."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from inferfleet_proto.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]
MODEL = "smollm2-135m-instruct"
CODE = grpc.StatusCode


def greedy(**changes) -> pb.GenerateRequest:
    request = pb.GenerateRequest(model=MODEL, text="Hello")
    request.stop.max_tokens = 4
    for path, value in changes.items():
        message, _, name = path.rpartition("__")
        setattr(getattr(request, message) if message else request, name, value)
    return request


def with_many_stops() -> pb.GenerateRequest:
    request = greedy()
    request.stop.stop_strings.extend(f"stop {number}" for number in range(10_000))
    return request


BAD = {
    "unknown model": (greedy(model="none"), CODE.NOT_FOUND, None),
    "empty text": (greedy(text=""), CODE.INVALID_ARGUMENT, "text"),
    "no prompt": (pb.GenerateRequest(model=MODEL), CODE.INVALID_ARGUMENT, "prompt"),
    "too long": (
        pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=[5] * 9000)),
        CODE.INVALID_ARGUMENT,
        "token_ids",
    ),
    "temperature -1": (
        greedy(sampling__temperature=-1.0),
        CODE.INVALID_ARGUMENT,
        "sampling.temperature",
    ),
    "top_p 0": (greedy(sampling__top_p=0.0), CODE.INVALID_ARGUMENT, "sampling.top_p"),
    "10,000 stops": (with_many_stops(), CODE.INVALID_ARGUMENT, "stop.stop_strings"),
    "token beyond the vocabulary": (
        pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=[49_152])),
        CODE.INVALID_ARGUMENT,
        "token_ids",
    ),
}


def fields_of(error: grpc.RpcError) -> list[str]:
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    fields = []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return fields


def send_raw(fleet, message: bytes) -> grpc.RpcError:
    call = fleet.channel.unary_stream(
        "/inferfleet.v1.Inference/Generate",
        request_serializer=bytes,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call(message, timeout=60))
    return caught.value


@pytest.fixture
def neighbour(fleet, golden, wait_until):
    """A long greedy stream that runs all the while and must not notice anything."""
    item = golden[1]
    stream = fleet.stream(fleet.request(item["prompt_ids"], max_tokens=16))
    wait_until(stream.deltas, "the neighbour's first token")
    yield stream
    assert stream.result().token_ids == item["output_ids"][:16]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_its_field(fleet, neighbour, name):
    request, code, field = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        list(fleet.stub.Generate(request, timeout=60))
    assert caught.value.code() is code, caught.value.details()
    if field is not None:
        named = fields_of(caught.value)
        assert any(field in one for one in named), named


def test_malformed_bytes_are_invalid(fleet, neighbour):
    assert send_raw(fleet, b"\xff\xfe\xfd" * 7).code() is CODE.INVALID_ARGUMENT


def test_a_message_over_the_limit_is_refused_and_the_channel_lives(fleet, neighbour):
    big = greedy(text="x" * (17 * 1024 * 1024)).SerializeToString()
    assert send_raw(fleet, big).code() is CODE.RESOURCE_EXHAUSTED
    assert list(fleet.stub.Generate(greedy(), timeout=60))
