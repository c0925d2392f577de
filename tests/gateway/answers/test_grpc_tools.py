"""Tool calls over gRPC: Generate sends deltas of calls, Complete whole calls."""

import grpc
import pytest

from inferfleet_proto.v1 import inference_pb2 as pb
from tests.doubles.scripts import EOS

MODEL = "tiny"
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'
ARGUMENTS = '{"name": "a</tool_call>"}'
CALL = f'<tool_call>\n{{"name": "log_reading", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(autouse=True)
def long_context(engine):
    engine.max_model_len = 8192


async def test_deltas_of_calls(gateway, engine):
    engine.reply = f"Hm.\n{CALL}"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    chat.tools.add(name="log_reading", parameters_json=SCHEMA)
    request = pb.GenerateRequest(model=MODEL, chat=chat)
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub = gateway.stub(channel)
        events = [event async for event in stub.Generate(request)]
        answer = await stub.Complete(request)
    deltas = [event.delta for event in events if event.HasField("delta")]
    calls = [delta.tool_call for delta in deltas if delta.WhichOneof("content") == "tool_call"]
    assert [bool(call.id and call.name) for call in calls] == [True] + [False] * (len(calls) - 1)
    assert "".join(call.arguments for call in calls) == ARGUMENTS
    assert "".join(delta.text for delta in deltas) == "Hm."
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert ids == [*engine.reply.encode(), EOS]
    assert answer.choices[0].tool_calls[0].arguments == ARGUMENTS


@pytest.mark.parametrize("field", ["echo", "no_text"])
async def test_fields_that_exclude_tools(stub, field):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    chat.tools.add(name="f")
    request = pb.GenerateRequest(model=MODEL, chat=chat, response={field: True})
    with pytest.raises(grpc.aio.AioRpcError, match=f"response.{field}"):
        await stub.Complete(request)
