"""Prefixes and slots of running requests count before any event or report contains them."""

import asyncio

from inferfleet_proto.admin.v1 import fleet_pb2

PROMPT = list(range(40))


async def test_a_second_request_follows_the_first_before_the_index_has_its_prefix(
    fleet, engine_request, wait_until
):
    """The index has no prefix; the first request is still being computed."""
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
    # In flight is counted when an engine is chosen; the request arrives there a little later.
    await wait_until(
        lambda: len(holder.requests) == 4, "all are at the engine that computes the prefix"
    )
    found = await fleet.admin().Explain(fleet_pb2.ExplainRequest(request_id="r3"))
    matched = {c.engine_id: c.matched_tokens for c in found.decisions[0].candidates}
    assert matched.pop(holder.info.engine_id) == 36
    assert set(matched.values()) == {0}
    assert not any(request.needs_state for request in fleet.index.requests)
    for call in calls:
        call.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    await fleet.until_idle()
    assert fleet.service.dependencies.matcher.holds.empty


async def test_an_engine_with_state_counts_for_what_it_has_a_snapshot_of(
    fleet, engine_request, wait_until
):
    """A request in flight there shares 36 tokens; the index has a snapshot after 8."""
    engine = await fleet.add("a", needs_state=True)
    engine.hang_after = 0
    calls = [fleet.run(engine_request(request_id="r0", prompt=PROMPT))]
    tasks = [asyncio.create_task(calls[0].read())]
    await wait_until(lambda: engine.requests, "the first is there")
    fleet.index.holds(engine, 2)
    calls.append(fleet.run(engine_request(request_id="r1", prompt=[*PROMPT[:36], 7, 7, 7, 7])))
    tasks.append(asyncio.create_task(calls[1].read()))
    await wait_until(lambda: len(engine.requests) == 2, "the second too")
    assert [request.needs_state for request in fleet.index.requests] == [True, True]
    found = await fleet.admin().Explain(fleet_pb2.ExplainRequest(request_id="r1"))
    assert found.decisions[0].candidates[0].matched_tokens == 8
    for call in calls:
        call.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.until_idle()


async def test_n_choices_take_n_slots(fleet, engine_request, wait_until):
    engine = await fleet.add("a", max_num_seqs=4)
    engine.hang_after = 1
    admission = fleet.admission
    call = fleet.run(engine_request(request_id="wide", n=6))
    assert await call.read()
    view = fleet.service.dependencies.registry.views("tiny")[0]
    assert (view.in_flight, view.occupancy) == (1, 6)
    waiting = asyncio.create_task(fleet.ask(engine_request(request_id="next", n=3)))
    await wait_until(lambda: admission.queued() == {"tiny": 1}, "6 + 3 of 4 + 4 slots")
    engine.hang_after = None
    call.cancel()
    assert await waiting
    await fleet.until_idle()
