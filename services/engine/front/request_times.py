"""The times of one request, from the core's marks and the front's clock; Unix nanoseconds."""

import time

from inferfleet_proto.v1 import inference_pb2
from services.engine.contract.messages import Mark


class RequestTimes:
    """Collects a request's marks; gives its timings and the intervals of its steps."""

    def __init__(self) -> None:
        self.received_ns = time.time_ns()
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.marks: list[Mark] = []

    def add_mark(self, mark: Mark) -> None:
        """Add a mark of the core."""
        self.marks.append(mark)

    def record_token(self) -> None:
        """Record that an output with tokens arrived now."""
        now = time.time_ns()
        if self.first_token_ns is None:
            self.first_token_ns = now
        self.last_token_ns = now

    def first(self, verb: str) -> int | None:
        """The first mark of a verb."""
        return next((mark.unix_ns for mark in self.marks if mark.verb == verb), None)

    def last(self, verb: str, *, end: bool = False) -> int | None:
        """The last mark of a verb.

        Args:
            end: only marks of a choice's end.
        """
        found = (m for m in reversed(self.marks) if m.verb == verb)
        return next((m.unix_ns for m in found if m.end or not end), None)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the arrival at the front; None before the first token."""
        first = self.first_token_ns
        return None if first is None else max(0, first - self.received_ns) / 1e9

    @property
    def _first_drawn_ns(self) -> int | None:
        return self.first("collect") or self.first_token_ns

    @property
    def _last_drawn_ns(self) -> int | None:
        # A request that the front ends (stop string) has no mark of its end from the core.
        return self.last("collect", end=True) or self.last_token_ns

    def timings(self) -> inference_pb2.Timings:
        """The seconds queued, in prefill and in decode."""
        end = self._last_drawn_ns or time.time_ns()
        first = min(self._first_drawn_ns or end, end)
        admitted = min(self.first("admit") or self.received_ns, first)
        return inference_pb2.Timings(
            queued_s=max(0, admitted - self.received_ns) / 1e9,
            prefill_s=max(0, first - admitted) / 1e9,
            decode_s=max(0, end - first) / 1e9,
        )

    def intervals(self) -> list[tuple[str, int, int]]:
        """Name, start and end of each step that was reached; a step starts where the last ended.

        enqueue  arrival → in the core's queue        admit    queue → blocks are there
        submit   blocks → first token (the chunks)    collect  first token → last token
        release  last token (or the end) → blocks are free
        """
        ends = (
            ("enqueue", self.first("enqueue")),
            ("admit", self.first("admit")),
            ("submit", self._first_drawn_ns),
            ("collect", self._last_drawn_ns),
            ("release", self.last("release")),
        )
        intervals: list[tuple[str, int, int]] = []
        start = self.received_ns
        for verb, end in ends:
            if end is not None:
                intervals.append((verb, start, max(start, end)))
                start = max(start, end)
        return intervals
