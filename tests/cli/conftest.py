"""A fleet of stand-in services: real processes that become ready and end on request."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from inferfleet_cli.supervisor.options import Options, Planner, ServicePlan
from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc

SERVICE = textwrap.dedent(
    """
    import json, os, signal, subprocess, sys, time
    from pathlib import Path

    ready, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "refuse":
        print("bad: no such thing", file=sys.stderr)
        sys.exit(2)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    record = {"pid": os.getpid(), "address": "127.0.0.1:1", "metrics_address": "127.0.0.1:2"}
    record["helper"] = helper.pid
    scratch = ready.with_suffix(".tmp")
    scratch.write_text(json.dumps(record))
    scratch.replace(ready)
    if mode == "crash" and not ready.with_suffix(".crashed").exists():
        ready.with_suffix(".crashed").touch()
        time.sleep(0.2)
        os._exit(7)
    while True:
        time.sleep(0.05)
    """
)


@pytest.fixture
def service_argv(tmp_path: Path) -> Callable[[Path, str], tuple[str, ...]]:
    """(ready file, mode) → a stand-in's command; modes: steady, deaf, crash, refuse."""
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    return lambda ready, mode: (sys.executable, "-S", str(script), str(ready), mode)


@pytest.fixture
def stand_ins(service_argv: Callable[[Path, str], tuple[str, ...]]) -> Callable[..., Planner]:
    """A planner for `Fleet`; keyword arguments give a service (with _ for -) another mode."""

    def make(**modes: str) -> Planner:
        def planner(_options: Options, _at: object, _token: object, ready: dict[str, Path]):
            return [
                ServicePlan(name, service_argv(path, modes.get(name.replace("-", "_"), "steady")))
                for name, path in ready.items()
            ]

        return planner

    return make


class FakeGateway(inference_pb2_grpc.InferenceServicer):
    """Answers every request with three deltas; keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.models = ["tiny"]

    def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(name=name) for name in self.models])

    def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.model not in self.models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not served")
        yield pb.GenerateResponse(
            started=pb.Started(request_id="r-1", model="tiny", seed=5, engine_id="engine-1")
        )
        for number, text in enumerate(["Par", "is", "."]):
            yield pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[number], num_tokens=1))
        if request.text == "break":
            context.abort(grpc.StatusCode.DATA_LOSS, "the engine is gone")
        yield pb.GenerateResponse(
            finished=pb.Finished(reason=pb.FinishReason.FINISH_REASON_EOS, stop_token_id=2)
        )
        yield pb.GenerateResponse(
            summary=pb.Summary(
                usage=pb.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3),
                timings=pb.Timings(queued_s=0.25, prefill_s=0.5, decode_s=1.5),
                engine_id="engine-2",
            )
        )


@pytest.fixture
def gateway() -> Iterator[tuple[FakeGateway, str]]:
    """A stand-in for a gateway, and its address."""
    servicer = FakeGateway()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()
