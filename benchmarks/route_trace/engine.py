"""A simulated engine: continuous batching with chunked prefill over real block bookkeeping.

The blocks (reference counts, LRU of reusable ones, events) and the shares of a round's prefill are
the engine's own code. Time is not measured but computed from the given rates; blocks for prompt and
output are taken at admission, so nothing is preempted.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from benchmarks.route_trace.trace import BLOCK_SIZE, NAMESPACE, Request
from services.balancer.engines.decayed_sum import DecayedSum
from services.balancer.engines.engine_view import RECENT_S, EngineState, EngineView
from services.engine.core.timing import RoundTimer
from services.engine.scheduling.blocks import Blocks
from services.engine.scheduling.policies import PrefillShare

LOOK_AHEAD = 16


@dataclass(frozen=True)
class Rates:
    """What one engine can do."""

    prefill_tokens_per_s: float = 10_000.0
    decode_base_s: float = 0.012
    """A decode round of an almost empty batch."""
    decode_per_seq_s: float = 0.0003
    round_tokens: int = 8192
    max_num_seqs: int = 64
    num_blocks: int = 1000


@dataclass(eq=False, slots=True)
class Running:
    """A request inside an engine."""

    request: Request
    expected_uncached: int
    blocks: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    computed: int = 0
    registered: int = 0
    generated: int = 0
    reported: bool = False

    @property
    def remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return self.request.input_length - self.computed


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a request."""

    number: int
    engine_id: str
    arrival_s: float
    first_token_s: float
    end_s: float
    hit_tokens: int


@dataclass(slots=True)
class _Round:
    """Rounds in progress: `repeats` equal ones (decode only), or one with chunks."""

    began_s: float
    seconds: float
    repeats: int
    chunks: list[tuple[Running, int]]
    decodes: list[Running]


class Engine:
    """Advanced from outside; owns its clock, its queue and its blocks."""

    def __init__(self, engine_id: str, rates: Rates) -> None:
        self.engine_id = engine_id
        self.rates = rates
        self.blocks = Blocks(rates.num_blocks)
        self.finished: list[Finished] = []
        self.busy_s = 0.0
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._round: _Round | None = None
        self._first_token_s: dict[Running, float] = {}
        self._timer = RoundTimer(lambda: 0.0)
        self._now_s = 0.0
        self._recent_uncached = DecayedSum(RECENT_S, lambda: self._now_s)

    @property
    def occupancy(self) -> int:
        """Requests that are here."""
        return len(self._waiting) + len(self._running)

    @property
    def next_s(self) -> float | None:
        """When the rounds in progress end; None if idle."""
        now = self._round
        return None if now is None else now.began_s + now.seconds * now.repeats

    def add(self, request: Request, now_s: float, matched_tokens: int) -> None:
        """A request arrives; it is looked at when the round in progress ends.

        Raises:
            ValueError: it would not fit even alone.
        """
        if _num_blocks(request) > self.rates.num_blocks:
            raise ValueError(f"request {request.number} needs {_num_blocks(request)} blocks")
        uncached = max(request.input_length - matched_tokens, 1)
        self._now_s = now_s
        self._recent_uncached.add(uncached)
        self._waiting.append(Running(request, uncached))
        if self._round is None:
            self._plan(now_s)
        else:
            self._round.repeats = 1

    def advance(self, now_s: float) -> None:
        """Let all rounds end that end until then."""
        self._now_s = now_s
        while (current := self._round) is not None:
            done = current.repeats
            if current.began_s + current.seconds * done > now_s:
                done = int((now_s - current.began_s) / current.seconds) if done > 1 else 0
            if not done:
                return
            self._apply(current, done)

    def view(self) -> EngineView:
        """What a balancer knows: the last report, and its own dispatches since."""
        rates, timer = self.rates, self._timer
        queued = sum(s.remaining for s in self._running)
        held = self.blocks.num_held
        for seq in self._waiting:
            # A report counts the whole prompt of what waits: hits are known at admission only.
            queued += seq.remaining if seq.reported else seq.expected_uncached
            held += 0 if seq.reported else -(-seq.expected_uncached // BLOCK_SIZE)
        return EngineView(
            self.engine_id,
            1,
            "m",
            EngineState.SERVING,
            hash_namespace=NAMESPACE,
            block_size=BLOCK_SIZE,
            max_num_seqs=rates.max_num_seqs,
            in_flight=self.occupancy,
            occupancy=self.occupancy,
            queued_uncached=queued,
            recent_uncached=self._recent_uncached.value,
            held_blocks=held,
            total_blocks=rates.num_blocks,
            prefill_tokens_per_s=timer.prefill_tokens_per_s,
            decode_round_s=timer.decode_round_s,
        )

    def _plan(self, now_s: float) -> None:
        decodes = [s for s in self._running if not s.remaining]
        chunked = [s for s in self._running if s.remaining]
        room = len(self._running) < self.rates.max_num_seqs
        candidates = list(islice(self._waiting, LOOK_AHEAD)) if room else []
        for seq in self._waiting:
            seq.reported = True
        wanted = [s.remaining for s in (*chunked, *candidates)]
        share = PrefillShare(wanted, self.rates.round_tokens - len(decodes))
        chunks = [(s, n) for s in chunked if (n := _take_tokens(share, s))]
        for seq in candidates:
            if not share.left or len(self._running) >= self.rates.max_num_seqs:
                break
            if share.offer(seq.remaining) and self._admit(seq):
                self._waiting.remove(seq)
                self._running.append(seq)
                chunks.append((seq, _take_tokens(share, seq)))
        if not chunks and not decodes:
            self._round = None
            return
        seconds = sum(n for _, n in chunks) / self.rates.prefill_tokens_per_s
        if decodes:
            seconds += self.rates.decode_base_s + self.rates.decode_per_seq_s * len(decodes)
        repeats = 1
        if not chunks and not self._waiting:
            repeats = min(s.request.output_length - s.generated for s in decodes)
        self._round = _Round(now_s, seconds, repeats, chunks, decodes)

    def _admit(self, seq: Running) -> bool:
        hits = []
        for block_hash in seq.request.chain[: seq.request.reusable]:
            block = self.blocks.find(block_hash)
            if block is None:
                break
            hits.append(block)
        new = _num_blocks(seq.request) - len(hits)
        revived = sum(not self.blocks.num_holders(block) for block in hits)
        if new + revived > self.blocks.num_available:
            return False
        for block in hits:
            self.blocks.share(block)
        seq.blocks = [*hits, *(self.blocks.take() for _ in range(new))]
        seq.hit_tokens = seq.computed = len(hits) * BLOCK_SIZE
        seq.registered = len(hits)
        return True

    def _apply(self, current: _Round, done: int) -> None:
        """`done` of the rounds in progress have ended."""
        end_s = current.began_s + current.seconds * done
        self.busy_s += current.seconds * done
        prefill = sum(n for _, n in current.chunks)
        self._timer.observe_round(prefill, len(current.decodes), current.seconds)
        for seq in current.decodes:
            seq.generated += done
        for seq, tokens in current.chunks:
            seq.computed += tokens
            self._register(seq)
            if not seq.remaining:
                seq.generated = 1
                self._first_token_s[seq] = end_s
        for seq in [s for s in self._running if s.generated >= s.request.output_length]:
            self._finish(seq, end_s)
        if done < current.repeats:
            current.began_s, current.repeats = end_s, current.repeats - done
        else:
            self._plan(end_s)

    def _register(self, seq: Running) -> None:
        chain = seq.request.chain
        for index in range(seq.registered, seq.computed // BLOCK_SIZE):
            parent = chain[index - 1] if index else None
            known = self.blocks.register(seq.blocks[index], chain[index], parent)
            if known != seq.blocks[index]:
                self.blocks.share(known)
                self.blocks.drop(seq.blocks[index])
                seq.blocks[index] = known
        seq.registered = max(seq.registered, seq.computed // BLOCK_SIZE)

    def _finish(self, seq: Running, end_s: float) -> None:
        self._running.remove(seq)
        for block in reversed(seq.blocks):
            self.blocks.drop(block)
        request, first_s = seq.request, self._first_token_s.pop(seq)
        self.finished.append(
            Finished(
                request.number, self.engine_id, request.arrival_s, first_s, end_s, seq.hit_tokens
            )
        )


def _take_tokens(share: PrefillShare, seq: Running) -> int:
    tokens = share.offer(seq.remaining)
    share.take(seq.remaining, tokens)
    return tokens


def _num_blocks(request: Request) -> int:
    return -(-(request.input_length + request.output_length) // BLOCK_SIZE)
