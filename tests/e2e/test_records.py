"""What a whole fleet writes down: a usage record per request, and never a word of a prompt."""

import json
import signal
import urllib.error
import urllib.request

import grpc
import pytest

from inferfleet_cli.supervisor.engine_list import TOKEN_KEY
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_proto.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]
# Of a word that no model says: one piece of each kind of text that a caller can send.
CANARY = "xylqwoz"
MODEL = "smollm2-135m-instruct"


def set_log_level(address, level, token):
    request = urllib.request.Request(
        f"http://{address}/log-level", data=level.encode(), method="PUT", headers={TOKEN_KEY: token}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.read().decode() == f"{level}\n"


@pytest.fixture
def at_level(fleet):
    """Sets the level of every service, by its metrics port."""
    token = StateDir(fleet.state_dir).token()

    def every_service(level):
        for service in fleet.status()["services"]:
            if service["metrics_address"]:
                set_log_level(service["metrics_address"], level, token)

    yield every_service
    every_service("info")


def post(fleet, path, body):
    request = urllib.request.Request(
        fleet.http_url + path,
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def say_the_word(fleet):
    """Good and bad requests of both faces with the canary wherever text may stand."""
    schema = {"type": "object", "properties": {CANARY: {"type": "integer"}}, "required": [CANARY]}
    messages = [{"role": "user", "content": f"Say {CANARY} twice."}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 3, "stop": [f"{CANARY}!"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": CANARY}}}
    statuses = [
        post(fleet, "/v1/chat/completions", chat)[0],
        post(fleet, "/v1/chat/completions", {**chat, "response_format": form})[0],
        post(fleet, "/v1/completions", {"model": MODEL, "prompt": CANARY, "max_tokens": 2})[0],
        post(fleet, "/v1/chat/completions", {**chat, "response_format": wrong})[0],
        post(fleet, "/v1/chat/completions", {**chat, "temperature": 7})[0],
        post(fleet, "/v1/chat/completions", {**chat, CANARY: 1})[0],
        post(fleet, "/v1/chat/completions", {**chat, "messages": CANARY})[0],
        post(fleet, "/v1/chat/completions", {**chat, "logit_bias": {CANARY: 1}})[0],
    ]
    text = pb.GenerateRequest(model=MODEL, text=f"{CANARY} " * 3, stop={"max_tokens": 2})
    fleet.stub.Complete(text, timeout=60)
    for bad in (
        pb.GenerateRequest(model=MODEL, text=CANARY, constraint={"regex": f"({CANARY}"}),
        pb.GenerateRequest(model=MODEL, text=CANARY, constraint={"ebnf": CANARY}),
        pb.GenerateRequest(model=MODEL, text=CANARY * 20_000),
    ):
        with pytest.raises(grpc.RpcError):
            fleet.stub.Complete(bad, timeout=60)
    fleet.stub.Tokenize(pb.TokenizeRequest(model=MODEL, text=CANARY), timeout=60)
    return statuses


@pytest.mark.parametrize(
    "level",
    ["debug", *(pytest.param(each, marks=pytest.mark.verify) for each in ("info", "error"))],
)
def test_no_log_of_any_service_holds_a_prompt(fleet, at_level, level):
    at_level(level)
    statuses = say_the_word(fleet)
    assert statuses[:3] == [200] * 3
    assert all(400 <= status < 500 for status in statuses[3:]), statuses
    written = [*StateDir(fleet.state_dir).logs.glob("*.log"), *fleet.state_dir.glob("usage*")]
    written += fleet.state_dir.glob("audit*")
    assert len(written) >= 7
    for path in written:
        lines = path.read_text(errors="replace").splitlines()
        assert [line for line in lines if CANARY in line] == [], path.name


def test_the_level_reaches_every_service_and_the_core_behind_an_engine(fleet, at_level, wait_until):
    at_level("debug")
    logs = {path.stem: path for path in StateDir(fleet.state_dir).logs.glob("*.log")}
    own = {name for name in logs if name.startswith(("gateway", "balancer", "kvcache", "engine-"))}
    assert len(own) >= 5
    for name in own:
        wait_until(
            lambda name=name: "log level changed from info to debug" in logs[name].read_text(),
            f"{name} to say its level",
        )
    for name in own:
        if name.startswith("engine-"):
            wait_until(lambda name=name: "by the front" in logs[name].read_text(), f"{name}'s core")
    audit = (fleet.state_dir / "audit").read_text().splitlines()
    acts = [json.loads(line) for line in audit if '"log_level"' in line]
    assert acts[-1]["why"] == "debug"


def records_of(fleet, ids):
    lines = (fleet.state_dir / "usage").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if record["request_id"] in ids]


def test_requests_continued_cancelled_and_refused_are_each_written_once(fleet, golden, wait_until):
    """The engine under some streams is killed; others are left by their callers."""
    item = golden[0]
    wanted = {}
    for number in range(6):
        request = fleet.request(item["prompt_ids"], max_tokens=40, ignore_eos=True)
        request.request_id = f"usage-{number}"
        wanted[request.request_id] = fleet.stream(request)
    streams = list(wanted.values())
    for stream in streams:
        wait_until(lambda stream=stream: stream.deltas() >= 2, "two deltas of each")
    streams[5].call.cancel()
    refused = fleet.request([], max_tokens=1)
    refused.request_id = "usage-refused"
    with pytest.raises(grpc.RpcError):
        fleet.stub.Complete(refused, timeout=60)
    victim = next(name for name, one in fleet.engines().items() if one["running"])
    fleet.signal(victim, signal.SIGKILL)
    answers = [stream.result() for stream in streams[:5]]
    ids = {*wanted, "usage-refused"}
    wait_until(lambda: len(records_of(fleet, ids)) >= len(ids), "all records")
    records = {record["request_id"]: record for record in records_of(fleet, ids)}
    assert len(records_of(fleet, ids)) == len(ids)
    for number, answer in enumerate(answers):
        record = records[f"usage-{number}"]
        assert record["status"] == "OK"
        assert record["prompt_tokens"] == len(item["prompt_ids"])
        assert record["output_tokens"] == len(answer.token_ids) == 40
        assert record["continuations"] == answer.summary.continuations
    assert sum(record["continuations"] for record in records.values()) >= 1
    left = records["usage-5"]
    assert left["status"] == "CANCELLED"
    assert left["prompt_tokens"] == len(item["prompt_ids"])
    assert 2 <= left["output_tokens"] <= 40
    assert records["usage-refused"]["status"] == "INVALID_ARGUMENT"
    assert records["usage-refused"]["output_tokens"] == 0
    wait_until(fleet.is_whole, "the engine to be started again")
