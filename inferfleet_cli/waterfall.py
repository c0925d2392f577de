"""Draws a request's waterfall as text, from the object that `trace --json` prints."""

from collections.abc import Iterator
from typing import Any

WIDTH = 36
ENGINE_STEPS = ("enqueue", "admit", "submit", "collect", "release")


def chart(trace: dict[str, Any], *, ascii_only: bool = False) -> str:
    """One line per span: service, name, a bar on the request's time line, and milliseconds."""
    total = max(trace["duration_s"], 1e-9)
    rows = [
        (span["instance"], "  " * span["depth"] + span["name"], span) for span in trace["spans"]
    ]
    service_width = max(len(row[0]) for row in rows)
    name_width = max(len(row[1]) for row in rows)
    lines = [f"request {trace['request_id']}   trace {trace['trace_id']}"]
    for service, name, span in rows:
        bar = _bar(span["start_s"], span["duration_s"], total, "#" if ascii_only else "█")
        spent = f"{span['duration_s'] * 1e3:8.1f} ms"
        error = f"  ! {span['error']}" if span["error"] else ""
        lines.append(f"{service:<{service_width}}  {name:<{name_width}}  |{bar}| {spent}{error}")
    return "\n".join(lines)


def seconds_by_step(trace: dict[str, Any]) -> dict[str, float]:
    """Seconds of each engine step, summed over all attempts of the request."""
    spent: dict[str, float] = {}
    for span in _engine_spans(trace):
        spent[span["name"]] = spent.get(span["name"], 0.0) + span["duration_s"]
    return {step: spent[step] for step in ENGINE_STEPS if step in spent}


def _engine_spans(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (s for s in trace["spans"] if s["service"] == "engine" and s["name"] in ENGINE_STEPS)


def _bar(start_s: float, duration_s: float, total_s: float, full: str) -> str:
    left = min(WIDTH - 1, int(WIDTH * start_s / total_s))
    length = max(1, min(WIDTH - left, round(WIDTH * duration_s / total_s)))
    return " " * left + full * length + " " * (WIDTH - left - length)
