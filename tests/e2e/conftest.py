"""The real fleet, started once a session by the real command, and hands to reach it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from inferfleet_cli.demo import missing_from
from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.control import send_command
from inferfleet_cli.supervisor.engine_list import TOKEN_KEY
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc

START_S = 180.0
PATIENCE_S = 60.0
MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.05)
    return value


class Command:
    """`inferfleet up` or another long command, its output read as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inferfleet_cli.main", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_line(self, words: str) -> None:
        def seen() -> bool:
            if self.process.poll() is not None and not any(words in one for one in self.lines):
                raise AssertionError("it ended:\n" + "".join(self.lines))
            return any(words in line for line in self.lines)

        until(seen, repr(words), START_S)

    def end(self, signum: signal.Signals = signal.SIGINT) -> int:
        """Signal it, wait, and return its status."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines.extend(iter(output.readline, ""))


class Stream(threading.Thread):
    """One Generate call read in a thread; `result` is what came, or it raises what went wrong."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest) -> None:
        super().__init__(daemon=True)
        self.call = stub.Generate(request, timeout=PATIENCE_S * 2)
        self.events: list[pb.GenerateResponse] = []
        self.error: grpc.RpcError | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self.call:
                self.events.append(event)
        except grpc.RpcError as error:
            self.error = error

    def deltas(self) -> int:
        return sum(event.HasField("delta") for event in self.events)

    def result(self) -> "Answer":
        self.join(PATIENCE_S * 2)
        assert not self.is_alive(), "the stream never ended"
        if self.error is not None:
            raise self.error
        return Answer(self.events)


class Answer:
    """A whole stream, checked for its shape."""

    def __init__(self, events: list[pb.GenerateResponse]) -> None:
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started"
        assert kinds[-2:] == ["finished", "summary"]
        assert set(kinds[1:-2]) <= {"delta"}
        deltas = [event.delta for event in events if event.HasField("delta")]
        self.started = events[0].started
        self.token_ids = [token for delta in deltas for token in delta.token_ids]
        self.text = "".join(delta.text for delta in deltas)
        self.reason = events[-2].finished.reason
        self.summary = events[-1].summary


class FleetUnderTest:
    """A running fleet."""

    def __init__(self, command: Command | None, state_dir: Path) -> None:
        self._command = command
        self.state_dir = state_dir
        record = StateDir(state_dir).read_record()
        assert record is not None
        self.grpc_address = str(record["gateway"])
        self.http_url = str(record["http"])
        self._channel = grpc.insecure_channel(
            self.grpc_address, options=[("grpc.max_send_message_length", -1)]
        )
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.channel = self._channel

    def close(self) -> None:
        self._channel.close()

    def has_logged(self, words: str) -> bool:
        """Whether the supervisor has printed it."""
        return self._command is not None and any(words in one for one in self._command.lines)

    def status(self) -> dict[str, Any]:
        return send_command(self.state_dir, "status")

    def trace(self, request_id: str) -> dict[str, Any]:
        return send_command(self.state_dir, "trace", request_id=request_id)

    def whole_trace(self, request_id: str) -> dict[str, Any]:
        """The trace once its last span has come."""

        def complete() -> dict[str, Any] | None:
            with contextlib.suppress(CliError):
                trace = self.trace(request_id)
                if not missing_from(trace["spans"]):
                    return trace
            return None

        return until(complete, f"the trace of {request_id}")

    def engines(self) -> dict[str, dict[str, Any]]:
        return {engine["engine_id"]: engine for engine in self.status()["engines"]}

    def index_entries(self) -> int:
        """(block, owner) pairs in the prefix index."""
        address = {one["name"]: one["address"] for one in self.status()["services"]}["kvcache"]
        token = ((TOKEN_KEY, StateDir(self.state_dir).token()),)
        with grpc.insecure_channel(address) as channel:
            stub = prefix_index_pb2_grpc.PrefixIndexStub(channel)
            return int(stub.Stats(prefix_index_pb2.StatsRequest(), metadata=token).entries)

    def pid(self, service: str) -> int:
        pids = {one["name"]: one["pid"] for one in self.status()["services"]}
        assert pids[service], f"{service} does not run"
        return int(pids[service])

    def signal(self, service: str, signum: signal.Signals) -> None:
        os.kill(self.pid(service), signum)

    def request(self, token_ids: list[int], **fields: Any) -> pb.GenerateRequest:
        """A greedy request; `fields` are those of StopParams."""
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=token_ids))
        request.sampling.temperature = 0
        for name, value in fields.items():
            setattr(request.stop, name, value)
        return request

    def stream(self, request: pb.GenerateRequest) -> Stream:
        return Stream(self.stub, request)

    def generate(self, token_ids: list[int], **fields: Any) -> Answer:
        return self.stream(self.request(token_ids, **fields)).result()

    def is_whole(self) -> bool:
        """Every process ready, every engine known to the balancer and idle."""
        status = self.status()
        services_ready = all(one["state"] == "ready" for one in status["services"])
        engines = [engine for engine in status["engines"] if engine["state"] == "serving"]
        wanted = sum(one["name"].startswith("engine-") for one in status["services"])
        loads = ("in_flight", "running", "waiting", "held_blocks")
        idle = not any(engine[load] for engine in engines for load in loads)
        return services_ready and len(engines) == wanted and idle


@pytest.fixture(scope="session")
def _fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    state_dir = tmp_path_factory.mktemp("fleet")
    # A crowded machine may take longer to match than the default allows, and then load decides; and
    # a prefill beside an engine that starts again may look like a stall.
    patient = ("--set=balancer.match_timeout_s=5", "--set=balancer.stall_limit_s=120")
    records = [f"--set=gateway.{name}_file={state_dir / name}" for name in ("usage", "audit")]
    where = ("--port=0", "--http-port=0", f"--state-dir={state_dir}")
    command = Command("up", *where, *patient, *records)
    try:
        command.wait_line("Ctrl-C stops the fleet")
        fleet = FleetUnderTest(command, state_dir)
        yield fleet
        fleet.close()
    finally:
        status = command.end()
    assert status == 0, "".join(command.lines)
    assert processes_of(state_dir) == []


@pytest.fixture
def fleet(_fleet: FleetUnderTest) -> Iterator[FleetUnderTest]:
    """A whole fleet of two engines; it must be whole and idle again after each test."""
    until(_fleet.is_whole, "the fleet to be whole")
    yield _fleet
    until(_fleet.is_whole, "the fleet to be whole and idle again")


def processes_of(state_dir: Path) -> list[str]:
    """Command lines of processes that name a state directory, and of cores without a parent."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(state_dir) in command and int(entry.name) != os.getpid():
                found.append(command)
    return found


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Greedy float32 answers that transformers gave: prompt_ids, output_ids, output_text."""
    data = json.loads((ROOT / "tests" / "data" / "smollm2_first_golden.json").read_text())
    return list(data["items"])


@pytest.fixture
def fleet_at() -> Iterator[Callable[[Path], FleetUnderTest]]:
    """A hold on a fleet that a test has started by itself, by its state directory."""
    with contextlib.ExitStack() as held:

        def hold(state_dir: Path) -> FleetUnderTest:
            fleet = FleetUnderTest(None, state_dir)
            held.callback(fleet.close)
            return fleet

        yield hold


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """`until`, for tests."""
    return until


@pytest.fixture
def left_behind() -> Callable[[Path], list[str]]:
    """`processes_of`, for tests."""
    return processes_of


@pytest.fixture
def inferfleet(tmp_path):
    """Runs one command on the fleet of this test; returns what it printed."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "inferfleet_cli.main", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
