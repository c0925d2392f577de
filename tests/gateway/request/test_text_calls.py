"""Tokenize and Detokenize: bounded, off the event loop, ended with their client, counted."""

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import httpx
import pytest
from opentelemetry import trace

from inferfleet_proto.v1 import inference_pb2
from services.common import errors
from services.common.errors import InvalidArgumentError
from services.gateway.request.admission import RequestAdmission
from services.gateway.request.checks import MAX_TOKENIZED_BYTES

VOCAB, CONTEXT = 259, 10_000
Tokenize, Detokenize = inference_pb2.TokenizeRequest, inference_pb2.DetokenizeRequest


class FakeTokenizer:
    """Records the threads in which it works; waits for `go`."""

    max_token_bytes = 128

    def __init__(self):
        self.threads = []
        self.go = threading.Event()
        self.go.set()

    def encode_text(self, text):
        self.threads.append(threading.current_thread().name)
        self.go.wait(10)
        return [0] * len(text)

    def decode(self, ids, *, skip_special_tokens):
        self.threads.append(threading.current_thread().name)
        return "x" * len(ids)


@pytest.fixture
def tokenizer():
    return FakeTokenizer()


@pytest.fixture
def admission(tokenizer):
    async def get(model):
        return SimpleNamespace(tokenizer=tokenizer, template=None)

    model = SimpleNamespace(vocab_size=VOCAB, max_model_len=CONTEXT)
    catalog = SimpleNamespace(find=lambda *_: model)
    with ThreadPoolExecutor(1, "text") as pool, ThreadPoolExecutor(1, "text-calls") as calls:
        yield RequestAdmission(
            catalog,
            SimpleNamespace(get=get),
            pool,
            trace.NoOpTracer(),
            calls_pool=calls,
            renderer=None,  # nothing here may be rendered
        )


async def refusal(awaitable):
    with pytest.raises(InvalidArgumentError) as caught:
        await awaitable
    return caught.value


async def test_more_ids_than_the_context_are_refused_before_they_are_read(admission, tokenizer):
    # The last id is not in the vocabulary: whoever reads the ids would name that.
    error = await refusal(admission.detokenize(Detokenize(token_ids=[1] * CONTEXT + [VOCAB])))
    assert error.violations[0].field == "token_ids"
    assert "at most 10000" in error.message
    assert "10001" in error.message
    assert not tokenizer.threads


async def test_ids_of_a_whole_context_are_decoded_off_the_loop(admission, tokenizer):
    answer = await admission.detokenize(Detokenize(token_ids=[1] * CONTEXT))
    assert len(answer.text) == CONTEXT
    assert tokenizer.threads == ["text-calls_0"]


async def test_a_text_beyond_the_bound_is_refused_before_it_is_tokenized(admission, tokenizer):
    for size in (16 * CONTEXT + 1, 128 * CONTEXT):
        error = await refusal(admission.tokenize(Tokenize(text="a" * size)))
        assert error.violations[0].field == "text"
        assert str(16 * CONTEXT if size < 128 * CONTEXT else CONTEXT) in error.message
    assert not tokenizer.threads
    await admission.tokenize(Tokenize(text="a" * 16 * CONTEXT))
    assert tokenizer.threads == ["text-calls_0"]


async def test_a_long_context_does_not_lift_the_bound(admission, tokenizer):
    admission._catalog.find().max_model_len = 10**6
    error = await refusal(admission.tokenize(Tokenize(text="a" * (MAX_TOKENIZED_BYTES + 1))))
    assert str(MAX_TOKENIZED_BYTES) in error.message


async def test_a_chat_has_the_length_check_of_generate(admission):
    chat = {"messages": [{"role": "user", "content": "a" * 128 * CONTEXT}]}
    error = await refusal(admission.tokenize(Tokenize(chat=chat)))
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_ready_ids_beyond_the_context_are_refused_before_they_are_read(admission):
    request = inference_pb2.GenerateRequest(token_ids={"ids": [1] * CONTEXT + [VOCAB]})
    admit = admission.admit(request, tenant="", request_id="r", context=None)
    assert (await refusal(admit)).reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_waiting_work_ends_with_its_client(admission, tokenizer):
    tokenizer.go.clear()
    request = Tokenize(text="a" * 5000)
    calls = [asyncio.create_task(admission.tokenize(request)) for _ in range(3)]
    await asyncio.sleep(0.05)
    for call in calls[1:]:
        call.cancel()
    await asyncio.wait(calls[1:])
    tokenizer.go.set()
    await calls[0]
    # The pool works in order: what is left of the others would be done before this.
    await asyncio.get_running_loop().run_in_executor(admission._calls_pool, int)
    assert len(tokenizer.threads) == 1  # the others were never begun


def series(text, name):
    """The values of a metric, by the text of its labels."""
    lines = (line.removeprefix(name) for line in text.splitlines() if line.startswith(name))
    return {line.split(" ")[0]: float(line.split(" ")[-1]) for line in lines}


@pytest.fixture
async def limited(start_gateway, tmp_path):
    """A gateway that admits two requests a minute, its stub, and its metrics."""
    digest = hashlib.sha256(b"k").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(f"acme sha256:{digest} id=k requests_per_min=2\n")
    running = await start_gateway(api_keys_file=str(keys))

    async def metrics():
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://{running.metrics}/metrics")).text

    async with grpc.aio.insecure_channel(running.address) as channel:
        yield running, running.stub(channel), metrics


async def code_of(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return errors.error_of(error).reason
    return "OK"


async def test_calls_count_against_the_keys_quota_and_in_the_metrics(limited):
    _, stub, metrics = limited
    key = (("authorization", "Bearer k"),)
    codes = []
    for _ in range(2):
        call = stub.Tokenize(Tokenize(model="tiny", text="ab"), metadata=key)
        codes.append(await code_of(call))
        call = stub.Detokenize(Detokenize(model="tiny", token_ids=[97]), metadata=key)
        codes.append(await code_of(call))
    assert codes == ["OK", "OK", "RATE_LIMIT_EXCEEDED", "RATE_LIMIT_EXCEEDED"]
    counts = series(await metrics(), "inferfleet_gateway_text_calls_total")
    assert counts == {
        f'{{method="{method}",status="{status}"}}': 1
        for method in ("Tokenize", "Detokenize")
        for status in ("OK", "RESOURCE_EXHAUSTED")
    }


async def test_wrong_keys_are_counted_by_face_and_reason(limited):
    running, stub, metrics = limited
    wrong = (("authorization", "Bearer x"),)
    for _ in range(5):
        call = stub.Tokenize(Tokenize(model="tiny", text="a"), metadata=wrong)
        assert await code_of(call) == "INVALID_API_KEY"
    await code_of(stub.ListModels(inference_pb2.ListModelsRequest()))
    async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
        await client.get("/v1/models", headers={"authorization": "Bearer x"})
        await client.post("/v1/chat/completions", json={})
    assert series(await metrics(), "inferfleet_gateway_unauthenticated_total") == {
        '{face="grpc",reason="INVALID_API_KEY"}': 5,
        '{face="grpc",reason="MISSING_API_KEY"}': 1,
        '{face="http",reason="INVALID_API_KEY"}': 1,
        '{face="http",reason="MISSING_API_KEY"}': 1,
    }
    # A call that is nobody's is no call of Tokenize.
    assert not series(await metrics(), "inferfleet_gateway_text_calls_total")


async def test_process_and_build_are_in_the_metrics(limited):
    _, _, metrics = limited
    text = await metrics()
    assert series(text, "process_resident_memory_bytes")[""] > 1e6
    assert series(text, "process_open_fds")[""] > 3
    (labels,) = series(text, "inferfleet_build_info")
    assert 'version="' in labels
