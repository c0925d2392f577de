"""What the registry's keys become, and that a blinking registry empties nothing."""

import json

import pytest
from google.protobuf import json_format

from inferfleet.internal.v1 import engine_pb2
from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from services.gateway.catalog import GONE_GRACE_S, Catalog, addresses_of


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


def test_the_more_common_revision_speaks_for_the_model(catalog, view):
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
