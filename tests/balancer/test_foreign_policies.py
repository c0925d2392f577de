"""Policies that users bring: found by name, checked at start, and never the end of a request."""

import logging
from random import Random

import pytest

from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import (
    Asked,
    Candidate,
    Choice,
    CostModel,
    EngineState,
    EngineView,
)
from services.balancer.routing.policies import POLICIES, PolicyError, find_policy
from services.balancer.routing.prefix_match import Matches
from services.balancer.routing.router import Router
from services.common.config.settings import ConfigError, load


def last_of_all(situation, rng):
    return Choice(max(situation.candidates, key=lambda c: c.engine.engine_id), "the last", {})


def broken(situation, rng):
    raise ZeroDivisionError("a bug")


def stranger(situation, rng):
    return Choice(Candidate(EngineView("elsewhere", 1, "m", EngineState.SERVING)), "", {})


not_a_function = 3


def choose(policy):
    views = [EngineView(name, 1, "m", EngineState.SERVING) for name in ("a", "b", "c")]
    router = Router(policy, lambda model: views, lambda e, n: True, cost=CostModel(), rng=Random(0))
    asked = Asked("r", "m", range(10))
    choice, _ = router.choose(asked, router.eligible(asked), Matches(True))
    return choice


@pytest.fixture
def here(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    return request.path.stem


def test_a_dotted_name_is_a_policy(here):
    choice = choose(f"{here}:last_of_all")
    assert (choice.candidate.engine.engine_id, choice.reason) == ("c", "the last")


def test_an_entry_point_is_a_policy(here, monkeypatch):
    from importlib.metadata import EntryPoint

    from services.balancer.routing import policies

    point = EntryPoint("mine", f"{here}:last_of_all", policies.ENTRY_POINTS)
    asked = []
    monkeypatch.setattr(policies, "entry_points", lambda group: asked.append(group) or [point])
    assert choose("mine").reason == "the last"
    assert asked == ["inferfleet.policies"]


@pytest.mark.parametrize("name", ["broken", "stranger"])
def test_where_a_foreign_policy_fails_least_time_chooses(here, caplog, name):
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert choose(f"{here}:{name}").candidate.engine.engine_id in ("a", "b", "c")
    assert "least_time chose instead" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("least_tim", "none of least_time"),
        ("no_such_module:choose", "cannot be loaded"),
        ("{here}:missing", "cannot be loaded"),
        ("{here}:not_a_function", "is not a function"),
        (":choose", "not module:function"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_at_start(here, name, words):
    name = name.format(here=here)
    with pytest.raises(PolicyError, match=words):
        find_policy(name)
    with pytest.raises(ConfigError, match=f"policy.*{words}"):
        load(BalancerConfig, ["--policy", name], prog="balancer", description="")


def test_our_own_are_found_by_name():
    assert all(find_policy(name) is policy for name, policy in POLICIES.items())
