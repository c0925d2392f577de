"""A real gateway on real sockets in front of a double that speaks Engine like an engine does."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import httpx
import openai
import pytest

from tests.doubles.fake_engine import FakeEngine
from tests.doubles.gateway import Running, running_gateway, text_engine
from tests.doubles.scripts import fail_with, hold_after_first, say_hello


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    double = text_engine()
    await double.start()
    yield double
    await double.stop()


@pytest.fixture
async def start_gateway(engine) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """Start a gateway before `engine`; keyword arguments are configuration keys."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**keys) -> Running:
            return await stack.enter_async_context(running_gateway(engine, **keys))

        yield start


@pytest.fixture
async def gateway(start_gateway) -> Running:
    return await start_gateway()


@pytest.fixture
async def stub(gateway) -> AsyncIterator:
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        yield gateway.stub(channel)


@pytest.fixture
async def http(gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", timeout=20) as client:
        yield client


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(
        base_url=f"http://{gateway.http}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def scripts():
    """The double's scripts, for test modules."""
    return {"hold": hold_after_first, "fail": fail_with, "hello": say_hello}
