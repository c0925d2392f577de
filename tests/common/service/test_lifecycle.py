"""A service's life, in processes of its own, as signals and failures end it."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from services.common.service import lifecycle

PROGRAM = """
import asyncio, sys
from services.common.service import lifecycle
from services.common.config.settings import ConfigError

class Service:
    def say(self, word):
        print(word, flush=True)

    async def start(self):
        {start}
        self.say("started")

    async def drain(self):
        self.say("draining")
        {drain}
        self.say("drained")

    async def stop(self):
        self.say("stopped")

    async def failed(self):
        {failed}

sys.exit(lifecycle.run(lambda: Service(), prog="prog"))
"""


@pytest.fixture
def launch():
    running = []

    def start(*, start="pass", drain="pass", failed="return await lifecycle.never()"):
        code = textwrap.dedent(PROGRAM).format(start=start, drain=drain, failed=failed)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def end(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out.split(), err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(launch, signum):
    process = launch()
    assert process.stdout.readline() == "started\n"
    process.send_signal(signum)
    assert end(process)[:2] == (0, ["draining", "drained", "stopped"])


def test_a_second_signal_ends_the_drain(launch):
    process = launch(drain="await asyncio.sleep(1000)")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGTERM)
    assert end(process)[:2] == (0, ["stopped"])


def test_a_signal_during_the_start_stops_it(launch):
    process = launch(start="self.say('starting'); await asyncio.sleep(1000)")
    assert process.stdout.readline() == "starting\n"
    process.send_signal(signal.SIGTERM)
    assert end(process)[:2] == (0, ["stopped"])


def test_a_failure_ends_with_1_without_a_drain(launch):
    status, words, err = end(launch(failed="return 'the disk is gone'"))
    assert (status, words) == (1, ["started", "stopped"])
    assert "the disk is gone" in err


def test_a_bad_configuration_is_one_line_and_2(launch):
    status, words, err = end(launch(start="raise ConfigError('port: taken')"))
    assert (status, words, err) == (2, ["stopped"], "prog: port: taken\n")


def test_the_ready_file_is_whole(tmp_path):
    path = tmp_path / "ready.json"
    lifecycle.write_ready("", service="engine", address="a:1", metrics_address="a:2")
    lifecycle.write_ready(str(path), service="engine", address="a:1", metrics_address="a:2")
    record = json.loads(path.read_text())
    assert record == {
        "service": "engine",
        "address": "a:1",
        "metrics_address": "a:2",
        "pid": os.getpid(),
    }
    assert [child.name for child in tmp_path.iterdir()] == ["ready.json"]


MAIN = """
import asyncio, os, sys
WAIT = "WAIT" in os.environ
from services.common.config.service_config import ServiceConfig
from services.common.service import lifecycle

class Service:
    def __init__(self, config, telemetry):
        self.telemetry = telemetry

    async def start(self):
        resource = self.telemetry.tracer.resource.attributes
        print(resource["service.name"], resource["port"], flush=True)

    async def drain(self):
        pass

    async def stop(self):
        print("stopped", flush=True)

    async def failed(self):
        await asyncio.Event().wait() if WAIT else None
        return "the disk is gone"

attributes = lambda config: {"port": str(config.port)}
sys.exit(lifecycle.main("kvcache", ServiceConfig, Service, description="d", attributes=attributes))
"""


def run_main(*argv):
    return subprocess.run(
        [sys.executable, "-c", MAIN, *argv], capture_output=True, text=True, timeout=30, check=False
    )


def test_main_loads_the_configuration_and_sets_telemetry_up():
    done = run_main("--port", "7", "--log-level", "error")
    assert (done.returncode, done.stdout) == (1, "kvcache 7\nstopped\n")
    line = json.loads(done.stderr)
    assert (line["service"], line["level"]) == ("kvcache", "error")
    assert line["message"].endswith("the service failed: the disk is gone")


def test_sigusr1_turns_debug_logging_on_and_off_again():
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "--log-level", "warning"],
        env={**os.environ, "WAIT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "kvcache 0\n"
        for before, after in (("warning", "debug"), ("debug", "warning")):
            process.send_signal(signal.SIGUSR1)
            line = json.loads(process.stderr.readline())
            assert line["message"] == f"log level changed from {before} to {after} by a signal"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_main_refuses_a_bad_configuration_in_the_name_of_the_service():
    done = run_main("--port", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("python -m services.kvcache: ")
