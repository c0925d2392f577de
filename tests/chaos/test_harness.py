"""The harness itself: what it counts, what it refuses, and that a cut is a cut."""

import asyncio

import pytest

from inferfleet_proto.v1 import inference_pb2 as pb
from tests.chaos.__main__ import arguments
from tests.chaos.client import BrokenStreamError, Counts, _Reader
from tests.chaos.proxy import Proxy
from tests.chaos.report import header, line
from tests.chaos.scenario import FLOW_LIMIT_S, Row
from tests.chaos.workload import Answer, Difference, cases, compare


def answer(*ids: int, **parts) -> Answer:
    fields = {"text": {0: "x" * len(ids)}, "reasons": {0: 6}, "completion_tokens": len(ids)}
    return Answer({0: list(ids)}, **{**fields, **parts})


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (answer(1, 2, 3), Difference()),
        (answer(1, 2), Difference(missing=1)),
        (answer(1, 2, 3, 3), Difference(duplicated=1)),
        (answer(1, 9, 3), Difference(changed=1)),
        (answer(1, 2, 3, text={0: "xx"}), Difference(other="text")),
        (answer(1, 2, 3, reasons={0: 4}), Difference(other="reasons")),
        (answer(1, 2, 3, exact=False), Difference(other="not exact")),
        (Answer({}, {}, {}), Difference(missing=3)),
    ],
)
def test_what_a_fault_did_to_an_answer_is_counted(got, difference):
    found = compare(got, answer(1, 2, 3))
    assert found == difference
    assert bool(found) == (difference != Difference())


def events(*kinds: str) -> list[pb.GenerateResponse]:
    made = []
    for kind in kinds:
        message = pb.GenerateResponse()
        getattr(message, kind).SetInParent()
        made.append(message)
    return made


@pytest.mark.parametrize(
    "kinds",
    [
        ("delta",),
        ("started", "started"),
        ("started", "finished", "delta"),
        ("started", "finished", "finished"),
        ("started", "finished", "summary", "delta"),
        ("started", "finished"),
        ("started", "summary"),
        (),
    ],
)
def test_a_stream_out_of_shape_is_broken(kinds):
    def read() -> None:
        reader = _Reader(1)
        for event in events(*kinds):
            reader.take(event)
        reader.end()

    with pytest.raises(BrokenStreamError):
        read()


def test_a_whole_stream_is_read():
    reader = _Reader(1)
    for event in events("started", "delta", "finished", "summary"):
        reader.take(event)
    assert reader.end().reasons == {0: 0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row("r", counts=Counts(requests=1)), None),
        (Row("r"), "no request"),
        (Row("r", counts=Counts(requests=1, failed=2)), "2 failed"),
        (Row("r", counts=Counts(requests=1, duplicated=1)), "1 duplicated"),
        (Row("r", counts=Counts(requests=1, missing=1)), "1 missing"),
        (Row("r", counts=Counts(requests=1, changed=1)), "1 changed"),
        (Row("r", counts=Counts(requests=1), unhealthy=1), "not SERVING"),
        (Row("r", counts=Counts(requests=1), needs_continuations=True), "nothing was resumed"),
        (Row("r", counts=Counts(requests=1), heal_s=[3.5]), "3.5 s"),
        (Row("r", counts=Counts(requests=1), violations=["why"]), "why"),
    ],
)
def test_every_violation_is_reported(row, words):
    problems = row.judge(strict_times=True)
    assert [words in problem for problem in problems] == [True] * (words is not None)


def test_times_are_judged_on_request_but_a_standstill_always_is():
    row = Row("r", counts=Counts(requests=1), heal_s=[3.5])
    assert row.judge(strict_times=False) == []
    row.heal_s.append(FLOW_LIMIT_S)
    assert row.judge(strict_times=False)


def test_a_line_has_the_widths_of_its_header():
    assert len(line(Row("engine SIGKILL"))) == len(header())


def test_the_cases_differ_and_hold_every_kind():
    made = cases(20, 100)
    assert len({case.prompt for case in made}) == 20
    assert {case.n for case in made} == {1, 3}
    assert sum(case.json_schema for case in made) == 4
    assert made == cases(20, 100)


@pytest.mark.parametrize("flags", [["--only=nothing"], ["--rounds=0"], ["--engines=1"]])
def test_what_cannot_be_run_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        arguments(flags)
    assert flags[0].partition("=")[0] in capsys.readouterr().err


@pytest.fixture
async def proxied():
    """A proxy before a server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await proxy.start()
    yield proxy
    await proxy.stop()
    server.close()


async def echoed(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"a")
    assert await reader.readexactly(1) == b"a"
    return reader, writer


async def test_a_reset_ends_connections_and_refuses_new_ones_until_healed(proxied):
    reader, writer = await echoed(proxied)
    proxied.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await echoed(proxied)
    proxied.heal()
    (await echoed(proxied))[1].close()


async def test_a_silent_proxy_keeps_connections_and_passes_nothing(proxied):
    reader, writer = await echoed(proxied)
    proxied.silence()
    writer.write(b"b")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), 0.2)
    assert not reader.at_eof()
    proxied.heal()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
