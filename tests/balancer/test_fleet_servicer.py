"""The operators' service: listing and draining engines, and explaining decisions."""

import grpc
import pytest

from inferfleet_proto.admin.v1 import fleet_pb2
from services.common import errors


async def test_explain_shows_all_decisions(fleet, engine_request):
    first = await fleet.add("a")
    await fleet.add("b")
    fleet.index.holds(first, 4)
    first.refuse_with = errors.InternalError("bug")
    await fleet.ask(engine_request())
    await fleet.until_idle()
    admin = fleet.admin()
    found = await admin.Explain(fleet_pb2.ExplainRequest(request_id="r1"))
    assert [d.engine_id for d in found.decisions] == ["a", "b"]
    assert [d.outcome for d in found.decisions] == ["INTERNAL", "OK"]
    assert [d.attempt for d in found.decisions] == [0, 1]
    by_id = {c.engine_id: c for c in found.decisions[0].candidates}
    assert by_id["a"].matched_tokens == 16
    assert by_id["a"].expected_s == pytest.approx(sum(by_id["a"].parts.values()))
    assert by_id["a"].expected_s < by_id["b"].expected_s
    with pytest.raises(grpc.RpcError) as caught:
        await admin.Explain(fleet_pb2.ExplainRequest(request_id="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_drained_engine_gets_no_more(fleet, engine_request):
    first, second = await fleet.add("a"), await fleet.add("b")
    fleet.index.holds(first, 4)
    admin = fleet.admin()
    await admin.Drain(fleet_pb2.DrainEngineRequest(engine_id="a", grace_s=1))
    listed = await admin.ListEngines(fleet_pb2.ListEnginesRequest())
    assert {e.info.engine_id: e.state for e in listed.engines} == {"a": "draining", "b": "serving"}
    await fleet.ask(engine_request())
    assert [len(first.requests), len(second.requests)] == [0, 1]


async def test_a_drain_that_fails_still_takes_the_engine_out(fleet):
    engine = await fleet.add("a")
    engine.drain_with = errors.InternalError("stuck")
    admin = fleet.admin()
    with pytest.raises(grpc.RpcError, match="out of routing"):
        await admin.Drain(fleet_pb2.DrainEngineRequest(engine_id="a"))
    assert fleet.state("a") == "draining"
    for request, code in (
        (fleet_pb2.DrainEngineRequest(engine_id="zzz"), grpc.StatusCode.NOT_FOUND),
        (fleet_pb2.DrainEngineRequest(engine_id="a", grace_s=-1), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await admin.Drain(request)
        assert caught.value.code() is code


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
async def test_an_impossible_drain_is_refused(fleet, fields, code, words):
    await fleet.add("a", model_revision="r1")
    with pytest.raises(grpc.RpcError) as caught:
        await fleet.admin().DrainRevision(fleet_pb2.DrainRevisionRequest(**fields))
    error = errors.error_of(caught.value)
    assert isinstance(error, code)
    assert words in str(error)
