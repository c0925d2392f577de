"""`CoreClient`: how the front talks to its core; `core_link.CoreLink` implements it."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import CoreReady, RoundReport, ToCore


class CoreClient(Protocol):
    """A core as the front sees it: one batch of messages each way per round.

    `start` and the iteration raise `core_link.CoreDiedError` when the core has failed.
    """

    async def start(self, config: EngineConfig) -> CoreReady:
        """Start the core and return once it accepts requests."""

    def send(self, messages: Sequence[ToCore]) -> None:
        """Send messages in order; never blocks. Messages to a core that has ended are lost."""

    def __aiter__(self) -> AsyncIterator[RoundReport]:
        """The reports of all rounds from now on, until `stop`."""

    async def stop(self) -> None:
        """End the core; idempotent."""
