"""Policies of users: found by name, checked at start; their failures fail no request."""

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
    RoutingRequest,
)
from services.balancer.routing.policies import POLICIES, PolicyError, find_policy
from services.balancer.routing.prefix_match import Matches
from services.balancer.routing.router import Router
from services.common.config.settings import ConfigError, load


def last_of_all(situation, rng):
    return Choice(max(situation.candidates, key=lambda c: c.engine.engine_id), "the last", {})


def by_former_names(situation, rng):
    """As policies written for earlier versions read the request."""
    assert isinstance(situation.asked, Asked)
    reason = f"{situation.asked.model}, {situation.asked.expected_output}"
    return Choice(situation.candidates[0], reason, {})


def broken(situation, rng):
    raise ZeroDivisionError("a bug")


def stranger(situation, rng):
    return Choice(Candidate(EngineView("elsewhere", 1, "m", EngineState.SERVING)), "", {})


not_a_function = 3


def choose(policy):
    views = [EngineView(name, 1, "m", EngineState.SERVING) for name in ("a", "b", "c")]
    router = Router(policy, lambda model: views, lambda e, n: True, cost=CostModel(), rng=Random(0))
    request = RoutingRequest("r", "m", range(10))
    choice, _ = router.choose(request, router.eligible(request), Matches(True))
    return choice


@pytest.fixture
def here(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    return request.path.stem


def test_a_dotted_name_is_a_policy(here):
    choice = choose(f"{here}:last_of_all")
    assert (choice.candidate.engine.engine_id, choice.reason) == ("c", "the last")


def test_a_policy_may_use_the_former_names(here):
    assert choose(f"{here}:by_former_names").reason == "m, 128"


def test_an_entry_point_is_a_policy(here, monkeypatch):
    from importlib.metadata import EntryPoint

    from services.balancer.routing import policies

    point = EntryPoint("mine", f"{here}:last_of_all", policies.ENTRY_POINTS)
    groups = []
    monkeypatch.setattr(policies, "entry_points", lambda group: groups.append(group) or [point])
    assert choose("mine").reason == "the last"
    assert groups == ["inferfleet.policies"]


@pytest.mark.parametrize("name", ["broken", "stranger"])
def test_where_a_policy_of_a_user_fails_least_time_chooses(here, caplog, name):
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
def test_a_policy_that_cannot_be_loaded_is_refused_at_start(here, name, words):
    name = name.format(here=here)
    with pytest.raises(PolicyError, match=words):
        find_policy(name)
    with pytest.raises(ConfigError, match=f"policy.*{words}"):
        load(BalancerConfig, ["--policy", name], prog="balancer", description="")


def test_built_in_policies_are_found_by_name():
    assert all(find_policy(name) is policy for name, policy in POLICIES.items())
