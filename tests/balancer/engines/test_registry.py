"""Which engines are in the view: one that is registered or reports stays in it."""

import logging

import pytest

from services.balancer.engines.member import Member
from services.common.etcd.registry import ENGINES_PREFIX


async def test_a_lost_key_alone_does_not_end_an_engine(fleet, engine_request):
    engine = await fleet.add("a")
    await fleet.keys.forget(engine)
    assert fleet.state("a") == "serving"
    await fleet.ask(engine_request())
    assert not fleet.member("a").registered
    await engine.stop()
    await fleet.until_state("a", "gone")


async def test_broken_reports_alone_do_not_end_it(fleet):
    engine = await fleet.add("a")
    await engine.stop()
    await fleet.until_state("a", "unreachable")
    await engine.start()
    await fleet.until_state("a", "serving")


async def test_while_etcd_is_away_no_engine_leaves(fleet):
    engine = await fleet.add("a")
    fleet.keys.connected = False
    await fleet.keys.forget(engine)
    await engine.stop()
    await fleet.until_state("a", "unreachable")
    fleet.service.dependencies.registry._sweep()
    assert fleet.state("a") == "unreachable", "the engine may return before etcd does"
    fleet.keys.connected = True
    await fleet.until_state("a", "gone")


async def test_a_stopped_engine_stays_in_the_view_without_its_key(fleet, monkeypatch):
    engine = await fleet.add("a")
    monkeypatch.setattr(Member, "may_wake", lambda *_: True)
    await fleet.keys.forget(engine)
    await engine.stop()
    await fleet.until_state("a", "stalled")
    fleet.service.dependencies.registry._sweep()
    assert fleet.state("a") == "stalled"
    monkeypatch.undo()
    await fleet.until_state("a", "gone")


async def test_a_key_deleted_while_the_watch_was_cut_is_gone_after_it(fleet, engine_request):
    ghost, _live = await fleet.add("a"), await fleet.add("b")
    fleet.keys.connected = False
    fleet.keys.items.pop(ENGINES_PREFIX + "a")
    await ghost.stop()
    await fleet.until_state("a", "unreachable")
    fleet.keys.connected = True
    await fleet.keys.set("other", None)
    await fleet.until_state("a", "gone")
    await fleet.ask(engine_request())
    assert fleet.metric("inferfleet_balancer_in_flight", engine="a") == 0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b'{"engineId": "x", "model": "m", "blockSize": 4, "maxNumSeqs": 1}', "address: empty"),
        (b"{not json", "not an EngineInfo"),
        (b'{"engineId": 5', "not an EngineInfo"),
        (b"\xff\xfe", "not an EngineInfo"),
        (
            b'{"engineId":"y","address":"h:1","model":"m","blockSize":4,"maxNumSeqs":1}',
            "holds the record of engine y",
        ),
    ],
)
async def test_a_bad_record_is_ignored_and_logged_once(fleet, caplog, value, problem):
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        await fleet.keys.set(ENGINES_PREFIX + "x", value)
        await fleet.add("good", epoch_ms=1) if not fleet.engines else None
    logged = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert len(logged) == 1
    assert problem in logged[0]
    assert [m.info.engine_id for m in fleet.service.dependencies.registry.members()] == ["good"]


async def test_a_restarted_engine_is_a_new_one(fleet, engine_request):
    old = await fleet.add("a", epoch_ms=1)
    await old.stop()
    new = await fleet.add("a", epoch_ms=2)
    await fleet.ask(engine_request())
    assert len(new.requests) == 1
    await fleet.keys.register(old)
    assert fleet.member("a").info.epoch_ms == 2, "an older record changes nothing"


async def test_another_process_at_the_address_is_not_the_engine(fleet):
    old = await fleet.add("a", epoch_ms=1)
    old.load.epoch_ms = 9
    await fleet.until_state("a", "unreachable")


async def test_a_changed_record_of_the_same_life_is_taken(fleet):
    engine = await fleet.add("a")
    member = fleet.member("a")
    engine.info.draining = True
    await fleet.keys.register(engine)
    await fleet.until_state("a", "draining")
    assert fleet.member("a") is member


@pytest.mark.parametrize("fleet", [{"stall_limit_s": 0.4}], indirect=True)
async def test_an_engine_that_stops_reporting_is_stalled(fleet):
    engine = await fleet.add("a")
    engine.silent = True
    await fleet.until_state("a", "stalled")
    engine.silent = False
    await fleet.until_state("a", "serving")


@pytest.mark.parametrize("fleet", [{"breaker_failures": 2, "breaker_open_s": 0.3}], indirect=True)
async def test_a_failing_engine_is_taken_out_and_tried_again(fleet, engine_request):
    bad, good = await fleet.add("bad"), await fleet.add("good")
    fleet.index.holds(bad, 4)
    bad.break_after = 0
    for number in range(2):
        await fleet.ask(engine_request(request_id=f"r{number}"))
    assert fleet.state("bad") == "open"
    assert fleet.metric("inferfleet_balancer_breaker_state", peer="bad") == 2
    await fleet.ask(engine_request())
    assert len(bad.requests) == 2
    bad.break_after = None
    await fleet.until_state("bad", "serving")
    await fleet.ask(engine_request())
    await fleet.until_idle()
    assert len(bad.requests) == 3
    assert fleet.metric("inferfleet_balancer_breaker_state", peer="bad") == 0
    assert len(good.requests) == 3
