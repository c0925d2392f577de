"""Tokenizers by digest: fetched from any engine, once for all requests that wait."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.errors import UnavailableError
from services.common.rpc import Membership
from services.common.text.byte_level import byte_assets
from services.gateway.models.catalog import models_of
from services.gateway.models.text_store import MAX_CACHED, TextStore
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.gateway import text_engine


@pytest.fixture
async def store():
    with ThreadPoolExecutor(1) as pool:
        store = TextStore(Membership(), pool)
        yield store
        await store.close()


async def model_of(*engines: FakeEngine):
    """The model that these engines serve; the digest is the last one's."""
    infos = []
    for number, engine in enumerate(engines):
        info = await engine.GetInfo(engine_pb2.GetInfoRequest(), None)
        info.engine_id = f"engine-{number}"
        info.tokenizer_digest = engines[-1].assets.digest
        infos.append(info)
    return models_of(infos)["tiny"]


async def test_waiting_requests_share_one_fetch(store, engine):
    model = await model_of(engine)
    texts = await asyncio.gather(*(store.get(model) for _ in range(10)))
    assert len({id(text) for text in texts}) == 1
    assert await store.get(model) is texts[0]
    assert engine.tokenizer_calls == 1


async def test_a_cancelled_request_does_not_cancel_the_fetch(store, engine):
    model = await model_of(engine)
    leaver = asyncio.create_task(store.get(model))
    stayer = asyncio.create_task(store.get(model))
    await asyncio.sleep(0)
    leaver.cancel()
    assert (await stayer).tokenizer.digest == engine.assets.digest


async def test_an_engine_that_is_gone_is_passed_over(store, engine):
    gone = text_engine()
    await gone.start()
    model = await model_of(gone, engine)
    await gone.stop()
    assert (await store.get(model)).tokenizer.digest == engine.assets.digest


async def test_an_engine_with_other_files_is_passed_over(store, engine):
    other = text_engine()
    other.assets = byte_assets(chat_template="something else")
    await other.start()
    model = await model_of(other, engine)
    assert (await store.get(model)).template.problem == ""
    assert (other.tokenizer_calls, engine.tokenizer_calls) == (1, 1)
    await other.stop()


async def test_no_engine_has_it(store, engine):
    model = await model_of(engine)
    engine.assets = byte_assets(special=())
    with pytest.raises(UnavailableError) as caught:
        await store.get(model)
    assert caught.value.reason == "TOKENIZER_UNAVAILABLE"
    engine.assets = byte_assets()
    assert await store.get(model)  # fetched again: the failure is not cached


async def test_old_digests_make_room(store, engine):
    first = await model_of(engine)
    await store.get(first)
    for number in range(MAX_CACHED):
        engine.assets = byte_assets(chat_template=f"template {number}")
        await store.get(await model_of(engine))
    calls = engine.tokenizer_calls
    engine.assets = byte_assets()
    await store.get(first)
    assert engine.tokenizer_calls == calls + 1


async def test_prefetch_does_not_wait_and_ignores_failures(store, engine):
    model = await model_of(engine)
    engine.assets = byte_assets(special=())
    store.prefetch([model])
    with pytest.raises(UnavailableError):
        await store.get(model)
