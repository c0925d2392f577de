"""Long prompts are tokenized in a thread; slots in flight; a drain waits for running requests."""

import asyncio

import grpc
import pytest

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import AlreadyExistsError, UnavailableError
from services.gateway.request.in_flight import InFlight
from tests.doubles.gateway import running_gateway


async def test_a_long_prompt_is_tokenized_in_a_thread(engine):
    engine.max_model_len = 100_000
    async with (
        running_gateway(engine) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        text = "äb" * 20_000
        request = inference_pb2.GenerateRequest(model="tiny", text=text)
        await gateway.stub(channel).Complete(request)
        chat = inference_pb2.Chat(messages=[{"role": "user", "content": text}])
        tokenize_request = inference_pb2.TokenizeRequest(model="tiny", chat=chat)
        rendered = (await gateway.stub(channel).Tokenize(tokenize_request)).rendered
    assert bytes(engine.requests[0].request.token_ids.ids) == text.encode()
    assert text in rendered


async def test_a_chat_that_cannot_fit_is_refused_before_its_template_is_rendered(
    engine, monkeypatch
):
    rendered = []
    monkeypatch.setattr(
        "services.gateway.models.renderer.render_prompt", lambda *_: rendered.append(1)
    )
    async with (
        running_gateway(engine) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        chat = inference_pb2.Chat(messages=[{"role": "user", "content": "ab" * 10_000}])
        with pytest.raises(grpc.aio.AioRpcError, match="chat: the prompt has at least"):
            await gateway.stub(channel).Complete(
                inference_pb2.GenerateRequest(model="tiny", chat=chat)
            )
    assert not rendered


def hold(in_flight, tenant, request_id):
    return in_flight.hold_slot(tenant, request_id, lambda: None)


async def test_a_slot_is_held_once_per_tenant_and_id():
    in_flight = InFlight()
    held = (hold(in_flight, "a", "1"), hold(in_flight, "b", "1"), hold(in_flight, "a", "2"))
    with held[0], held[1], held[2]:
        assert len(in_flight) == 3
        with pytest.raises(AlreadyExistsError), hold(in_flight, "a", "1"):
            pass
        assert len(in_flight) == 3
    assert len(in_flight) == 0


async def test_a_drain_refuses_waits_and_gives_up():
    in_flight = InFlight()
    with hold(in_flight, "a", "1"):
        assert not await in_flight.drain(0.01)
        with pytest.raises(UnavailableError), hold(in_flight, "a", "2"):
            pass
        waiting = asyncio.create_task(in_flight.drain(10))
        await asyncio.sleep(0)
    assert await waiting
    assert await in_flight.drain(0)
