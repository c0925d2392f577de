"""Records as anyone may have written them, and the choice of a revision as a pure function."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.etcd.model_alias import (
    AliasError,
    AliasRecord,
    Target,
    check_alias,
    choose,
    parse_record,
)

KEYS = [f"tenant\0request-{n}" for n in range(4000)]


def everywhere(target):
    return True


def split(*targets, keys=KEYS, usable=everywhere):
    return [choose("chat", targets, key, usable) for key in keys]


def test_shares_are_as_the_weights():
    chosen = Counter(t.revision for t in split(Target("m", "r1", 19), Target("m", "r2", 1)))
    assert 120 < chosen["r2"] < 280, "200 of 4,000 expected, 14 standard deviation"


@pytest.mark.parametrize("percent", [1, 5])
def test_a_growing_canary_takes_keys_and_moves_no_other(percent):
    before = split(Target("m", "a", 60), Target("m", "b", 40), Target("m", "new", percent))
    after = split(Target("m", "a", 60), Target("m", "b", 40), Target("m", "new", 10 * percent))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old.key != new.key]
    assert moved
    assert {new.revision for _, new in moved} == {"new"}


def test_who_cannot_be_used_gives_its_keys_to_the_others_and_gets_them_back():
    targets = [Target("m", "a", 1), Target("m", "b", 1), Target("m", "c", 1)]
    whole = split(*targets)
    without = split(*targets, usable=lambda t: t.revision != "b")
    for one, other in zip(whole, without, strict=True):
        assert other.revision != "b"
        assert one.revision == "b" or one == other


def test_a_weight_of_0_gets_nothing_and_nobody_is_no_error():
    none, some = Target("m", "a", 0), Target("m", "b", 1)
    assert {t.revision for t in split(none, some)} == {"b"}
    assert choose("chat", [none], "k", everywhere) is None
    assert choose("chat", [some], "k", lambda t: False) is None


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=16),
    key=st.text(),
    alias=st.text(min_size=1),
)
def test_a_choice_is_one_of_the_targets_whatever_the_weights(weights, key, alias):
    targets = [Target("m", f"r{n}", w) for n, w in enumerate(weights)]
    chosen = choose(alias, targets, key, everywhere)
    assert chosen == choose(alias, reversed(targets), key, everywhere), "order does not matter"
    assert (chosen is None) == (not any(weights))
    assert chosen is None or chosen.weight > 0


def test_what_is_written_is_read():
    record = AliasRecord(
        (Target("m", "r2", 95.0), Target("m", "r1", 5.0)), 7, (Target("m", "r1", 1.0),), "a@b", 12
    )
    assert parse_record(record.to_json()) == record
    assert record.shares == {("m", "r2"): 0.95, ("m", "r1"): 0.05}


GOOD = {"model": "m", "revision": "r", "weight": 1}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (b"\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        ({}, "targets: is not a list"),
        ({"targets": []}, "targets: must name 1 to 16"),
        ({"targets": [1]}, "targets[0]: is not an object"),
        ({"targets": [GOOD, {**GOOD, "model": 3}]}, "targets[1].model"),
        ({"targets": [{**GOOD, "revision": ""}]}, "targets[0].revision: is empty"),
        ({"targets": [{**GOOD, "weight": "1"}]}, "targets[0].weight"),
        ({"targets": [{**GOOD, "weight": True}]}, "targets[0].weight"),
        ({"targets": [{**GOOD, "weight": -1}]}, "targets[0].weight"),
        ({"targets": [{**GOOD, "weight": 1e9}]}, "targets[0].weight"),
        (b'{"targets": [{"model": "m", "revision": "r", "weight": NaN}]}', "targets[0].weight"),
        ({"targets": [{**GOOD, "weight": 0}]}, "targets: no weight"),
        ({"targets": [GOOD, GOOD]}, "targets[1]: m@r is listed twice"),
        ({"targets": [GOOD], "version": 0}, "version"),
        ({"targets": [GOOD], "version": "2"}, "version"),
        ({"targets": [GOOD], "previous": [{}]}, "previous[0].model"),
        ({"targets": [GOOD], "author": 3}, "author"),
        ({"targets": [GOOD], "deleted": 1}, "deleted"),
    ],
)
def test_a_bad_record_is_refused_by_field(value, field):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(AliasError) as caught:
        parse_record(raw)
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("name", ["", " ", "a b", "-x", "x" * 129, "é"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(AliasError, match="alias"):
        check_alias(name)


def test_names_of_models_are_names():
    for name in ("chat", "meta-llama/Llama-3.1:8b", "m_1"):
        check_alias(name)
