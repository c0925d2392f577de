"""Two ends of a carrier."""

from collections.abc import AsyncIterator

import pytest

from tests.doubles.carrier_peer import CarrierPeer, Linked, linked


@pytest.fixture(params=[False, True], ids=["eager", "patient"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Linked]:
    """Linked over real sockets; the peer's front writes at once, or joins while it waits."""
    async with linked(CarrierPeer(patient=request.param)) as made:
        yield made
