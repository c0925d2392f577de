import asyncio

import grpc
import pytest

from inferfleet_proto.v1 import inference_pb2
from services.common import errors, rpc
from services.engine.contract.messages import AbortRequest, AddRequest, TokenLogprobs


def request(**prompt):
    return inference_pb2.GenerateRequest(
        model="tiny", sampling=inference_pb2.SamplingParams(seed=3), **prompt
    )


async def refused(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return errors.error_of(caught.value)


def chat(*contents):
    messages = [inference_pb2.ChatMessage(role="user", content=c) for c in contents]
    return inference_pb2.Chat(messages=messages)


async def test_generate_from_text_chat_and_ids(front, out):
    prompts = (
        ({"text": "Hi"}, list(b"Hi")),
        ({"token_ids": inference_pb2.TokenIds(ids=[1, 2])}, [1, 2]),
        (
            {"chat": chat("Hi")},
            [257, *b"user\nHi", 258, *b"\n", 257, *b"assistant\n"],
        ),
    )
    for count, (prompt, ids) in enumerate(prompts, start=1):
        call = front.public.Generate(request(**prompt))
        added = await front.core.got(AddRequest, count)
        assert added.request.prompt_token_ids == ids
        assert added.request.tenant == ""
        front.core.say(out(added.request_key, "yes", "MAX_TOKENS"))
        text = ""
        while (event := await call.read()) is not grpc.aio.EOF:
            text += event.delta.text
        assert text == "yes"
        sent = dict(await call.initial_metadata())
        assert sent[rpc.ENGINE_ID_KEY] == "engine-under-test"
        assert len(sent[rpc.REQUEST_ID_KEY]) == 32


async def test_complete_is_the_stream_in_one_message(front, out):
    wanted = request(
        text="Hi",
        request_id="mine",
        stop=inference_pb2.StopParams(stop_strings=["."]),
        response=inference_pb2.ResponseOptions(logprobs=True),
    )
    wanted.sampling.n = 2
    answering = asyncio.ensure_future(front.public.Complete(wanted))
    key = (await front.core.got(AddRequest)).request_key
    one, two = (TokenLogprobs(65, -0.5, []) for _ in range(2))
    front.core.say(
        out(key, "A", logprobs=[one], num_cached_tokens=1), out(key, [66], choice=1, logprobs=[two])
    )
    front.core.say(out(key, "B."), out(key, [258], "EOS", choice=1))
    answer = await answering
    assert (answer.request_id, answer.model, answer.seed) == ("mine", "tiny", 3)
    assert [choice.text for choice in answer.choices] == ["AB", "B"]
    assert list(answer.choices[0].token_ids) == list(b"AB.")
    assert answer.choices[0].logprobs[0].token == b"A"
    assert answer.choices[0].finished.stop_string == "."
    assert answer.choices[1].finished.reason == inference_pb2.FINISH_REASON_EOS
    assert answer.summary.usage.completion_tokens == 5
    assert answer.summary.usage.cached_tokens == 1


async def test_a_caller_of_complete_that_leaves_frees_the_request(front):
    answering = asyncio.ensure_future(front.public.Complete(request(text="Hi")))
    await front.core.got(AddRequest)
    answering.cancel()
    await front.core.got(AbortRequest)


async def test_tokenize_and_detokenize(front):
    answer = await front.public.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text="é"))
    assert (list(answer.token_ids), answer.rendered) == ([0xC3, 0xA9], "é")
    answer = await front.public.Tokenize(
        inference_pb2.TokenizeRequest(model="tiny", chat=chat("x"))
    )
    assert answer.rendered.startswith("<|im_start|>user\nx<|im_end|>")
    assert answer.token_ids[0] == 257
    for parse, ids in ((False, [*b"<|im_end|>"]), (True, [258])):  # R2-16
        answer = await front.public.Tokenize(
            inference_pb2.TokenizeRequest(
                model="tiny", text="<|im_end|>", parse_special_tokens=parse
            )
        )
        assert list(answer.token_ids) == ids
    evil = inference_pb2.TokenizeRequest(model="tiny", chat=chat("<|im_end|>"))
    answer = await front.public.Tokenize(evil)
    assert [i for i in answer.token_ids if i > 255] == [257, 258, 257]
    long = "word " * 5000
    answer = await front.public.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text=long))
    assert bytes(answer.token_ids).decode() == long
    for keep, text in ((False, "a\ufffd"), (True, "a<|im_end|>\ufffd")):
        answer = await front.public.Detokenize(
            inference_pb2.DetokenizeRequest(
                model="tiny", token_ids=[97, 258, 0xC3], keep_special_tokens=keep
            )
        )
        assert answer.text == text


async def test_list_models(front):
    answer = await front.public.ListModels(inference_pb2.ListModelsRequest())
    (model,) = answer.models
    assert (model.name, model.revision, model.num_engines) == ("tiny", "sha256:0123", 1)
    assert (model.max_model_len, model.vocab_size) == (64, 259)


async def test_bad_input(front):
    public = front.public
    cases = (
        (public.Complete(inference_pb2.GenerateRequest(model="tiny")), "prompt"),
        (public.Complete(request(text="")), "token_ids.ids"),
        (public.Complete(request(chat=inference_pb2.Chat())), "chat.messages"),
        (public.Complete(request(text="x", request_id="Ж")), "request_id"),
        (public.Complete(request(text="x" * 64)), "prompt"),
        (public.Tokenize(inference_pb2.TokenizeRequest(model="tiny")), "prompt"),
        (
            public.Detokenize(inference_pb2.DetokenizeRequest(model="tiny", token_ids=[259])),
            "token_ids[0]",
        ),
    )
    for call, field in cases:
        error = await refused(call)
        assert isinstance(error, errors.InvalidArgumentError)
        assert error.violations[0].field == field
    unknown = inference_pb2.GenerateRequest(model="other", text="x")
    assert isinstance(await refused(public.Complete(unknown)), errors.NotFoundError)
    assert not [m for m in front.core.received if isinstance(m, AddRequest)]


async def test_tools_that_nobody_would_call_are_refused(front):
    modes = inference_pb2.ToolChoice
    tool = inference_pb2.Tool(name="f")
    for field, tools, mode in (
        ("chat.tools", [tool], modes.MODE_UNSPECIFIED),
        ("chat.tools", [tool], modes.MODE_AUTO),
        ("chat.tool_choice", [], modes.MODE_REQUIRED),
        ("chat.tool_choice", [tool], modes.MODE_NAMED),
    ):
        request_chat = chat("x")
        request_chat.tools.extend(tools)
        request_chat.tool_choice.mode = mode
        error = await refused(front.public.Complete(request(chat=request_chat)))
        assert isinstance(error, errors.InvalidArgumentError)
        assert error.violations[0].field == field


async def test_the_public_service_asks_for_no_token_and_the_internal_one_does(
    start_front, run_request, out, tmp_path
):
    (tmp_path / "token").write_text("secret")
    front = await start_front(public=True, fleet_token_file=str(tmp_path / "token"))
    call = front.engine.Run(run_request())
    error = await refused(call.read())
    assert isinstance(error, errors.PermissionDeniedError)
    call = front.engine.Run(run_request(), metadata=((rpc.TOKEN_KEY, "secret"),))
    key = (await front.core.got(AddRequest)).request_key
    front.core.say(out(key, "x", "MAX_TOKENS"))
    assert (await call.read()).HasField("started")
    answer = await front.public.ListModels(inference_pb2.ListModelsRequest())
    assert answer.models
    by_public_port = grpc.aio.insecure_channel(front.server.public_address)
    async with by_public_port as channel:
        run = channel.unary_unary("/inferfleet.internal.v1.Engine/GetInfo")
        assert isinstance(await refused(run(b"")), errors.UnimplementedError)
