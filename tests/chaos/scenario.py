"""The scenario's interface: its plan, its stage (a fleet with clients), and its row of results."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.client import Clients, Counts
from tests.chaos.etcd_cluster import EtcdCluster
from tests.chaos.fleet import STALL_LIMIT_S, ChaosFleet
from tests.chaos.workload import Case

HEAL_LIMIT_S = 3.0
FLOW_LIMIT_S = 60.0
_HEALTH_EVERY_S = 0.5


@dataclass(frozen=True)
class Plan:
    """The size of a run."""

    streams: int = 32
    rounds: int = 20
    outage_s: float = 60.0
    pause_s: float = 15.0
    tokens: int = 240
    """Of most answers; decides how long a stream is open."""


@dataclass
class Row:
    """One line of the table; everything that a scenario found."""

    scenario: str
    rounds: int = 0
    counts: Counts = field(default_factory=Counts)
    heal_s: list[float] = field(default_factory=list)
    """Until the last stream that had begun moved again, by round."""
    first_s: list[float] = field(default_factory=list)
    """Until the last request that still waited got its first token, by round."""
    heal_limit_s: float = HEAL_LIMIT_S
    whole_s: float = 0.0
    """From the end of the fault until every process serves again."""
    unhealthy: int = 0
    """Health checks that did not say SERVING, of services that were not hit themselves."""
    needs_continuations: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def judge(self, *, strict_times: bool) -> list[str]:
        """The violations of this row; empty if there are none."""
        bad = list(self.violations)
        counts = self.counts
        for name in ("failed", "duplicated", "missing", "changed"):
            if getattr(counts, name):
                bad.append(f"{getattr(counts, name)} {name}: {'; '.join(counts.problems[:3])}")
        if self.unhealthy:
            bad.append(f"{self.unhealthy} health checks not SERVING")
        if self.needs_continuations and not counts.continuations:
            bad.append("nothing was resumed: the fault hit no stream")
        if not counts.requests:
            bad.append("no request was sent")
        slow = max(self.heal_s, default=0.0)
        if max(self.first_s, default=0.0) >= FLOW_LIMIT_S:
            bad.append(f"a request had no first token within {FLOW_LIMIT_S:g} s")
        if slow >= FLOW_LIMIT_S or (strict_times and slow > self.heal_limit_s):
            bad.append(f"healed in {slow:.1f} s, allowed {self.heal_limit_s:g}")
        return bad


@dataclass
class Stage:
    """A running fleet with its clients, as scenarios use it."""

    fleet: ChaosFleet
    clients: Clients
    cases: list[Case]
    plan: Plan
    say: Callable[[str], None]
    cluster: EtcdCluster | None = None

    async def settle(self) -> None:
        """Wait until the fleet is whole."""
        await self.fleet.until(self.fleet.whole, "the fleet to be whole")

    async def flowing(self, enough: int) -> None:
        """Wait until so many streams have given something."""

        async def many() -> bool:
            return sum(stream.heard > 0 for stream in self.clients.open) >= enough

        await self.fleet.until(many, f"{enough} running streams", FLOW_LIMIT_S)

    @contextlib.asynccontextmanager
    async def under_load(
        self,
        row: Row,
        *,
        streams: int | None = None,
        gateway: int | None = None,
        watch: Callable[[str], bool] | None = None,
    ) -> AsyncIterator[None]:
        """Streams run inside; afterwards they have ended and the row has their counts.

        Args:
            streams: how many; default: the plan's.
            gateway: the one that they all use; default: in turn.
            watch: services whose health must stay SERVING.
        """
        row.counts = self.clients.fresh_counts()
        streams = streams or self.plan.streams
        self.clients.start(self.cases, streams, gateway)
        watcher = asyncio.create_task(self._watch_health(row, watch)) if watch else None
        try:
            await self.flowing(streams // 2)
            yield
        finally:
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait({watcher})
            await self.clients.stop()

    async def heal(self, row: Row, since: float, *, in_flight_s: float = 0.0) -> None:
        """Wait until all streams that are open move again, and note how long that took.

        Args:
            in_flight_s: messages that arrive within this time were sent before the fault.
        """
        await asyncio.sleep(in_flight_s)
        heal, first = await self.clients.all_flow_since(since + in_flight_s, FLOW_LIMIT_S)
        row.heal_s.append(heal + in_flight_s)
        row.first_s.append(first + in_flight_s)
        row.notes.setdefault("slowest", []).append(self.clients.slowest)

    async def whole_again(self, row: Row, since: float | None = None) -> None:
        """Wait until the fleet is whole and note how long that took."""
        began = time.monotonic() if since is None else since
        await self.settle()
        row.whole_s = max(row.whole_s, time.monotonic() - began)

    async def _watch_health(self, row: Row, watch: Callable[[str], bool]) -> None:
        names = [name for name in self.fleet.children if watch(name)]
        while True:
            for name in names:
                if not await self.fleet.healthy(name):
                    row.unhealthy += 1
                    row.notes.setdefault("not_serving", []).append(name)
            await asyncio.sleep(_HEALTH_EVERY_S)


Scenario = Callable[[Stage], Awaitable[list[Row]]]
IN_FLIGHT_S = 0.5
"""Of faults that break no connection."""
STALL_HEAL_LIMIT_S = STALL_LIMIT_S + HEAL_LIMIT_S
