"""Quotas counted by one gateway alone."""

import pytest

from services.gateway.callers.keys_file import Identity, Limits
from services.gateway.callers.quota.local import LocalCounts
from services.gateway.callers.quota.verdict import Left, headers_of, refusal, scopes_of


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def counts(clock):
    return LocalCounts(clock)


def who(tenant_limits, key_limits=None):
    return Identity("acme", "laptop", tenant_limits, key_limits or Limits())


def admit(counts, identity, tokens=1, running=0):
    scopes = scopes_of(identity)
    return counts.admit("acme", scopes, [running] * len(scopes), tokens)


def test_a_minute_of_requests_at_once_and_then_as_they_come_back(counts, clock):
    acme = who(Limits(requests_per_min=3))
    assert [admit(counts, acme).refused for _ in range(4)] == [None] * 3 + ["requests_per_min"]
    verdict = admit(counts, acme)
    assert verdict.wait_s == pytest.approx(20)
    clock.now += verdict.wait_s + 0.001
    assert admit(counts, acme).refused is None
    assert admit(counts, acme).refused == "requests_per_min"


def test_an_idle_hour_saves_up_one_minute(counts, clock):
    acme = who(Limits(requests_per_min=3))
    assert admit(counts, acme).refused is None
    clock.now += 3600
    assert [admit(counts, acme).refused for _ in range(4)] == [None] * 3 + ["requests_per_min"]


def test_real_tokens_replace_the_reserved_ones_also_beyond_the_limit(counts, clock):
    acme = who(Limits(tokens_per_min=60))
    scopes = scopes_of(acme)
    assert admit(counts, acme, tokens=40).refused is None
    assert admit(counts, acme, tokens=40).refused == "tokens_per_min"
    counts.settle("acme", scopes, reserved=40, used=10)
    assert admit(counts, acme, tokens=40).refused is None
    counts.settle("acme", scopes, reserved=40, used=140)  # 90 in debt
    verdict = admit(counts, acme, tokens=1)
    assert verdict.refused == "tokens_per_min"
    assert verdict.wait_s == pytest.approx(91)
    clock.now += 91.5
    assert admit(counts, acme, tokens=1).refused is None


def test_a_request_larger_than_the_quota_waits_for_a_full_one(counts):
    acme = who(Limits(tokens_per_min=60))
    assert admit(counts, acme, tokens=1000).refused is None
    verdict = admit(counts, acme, tokens=1000)
    assert (verdict.refused, verdict.wait_s) == ("tokens_per_min", pytest.approx(60))


def test_nothing_is_taken_when_one_quota_refuses(counts):
    acme = who(Limits(requests_per_min=5), Limits(tokens_per_min=10))
    assert admit(counts, acme, tokens=10).refused is None
    for _ in range(20):
        verdict = admit(counts, acme, tokens=10)
        assert (verdict.refused, verdict.scope) == ("tokens_per_min", 1)
    assert verdict.left[0].requests == 4


def test_requests_at_once(counts):
    acme = who(Limits(concurrency=2))
    assert admit(counts, acme, running=1).refused is None
    assert admit(counts, acme, running=2).refused == "concurrency"


def test_the_share_of_one_of_four_gateways(counts):
    counts.share = 0.25
    acme = who(Limits(requests_per_min=8, concurrency=2))
    assert admit(counts, acme, running=1).refused == "concurrency"
    assert [admit(counts, acme).refused for _ in range(3)] == [None, None, "requests_per_min"]


def test_counting_alone_starts_from_the_last_levels_in_redis(counts):
    acme = who(Limits(requests_per_min=100))
    counts.share = 0.5
    counts.mirror("acme", scopes_of(acme), [Left(requests=4.0)])
    assert [admit(counts, acme).refused for _ in range(3)] == [None, None, "requests_per_min"]


def test_tenants_and_keys_do_not_share(counts):
    scopes = scopes_of(who(Limits(requests_per_min=1)))
    assert counts.admit("a", scopes, [0], 1).refused is None
    assert counts.admit("b", scopes, [0], 1).refused is None
    assert counts.admit("a", scopes, [0], 1).refused == "requests_per_min"


def test_headers_show_the_scope_with_the_least_left():
    acme = who(Limits(requests_per_min=60, tokens_per_min=600), Limits(requests_per_min=6))
    headers = headers_of(acme, [Left(50.0, 300.0), Left(2.5, None)])
    assert headers == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "35000ms",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "30000ms",
    }


def test_the_refusal_names_quota_and_owner(counts):
    acme = who(Limits(), Limits(requests_per_min=1))
    admit(counts, acme)
    error = refusal(admit(counts, acme), acme, "r", 1)
    assert error.message == (
        "quota requests_per_min of key laptop is used up: 1 requests per minute"
    )
    assert error.metadata["quota"] == "requests_per_min"
    assert error.retry_after_s == pytest.approx(60, abs=0.01)
