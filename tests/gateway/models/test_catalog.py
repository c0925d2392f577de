"""Models made of the registry's records; a registry without data does not remove them."""

import json

import pytest
from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from services.common.etcd.model_alias import MODELS_PREFIX
from services.gateway.models.catalog import GONE_GRACE_S, Catalog, addresses_of


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class KeysView:
    """A view whose keys the test writes."""

    def __init__(self):
        self.keys = {}
        self.connected = True

    def snapshot(self):
        return self.keys

    async def wait_change(self, version):
        raise NotImplementedError


def info(engine_id="a", **fields) -> bytes:
    fields = {
        "address": "10.0.0.1:1",
        "model": "m",
        "model_revision": "r1",
        "tokenizer_digest": "d1",
        "max_model_len": 100,
        "vocab_size": 300,
        "epoch_ms": 5000,
        **fields,
    }
    message = engine_pb2.EngineInfo(engine_id=engine_id, **fields)
    return json_format.MessageToJson(message).encode()


@pytest.fixture
def view():
    return KeysView()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def catalog(view, clock):
    return Catalog(view, ["short=m"], clock)


def test_engines_of_a_model_become_one_view(catalog, view):
    view.keys = {"/a": info("a"), "/b": info("b", max_model_len=50, epoch_ms=3000)}
    catalog.refresh()
    (model,) = catalog.models
    assert (model.max_model_len, model.created_unix_s, len(model.engines)) == (50, 3, 2)
    assert catalog.find("m") == catalog.find("short") == model


def test_the_more_common_revision_describes_the_model(catalog, view):
    new = {"model_revision": "r2", "tokenizer_digest": "d2"}
    view.keys = {"/a": info("a", **new), "/b": info("b", **new), "/c": info("c")}
    catalog.refresh()
    assert (catalog.find("m").revision, catalog.find("m").tokenizer_digest) == ("r2", "d2")
    assert [e.engine_id for e in catalog.find("m").engines] == ["a", "b"]


def test_a_key_that_vanishes_stays_for_the_grace(catalog, view, clock):
    view.keys = {"/a": info()}
    catalog.refresh()
    view.keys = {}
    clock.now += GONE_GRACE_S - 1
    catalog.refresh()
    assert catalog.find("m")
    clock.now += 2
    catalog.refresh()
    with pytest.raises(NotFoundError):
        catalog.find("m")


@pytest.mark.parametrize("value", [b"\xff", b"{", b"[]", info(address=""), info(model="")])
def test_records_of_no_use_are_passed_over(catalog, view, value):
    view.keys = {"/bad": value, "/a": info()}
    catalog.refresh()
    assert [e.engine_id for e in catalog.find("m").engines] == ["a"]


def test_fields_of_a_newer_engine_do_no_harm(catalog, view):
    record = json.loads(info())
    view.keys = {"/a": json.dumps({**record, "invented": 1}).encode()}
    catalog.refresh()
    assert catalog.find("m")


def test_unread_registry_is_unavailable_and_no_name_is_invalid(catalog, view):
    view.connected = False
    catalog.refresh()
    with pytest.raises(UnavailableError) as caught:
        catalog.find("m")
    assert caught.value.retry_after_s
    with pytest.raises(InvalidArgumentError, match="model"):
        catalog.find("")


def test_balancers_addresses(view):
    view.keys = {
        "/b": b'{"address": "h:2"}',
        "/a": b'{"address": "h:1"}',
        "/c": b"rubbish",
        "/d": b'{"address": 5}',
        "/e": b'{"address": ""}',
        "/f": b"[]",
    }
    assert addresses_of(view) == ("h:1", "h:2")


def record(*targets, version=1) -> bytes:
    return json.dumps(
        {
            "version": version,
            "targets": [{"model": m, "revision": r, "weight": w} for m, r, w in targets],
        }
    ).encode()


@pytest.fixture
def records():
    return KeysView()


@pytest.fixture
def weighted(view, clock, records):
    view.keys = {
        "/a": info("a"),
        "/b": info("b", model_revision="r2", tokenizer_digest="d2"),
    }
    records.keys = {MODELS_PREFIX + "chat": record(("m", "r1", 1), ("m", "r2", 1))}
    made = Catalog(view, [], clock, records)
    made.refresh()
    return made


def test_an_alias_pins_the_revision_and_its_tokenizer(weighted):
    found = {weighted.find("chat", f"k{n}").pinned for n in range(50)}
    assert found == {"r1", "r2"}
    for n in range(50):
        model = weighted.find("chat", f"k{n}")
        assert (model.name, model.revision) == ("m", model.pinned)
        assert model.tokenizer_digest == {"r1": "d1", "r2": "d2"}[model.pinned]
        assert model == weighted.find("chat", f"k{n}"), "sticky"


def test_a_draining_or_avoided_revision_gets_no_new_request(weighted, view):
    avoided = {weighted.find("chat", f"k{n}", {("m", "r1")}).pinned for n in range(20)}
    assert avoided == {"r2"}
    view.keys["/a"] = info("a", draining=True)
    weighted.refresh()
    assert {weighted.find("chat", f"k{n}").pinned for n in range(20)} == {"r2"}
    with pytest.raises(UnavailableError):
        weighted.find("chat", "k", {("m", "r1"), ("m", "r2")})


def test_a_revision_can_be_named(weighted):
    assert weighted.find("m@r2").pinned == "r2"
    with pytest.raises(NotFoundError):
        weighted.find("m@r3")


def test_tokenizers_of_two_revisions_are_never_mixed(weighted):
    assert weighted.find("m").pinned == weighted.find("m").revision


def test_an_alias_of_the_models_own_name_comes_first(weighted, records):
    records.keys = {MODELS_PREFIX + "m": record(("m", "r2", 1))}
    weighted.refresh()
    assert weighted.find("m").pinned == "r2"
    listed = {one.name: one.view.revision for one in weighted.listed}
    assert listed["m"] == "r2"


def test_the_last_valid_record_stays_until_it_is_deleted_on_purpose(weighted, records):
    key = MODELS_PREFIX + "chat"
    records.keys = {key: b"{", MODELS_PREFIX + "a b": record(("m", "r1", 1))}
    weighted.refresh()
    assert weighted.find("chat", "k").name == "m"
    assert sorted(weighted.table.problems) == ["a b", "chat"]
    records.keys = {}
    weighted.refresh()
    assert not weighted.table.problems
    assert weighted.find("chat", "k").name == "m", "an emptied store deletes nothing"
    records.keys = {key: b'{"version": 2, "deleted": true}'}
    weighted.refresh()
    with pytest.raises(NotFoundError):
        weighted.find("chat", "k")


def test_all_names_are_listed_once_with_their_revisions(weighted):
    listed = {one.name: one for one in weighted.listed}
    assert sorted(listed) == ["chat", "m"]
    assert [view.revision for view in listed["m"].revisions] == ["r1", "r2"]
    assert listed["chat"].shares == {("m", "r1"): 0.5, ("m", "r2"): 0.5}
