"""What a balancer knows before any event tells it, what n choices take, and draining a revision."""

import asyncio

import grpc
import pytest

from inferfleet_proto.admin.v1 import fleet_pb2
from services.common import errors

PROMPT = list(range(40))


async def test_a_second_request_follows_the_first_one_that_nobody_has_told_of(
    fleet, engine_request, wait_until
):
    """The index knows nothing; the first request is still being computed."""
    engines = [await fleet.add(name) for name in ("a", "b", "c")]
    for engine in engines:
        engine.hang_after = 0
    calls = [fleet.run(engine_request(request_id="r0", prompt=PROMPT))]
    first = asyncio.create_task(calls[0].read())
    await wait_until(lambda: any(e.requests for e in engines), "the first is there")
    (holder,) = [e for e in engines if e.requests]
    others = []
    for number in range(1, 4):
        prompt = [*PROMPT[:36], *range(100 * number, 100 * number + 4)]
        calls.append(fleet.run(engine_request(request_id=f"r{number}", prompt=prompt)))
        others.append(asyncio.create_task(calls[-1].read()))
        await wait_until(lambda n=number: fleet.in_flight() == n + 1, "one more")
    # In flight is counted when an engine is chosen; the engine hears of it a little later.
    await wait_until(
        lambda: len(holder.requests) == 4, "all are at the engine that computes the prefix"
    )
    story = await fleet.admin().Explain(fleet_pb2.ExplainRequest(request_id="r3"))
    matched = {c.engine_id: c.matched_tokens for c in story.decisions[0].candidates}
    assert matched.pop(holder.info.engine_id) == 36
    assert set(matched.values()) == {0}
    for call in calls:
        call.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    await fleet.until_idle()
    assert fleet.service.rooms.matcher.holds.empty


async def test_n_choices_take_n_places(fleet, engine_request, wait_until):
    engine = await fleet.add("a", max_num_seqs=4)
    engine.hang_after = 1
    admission = fleet.service.rooms.admission
    call = fleet.run(engine_request(request_id="wide", n=6))
    assert await call.read()
    view = fleet.service.rooms.registry.views("tiny")[0]
    assert (view.in_flight, view.occupancy) == (1, 6)
    waiting = asyncio.create_task(fleet.ask(engine_request(request_id="next", n=3)))
    await wait_until(lambda: admission.queued() == {"tiny": 1}, "6 + 3 of 4 + 4 places")
    engine.hang_after = None
    call.cancel()
    assert await waiting
    await fleet.until_idle()


async def test_a_revision_is_drained_and_no_other(fleet, engine_request):
    old = [await fleet.add(f"old-{n}", model_revision="r1") for n in range(2)]
    new = await fleet.add("new", model_revision="r2")
    admin = fleet.admin()
    answer = await admin.DrainRevision(
        fleet_pb2.DrainRevisionRequest(model="tiny", model_revision="r1", grace_s=1)
    )
    assert [(e.engine_id, e.problem) for e in answer.engines] == [("old-0", ""), ("old-1", "")]
    assert all(engine.load.draining for engine in old)
    for number in range(6):
        await fleet.ask(engine_request(request_id=f"r{number}"))
    assert len(new.requests) == 6
    wanted = engine_request(request_id="late")
    wanted.model_revision = "r1"
    with pytest.raises(errors.UnavailableError):
        await fleet.ask(wanted)
    assert (
        fleet.metric(
            "inferfleet_balancer_revision_requests_total", model="tiny", revision="r2", status="OK"
        )
        == 6
    )


async def test_an_engine_that_does_not_drain_is_named_and_still_out(fleet, engine_request):
    stubborn = await fleet.add("stubborn", model_revision="r1")
    stubborn.drain_with = errors.InternalError("no")
    answer = await fleet.admin().DrainRevision(
        fleet_pb2.DrainRevisionRequest(model="tiny", model_revision="r1")
    )
    assert answer.engines[0].problem
    assert fleet.state("stubborn") == "draining"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"model": "tiny", "model_revision": "r9"}, errors.NotFoundError, "model_revision"),
        ({"model": "tiny", "grace_s": -1.0}, errors.InvalidArgumentError, "grace_s"),
        ({"model": "tiny", "grace_s": float("nan")}, errors.InvalidArgumentError, "grace_s"),
    ],
)
async def test_what_cannot_be_drained_is_refused(fleet, fields, code, words):
    await fleet.add("a", model_revision="r1")
    with pytest.raises(grpc.RpcError) as caught:
        await fleet.admin().DrainRevision(fleet_pb2.DrainRevisionRequest(**fields))
    told = errors.error_of(caught.value)
    assert isinstance(told, code)
    assert words in str(told)
