"""A real gateway before an engine played by a script."""

from collections.abc import AsyncIterator

import pytest

from tests.doubles.fake_engine import FakeEngine
from tests.doubles.gateway import Running, running_gateway, text_engine


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    double = text_engine()
    await double.start()
    yield double
    await double.stop()


@pytest.fixture
async def roomy_gateway(engine) -> AsyncIterator[Running]:
    """With a context that the description of tools fits into, a byte a token."""
    engine.max_model_len = 4096
    async with running_gateway(engine) as running:
        yield running


@pytest.fixture
async def gateway(engine) -> AsyncIterator[Running]:
    async with running_gateway(engine) as running:
        yield running
