"""Policies as pure functions: which engine is chosen, why, and how load moves the choice."""

import dataclasses
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.balancer.engines.engine_view import (
    Candidate,
    CostModel,
    EngineState,
    EngineView,
    RoutingRequest,
    Situation,
)
from services.balancer.routing.policies import POLICIES, least_time
from services.balancer.routing.prefix_match import Matches
from services.balancer.routing.router import Origin, Router


def view(engine_id, **changes):
    facts = {"prefill_tokens_per_s": 1000.0, "decode_round_s": 0.03, "total_blocks": 100}
    return EngineView(engine_id, 1, "m", EngineState.SERVING, **{**facts, **changes})


def situation(*candidates, tokens=100, turn=0, **request):
    made = RoutingRequest("r", "m", range(tokens), **request)
    return Situation(made, tuple(candidates), CostModel(), turn)


def chosen(policy, *candidates, rng=None, **changes):
    choice = POLICIES[policy](situation(*candidates, **changes), rng or Random(1))
    return choice.candidate.engine.engine_id


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_is_a_function_of_its_inputs(policy):
    candidates = [Candidate(view(f"e{i}", occupancy=i % 3), i) for i in range(8)]
    for turn in range(5):
        picks = {chosen(policy, *candidates, rng=Random(turn), turn=turn) for _ in range(3)}
        assert len(picks) == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_candidate_is_taken(policy):
    assert chosen(policy, Candidate(view("only", occupancy=99, held_blocks=100))) == "only"


loads = st.fixed_dictionaries(
    {
        "occupancy": st.integers(0, 300),
        "queued_uncached": st.integers(0, 1_000_000),
        "held_blocks": st.integers(0, 200),
        "prefill_tokens_per_s": st.sampled_from([0.0, 1.0, 500.0, 20_000.0]),
        "decode_round_s": st.sampled_from([0.0, 0.001, 0.5]),
    }
)


@given(
    load=loads,
    field=st.sampled_from(["occupancy", "queued_uncached", "held_blocks"]),
    more=st.integers(1, 1000),
    matched=st.integers(0, 200),
)
def test_more_load_is_never_cheaper(load, field, more, matched):
    lighter, heavier = view("e", **load), view("e", **{**load, field: load[field] + more})
    costs = [
        least_time.score_all(situation(Candidate(engine, matched)))["e"].expected_s
        for engine in (lighter, heavier)
    ]
    assert 0 < costs[0] <= costs[1] < float("inf")


@given(load=loads, matched=st.integers(0, 99), more=st.integers(0, 50))
def test_a_longer_match_is_never_dearer(load, matched, more):
    engine = view("e", **load)
    costs = [
        least_time.score_all(situation(Candidate(engine, m)))["e"].expected_s
        for m in (matched, matched + more)
    ]
    assert costs[1] <= costs[0]


def test_the_parts_add_up_to_the_formula():
    engine = view("e", occupancy=8, queued_uncached=500, held_blocks=50)
    score = least_time.score_all(situation(Candidate(engine, 40), expected_output=10))["e"]
    assert score.parts == pytest.approx(
        {
            "prefill_s": 0.06,
            "burden_s": (CostModel().recompute_weight - 1) * 0.06,
            "turnover_s": CostModel().turnover_weight * 0.06,
            "queued_s": 0.5,
            "pressure_s": 0.5,
            "decode_s": 10 * 0.03 * 0.5,
        }
    )
    assert score.expected_s == pytest.approx(sum(score.parts.values()))


def test_a_full_pool_is_clamped():
    full = least_time.score_all(situation(Candidate(view("e", held_blocks=100))))["e"]
    assert full.parts["pressure_s"] == pytest.approx(0.5 * 0.98 / 0.02)


def test_an_unknown_prompt_goes_where_the_cache_is_stale():
    busy, calm = view("busy", recent_uncached=900.0), view("calm", recent_uncached=100.0)
    assert chosen("least_time", Candidate(busy), Candidate(calm)) == "calm"
    scores = least_time.score_all(situation(Candidate(busy), Candidate(calm)))
    parts = [scores[name].parts["turnover_s"] for name in ("busy", "calm")]
    weight = CostModel().turnover_weight
    assert parts == pytest.approx([weight * 1.8 * 0.1, weight * 0.2 * 0.1])
    large = view("large", recent_uncached=900.0, total_blocks=10_000)
    assert chosen("least_time", Candidate(large), Candidate(calm)) == "large", "by its size"
    held = view("held", recent_uncached=100.0, held_blocks=95)
    assert least_time.turnover(held) > least_time.turnover(calm), (
        "relative to the blocks that no request holds"
    )


def test_an_engine_without_measurements_gets_its_peers_rate():
    scores = least_time.score_all(
        situation(
            Candidate(view("cold", prefill_tokens_per_s=0.0)),
            Candidate(view("slow", prefill_tokens_per_s=100.0)),
            Candidate(view("fast", prefill_tokens_per_s=300.0)),
        )
    )
    assert scores["cold"].parts["prefill_s"] == pytest.approx(100 / 200)


def test_a_hot_prefix_spreads_when_waiting_costs_more_than_recomputing():
    def winner(queued):
        return chosen(
            "least_time",
            Candidate(view("holder", queued_uncached=queued), 96),
            Candidate(view("other")),
        )

    saved = 96 * (CostModel().recompute_weight + CostModel().turnover_weight)
    assert winner(0) == "holder"
    assert winner(int(saved) - 4) == "holder"
    assert winner(int(saved) + 4) == "other"


def test_ties_are_broken_at_random():
    candidates = [Candidate(view(f"e{i}")) for i in range(4)]
    rng = Random(3)
    counts = Counter(chosen("least_time", *candidates, rng=rng) for _ in range(400))
    assert set(counts) == {"e0", "e1", "e2", "e3"}
    assert min(counts.values()) > 50


def test_round_robin_takes_turns_in_any_order_of_candidates():
    candidates = [Candidate(view(name)) for name in ("c", "a", "b")]
    turns = [chosen("round_robin", *candidates, turn=i) for i in range(6)]
    assert turns == ["a", "b", "c"] * 2


def test_prefix_only_follows_the_longest_match():
    busy = Candidate(view("busy", occupancy=50), 64)
    idle, idler = Candidate(view("idle", occupancy=3), 32), Candidate(view("idler"), 32)
    assert chosen("prefix_only", idle, busy, idler) == "busy"
    assert chosen("prefix_only", idle, idler) == "idler"


def test_power_of_two_avoids_the_busiest():
    candidates = [Candidate(view("busy", occupancy=9)), Candidate(view("x")), Candidate(view("y"))]
    rng = Random(5)
    picks = {chosen("power_of_two", *candidates, rng=rng) for _ in range(100)}
    assert picks == {"x", "y"}


@given(sessions=st.sets(st.text(min_size=1), min_size=1, max_size=20), gone=st.integers(0, 4))
def test_only_the_sessions_of_a_lost_engine_move(sessions, gone):
    candidates = [Candidate(view(f"e{i}")) for i in range(5)]
    left = [c for i, c in enumerate(candidates) if i != gone]
    for session in sessions:
        before = chosen("session", *candidates, session_id=session)
        after = chosen("session", *left, session_id=session)
        assert before == f"e{gone}" or after == before


def test_without_a_session_the_least_time_wins():
    candidates = [Candidate(view("busy", queued_uncached=9999)), Candidate(view("idle"))]
    assert chosen("session", *candidates) == "idle"


def route(views, *, matches=None, policy="least_time", **request):
    router = Router(
        policy,
        lambda model: views,
        lambda engine, slots: engine.occupancy + slots <= 10,
        cost=CostModel(),
        rng=Random(0),
    )
    made = RoutingRequest("r", "m", range(100), **request)
    eligible = router.eligible(made)
    if not eligible:
        return None
    choice, _ = router.choose(made, eligible, matches or Matches(True))
    return choice.candidate.engine.engine_id


def test_an_unhealthy_idle_engine_does_not_count():
    """A and B are healthy at load 5, C is not and has none; the prompt is B's."""
    views = [
        view("A", occupancy=5, in_flight=5),
        view("B", occupancy=5, in_flight=5),
        dataclasses.replace(view("C"), state=EngineState.UNREACHABLE),
    ]
    matches = Matches(True, {("B", 1): 96, ("C", 1): 96})
    for policy in ("least_time", "prefix_only"):
        assert route(views, matches=matches, policy=policy) == "B"
    for policy in sorted(POLICIES):
        assert route(views, policy=policy) in ("A", "B")


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.SERVING])
def test_only_serving_engines_are_eligible(state):
    assert route([dataclasses.replace(view("A"), state=state)]) is None


def test_full_engines_are_a_last_resort():
    views = [view("full", occupancy=10), view("free", occupancy=9, queued_uncached=10**9)]
    assert route(views) == "free"
    assert route(views[:1]) == "full"
    assert route([views[1], view("B", occupancy=8)], num_choices=2) == "B"


def test_a_match_of_an_earlier_life_does_not_count():
    assert Matches(True, {("A", 7): 50}).matched_tokens(view("A")) == 0
    assert Matches(True, {("A", 1): 50}).matched_tokens(view("A")) == 50


@pytest.mark.parametrize(
    ("rule", "greedy", "other", "allowed", "exact"),
    [
        ("equal", False, {"deterministic": True}, True, True),
        ("equal", False, {}, True, False),
        ("equal", False, {"numerics_id": "y"}, False, False),
        ("exact", False, {"deterministic": True}, True, True),
        ("exact", False, {}, False, False),
        ("exact", True, {}, True, False),
        ("exact", True, {"numerics_id": "y"}, False, False),
        ("any", False, {"numerics_id": "y"}, True, False),
        ("any", False, {"revision": "other"}, False, False),
        ("never", True, {"deterministic": True}, False, True),
    ],
)
def test_which_engines_may_resume_a_broken_stream(rule, greedy, other, allowed, exact):
    facts = {"numerics_id": "x", "revision": "r", "deterministic": False}
    first = view("A", **{**facts, "deterministic": True})
    second = view("B", **{**facts, **other})
    origin = Origin(first, rule)
    assert origin.allows(second, greedy=greedy) == allowed
    assert origin.exact(second) == exact


def test_demanded_numerics_are_kept():
    views = [view("A", numerics_id="x"), view("B", numerics_id="y", queued_uncached=10**6)]
    assert route(views, numerics_id="y") == "B"
    assert route(views, numerics_id="z") is None


def test_a_wanted_revision_is_kept():
    views = [view("A", revision="r1"), view("B", revision="r2", queued_uncached=10**6)]
    assert route(views, revision="r2") == "B"
    assert route(views, revision="r3") is None
    assert route(views) == "A"
