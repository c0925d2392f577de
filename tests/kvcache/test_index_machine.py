"""The index beside a dictionary: random histories of batches, gaps, restarts and losses."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.kvcache.events import HISTORY, STATE, Batch, Operation
from services.kvcache.index import PrefixIndex, Status
from services.kvcache.redis_settings import RedisSettings

CHAIN = [bytes([i]) * 16 for i in range(1, 7)]
ENGINES = ["a", "b", "c"]
Kinds = dict[bytes, int]


@dataclass
class Record:
    """What a correct index knows of one engine."""

    epoch: int
    sequence: int = 0
    held: Kinds | None = None
    pending: Kinds | None = None
    part: int = -1


@dataclass
class Model:
    """A correct index, without Redis."""

    records: dict[str, Record] = field(default_factory=dict)

    def apply(self, batch: Batch) -> tuple[Status, int]:
        record = self.records.get(batch.engine_id)
        if record and record.epoch > batch.epoch_ms:
            return Status.STALE, record.sequence
        fresh = record is None or record.epoch < batch.epoch_ms
        if record and not fresh and batch.sequence <= record.sequence:
            return Status.DUPLICATE, record.sequence
        if fresh:
            begins = batch.part == 0 or (batch.part is None and batch.sequence == 1)
            if not begins:
                if record:
                    self.records[batch.engine_id] = Record(batch.epoch_ms)
                return Status.GAP, 0
            record = self.records[batch.engine_id] = Record(batch.epoch_ms, held={})
        assert record is not None
        if not fresh and not self._follows(record, batch):
            return Status.GAP, record.sequence
        self._write(record, batch)
        return Status.APPLIED, record.sequence

    @staticmethod
    def _follows(record: Record, batch: Batch) -> bool:
        if batch.part == 0:
            return True
        if batch.sequence != record.sequence + 1:
            return False
        if batch.part is None:
            return record.held is not None and record.pending is None
        return record.pending is not None and batch.part == record.part + 1

    @staticmethod
    def _write(record: Record, batch: Batch) -> None:
        if batch.part == 0:
            record.pending = {}
        target = record.pending if record.pending is not None else record.held
        assert target is not None
        for code, bits, hashes in batch.operations:
            for i in range(0, len(hashes), 16):
                block = hashes[i : i + 16]
                had = target.get(block, 0)
                target[block] = had | bits if code == "S" else had & ~bits
            if code == "C":
                target.clear()
        record.sequence = batch.sequence
        record.part = -1 if batch.part is None else batch.part
        if batch.part is not None and batch.last_part:
            record.held, record.pending, record.part = record.pending, None, -1

    def match(self, prompt: list[bytes], needs_state: bool) -> set[tuple[str, int, int]]:
        found = set()
        for engine, record in self.records.items():
            best = 0
            for depth, block in enumerate(prompt, 1):
                bits = (record.held or {}).get(block, 0)
                if not bits & HISTORY:
                    break
                if not needs_state or bits & STATE:
                    best = depth
            if best:
                found.add((engine, record.epoch, best))
        return found


operations = st.lists(
    st.one_of(
        st.builds(
            lambda code, bits, names: Operation(code, bits, b"".join(names)),
            st.sampled_from("SSSR"),
            st.sampled_from([HISTORY, HISTORY, STATE, HISTORY | STATE]),
            st.lists(st.sampled_from(CHAIN), max_size=5),
        ),
        st.just(Operation("C", 0, b"")),
        # Whole prefixes, so that matches are not rare.
        st.integers(1, 6).map(lambda n: Operation("S", HISTORY, b"".join(CHAIN[:n]))),
    ),
    max_size=3,
).map(tuple)


class IndexMachine(RuleBasedStateMachine):
    """One index for the whole run: each history begins with an emptied store."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        # The loop runs all the time: while a probe is not served, Redis counts as unavailable.
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.raw = redis.Redis.from_url(self.url)
        self.model = Model()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def wait_available(self) -> None:
        """On a busy machine Redis may be late, and then counts as unavailable."""
        deadline = time.monotonic() + 30
        while not self.index.available:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @initialize()
    def open(self) -> None:
        self.raw.flushall()
        self.index = PrefixIndex(RedisSettings(self.url), entry_ttl_s=60, max_entries=1_000)
        self.run(self.index.start())
        self.wait_available()

    def teardown(self) -> None:
        self.run(self.index.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.raw.close()

    def send(self, batch: Batch) -> None:
        self.wait_available()
        applied = self.run(self.index.apply(batch))
        assert (applied.status, applied.acked) == self.model.apply(batch)

    @rule(engine=st.sampled_from(ENGINES), ops=operations)
    def next_batch(self, engine: str, ops: tuple[Operation, ...]) -> None:
        known = self.model.records.get(engine, Record(1))
        self.send(Batch(engine, known.epoch, known.sequence + 1, ops))

    @rule(engine=st.sampled_from(ENGINES), ops=operations)
    def restart(self, engine: str, ops: tuple[Operation, ...]) -> None:
        known = self.model.records.get(engine, Record(1))
        self.send(Batch(engine, known.epoch + 1, 1, ops))

    @rule(
        engine=st.sampled_from(ENGINES), ops=operations, last=st.booleans(), gap=st.integers(0, 2)
    )
    def snapshot(self, engine: str, ops: tuple[Operation, ...], last: bool, gap: int) -> None:
        known = self.model.records.get(engine, Record(1))
        part = known.part + 1 if known.pending is not None and not gap else 0
        sequence = known.sequence + 1 + gap
        self.send(Batch(engine, known.epoch, sequence, ops, part=part, last_part=last))

    @rule(
        engine=st.sampled_from(ENGINES),
        epoch=st.integers(1, 4),
        sequence=st.integers(1, 8),
        part=st.one_of(st.none(), st.integers(0, 3)),
        last=st.booleans(),
        ops=operations,
    )
    def anything(self, engine, epoch, sequence, part, last, ops) -> None:
        self.send(
            Batch(engine, epoch, sequence, ops, part=part, last_part=part is not None and last)
        )

    @rule(engine=st.sampled_from(ENGINES), back=st.integers(0, 2))
    def forget(self, engine: str, back: int) -> None:
        record = self.model.records.get(engine)
        epoch = max((record.epoch if record else 1) - back, 1)
        self.run(self.index.forget(engine, epoch))
        if record and record.epoch <= epoch:
            self.model.records[engine] = Record(record.epoch)

    @rule()
    def store_is_emptied(self) -> None:
        self.raw.flushall()
        self.model.records.clear()

    @rule()
    def some_entries_are_swept(self) -> None:
        keys = self.raw.keys(f"{self.index.entry_prefix}*")
        self.run(self.index.sweep_entries(keys, surplus=0))

    @invariant()
    def the_index_says_what_the_dictionary_says(self) -> None:
        self.wait_available()
        for needs_state in (False, True):
            reply = self.run(self.index.match(b"".join(CHAIN), needs_state, 5.0))
            found = {(m.engine_id, m.epoch_ms, m.blocks) for m in reply}
            assert found == self.model.match(CHAIN, needs_state)

    @invariant()
    def entries_are_counted(self) -> None:
        self.wait_available()
        keys = self.raw.keys(f"{self.index.entry_prefix}*")
        assert self.run(self.index.num_entries()) == len(keys)


@pytest.mark.parametrize(
    "examples", [30, pytest.param(1_000, marks=[pytest.mark.verify, pytest.mark.timeout(900)])]
)
def test_random_histories(redis_url: str, examples: int):
    machine = type("Machine", (IndexMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
