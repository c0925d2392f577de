"""All of `make chaos` with fewer kills and shorter outages, for `make verify`; times not judged."""

import pytest

from tests.chaos.run import SETS, run_all
from tests.chaos.scenario import Plan

PLAN = Plan(streams=24, rounds=4, outage_s=20.0, pause_s=12.0)


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SETS)
async def test_no_fault_is_noticed(kind, tmp_path):
    problems = {}
    async for row in run_all(list(SETS[kind]), 3, PLAN, print, tmp_path):
        problems[row.scenario] = row.judge(strict_times=False)
    assert len(problems) >= len(SETS[kind])
    assert {name: found for name, found in problems.items() if found} == {}
