"""The public gRPC contract at the gateway."""

import asyncio

import grpc
import pytest

from inferfleet_proto.v1 import inference_pb2
from services.common import errors, rpc
from services.common.block_hash import effective_salt

MODEL = "tiny"


def request(**fields) -> inference_pb2.GenerateRequest:
    fields.setdefault("text", "ab")
    return inference_pb2.GenerateRequest(model=MODEL, **fields)


async def texts(call) -> str:
    return "".join([event.delta.text async for event in call if event.HasField("delta")])


async def failure(awaitable) -> errors.FleetError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return errors.error_of(caught.value)


class TestGenerate:
    async def test_streams_the_engines_events(self, stub, engine):
        call = stub.Generate(request())
        events = [event async for event in call]
        assert "".join(e.delta.text for e in events) == engine.reply
        assert [e.WhichOneof("event") for e in events[:1] + events[-2:]] == [
            "started",
            "finished",
            "summary",
        ]
        metadata = dict(await call.initial_metadata())
        assert metadata[rpc.REQUEST_ID_KEY] == events[0].started.request_id
        assert metadata[rpc.ENGINE_ID_KEY] == "engine-1"
        assert len(metadata[rpc.TRACE_ID_KEY]) == 32

    async def test_the_engine_gets_ids_seed_and_no_text(self, stub, engine):
        await texts(stub.Generate(request(request_id="mine")))
        inner = engine.requests[0]
        assert list(inner.request.token_ids.ids) == [97, 98]
        assert inner.request.WhichOneof("prompt") == "token_ids"
        assert inner.request.sampling.HasField("seed")
        assert inner.request.request_id == "mine"
        assert (inner.tenant, inner.salt) == ("", b"")
        assert engine.metadata[0][rpc.REQUEST_ID_KEY] == "mine"
        assert 590 < engine.timeouts[0] <= 601  # gRPC rounds long ones up to whole seconds

    async def test_two_requests_get_two_seeds_and_a_chosen_one_stays(self, stub, engine):
        for sampling in ({}, {}, {"seed": 0}):
            await texts(stub.Generate(request(sampling=sampling)))
        seeds = [r.request.sampling.seed for r in engine.requests]
        assert seeds[0] != seeds[1]
        assert seeds[2] == 0

    async def test_a_chat_is_rendered(self, stub, engine):
        chat = inference_pb2.Chat(messages=[{"role": "user", "content": "hi"}])
        await texts(stub.Generate(inference_pb2.GenerateRequest(model=MODEL, chat=chat)))
        ids = engine.requests[0].request.token_ids.ids
        expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == expected

    async def test_messages_pass_byte_for_byte(self, gateway, engine):
        """A field that this build does not know is not lost on the way."""

        async def from_the_future(_, double):
            raw = double.started(engine.requests[-1]).SerializeToString()
            yield inference_pb2.GenerateResponse.FromString(raw + b"\xfa\x07\x03new")
            yield double.summary(engine.requests[-1], 0)

        engine.script = from_the_future
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            call = channel.unary_stream("/inferfleet.v1.Inference/Generate")
            raw = [m async for m in call(request().SerializeToString())]
        assert raw[0].endswith(b"\xfa\x07\x03new")

    async def test_the_callers_deadline_passes_through(self, stub, engine):
        await texts(stub.Generate(request(), timeout=5))
        assert 3 < engine.timeouts[0] < 6  # gRPC rounds what it sends

    async def test_complete_gathers_the_stream(self, stub, engine):
        answer = await stub.Complete(request(sampling={"n": 2, "seed": 7}))
        assert [c.text for c in answer.choices] == [engine.reply] * 2
        assert answer.choices[1].token_ids[-1] == 258
        assert answer.seed == 7
        assert answer.summary.usage.completion_tokens == 2 * (len(engine.reply.encode()) + 1)


class TestTextAndModels:
    async def test_tokenize_and_back(self, stub):
        answer = await stub.Tokenize(inference_pb2.TokenizeRequest(model=MODEL, text="é"))
        assert list(answer.token_ids) == [0xC3, 0xA9]
        back = inference_pb2.DetokenizeRequest(model=MODEL, token_ids=[*answer.token_ids, 258])
        assert (await stub.Detokenize(back)).text == "é"
        back.keep_special_tokens = True
        assert (await stub.Detokenize(back)).text == "é<|im_end|>"

    async def test_control_tokens_come_only_from_a_prompt_that_asks(self, stub, engine):  # R2-16
        text = "a<|im_end|>"
        for parse, ids in ((False, [*text.encode()]), (True, [97, 258])):
            asked = inference_pb2.TokenizeRequest(
                model=MODEL, text=text, parse_special_tokens=parse
            )
            assert list((await stub.Tokenize(asked)).token_ids) == ids
            await texts(stub.Generate(request(text=text, parse_special_tokens=parse)))
            assert list(engine.requests[-1].request.token_ids.ids) == ids
        chat = inference_pb2.Chat(messages=[{"role": "user", "content": text}])
        answer = await stub.Tokenize(inference_pb2.TokenizeRequest(model=MODEL, chat=chat))
        assert [i for i in answer.token_ids if i > 255] == [257, 258, 257]
        parts = {"model": MODEL, "chat": chat, "parse_special_tokens": True}
        for call in (
            stub.Complete(inference_pb2.GenerateRequest(**parts)),
            stub.Tokenize(inference_pb2.TokenizeRequest(**parts)),
        ):
            assert (await failure(call)).violations[0].field == "parse_special_tokens"

    async def test_detokenize_names_a_foreign_id(self, stub):
        call = stub.Detokenize(inference_pb2.DetokenizeRequest(model=MODEL, token_ids=[999]))
        error = await failure(call)
        assert error.violations[0].field == "token_ids"

    async def test_models(self, stub):
        (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.num_engines, model.vocab_size) == (MODEL, 1, 259)

    async def test_the_tokenizer_is_fetched_once_for_many(self, stub, engine):
        await asyncio.gather(*(texts(stub.Generate(request())) for _ in range(20)))
        assert engine.tokenizer_calls == 1


BAD = {
    "text": {"text": ""},
    "token_ids.ids": {"token_ids": {"ids": [259]}, "text": None},
    "sampling.temperature": {"sampling": {"temperature": -1}},
    "sampling.top_p": {"sampling": {"top_p": 0}},
    "sampling.min_p": {"sampling": {"min_p": float("nan")}},
    "sampling.n": {"sampling": {"n": 17}},
    "sampling.logit_bias": {"sampling": {"logit_bias": {259: 1}}},
    "sampling.logit_bias[5]": {"sampling": {"logit_bias": {5: 1e9}}},
    "sampling.bad_token_ids": {"sampling": {"bad_token_ids": [259]}},
    "stop.max_tokens": {"stop": {"max_tokens": 0}},
    "stop.min_tokens": {"stop": {"min_tokens": 5, "max_tokens": 4}},
    "stop.stop_strings": {"stop": {"stop_strings": ["x"] * 10_000}},
    "stop.stop_strings[1]": {"stop": {"stop_strings": ["x", ""]}},
    "stop.stop_token_ids": {"stop": {"stop_token_ids": [259]}},
    "response.top_logprobs": {"response": {"top_logprobs": 21}},
    "constraint.regex": {"constraint": {"regex": ""}},
    "constraint.choice": {"constraint": {"choice": {"texts": ["a", ""]}}},
    "request_id": {"request_id": "a b"},
    "chat.messages": {"chat": {}, "text": None},
    "chat.tools[0].name": {
        "chat": {"messages": [{"role": "user"}], "tools": [{"name": "f g"}]},
        "text": None,
    },
    "chat.tools[1].name": {
        "chat": {"messages": [{"role": "user"}], "tools": [{"name": "f"}, {"name": "f"}]},
        "text": None,
    },
    "chat.tools[0].parameters": {
        "chat": {"messages": [{"role": "user"}], "tools": [{"name": "f", "parameters_json": "[]"}]},
        "text": None,
    },
    "chat.tool_choice": {
        "chat": {"messages": [{"role": "user"}], "tool_choice": {"mode": "MODE_REQUIRED"}},
        "text": None,
    },
    "chat.tool_choice.name": {
        "chat": {
            "messages": [{"role": "user"}],
            "tools": [{"name": "f"}],
            "tool_choice": {"mode": "MODE_NAMED", "name": "g"},
        },
        "text": None,
    },
}


class TestBadInput:
    @pytest.mark.parametrize("field", BAD)
    async def test_the_field_is_named_and_nothing_is_sent(self, stub, engine, field):
        error = await failure(texts(stub.Generate(request(**BAD[field]))))
        assert isinstance(error, errors.InvalidArgumentError)
        assert error.violations[0].field == field
        assert field in error.message
        assert engine.requests == []

    async def test_ids_still_come_back_with_an_error(self, stub):
        call = stub.Generate(request(text=""))
        await failure(texts(call))
        metadata = dict(await call.initial_metadata())
        assert metadata[rpc.REQUEST_ID_KEY].startswith("req-")
        assert len(metadata[rpc.TRACE_ID_KEY]) == 32

    async def test_no_prompt_and_no_model(self, stub):
        error = await failure(texts(stub.Generate(request(text=None))))
        assert error.violations[0].field == "prompt"
        error = await failure(texts(stub.Generate(inference_pb2.GenerateRequest(text="a"))))
        assert error.violations[0].field == "model"
        error = await failure(
            texts(stub.Generate(inference_pb2.GenerateRequest(model="gpt", text="a")))
        )
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")

    @pytest.mark.parametrize(("length", "fits"), [(254, True), (255, True), (256, False)])
    async def test_the_contexts_end(self, stub, length, fits):
        call = stub.Generate(request(text=None, token_ids={"ids": [97] * length}))
        if fits:
            await texts(call)
            return
        error = await failure(texts(call))
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert error.metadata == {"prompt_tokens": "256", "max_model_len": "256"}

    async def test_a_hopelessly_long_text_is_refused_untokenised(self, stub):
        error = await failure(texts(stub.Generate(request(text="x" * 1_000_000))))
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert error.metadata["prompt_tokens"].startswith("at least")

    async def test_malformed_bytes_are_the_callers_fault(self, gateway):
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            call = channel.unary_stream("/inferfleet.v1.Inference/Generate")
            error = await failure(call(b"\xff\xff\xff").read())
            assert error.reason == "MALFORMED_MESSAGE"
            half_a_character = b"\x12\x01\xc3"
            error = await failure(call(half_a_character).read())
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_message_over_the_limit_disturbs_no_neighbour(self, gateway, engine, scripts):
        engine.script = scripts["hold"]
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(gateway.address, options=options) as channel:
            neighbour = gateway.stub(channel).Generate(request())
            await neighbour.read()
            huge = request(text="x" * (17 * 1024 * 1024))
            error = await failure(gateway.stub(channel).Generate(huge).read())
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await neighbour.read()).delta.text == "H"
            neighbour.cancel()

    async def test_more_than_four_mebibytes_pass(self, stub):
        """1.2 million ids: a length error of ours, not one of the transport."""
        error = await failure(
            texts(stub.Generate(request(text=None, token_ids={"ids": [97] * 5_000_000})))
        )
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"


class TestEnds:
    async def test_a_client_that_leaves_is_cancelled_upstream(self, stub, engine, scripts):
        engine.script = scripts["hold"]
        call = stub.Generate(request(request_id="gone"))
        await call.read()
        await call.read()
        call.cancel()
        await engine.wait_for(lambda: engine.running == 0 and engine.cancelled == 1)
        engine.script = scripts["hello"]
        assert await texts(stub.Generate(request(request_id="gone"))) == engine.reply

    async def test_the_same_id_twice_in_flight_is_refused(self, stub, engine, scripts):
        engine.script = scripts["hold"]
        first = stub.Generate(request(request_id="one"))
        await first.read()
        error = await failure(texts(stub.Generate(request(request_id="one"))))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        assert (await first.read()).delta.text == "H"
        first.cancel()

    async def test_a_status_before_and_after_the_first_token_reaches_the_caller(
        self, stub, engine, scripts
    ):
        full = errors.ResourceExhaustedError("queue full", reason="QUEUE_FULL", retry_after_s=2)
        engine.script = scripts["fail"](full)
        error = await failure(texts(stub.Generate(request())))
        assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 2)
        broken = errors.AbortedError("engine lost", metadata={"completion_tokens": "2"})
        engine.script = scripts["fail"](broken, after=2)
        error = await failure(texts(stub.Generate(request())))
        assert error.reason == "STREAM_BROKEN"
        assert error.metadata == {"completion_tokens": "2"}

    async def test_a_cut_stream_never_ends_cleanly(self, stub, engine):
        async def cut(engine_request, double):
            yield double.started(engine_request)

        engine.script = cut
        error = await failure(texts(stub.Generate(request())))
        assert error.code is grpc.StatusCode.ABORTED

    async def test_an_abort_by_the_fleet_reaches_the_caller(self, stub, engine, scripts):
        engine.script = scripts["fail"](errors.CancelledError("aborted by hand"), after=1)
        call = stub.Generate(request())
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await texts(call)
        assert await call.code() is grpc.StatusCode.CANCELLED

    async def test_a_silent_stream_ends(self, start_gateway, engine, scripts):
        engine.script = scripts["hold"]
        running = await start_gateway(stall_timeout_s=0.3)
        async with grpc.aio.insecure_channel(running.address) as channel:
            error = await failure(texts(running.stub(channel).Generate(request())))
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "STREAM_STALLED")
        await engine.wait_for(lambda: engine.running == 0)

    async def test_no_answer_within_the_time(self, start_gateway, engine, scripts):
        async def never(engine_request, double):
            await asyncio.Event().wait()
            yield double.started(engine_request)

        engine.script = never
        running = await start_gateway(request_timeout_s=0.30012345)
        async with grpc.aio.insecure_channel(running.address) as channel:
            error = await failure(texts(running.stub(channel).Generate(request())))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.message == "no answer within 0.3 s"
        await engine.wait_for(lambda: engine.running == 0)


class TestSalt:
    async def test_it_comes_from_the_key_and_never_from_the_caller(
        self, start_gateway, engine, tmp_path
    ):
        keys = tmp_path / "keys"
        # printf %s secret | sha256sum
        digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
        keys.write_text(f"acme sha256:{digest}\n")
        running = await start_gateway(api_keys_file=str(keys))
        async with grpc.aio.insecure_channel(running.address) as channel:
            stub = running.stub(channel)
            error = await failure(texts(stub.Generate(request())))
            assert error.reason == "MISSING_API_KEY"
            wrong = (("authorization", "Bearer wrong"),)
            error = await failure(texts(stub.Generate(request(), metadata=wrong)))
            assert error.reason == "INVALID_API_KEY"
            right = (("authorization", "Bearer secret"),)
            await texts(stub.Generate(request(), metadata=right))
        assert engine.requests[0].tenant == "acme"
        assert engine.requests[0].salt == effective_salt("acme")
