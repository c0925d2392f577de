"""Only what is whole and agrees with itself is read; what does not fit says where."""

import json

import pytest

from services.engine.eplb.placement_map import (
    Applied,
    EngineLoads,
    MapFormatError,
    PlacementMap,
    Rejection,
    decode,
    encode,
    problem_with,
    version_in,
)


def test_a_map_comes_back_as_it_went(make_map):
    placement = make_map(
        7, load=((1, 2, 3, 4),) * 2, balance_before=0.5, balance_after=0.9, window_rounds=100
    )
    assert decode(encode(placement), PlacementMap) == placement
    assert json.loads(encode(placement))["copies"] == [[2, 2, 1, 1]] * 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": -1}, r"version"),
        ({"version": True}, r"\$\.version"),
        ({"version": "3"}, r"\$\.version"),
        ({"model": ""}, r"\$\.model"),
        ({"num_ranks": 0}, r"\$\.num_ranks"),
        ({"num_ranks": 4}, r"6 slots do not divide among 4 ranks"),
        ({"surprise": 1}, r"surprise"),
        ({"author": None}, r"\$\.author"),
        ({"phy2log": []}, r"phy2log is empty"),
        ({"phy2log": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3]]}, r"layer 1 has 4 entries, expected 6"),
        ({"phy2log": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 9]]}, r"layer 1: expert 1 has 1 slots"),
        ({"phy2log": [[0, 1, 2, 3, 0, -1]] * 2}, r"\$\.phy2log\[0\]\[5\]"),
        ({"phy2log": [[0, 1, 2, 3, 0, 0.5]] * 2}, r"phy2log"),
        ({"copies": [[2, 2, 1, 1]]}, r"1 layers, expected 2 - at `\$\.copies`"),
        ({"copies": [[2, 2, 1, 1], [1, 2, 2, 1]]}, r"layer 1: expert 0 has 2 slots"),
        ({"copies": [[2, 2, 1], [2, 2, 1]]}, r"layer 0 names experts beyond the 3"),
        ({"load": [[1, 2, 3, 4]]}, r"at `\$\.load`"),
        ({"load": [[1, 2, 3, 4], [1, 2]]}, r"at `\$\.load\[1\]`"),
        ({"load": [[1, 2, 3, 2**60]] * 2}, r"load"),
    ],
)
def test_what_is_wrong_is_named(make_map, change, problem):
    raw = json.dumps(json.loads(encode(make_map(3))) | change)
    with pytest.raises(MapFormatError, match=problem):
        decode(raw, PlacementMap)


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"version": 3}'])
def test_no_map_at_all(raw):
    with pytest.raises(MapFormatError):
        decode(raw, PlacementMap)


def test_the_version_can_be_read_where_nothing_else_can():
    assert version_in(b'{"version": 12, "nonsense": []}') == 12
    assert [version_in(raw) for raw in (b"", b'{"version": -2}', b"\xff", b"[1]", b"{}")] == [0] * 5


def test_loads_must_have_the_shape_they_claim(make_loads):
    record = make_loads()
    assert decode(encode(record), EngineLoads) == record
    with pytest.raises(MapFormatError, match="load"):
        decode(encode(make_loads(num_layers=3)), EngineLoads)


def test_a_map_that_fits_has_no_problem(make_map, shape):
    assert problem_with(make_map(1), shape, "sha256:abc") is None
    assert problem_with(make_map(0), shape, "sha256:abc", draft=True) is None


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"model_revision": "sha256:other"}, "for model revision 'sha256:other'"),
        ({"num_ranks": 3}, "for 3 ranks, the engine has 2"),
        ({"phy2log": ((0, 1, 2, 3, 0, 1),)}, "1 layers, the model has 2"),
        ({"phy2log": ((0, 1, 2, 3),) * 2}, "layer 0 has 4 slots, the engine has 6"),
        ({"phy2log": ((0, 1, 2, 3, 0, 1), (0, 1, 2, 0, 0, 1))}, "layer 1: expert 3 has no slot"),
        ({"phy2log": ((0, 1, 2, 3, 0, 1), (0, 1, 2, 3, 0, 4))}, "layer 1, slot 5"),
        ({"version": 0}, "version 0"),
    ],
)
def test_a_map_that_does_not_fit_says_where(make_map, shape, facts, problem):
    version = facts.pop("version", 5)
    assert problem in problem_with(make_map(version, **facts), shape, "sha256:abc")


def test_an_engine_has_done_with_a_map_when_it_uses_or_refuses_it():
    assert Applied(engine_id="e", version=3).settled(3)
    assert not Applied(engine_id="e", version=3).settled(4)
    assert Applied(engine_id="e", version=3, rejected=Rejection(4, "no")).settled(4)
    assert not Applied(engine_id="e", version=3, rejected=Rejection(4, "no")).settled(5)
