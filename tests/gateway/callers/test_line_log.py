"""The writer of record files: rotation, rotation by another program, slow and broken sinks."""

import json
import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from services.gateway.callers.records import line_log
from services.gateway.callers.records.line_log import LineLog


class Line(msgspec.Struct):
    number: int
    filling: str = ""


@pytest.fixture
def lost():
    return []


@pytest.fixture
def make(tmp_path, lost):
    made = []

    def make(max_bytes=10**6, kept=3, path=tmp_path / "log"):
        found = LineLog(str(path), max_bytes=max_bytes, kept=kept, on_loss=lost.append)
        found.start()
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


def numbers(path):
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_lines_in_order_over_rotated_files(make, tmp_path, lost):
    log = make(max_bytes=4000, kept=100)
    for number in range(200):
        log.put(Line(number, "x" * 100))
        if number % 10 == 0:  # smaller batches than a whole run
            wait_until(log._queue.empty)
    log.close()
    files = sorted(tmp_path.glob("log.*"), key=lambda path: -int(path.suffix[1:]))
    assert len(files) >= 4
    found = [number for path in (*files, tmp_path / "log") for number in numbers(path)]
    assert found == list(range(200))
    assert not lost


def test_only_so_many_are_kept(make, tmp_path):
    log = make(max_bytes=1, kept=2)
    for number in range(6):
        log.put(Line(number))
        wait_until(lambda: numbers(tmp_path / "log") == [number])  # noqa: B023 (at once)
    log.close()
    assert [numbers(tmp_path / f"log{end}") for end in ("", ".1", ".2")] == [[5], [4], [3]]
    assert not (tmp_path / "log.3").exists()


def test_a_moved_file_is_reopened(make, tmp_path):
    log = make()
    log.put(Line(1))
    wait_until(lambda: (tmp_path / "log").stat().st_size)
    (tmp_path / "log").rename(tmp_path / "taken")
    log.put(Line(2))
    log.close()
    assert (numbers(tmp_path / "taken"), numbers(tmp_path / "log")) == ([1], [2])


def test_the_file_is_not_readable_for_everyone(make, tmp_path):
    make()
    assert (tmp_path / "log").stat().st_mode & 0o007 == 0


def test_a_slow_sink_delays_nothing_and_losses_are_counted(make, lost, monkeypatch):
    unblocked = threading.Event()
    monkeypatch.setattr(line_log, "QUEUED", 10)
    monkeypatch.setattr(line_log, "BATCH", 1)
    monkeypatch.setattr(LineLog, "_write", lambda self, records: unblocked.wait(30))
    log = make()
    for number in range(50):
        log.put(Line(number))
    assert sum(lost) >= 39  # 10 wait, one is being written
    unblocked.set()


def test_a_full_disk_costs_records_and_not_the_file(tmp_path, lost, make):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    log = make(path="/dev/full")
    log.put(Line(1))
    wait_until(lambda: lost)
    assert lost == [1]


def test_a_partial_line_is_ended(make, tmp_path):
    log = make()
    os.write(log._descriptor, b'{"number": ')
    log._partial_line = True
    log.put(Line(7))
    log.close()
    assert (tmp_path / "log").read_text() == '{"number": \n{"number":7,"filling":""}\n'


def test_stdout():
    code = (
        "import msgspec\n"
        "from services.gateway.callers.records.line_log import LineLog\n"
        "class Line(msgspec.Struct):\n    number: int\n"
        "log = LineLog('-', max_bytes=1, kept=0, on_loss=print)\n"
        "log.start(); log.put(Line(1)); log.put(Line(2)); log.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == '{"number":1}\n{"number":2}\n'
