"""`inferfleet placement` against a real etcd, with engines that are only their keys there."""

import asyncio
import json
import threading
import time

import pytest

from inferfleet_cli.main import main
from inferfleet_cli.placement import group
from services.common.etcd.client import Etcd, Put
from services.engine.eplb.placement_map import (
    Applied,
    EngineLoads,
    PlacementMap,
    Rejection,
    decode,
    encode,
)
from services.engine.eplb.placement_store import ROOT, GroupKeys
from tests.doubles.etcd_keys import delete_prefix

pytestmark = pytest.mark.services
MODEL, REVISION, GROUP = "org/moe", "sha256:0123456789abcdef", "org-moe-0123456789ab"
SKEWED = ((10, 10, 700, 10), (10, 700, 10, 10))
GOOD = [[0, 1, 2, 3, 2, 2], [0, 1, 2, 3, 1, 1]]


def engine_loads(engine_id="engine-1", load=SKEWED, model=MODEL, **facts):
    shape = {"num_layers": 2, "num_experts": 4, "num_slots": 6, "num_ranks": 2}
    made = {"model": model, "model_revision": REVISION, "window_rounds": 100, "load": load}
    return EngineLoads(engine_id=engine_id, **(shape | made | facts))


class Fleet:
    """What engines wrote into etcd."""

    def __init__(self, address):
        self.address = address
        self.keys = GroupKeys(GROUP)

    def write(self, *puts):
        """[(key, record or bytes), …] in one transaction."""

        async def write():
            etcd = Etcd([self.address])
            raw = [(k, v if isinstance(v, bytes) else encode(v)) for k, v in puts]
            await etcd.transaction([], [Put(key, value) for key, value in raw])
            await etcd.close()

        asyncio.run(write())

    def read(self, key):
        async def read():
            etcd = Etcd([self.address])
            found = await etcd.get(key)
            await etcd.close()
            return None if found is None else found.value

        return asyncio.run(read())

    def forget(self, *prefixes):
        async def forget():
            etcd = Etcd([self.address])
            for prefix in prefixes:
                await delete_prefix(etcd, prefix)
            await etcd.close()

        asyncio.run(forget())

    def current(self):
        return decode(self.read(self.keys.map), PlacementMap)

    def engine(self, engine_id="engine-1", version=0, rejected=None, **facts):
        applied = Applied(engine_id=engine_id, version=version, rejected=rejected)
        self.write(
            (self.keys.loads(engine_id), engine_loads(engine_id, **facts)),
            (self.keys.applied(engine_id), applied),
        )


@pytest.fixture
def fleet(etcd_endpoint):
    """An etcd without groups."""
    fleet = Fleet(etcd_endpoint)
    fleet.forget(ROOT)
    yield fleet
    fleet.forget(ROOT)


@pytest.fixture
def run(fleet, capsys):
    """(action, arguments …) → (status, what was printed)."""

    def run(*arguments):
        status = main(["placement", *arguments, "--etcd", fleet.address])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.fixture
def map_file(tmp_path):
    def write(content):
        path = tmp_path / "map.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_help_teaches_and_bad_usage_is_status_2(capsys):
    for arguments in ([], ["set"], ["rollback"], ["rollback", "x"], ["plan", "--policy", "best"]):
        with pytest.raises(SystemExit) as ended:
            main(["placement", *arguments])
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["placement", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "inferfleet placement set --plan" in text
    assert "Exit status: 0" in text


def test_without_a_fleet_the_command_says_what_to_do(tmp_path, capsys):
    assert main(["placement", "get", "--state-dir", str(tmp_path)]) == 1
    assert "`inferfleet up`" in capsys.readouterr().err
    assert main(["placement", "get", "--etcd", "127.0.0.1:1"]) == 1
    assert "etcd does not answer" in capsys.readouterr().err
    assert main(["placement", "get", "--etcd", "nowhere"]) == 2
    assert "host:port" in capsys.readouterr().err
    assert main(["placement", "get", "--etcd=h:1", "--etcd-user=me"]) == 2
    assert "etcd_password_file: needed" in capsys.readouterr().err


def test_the_etcd_of_the_local_fleet_is_found(fleet, run, tmp_path, monkeypatch, capsys):
    fleet.engine()
    monkeypatch.setattr(
        "inferfleet_cli.etcd_action.StateDir.read_record",
        lambda self: {"etcd": fleet.address} if self.root == tmp_path else None,
    )
    assert main(["placement", "get", "--state-dir", str(tmp_path)]) == 0
    assert main(["placement", "--state-dir", str(tmp_path), "get"]) == 0
    assert GROUP in capsys.readouterr().out


def test_a_plan_waits_for_the_first_counts(fleet, run):
    fleet.engine(load=((0,) * 4,) * 2)
    counted = threading.Timer(0.5, fleet.engine)
    counted.start()
    status, text = run("plan")
    counted.join()
    assert (status, "load of the last 100 rounds of 1 engine" in text) == (0, True), text


def test_nothing_there_is_status_3(fleet, run, monkeypatch):
    monkeypatch.setattr("inferfleet_cli.placement.group._COUNT_S", 0.2)
    assert run("get")[0] == 3
    fleet.engine(load=((0,) * 4,) * 2)
    for arguments, words in [
        (("plan",), "counted no tokens yet"),
        (("history",), "no map"),
        (("rollback", "1"), "versions kept: none"),
        (("get", "--group=other"), f"only: {GROUP}"),
    ]:
        status, text = run(*arguments)
        assert (status, words in text) == (3, True), text


def test_a_plan_shows_todays_and_tomorrows_balance(fleet, run):
    fleet.engine("engine-1")
    fleet.engine("engine-2")
    status, text = run("plan")
    assert status == 0
    assert "2 layers, 4 experts in 6 slots on 2 ranks" in text
    assert "load of the last 100 rounds of 2 engines" in text
    rows = [line.split() for line in text.splitlines() if line[:1] in ("0", "1", "a")]
    assert [row[0] for row in rows] == ["0", "1", "all"]
    assert [row[2:4] for row in rows[:2]] == [["0.514", "0.766"], ["1.000", "1.000"]]
    assert rows[1][-1] == "0/6"  # a layer that is balanced already is left alone
    assert rows[0][1] == "1460"
    assert fleet.read(fleet.keys.map) is None


def test_what_plan_prints_set_takes_and_get_shows(fleet, run, map_file):
    fleet.engine()
    planned = run("plan", "--json")[1]
    status, text = run("set", map_file(planned), "--wait=0", "--author=me")
    assert (status, f"{GROUP}: version 1 written" in text) == (0, True)
    current = fleet.current()
    assert current.author == "me"
    assert current.load == SKEWED
    assert current.balance_after > current.balance_before
    assert [list(row) for row in current.phy2log] == json.loads(planned)["phy2log"]
    shown = json.loads(run("get", "--json")[1])
    assert shown["map"]["version"] == 1
    assert shown["engines"] == [{"engine_id": "engine-1", "version": 0, "rejected": None}]
    assert run("set", map_file(shown), "--wait=0")[0] == 0
    assert fleet.current().version == 2
    assert "balance" in run("get")[1]


def test_set_plan_writes_only_what_gains(fleet, run):
    fleet.engine()
    assert run("set", "--plan", "--wait=0")[0] == 0
    assert fleet.current().policy == "global"
    status, text = run("set", "--plan", "--wait=0")
    assert (status, "nothing written" in text) == (0, True)
    assert fleet.current().version == 1


def test_history_and_rollback(fleet, run, map_file):
    fleet.engine()
    for rows in (GOOD, [row[::-1] for row in GOOD]):
        assert run("set", map_file({"phy2log": rows}), "--wait=0", "--author=me")[0] == 0
    status, text = run("rollback", "1", "--wait=0", "--author=you")
    assert (status, "version 3 written" in text) == (0, True)
    current = fleet.current()
    assert [list(row) for row in current.phy2log] == GOOD
    assert (current.policy, current.author) == ("rollback to 1", "you")
    lines = run("history")[1].splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["3", "2", "1"]
    assert lines[0].startswith("3 *")
    assert [one["version"] for one in json.loads(run("history", "--json")[1])] == [3, 2, 1]
    status, text = run("rollback", "3")
    assert (status, "is the current map already" in text) == (1, True)
    status, text = run("rollback", "9")
    assert (status, "kept: 1, 2, 3" in text) == (3, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"phy2log": GOOD[:1]}, "it has 1 layers, the model has 2"),
        ({"phy2log": [[0, 1, 2, 3], [0, 1, 2, 3]]}, "layer 0 has 4 slots, the engine has 6"),
        ({"phy2log": [GOOD[0], [0, 1, 2, 2, 2, 2]]}, "layer 1: expert 3 has no slot"),
        ({"phy2log": [GOOD[0], [0, 1, 2, 3, 3, 4]]}, "layer 1, slot 5: there is no expert 4"),
        ({"phy2log": GOOD, "model_revision": "sha256:other"}, "for model revision 'sha256:other'"),
        ({"phy2log": GOOD, "num_ranks": 3}, "for 3 ranks, the engine has 2"),
        ({"phy2log": [[0, -1]]}, "$.phy2log[0][1]"),
        ({"phy2log": "x"}, "$.phy2log"),
        ({}, "phy2log"),
        ("{", "map.json"),
        ("[]", "map.json"),
    ],
)
def test_a_map_that_does_not_fit_is_status_5_and_not_written(fleet, run, map_file, content, words):
    fleet.engine()
    status, text = run("set", map_file(content))
    assert (status, words in text) == (5, True), text
    assert fleet.read(fleet.keys.map) is None


def test_a_map_that_was_changed_meanwhile_is_not_overwritten(fleet, run, map_file, monkeypatch):
    fleet.engine()
    path = map_file({"phy2log": GOOD})

    async def slow(etcd, name):
        target = await group.find_target(etcd, name)
        await etcd.put(fleet.keys.map, b"{}")
        return target

    monkeypatch.setattr("inferfleet_cli.placement.actions.find_target", slow)
    status, text = run("set", path)
    assert (status, "meanwhile" in text) == (4, True)
    assert fleet.read(fleet.keys.map) == b"{}"


def _when_written(fleet, version, *answers):
    """A thread that answers as engines would, once a version stands."""

    def answer():
        deadline = time.monotonic() + 30
        while (raw := fleet.read(fleet.keys.history(version))) is None:
            assert time.monotonic() < deadline
        assert raw
        for applied in answers:
            fleet.write((fleet.keys.applied(applied.engine_id), applied))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_set_waits_until_all_engines_use_it(fleet, run, map_file):
    fleet.engine("engine-1")
    fleet.engine("engine-2")
    engines = _when_written(
        fleet, 1, *(Applied(engine_id=f"engine-{i}", version=1) for i in (1, 2))
    )
    status, text = run("set", map_file({"phy2log": GOOD}))
    engines.join()
    assert status == 0
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [
        ["engine-1", "1"],
        ["engine-2", "1"],
    ]


def test_an_engine_that_refuses_is_named(fleet, run, map_file):
    fleet.engine("engine-1")
    fleet.engine("engine-2")
    no = Applied(engine_id="engine-2", version=0, rejected=Rejection(1, "rank 1 has no memory"))
    engines = _when_written(fleet, 1, Applied(engine_id="engine-1", version=1), no)
    status, text = run("set", map_file({"phy2log": GOOD}))
    engines.join()
    assert status == 5
    assert "1: rank 1 has no memory" in text
    assert "keep the map before it" in text


def test_an_engine_that_does_not_answer_is_named(fleet, run, map_file):
    fleet.engine("engine-1")
    status, text = run("set", map_file({"phy2log": GOOD}), "--wait=0.3")
    assert (status, "not in use after 0.3 s at engine-1" in text) == (1, True)


def test_of_several_models_one_must_be_named(fleet, run):
    fleet.engine()
    other = GroupKeys("small-0123456789ab")
    fleet.write((other.loads("engine-9"), engine_loads("engine-9", model="small")))
    status, text = run("get")
    assert (status, "name one of: org-moe-0123456789ab, small-0123456789ab" in text) == (1, True)
    for name in ("small", "small-0123456789ab"):
        assert "small-0123456789ab" in run("get", "--group", name)[1]
    assert GROUP in run("plan", "--group", MODEL)[1]


def test_a_map_without_engines_can_still_be_rolled_back(fleet, run, map_file):
    fleet.engine()
    for _ in range(2):
        assert run("set", map_file({"phy2log": GOOD}), "--wait=0")[0] == 0

    fleet.forget(fleet.keys.applied(""), fleet.keys.loads(""))
    status, text = run("rollback", "1")
    assert (status, "no engine of this group is registered" in text) == (0, True)
    assert fleet.current().version == 3


def test_a_map_that_cannot_be_read_is_shown_as_such(fleet, run, map_file):
    fleet.engine()
    fleet.write((fleet.keys.map, b'{"version": 7}'))
    status, text = run("get")
    assert (status, "unreadable: " in text) == (0, True)
    assert run("set", map_file({"phy2log": GOOD}), "--wait=0")[0] == 0
    assert fleet.current().version == 8


def test_a_plan_from_a_file_needs_no_fleet(tmp_path, capsys):
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps(SKEWED))
    flags = ["--loads", str(loads), "--ranks=2", "--slots=6"]
    assert main(["placement", "plan", *flags]) == 0
    assert "2 layers, 4 experts in 6 slots on 2 ranks" in capsys.readouterr().out
    assert main(["placement", "plan", *flags, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["num_ranks"] == 2
    assert {len(row) for row in planned["phy2log"]} == {6}
    for bad, words in [
        (["--ranks=2", "--slots=5"], "5 replicas do not divide among 2 GPUs"),
        (["--ranks=2", "--slots=2"], "2 replicas cannot hold 4 experts"),
        (["--ranks=-2", "--slots=6"], "at least 1"),
        (["--ranks=2", "--slots=6", "--policy=hierarchical", "--groups=3"], "groups"),
    ]:
        assert main(["placement", "plan", "--loads", str(loads), *bad]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "[[]]", "[[1, 2], [1]]", '{"load": [[-1]]}', "7"])
def test_loads_that_are_no_table_are_refused(tmp_path, capsys, content):
    loads = tmp_path / "loads.json"
    loads.write_text(content)
    status = main(["placement", "plan", "--loads", str(loads), "--ranks=1", "--slots=1"])
    assert status in (1, 5)
    assert "loads.json" in capsys.readouterr().err
