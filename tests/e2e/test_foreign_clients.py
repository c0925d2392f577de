"""Clients of other projects: grpcurl, the openai package, plain HTTP."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]
MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def grpcurl(*arguments: str) -> str:
    tool = Path(sys.executable).parent / "grpcurl"
    found = str(tool) if tool.exists() else shutil.which("grpcurl")
    assert found, "grpcurl is missing: it comes with the dev set (make dev)"
    done = subprocess.run(
        [found, "-plaintext", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_grpcurl_lists_and_calls_by_reflection(fleet):
    listed = grpcurl(fleet.grpc_address, "list").split()
    assert "inferfleet.v1.Inference" in listed
    assert "grpc.health.v1.Health" in listed
    assert "rpc Generate" in grpcurl(fleet.grpc_address, "describe", "inferfleet.v1.Inference")
    health = grpcurl(fleet.grpc_address, "grpc.health.v1.Health/Check")
    assert json.loads(health)["status"] == "SERVING"
    request = {"model": MODEL, "chat": {"messages": QUESTION}, "sampling": {"temperature": 0}}
    reply = grpcurl(
        "-d", json.dumps(request), fleet.grpc_address, "inferfleet.v1.Inference/Complete"
    )
    assert json.loads(reply)["choices"][0]["text"] == ANSWER


@pytest.fixture
def client(fleet):
    with openai.OpenAI(base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_whole_and_streamed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == 8
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == ANSWER
    assert len([text for text in texts if text]) > 2
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_the_openai_client_gets_plain_completions(client):
    reply = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in reply.choices[0].text
    assert reply.choices[0].finish_reason == "length"


def test_the_openai_client_raises_what_its_users_expect(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="none-such", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert caught.value.body["param"] == "temperature"


def test_server_sent_events_end_with_done(fleet):
    body = {"model": MODEL, "messages": QUESTION, "stream": True, "max_tokens": 2}
    with httpx.stream("POST", f"{fleet.http_url}/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [line for line in reply.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)


def test_every_service_reports_metrics_and_health(fleet):
    for service in fleet.status()["services"]:
        if address := service["metrics_address"]:
            assert httpx.get(f"http://{address}/healthz").status_code == 200, service["name"]
            assert "# TYPE" in httpx.get(f"http://{address}/metrics").text, service["name"]
