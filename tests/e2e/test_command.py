"""The command as a user types it: make run's demo, detach, status, generate, trace, down."""

import json
import socket
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def inferfleet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferfleet.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_demo_answers_shows_its_waterfall_and_leaves_nothing(tmp_path, left_behind):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        done = inferfleet(
            "demo", "--engines=1", f"--port={taken}", "--http-port=0", f"--state-dir={tmp_path}"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert f"Port {taken} (gRPC) is taken: using" in done.stdout
    for service in ("redis", "etcd", "kvcache", "balancer", "engine-1", "gateway"):
        assert any(line.startswith(f"  {service}") and "ready in" in line for line in lines)
    assert "The capital of France is Paris." in lines
    for verb in ("enqueue", "admit", "submit", "collect", "release"):
        row = next(line for line in lines if f" {verb} " in line and "|" in line)
        assert row.startswith("engine-1")
        assert row.endswith(" ms")
    assert left_behind(tmp_path) == []
    assert not list((tmp_path / "demo").glob("fleet.*"))


def test_a_detached_fleet_answers_every_command_and_drains_when_told(
    tmp_path, start_command, wait_until, left_behind
):
    where = f"--state-dir={tmp_path}"
    up = inferfleet(
        "up", "--detach", "--engines=1", "--port=0", "--http-port=0", "--grace=90", where
    )
    assert up.returncode == 0, up.stdout + up.stderr
    assert "Running in the background" in up.stdout
    again = inferfleet("up", where)
    assert again.returncode == 1
    assert "already runs" in again.stderr

    status = json.loads(inferfleet("status", "--json", where).stdout)
    assert {service["state"] for service in status["services"]} == {"ready"}
    assert [engine["state"] for engine in status["engines"]] == ["serving"]
    assert "engine-1" in inferfleet("status", where).stdout

    asked = inferfleet("generate", "Say hello", "--chat", "--seed=7", "--json", where)
    answer = json.loads(asked.stdout)
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["engine_id"] == "engine-1"
    again = json.loads(
        inferfleet("generate", "Say hello", "--chat", "--seed=7", "--json", where).stdout
    )
    assert again["token_ids"] == answer["token_ids"]

    def traced() -> dict | None:
        done = inferfleet("trace", answer["request_id"], "--json", where)
        trace = json.loads(done.stdout) if done.returncode == 0 else {"spans": []}
        return trace if any(span["name"] == "release" for span in trace["spans"]) else None

    assert wait_until(traced, "the trace")["trace_id"] == answer["trace_id"]
    assert "release" in inferfleet("trace", answer["request_id"], where).stdout

    count = ["generate", "Count:", "--max-tokens=24", "--temperature=0", where]
    stream = start_command(*count)
    wait_until(lambda: busy(tmp_path), "the stream to run")
    assert inferfleet("down", "--timeout=120", where).stdout.strip() == "stopped"
    assert stream.process.wait(60) == 0, stream.lines
    assert "24 generated" in "".join(stream.lines)
    assert left_behind(tmp_path) == []
    assert inferfleet("status", where).returncode == 3


def busy(state_dir) -> bool:
    done = inferfleet("status", "--json", f"--state-dir={state_dir}")
    return any(engine["running"] for engine in json.loads(done.stdout)["engines"])
