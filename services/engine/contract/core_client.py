"""What the front needs of its core; `core_link.CoreLink` serves it over two processes."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import CoreReady, RoundReport, ToCore


class CoreClient(Protocol):
    """A core, seen from the front: one batch of messages each way a round.

    `start` and the iteration raise core_link.CoreDiedError when the core cannot go on.
    """

    async def start(self, config: EngineConfig) -> CoreReady:
        """Start the core and return once it serves."""

    def send(self, messages: Sequence[ToCore]) -> None:
        """Hand over messages in order; never blocks; those for a core that is gone are lost."""

    def __aiter__(self) -> AsyncIterator[RoundReport]:
        """All rounds from now on, until `stop`."""

    async def stop(self) -> None:
        """End the core; idempotent."""
