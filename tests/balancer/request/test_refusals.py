"""A request that an engine refuses: no engine failed, and nothing counts against it."""

import logging

import pytest

from services.balancer.request.failure import Failure
from services.common import errors

LOGGER = "services.balancer.request.engine_stream"
SCHEMA = errors.InvalidArgumentError.for_field("constraint.json_schema", "no such keyword")


async def test_a_callers_bad_schema_is_no_failure_of_the_engine(fleet, engine_request, caplog):
    engine = await fleet.add("a")
    caplog.set_level(logging.DEBUG, LOGGER)
    engine.refuse_with = SCHEMA
    for number in range(5):  # more than the failures that open a breaker
        with pytest.raises(errors.InvalidArgumentError):
            await fleet.ask(engine_request(request_id=f"r{number}"))
    engine.refuse_with = None
    await fleet.ask(engine_request(request_id="good"))
    records = [record for record in caplog.records if record.name == LOGGER]
    assert len(records) == 5
    for record in records:
        assert record.levelno <= logging.INFO
        assert "engine a refused: INVALID_ARGUMENT" in record.getMessage()
        assert "constraint.json_schema" in record.getMessage()
        assert "failed" not in record.getMessage()
        assert "no such keyword" not in record.getMessage()  # it may quote the caller's schema


async def test_an_engine_that_fails_is_still_a_warning(fleet, engine_request, caplog):
    engine = await fleet.add("a")
    caplog.set_level(logging.DEBUG, LOGGER)
    engine.refuse_with = errors.InternalError("bug")
    with pytest.raises(errors.FleetError):
        await fleet.ask(engine_request())
    warnings = [r for r in caplog.records if r.name == LOGGER and r.levelno == logging.WARNING]
    assert "engine a failed: INTERNAL: bug" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("failure", "refused"),
    [
        (Failure(SCHEMA), True),
        (Failure(errors.ResourceExhaustedError("full")), True),
        (Failure(errors.FailedPreconditionError("numerics")), True),
        (Failure(errors.NotFoundError("model")), True),
        (Failure(errors.InternalError("bug")), False),
        (Failure(errors.UnavailableError("gone")), False),
        (Failure(errors.UnavailableError("gone"), lost=True), False),
        (Failure(errors.AbortedError("broke")), False),
        (Failure(errors.DataLossError("lost")), False),
    ],
)
def test_refusals_and_failures(failure, refused):
    assert failure.refused is refused
