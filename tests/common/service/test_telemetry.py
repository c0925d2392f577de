import json
import logging
import os
import subprocess
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.service import telemetry
from tests.chaos.certificates import write_certificates

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.fixture
def setup(capsys):
    """Telemetry with its logs read back; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    started = []

    def start(**parts):
        parts = {"otlp_endpoint": "", "log_level": "info", **parts}
        made = telemetry.setup("engine", **parts)
        started.append(made)
        return made, lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    yield start
    for made in started:
        made.close()
    root.handlers[:] = handlers
    root.setLevel(level)


STRAY = """
import logging, threading, warnings
from services.common.service import telemetry
telemetry.setup("engine", otlp_endpoint="", log_level="info")
telemetry.log_stray_output()
logging.getLogger("bad").warning("%d items", "three")
warnings.warn("old option")
thread = threading.Thread(target=lambda: 1 / 0, name="loader")
thread.start()
thread.join()
class Broken:
    def __del__(self):
        raise RuntimeError("late")
Broken()
raise SystemError("the end")
"""


@pytest.mark.timeout(180)
def test_what_python_would_print_itself_is_json_too():
    done = subprocess.run([sys.executable, "-c", STRAY], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert [line["logger"] for line in lines] == ["bad", "py.warnings", *["uncaught"] * 3]
    assert "old option" in lines[1]["message"]
    assert "loader" in lines[2]["message"]
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert "late" in lines[3]["exception"]
    assert "the end" in lines[4]["exception"]


HANDSHAKE = """
import services, sys, grpc
from concurrent import futures
cert, key = (open(path, "rb").read() for path in sys.argv[1:])
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
server.start()
try:
    grpc.channel_ready_future(grpc.insecure_channel(f"127.0.0.1:{port}")).result(1)
except grpc.FutureTimeoutError:
    print("refused")
server.stop(None).wait()
"""


@pytest.mark.timeout(180)
def test_a_failed_handshake_is_no_plain_line(tmp_path):
    files = write_certificates(tmp_path)
    command = [sys.executable, "-c", HANDSHAKE, str(files.cert), str(files.key)]
    environ = {name: text for name, text in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert (done.stdout, done.stderr) == ("refused\n", "")


def span_in(context):
    return trace.get_current_span(context).get_span_context()


def test_the_caller_s_trace_goes_on():
    context = telemetry.extract((("traceparent", f"00-{TRACE}-{SPAN}-01"), ("other", "x")))
    found = span_in(context)
    assert format(found.trace_id, "032x") == TRACE
    assert format(found.span_id, "016x") == SPAN
    assert found.trace_flags.sampled
    assert dict(telemetry.inject(context))["traceparent"] == f"00-{TRACE}-{SPAN}-01"


def test_tracestate_travels_along():
    context = telemetry.extract((("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "a=b")))
    assert dict(telemetry.inject(context))["tracestate"] == "a=b"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        b"\xff\xfe",
    ],
)
def test_a_malformed_parent_is_a_new_trace(value):
    assert not span_in(telemetry.extract((("traceparent", value),))).is_valid
    assert telemetry.inject(telemetry.extract((("traceparent", value),))) == ()


def test_no_metadata_is_a_new_trace():
    assert not span_in(telemetry.extract(None)).is_valid
    assert not span_in(telemetry.extract(())).is_valid


def test_spans_reach_the_exporter_with_the_service_s_name(setup):
    exporter = InMemorySpanExporter()
    made, _ = setup(exporter=exporter, attributes={"inferfleet.engine_id": "e"})
    with made.tracer.start_as_current_span("work") as span:
        assert telemetry.trace_id_of(span) == format(span.get_span_context().trace_id, "032x")
    made.close()
    (found,) = exporter.get_finished_spans()
    assert found.resource.attributes["service.name"] == "engine"
    assert found.resource.attributes["inferfleet.engine_id"] == "e"


def test_an_unsampled_parent_is_not_recorded(setup):
    exporter = InMemorySpanExporter()
    made, _ = setup(exporter=exporter)
    parent = telemetry.extract((("traceparent", f"00-{TRACE}-{SPAN}-00"),))
    with made.tracer.start_as_current_span("work", context=parent) as span:
        handed_on = dict(telemetry.inject(trace.set_span_in_context(span)))["traceparent"]
    made.close()
    assert exporter.get_finished_spans() == ()
    assert handed_on.startswith(f"00-{TRACE}-")
    assert handed_on.endswith("-00")


def test_a_collector_that_is_away_costs_nothing_but_its_spans(setup):
    made, lines = setup(otlp_endpoint="http://127.0.0.1:1")
    with made.tracer.start_as_current_span("work"):
        pass
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 8  # all retries of the exporter together take 12 s
    assert lines() == []


def test_a_log_line_is_json_with_request_and_trace(setup):
    made, lines = setup()
    log = logging.getLogger("some.room")
    log.info("plain %s", 'with "quotes"\nand lines')
    log.debug("too fine")
    token = telemetry.request_id_var.set("r-1")
    try:
        with made.tracer.start_as_current_span("work") as span:
            log.warning("inside")
    finally:
        telemetry.request_id_var.reset(token)
    try:
        raise ValueError("Ж")
    except ValueError:
        log.exception("failed")
    plain, inside, failed = lines()
    assert plain["message"] == 'plain with "quotes"\nand lines'
    assert (plain["service"], plain["logger"], plain["level"]) == ("engine", "some.room", "info")
    assert "request_id" not in plain
    assert "trace_id" not in plain
    assert inside["request_id"] == "r-1"
    assert inside["trace_id"] == telemetry.trace_id_of(span)
    assert "ValueError: Ж" in failed["exception"]
