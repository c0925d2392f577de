"""Replays a trace over simulated engines with the balancer's own router and policies.

The index is in memory, with the semantics of kvcache: owners by 16-byte hash, the longest
contiguous prefix per owner, fed by the engines' events. It is never late and never away.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random

from benchmarks.route_trace.engine import Engine, Finished, Rates
from benchmarks.route_trace.trace import BLOCK_SIZE, NAMESPACE, Request
from services.balancer.engines.engine_view import CostModel, EngineView, RoutingRequest
from services.balancer.routing.prefix_holds import PrefixHolds
from services.balancer.routing.prefix_match import Matches
from services.balancer.routing.router import Router
from services.common.block_hash import INDEX_HASH_BYTES, BlockHash, join_for_index
from services.engine.contract.messages import RemovedBlocks, StoredBlocks
from services.engine.scheduling.blocks import Blocks

HEADROOM = 4
"""The balancer's default: requests an engine is given beyond those it runs at once."""


class Index:
    """Which engine holds which block."""

    def __init__(self) -> None:
        self._owners: dict[bytes, set[str]] = {}

    def feed(self, engine: Engine) -> None:
        """Take an engine's news."""
        for event in engine.blocks.drain_events():
            if isinstance(event, StoredBlocks):
                for block in event.hashes:
                    self._owners.setdefault(block[:INDEX_HASH_BYTES], set()).add(engine.engine_id)
            elif isinstance(event, RemovedBlocks):
                for block in event.hashes:
                    self._remove(block[:INDEX_HASH_BYTES], engine.engine_id)

    def _remove(self, key: bytes, owner: str) -> None:
        owners = self._owners[key]
        owners.discard(owner)
        if not owners:
            del self._owners[key]

    def owners(self, block_hash: BlockHash) -> frozenset[str]:
        """Engines that hold it."""
        return frozenset(self._owners.get(block_hash[:INDEX_HASH_BYTES], ()))

    def match(self, chain: Sequence[BlockHash]) -> Mapping[str, int]:
        """Blocks of the longest contiguous prefix, by engine that holds any."""
        found: dict[str, int] = {}
        held: set[str] | None = None
        for depth, block in enumerate(chain):
            owners = self._owners.get(block[:INDEX_HASH_BYTES], set())
            still = owners if held is None else held & owners
            for gone in (held or set()) - still:
                found[gone] = depth
            held = still
            if not held:
                return found
        return {**found, **dict.fromkeys(held or (), len(chain))}


@dataclass(frozen=True)
class Result:
    """One policy at one load."""

    policy: str
    load: float
    requests: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    imbalance: float
    """Busy seconds of the busiest engine over the mean."""
    decisions_per_s: float
    requests_per_s: float


class Fleet:
    """Engines, index and router under one virtual clock."""

    def __init__(
        self, num_engines: int, rates: Rates, policy: str, seed: int, cost: CostModel
    ) -> None:
        self.engines = {
            name: Engine(name, rates) for name in (f"engine-{i:03}" for i in range(num_engines))
        }
        self.index = Index()
        self.holds = PrefixHolds()
        self.deciding_s = 0.0
        self._releases: dict[int, Callable[[], None]] = {}
        self._router = Router(policy, self._views, _has_free_slots, cost=cost, rng=Random(seed))

    def advance(self, now_s: float) -> None:
        """Let the engines work until `now_s`, and update the index."""
        for engine in self.engines.values():
            known = len(engine.finished)
            engine.advance(now_s)
            self.index.feed(engine)
            for ended in engine.finished[known:]:
                if (release := self._releases.pop(ended.number, None)) is not None:
                    release()

    def send(self, request: Request, now_s: float) -> str:
        """Route one request; the engine's id."""
        began = time.perf_counter()
        wanted = RoutingRequest(
            str(request.number), "m", range(request.input_length), session_id=request.session
        )
        found = self.index.match(request.chain[: request.reusable])
        tokens = {(name, 1): n * BLOCK_SIZE for name, n in found.items()}
        chain = join_for_index(request.chain[: request.reusable])
        matches = Matches(True, tokens, {(NAMESPACE, BLOCK_SIZE): chain}, self.holds)
        choice, _ = self._router.choose(wanted, self._router.eligible(wanted), matches)
        self.deciding_s += time.perf_counter() - began
        engine = self.engines[choice.candidate.engine.engine_id]
        engine.add(request, now_s, choice.candidate.matched_tokens)
        self._releases[request.number] = self.holds.hold((engine.engine_id, 1), chain)
        self.index.feed(engine)
        return engine.engine_id

    def drain(self) -> float:
        """Work until nothing is left; the time of the end."""
        now_s = 0.0
        while (next_s := self.next_s) is not None:
            now_s = next_s
            self.advance(now_s)
        return now_s

    @property
    def next_s(self) -> float | None:
        """The next end of a round anywhere."""
        return min(
            (at for e in self.engines.values() if (at := e.next_s) is not None), default=None
        )

    @property
    def in_flight(self) -> int:
        """Requests at all engines."""
        return sum(e.occupancy for e in self.engines.values())

    @property
    def finished(self) -> list[Finished]:
        """All that became of requests, by number."""
        ended = (f for e in self.engines.values() for f in e.finished)
        return sorted(ended, key=lambda f: f.number)

    def _views(self, model: str) -> list[EngineView]:
        return [engine.view() for engine in self.engines.values()]


def _has_free_slots(engine: EngineView, slots: int) -> bool:
    return engine.occupancy + slots <= engine.max_num_seqs + HEADROOM


def at_rate(trace: Sequence[Request], requests_per_s: float) -> list[Request]:
    """The same trace, stretched to a mean rate."""
    began, ended = trace[0].arrival_s, trace[-1].arrival_s
    if ended <= began:
        raise ValueError("the trace has no length in time: it cannot be stretched to a load")
    factor = len(trace) / requests_per_s / (ended - began)
    return [replace(r, arrival_s=(r.arrival_s - began) * factor) for r in trace]


def replay(trace: Sequence[Request], fleet: Fleet) -> list[Finished]:
    """All requests at their times; what became of each."""
    for request in trace:
        fleet.advance(request.arrival_s)
        fleet.send(request, request.arrival_s)
    fleet.drain()
    return fleet.finished


def saturation(trace: Sequence[Request], fleet: Fleet, window: int) -> float:
    """Requests a second with always `window` of them at every engine on average."""
    now_s, most = 0.0, window * len(fleet.engines)
    for request in trace:
        while fleet.in_flight >= most and (next_s := fleet.next_s) is not None:
            now_s = next_s
            fleet.advance(now_s)
        fleet.send(replace(request, arrival_s=now_s), now_s)
    return len(trace) / fleet.drain()


def pooled_hit_rate(trace: Sequence[Request], num_blocks: int) -> float:
    """Share of prompt tokens found in one LRU cache that all requests share, in their order."""
    blocks, hit, total = Blocks(num_blocks), 0, 0
    for request in trace:
        table: list[int] = []
        for index, block_hash in enumerate(request.chain):
            block = blocks.find(block_hash)
            if block is None:
                block = blocks.take()
                blocks.register(block, block_hash, request.chain[index - 1] if index else None)
            else:
                blocks.share(block)
                hit += BLOCK_SIZE if index < request.reusable else 0
            table.append(block)
        for block in reversed(table):
            blocks.drop(block)
        total += request.input_length
    blocks.drain_events()
    return hit / total


def summarise(
    policy: str, load: float, trace: Sequence[Request], fleet: Fleet, ended: Sequence[Finished]
) -> Result:
    """The row of the table."""
    ttft = sorted(f.first_token_s - f.arrival_s for f in ended)
    p50, p90, p99 = (ttft[min(len(ttft) - 1, int(len(ttft) * p))] for p in (0.5, 0.9, 0.99))
    busy = [e.busy_s for e in fleet.engines.values()]
    return Result(
        policy,
        load,
        len(ended),
        sum(f.hit_tokens for f in ended) / sum(r.input_length for r in trace),
        p50,
        p90,
        p99,
        max(busy) / (sum(busy) / len(busy)),
        len(trace) / fleet.deciding_s,
        len(trace) / max(f.end_s for f in ended),
    )


def as_json(result: Result) -> dict[str, object]:
    """Rounded for a file that is read by people too."""
    return {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in asdict(result).items()
    }
