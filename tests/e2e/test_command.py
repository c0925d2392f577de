"""The command as a user types it: make run's demo, detach, status, generate, trace, down."""

import json
import os
import socket
import subprocess
import sys

import pytest

# Two threads that a busy neighbour holds up wait for each other; one does not.
ONE_THREAD = "--set=engine.threads=1"
pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def inferfleet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferfleet_cli.main", *arguments],
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
            "demo",
            "--engines=1",
            f"--port={taken}",
            "--http-port=0",
            ONE_THREAD,
            f"--state-dir={tmp_path}",
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
    assert not (tmp_path / "demo").exists()


def test_a_detached_fleet_answers_every_command_and_drains_on_request(
    tmp_path, fleet_at, wait_until, left_behind
):
    where = f"--state-dir={tmp_path}"
    up = inferfleet(
        "up",
        "--detach",
        f"--end-with={os.getpid()}",
        "--engines=1",
        "--port=0",
        "--http-port=0",
        "--grace=90",
        ONE_THREAD,
        where,
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

    ask = ("generate", "Say hello", "--chat", "--seed=7", "--max-tokens=8", "--json", where)
    done = inferfleet(*ask)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["engine_id"] == "engine-1"
    repeated = json.loads(inferfleet(*ask).stdout)
    assert repeated["token_ids"] == answer["token_ids"]

    def traced() -> dict | None:
        done = inferfleet("trace", answer["request_id"], "--json", where)
        trace = json.loads(done.stdout) if done.returncode == 0 else {"spans": []}
        return trace if any(span["name"] == "release" for span in trace["spans"]) else None

    assert wait_until(traced, "the trace")["trace_id"] == answer["trace_id"]
    assert "release" in inferfleet("trace", answer["request_id"], where).stdout

    fleet = fleet_at(tmp_path)
    stream = fleet.stream(fleet.request([504, 3575, 282], max_tokens=40, ignore_eos=True))
    wait_until(lambda: stream.deltas() >= 2, "the stream to run")
    assert inferfleet("down", "--timeout=120", where).stdout.strip() == "stopped"
    assert len(stream.result().token_ids) == 40
    assert left_behind(tmp_path) == []
    assert inferfleet("status", where).returncode == 3
