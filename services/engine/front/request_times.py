"""When things happened to one request, by the core's marks and the front's clock."""

import time

from inferfleet_proto.v1 import inference_pb2
from services.engine.contract.messages import Mark


class RequestTimes:
    """Collects marks; reads as timings and as the five verbs' intervals. All in Unix ns."""

    def __init__(self) -> None:
        self.received_ns = time.time_ns()
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.marks: list[Mark] = []

    def add(self, mark: Mark) -> None:
        """Keep a mark of the core."""
        self.marks.append(mark)

    def token(self) -> None:
        """An output with tokens arrived."""
        now = time.time_ns()
        if self.first_token_ns is None:
            self.first_token_ns = now
        self.last_token_ns = now

    def first(self, verb: str) -> int | None:
        """The first mark of a verb."""
        return next((mark.unix_ns for mark in self.marks if mark.verb == verb), None)

    def last(self, verb: str, detail: str = "") -> int | None:
        """The last mark of a verb (that has a certain detail)."""
        found = (m for m in reversed(self.marks) if m.verb == verb)
        return next((m.unix_ns for m in found if not detail or detail in m.detail), None)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival at the front."""
        first = self.first_token_ns
        return None if first is None else max(0, first - self.received_ns) / 1e9

    @property
    def _first_drawn_ns(self) -> int | None:
        return self.first("collect") or self.first_token_ns

    @property
    def _last_drawn_ns(self) -> int | None:
        # A request that is ended from here (a stop string) has no end in the core's own words.
        return self.last("collect", "end") or self.last_token_ns

    def timings(self) -> inference_pb2.Timings:
        """Seconds as the contract divides them."""
        end = self._last_drawn_ns or time.time_ns()
        first = min(self._first_drawn_ns or end, end)
        admitted = min(self.first("admit") or self.received_ns, first)
        return inference_pb2.Timings(
            queued_s=max(0, admitted - self.received_ns) / 1e9,
            prefill_s=max(0, first - admitted) / 1e9,
            decode_s=max(0, end - first) / 1e9,
        )

    def intervals(self) -> list[tuple[str, int, int]]:
        """Verb, start and end, for the verbs that were reached; each begins where one ended.

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
