"""Order, bounds and fairness of the queue, and its counts over random histories."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.balancer.queue.fair_queue import (
    MAX_LEVELS,
    PRIORITY_TOKENS,
    FairQueue,
    head_start,
)
from services.balancer.queue.tenant_counters import TenantCounters


def queue(limit=10):
    return FairQueue(limit, TenantCounters())


def drained(q):
    out = []
    while (key := q.pop()) is not None:
        out.append(key)
    return out


def test_first_come_first_served_within_a_tenant():
    q = queue()
    for key in "abc":
        assert q.offer(key, "t", 0).accepted
    assert drained(q) == ["a", "b", "c"]


def test_priority_goes_first():
    q = queue()
    q.offer("low", "t", -1)
    q.offer("plain", "t", 0)
    q.offer("high", "t", 5)
    assert drained(q) == ["high", "plain", "low"]


def test_the_least_served_tenant_is_next():
    q = queue()
    for tenant in ("rich", "poor"):
        q.counters.enter(tenant)
    q.counters.charge("rich", 100)
    q.offer("r1", "rich", 0)
    q.offer("p1", "poor", 0)
    assert q.pop() == "p1"
    q.counters.charge("poor", 101)
    q.offer("p2", "poor", 0)
    assert q.pop() == "r1"


def test_idleness_earns_no_credit():
    counters = TenantCounters()
    counters.enter("busy")
    counters.charge("busy", 1000)
    counters.enter("late")
    assert counters.served("late") == 1000
    counters.leave("busy")
    counters.leave("late")
    counters.enter("later")
    assert counters.served("later") == 1000
    assert list(counters.active) == ["later"]


def test_two_tenants_share_evenly_though_one_floods():
    q, served = queue(100), []
    for tenant in ("flood", "calm"):
        q.counters.enter(tenant)
    for i in range(50):
        q.offer(("flood", i), "flood", 0)
    for i in range(10):
        q.offer(("calm", i), "calm", 0)
    for _ in range(20):
        tenant, _i = q.pop()
        served.append(tenant)
        q.counters.charge(tenant, 10)
    assert served.count("calm") == 10


def test_a_flood_cannot_shut_others_out():
    q = queue(4)
    for i in range(4):
        q.offer(("flood", i), "flood", 0)
    assert q.offer(("flood", 9), "flood", 0) == (False, None)
    assert q.offer(("calm", 0), "calm", 0) == (True, ("flood", 3))
    assert q.offer(("calm", 1), "calm", 0) == (True, ("flood", 2))
    assert q.offer(("calm", 2), "calm", 0) == (False, None), "level now"


def test_higher_priority_displaces_the_newest_of_the_lowest_of_its_tenant():
    q = queue(2)
    q.offer("a", "t", 0)
    q.offer("b", "t", 0)
    assert q.offer("c", "t", 1) == (True, "b")
    assert q.offer("d", "t", 0) == (False, None)
    assert q.offer("e", "u", -1) == (True, "a"), "u has no request in the queue, and t has two"
    assert q.offer("f", "u", 9) == (True, "e")
    assert q.offer("g", "u", 9) == (False, None), "level now, at any priority"


def test_priority_is_a_bounded_head_start_between_tenants():
    q, served = queue(400), []
    for tenant in ("pushy", "plain"):
        q.counters.enter(tenant)
        for i in range(100):
            q.offer((tenant, i), tenant, 10**6 if tenant == "pushy" else 0)
    cost = PRIORITY_TOKENS * MAX_LEVELS / 10
    for _ in range(40):
        tenant, _i = q.pop()
        served.append(tenant)
        q.counters.charge(tenant, cost)
    assert served[:10] == ["pushy"] * 10, "it goes first"
    assert served[10:].count("plain") == 15, "and is then served evenly, for all its priority"


def test_urgent_requests_of_one_tenant_do_not_keep_others_out_of_the_queue():
    q = queue(4)
    for i in range(4):
        q.offer(("pushy", i), "pushy", 100)
    assert q.offer(("plain", 0), "plain", 0) == (True, ("pushy", 3))
    assert q.offer(("plain", 1), "plain", 0) == (True, ("pushy", 2))
    assert q.offer(("pushy", 9), "pushy", 100) == (False, None)


def test_a_queue_of_size_zero_accepts_nothing():
    assert queue(0).offer("a", "t", 0) == (False, None)


class Histories(RuleBasedStateMachine):
    """Arrive, leave, be served, run and end; the counts agree after every step."""

    def __init__(self):
        super().__init__()
        self.q = queue(4)
        self.waiting: dict[int, tuple[str, int]] = {}
        self.running: list[str] = []
        self.next_key = 0

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(-1, 1))
    def arrive(self, tenant, priority):
        key, self.next_key = self.next_key, self.next_key + 1
        self.q.counters.enter(tenant)
        offer = self.q.offer(key, tenant, priority)
        if offer.displaced is not None:
            owner, level = self.waiting[offer.displaced]
            held = [t for t, _ in self.waiting.values()]
            own = owner == tenant and level < priority
            assert own or held.count(owner) > held.count(tenant) + 1
            self.q.counters.leave(self.waiting.pop(offer.displaced)[0])
        if offer.accepted:
            self.waiting[key] = (tenant, priority)
        else:
            self.q.counters.leave(tenant)
            assert len(self.waiting) == 4

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.q.remove(key)
        assert not self.q.remove(key)
        self.q.counters.leave(self.waiting.pop(key)[0])

    @rule()
    def serve(self):
        key = self.q.pop()
        assert (key is None) == (not self.waiting)
        if key is not None:
            tenant, priority = self.waiting.pop(key)
            assert all(priority >= p for t, p in self.waiting.values() if t == tenant)
            level = self.q.counters.served(tenant) - head_start(priority)
            for rival, other in self.waiting.values():
                assert level <= self.q.counters.served(rival) - head_start(other)
            self.running.append(tenant)

    @precondition(lambda self: self.running)
    @rule(tokens=st.integers(-5, 50))
    def end(self, tokens):
        tenant = self.running.pop()
        self.q.counters.charge(tenant, tokens)
        self.q.counters.leave(tenant)

    @invariant()
    def counts_agree(self):
        self.q.check_integrity()
        assert set(self.q) == set(self.waiting)
        tenants = [t for t, _ in self.waiting.values()] + self.running
        assert dict(self.q.counters.active) == {t: tenants.count(t) for t in set(tenants)}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
