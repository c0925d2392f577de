"""Public bug reports as cases: HTTP and gRPC through a gateway to an engine with a tiny model.

Any weights will do: a constraint forces the text, a bias forces a token. Requests and what is right
for them lie in tests/data/completions.json; docs/cases.md says which report each is of.
"""

import contextlib
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import jsonschema
import openai
import pytest

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc
from tests.doubles.gateway import sse_events
from tests.doubles.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = json.loads((ROOT / "tests" / "data" / "completions.json").read_text())["requests"]
BAD = [case for case in REQUESTS if case["expect"]["status"] != 200]
GOOD = [case for case in REQUESTS if case["expect"]["status"] == 200]
FORCED = "KLMNOPQRSTUVWXYZ"
EOS, EOT = 257, 258
ENGINE = {
    "served-name": "tiny",
    "max-model-len": 256,
    "block-size": 16,
    "num-blocks": 64,
    "max-num-batched-tokens": 16,
    "threads": 1,
}


def names(case) -> str:
    return f"{case['case']} {case['name']}"


def until(condition, what: str, patience_s: float = 60.0):
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.02)
    return value


class Served:
    """A gateway process, the engine process behind it, and clients of both."""

    def __init__(self, engine: dict, gateway: dict) -> None:
        self.http = httpx.Client(base_url=f"http://{gateway['http_address']}", timeout=200)
        self.openai = openai.OpenAI(
            base_url=f"http://{gateway['http_address']}/v1", api_key="none", max_retries=0
        )
        self._channels = [grpc.insecure_channel(a["address"]) for a in (engine, gateway)]
        self.engine = engine_pb2_grpc.EngineStub(self._channels[0])
        self.grpc = inference_pb2_grpc.InferenceStub(self._channels[1])
        self._metrics = engine["metrics_address"]

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        for channel in self._channels:
            channel.close()

    def post(self, body: dict, **headers: str) -> httpx.Response:
        return self.http.post("/v1/completions", json=expanded(body), headers=headers)

    def choice(self, **body) -> dict:
        response = self.post(body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def streamed(self, **body) -> list[dict]:
        """The events' choices."""
        response = self.post({**body, "stream": True})
        assert response.status_code == 200, response.text
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        return [event["choices"][0] for event in events[:-1]]

    def load(self) -> engine_pb2.LoadReport:
        call = self.engine.WatchLoad(engine_pb2.WatchLoadRequest())
        load = next(call)
        call.cancel()
        return load

    def idle(self) -> bool:
        load = self.load()
        return not (load.running_requests or load.waiting_requests or load.held_blocks)

    def cancelled(self) -> int:
        text = httpx.get(f"http://{self._metrics}/metrics").text
        name = 'inferfleet_engine_requests_total{code="CANCELLED",finish_reason=""} '
        return int(sum(float(ln.split()[-1]) for ln in text.splitlines() if ln.startswith(name)))


def expanded(body: dict) -> dict:
    prompt = body.get("prompt")
    if isinstance(prompt, dict):
        prompt = [prompt["repeat"]] * prompt["count"]
    return {"model": "tiny", **body, "prompt": prompt}


@contextlib.contextmanager
def process(module: str, folder: Path, *flags: str):
    ready = folder / f"{module}.json"
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", module, "--log-level=error"),
            *("--port=0", f"--ready-file={ready}", *flags),
        ],
        cwd=ROOT,
    )
    try:
        until(lambda: ready.exists() or child.poll() is not None, f"{module} to be ready", 180)
        assert child.poll() is None, f"{module} ended before it was ready"
        yield json.loads(ready.read_text())
    finally:
        child.terminate()
        assert child.wait(60) == 0


@pytest.fixture(scope="module")
def _served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    model = write_tiny_model(folder / "tiny")
    flags = [f"--{name}={value}" for name, value in ENGINE.items()]
    with (
        process("services.engine", folder, f"--model={model}", *flags) as engine,
        process(
            "services.gateway",
            folder,
            *("--http-port=0", f"--engines={engine['address']}"),
            f"--balancers={engine['address']}",
        ) as gateway,
    ):
        served = Served(engine, gateway)
        yield served
        served.close()


@pytest.fixture
def served(_served):
    """It must be idle again after each test, every block free."""
    yield _served
    until(_served.idle, "the engine to be idle again")


@pytest.mark.parametrize("case", GOOD, ids=names)
def test_a_good_request_has_its_answer(served, case):
    expect = case["expect"]
    response = served.post(case["body"])
    assert response.status_code == 200, response.text
    answer = response.json()
    choice = answer["choices"][0]
    assert choice["text"] == expect.get("text", choice["text"])
    assert choice["finish_reason"] == expect.get("finish", choice["finish_reason"])
    tokens = answer["usage"]["completion_tokens"]
    assert tokens == expect.get("tokens", tokens)
    pieces = served.streamed(**case["body"], seed=answer.get("seed", 1))
    if "text" in expect:
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == expect["finish"]
    if expect.get("greedy"):
        greedy = served.choice(prompt=case["body"]["prompt"], max_tokens=4, temperature=0)
        assert choice["text"] == greedy["text"]


def test_every_bad_request_is_a_400_and_a_running_stream_goes_on(served):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    alone = served.choice(**body)["text"]
    with served.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as neighbour:
        for case in BAD:
            expect, response = case["expect"], served.post(case["body"])
            error = response.json()["error"]
            assert response.status_code == 400, (names(case), error)
            assert error["param"] == expect.get("param", error["param"]), names(case)
            assert error["code"] == expect.get("code", error["code"]), names(case)
            assert all(word in error["message"] for word in expect.get("says", ())), error
        events = sse_events(neighbour.read().decode())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == alone


FORCE = {"structured_outputs": {"choice": [FORCED]}, "prompt": "x", "max_tokens": 40}


def test_log_probabilities_are_the_same_streamed_and_whole(served):
    body = {**FORCE, "logprobs": 2, "stop": ["QR"], "seed": 3, "model": "tiny"}
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    whole = served.openai.completions.create(
        **{k: v for k, v in body.items() if k != "structured_outputs"},
        extra_body={"structured_outputs": FORCE["structured_outputs"]},
    ).choices[0]
    pieces = served.streamed(**body)
    for column in columns[:3]:
        joined = [entry for piece in pieces for entry in (piece["logprobs"] or {}).get(column, [])]
        assert joined == getattr(whole.logprobs, column), column
    # They cover the text and the token in which the stop ends, and nothing after it.
    assert whole.text == "KLMNOP"
    assert "".join(whole.logprobs.tokens) in ("KLMNOPQ", "KLMNOPQR")
    assert all(math.isfinite(value) and value <= 0 for value in whole.logprobs.token_logprobs)
    for alternatives in whole.logprobs.top_logprobs:
        assert all(math.isfinite(value) for value in alternatives.values())


TEXTS = ["餐具店", "žlutý", "🔥", "👩‍🚀", "🇨🇿", "a🌶b"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_of_many_tokens_come_whole(served, text):
    """Every token of this model is one byte of UTF-8."""
    body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"choice": [text]}}
    whole = served.choice(**body)
    pieces = [piece["text"] for piece in served.streamed(**body)]
    assert whole["text"] == text == "".join(pieces)
    assert all("\ufffd" not in piece for piece in pieces)
    request = pb.GenerateRequest(model="tiny", text="x")
    request.constraint.choice.texts.append(text)
    request.response.logprobs = True
    deltas = [e.delta for e in served.grpc.Generate(request, timeout=60) if e.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == text
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.token for entry in entries if entry.token_id < 256) == text.encode()


def test_no_part_of_the_prompt_is_in_the_answer(served):
    """The prompt ends in 3 of the 4 bytes of a character; the answer is the fourth."""
    raw = "Hello world 🌶".encode()
    ids = [*served.grpc.Tokenize(pb.TokenizeRequest(model="tiny", text="Hello world ")).token_ids]
    request = pb.GenerateRequest(model="tiny")
    of_byte = {e.token[0]: e.token_id for e in byte_tokens(served)}
    ids += [of_byte[byte] for byte in raw[-4:-1]]
    request.token_ids.ids.extend(ids)
    request.sampling.allowed_token_ids.append(of_byte[raw[-1]])
    request.stop.max_tokens = 1
    deltas = [e.delta.text for e in served.grpc.Generate(request, timeout=60)]
    assert "".join(deltas) == "🌶"


def byte_tokens(served) -> list[pb.TokenLogprob]:
    """One entry per token of one byte, by asking for them as a prompt's log probabilities."""
    entries: list[pb.TokenLogprob] = []
    for first in range(0, 256, 128):
        request = pb.GenerateRequest(model="tiny")
        request.token_ids.ids.extend(range(first, first + 128))
        request.response.prompt_logprobs = True
        request.stop.max_tokens = 1
        for event in served.grpc.Generate(request, timeout=60):
            entries += event.started.prompt_logprobs
    return entries


class TestTwoEndTokens:
    """generation_config.json lists two, config.json one of them."""

    @pytest.mark.parametrize("end", [EOS, EOT])
    def test_each_ends_the_answer_unseen(self, served, end):
        choice = served.choice(prompt="x", logit_bias={str(end): 100}, max_tokens=8)
        assert (choice["finish_reason"], choice["text"]) == ("stop", "")

    def test_neither_comes_before_min_tokens(self, served):
        body = {"prompt": "x", "logit_bias": {str(EOT): 100, str(EOS): 90}, "max_tokens": 30}
        response = served.post({**body, "min_tokens": 8}).json()
        assert response["usage"]["completion_tokens"] == 9
        assert response["choices"][0]["finish_reason"] == "stop"

    def test_ignored_they_are_tokens_like_others(self, served):
        body = {"prompt": "x", "logit_bias": {str(EOT): 100}, "max_tokens": 8, "ignore_eos": True}
        response = served.post(body).json()
        assert response["usage"]["completion_tokens"] == 8
        assert response["choices"][0]["finish_reason"] == "length"


def test_a_warm_prompt_has_the_log_probabilities_of_a_cold_one(served):
    """Three times, in chunks of 16, with a neighbour that shares 64 tokens of it."""
    prompt = [(7 * i * i + 3) % 250 for i in range(100)]
    other = [*prompt[:64], *(9 for _ in range(36))]
    body = {"echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    answers = {}
    for name, ids in (("p", prompt), ("o", other), ("p", prompt), ("o", other), ("p", prompt)):
        got = served.choice(prompt=ids, **body)["logprobs"]["token_logprobs"]
        assert len(got) == 101
        assert got[0] is None
        assert all(math.isfinite(value) for value in got[1:])
        assert got[1:] == pytest.approx(answers.setdefault(name, got)[1:], abs=1e-4)
    assert answers["p"][1:64] == pytest.approx(answers["o"][1:64], abs=1e-4)


LONG = {"model": "tiny", "max_tokens": 2000, "ignore_eos": True}


class TestLeaving:
    def leave(self, served, after: int, **body) -> None:
        """Read so many events and close the connection."""
        with (
            httpx.Client(base_url=served.http.base_url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json={**LONG, **body}) as response,
        ):
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            for _ in range(after):
                next(lines)

    @pytest.mark.parametrize("after", [1, 3])
    def test_a_stream(self, served, after):
        before = served.cancelled()
        self.leave(served, after, prompt="x", stream=True)
        until(served.idle, "its blocks to be free")
        until(lambda: served.cancelled() == before + 1, "it to be counted as cancelled")

    def test_a_whole_answer(self, served):
        # It may be done within that time: then there is nothing to leave.
        with (
            httpx.Client(base_url=served.http.base_url, timeout=0.3) as client,
            contextlib.suppress(httpx.TimeoutException),
        ):
            client.post("/v1/completions", json={**LONG, "prompt": "x", "n": 16})
        until(served.idle, "its blocks to be free")

    def test_after_the_last_event_nothing_is_cancelled(self, served):
        before = served.cancelled()
        assert served.streamed(prompt="x", max_tokens=2, ignore_eos=True)
        until(served.idle, "the end")
        assert served.cancelled() == before


def test_one_id_twice_is_refused_and_the_first_goes_on(served):
    body = {"model": "tiny", "prompt": "first", "max_tokens": 230, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True}
    alone = "".join(piece["text"] for piece in served.streamed(**body))
    headers = {"X-Request-Id": "twice"}
    statuses: list[int] = []
    # On a crowded machine the first may have ended before the second comes.
    while 409 not in statuses and len(statuses) < 10:
        with served.http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
            statuses.append(
                served.post({"prompt": "second", "max_tokens": 5}, **headers).status_code
            )
            events = sse_events(first.read().decode())
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == alone
    assert statuses[-1] == 409
    assert served.post({"prompt": "third", "max_tokens": 5}, **headers).status_code == 200


SCHEMAS = json.loads((ROOT / "tests" / "data" / "schemas.json").read_text())
SHORT = {"type": "string", "minLength": 1, "maxLength": 20}
BOTH = ["name", "bio"]
PERSON = {"type": "object", "properties": dict.fromkeys(BOTH, SHORT), "required": BOTH}
UNDER = {"prompt": "x", "max_tokens": 200, "structured_outputs": {"json": PERSON}}


def test_every_schema_is_refused_by_path_or_its_answer_validates(served):
    for case in (case for case in SCHEMAS if "schema" in case):
        response = served.post({**UNDER, "structured_outputs": {"json": case["schema"]}})
        if response.status_code == 400:
            message = response.json()["error"]["message"]
            assert case["policy"] != "enforce" or "/additionalProperties" in message
            continue
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), case["schema"])


def test_no_end_or_stop_id_ends_an_object_and_a_stop_string_does(served):
    ends = {"logit_bias": {str(EOS): 100, str(EOT): 100}}
    for wanted in (ends, {**ends, "ignore_eos": True}, {"stop_token_ids": [5], "seed": 4}):
        choice = served.choice(**UNDER, **wanted)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), PERSON)
    cut = served.choice(**UNDER, stop=['"bio"'])
    assert cut["finish_reason"] == "stop"
    assert '"bio"' not in cut["text"]


def test_twenty_equal_schemas_at_once_beside_plain_streams(served):
    plain = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    alone = served.choice(**plain)["text"]
    schema = {"type": "array", "items": {"enum": ["twenty", "at", "once"]}, "minItems": 3}
    same = {**UNDER, "structured_outputs": {"json": {**schema, "maxItems": 5}}}
    with ThreadPoolExecutor(28) as pool:
        streams = [pool.submit(served.streamed, **plain) for _ in range(8)]
        answers = list(pool.map(lambda seed: served.choice(**same, seed=seed), range(20)))
        texts = ["".join(piece["text"] for piece in stream.result()) for stream in streams]
    assert texts == [alone] * 8
    for choice in answers:
        jsonschema.validate(json.loads(choice["text"]), schema)
