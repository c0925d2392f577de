"""Formats the rows as a table and as JSON."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from inferfleet_cli.supervisor.dev_backends import Binary, find_etcd, find_redis
from tests.chaos.scenario import Row

_COLUMNS = (
    ("fault", 34),
    ("rounds", 6),
    ("requests", 8),
    ("failed", 6),
    ("dupl.", 6),
    ("missing", 7),
    ("changed", 7),
    ("resumed", 10),
    ("repeated", 8),
    ("refused", 7),
    ("heal s p50", 10),
    ("max", 5),
    ("first s", 7),
    ("whole s", 7),
)


def header() -> str:
    """The table's first line."""
    return " ".join(f"{name:<{w}}" if w > 20 else f"{name:>{w}}" for name, w in _COLUMNS)


def line(row: Row) -> str:
    """One row as text."""
    counts = row.counts
    heal = row.heal_s or [0.0]
    cells: list[object] = [row.scenario, row.rounds, counts.requests, counts.failed]
    cells += [counts.duplicated, counts.missing, counts.changed, counts.continuations]
    cells += [counts.repeated, counts.refused, f"{median(heal):.2f}", f"{max(heal):.2f}"]
    cells += [f"{max(row.first_s, default=0.0):.2f}", f"{row.whole_s:.1f}"]
    widths = [width for _, width in _COLUMNS]
    return " ".join(
        f"{cell:<{w}}" if w > 20 else f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)
    )


def as_json(rows: list[Row], command: str, violations: dict[str, list[str]]) -> dict[str, Any]:
    """Everything, with what is needed to read it later."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "redis": _version_of(find_redis()),
        "etcd": _version_of(find_etcd()),
        "cores": os.cpu_count(),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "rows": [_row(row) for row in rows],
        "violations": violations,
    }


def _row(row: Row) -> dict[str, Any]:
    counts = {k: v for k, v in vars(row.counts).items() if k != "problems"}
    return {
        "scenario": row.scenario,
        "rounds": row.rounds,
        **counts,
        "heal_s": [round(one, 3) for one in row.heal_s],
        "first_s": [round(one, 3) for one in row.first_s],
        "heal_limit_s": row.heal_limit_s,
        "whole_s": round(row.whole_s, 2),
        "health_checks_not_serving": row.unhealthy,
        "notes": row.notes,
    }


def _version_of(binary: Binary) -> str:
    done = subprocess.run(
        [str(binary.path), "--version"], capture_output=True, text=True, check=False
    )
    first = (done.stdout or done.stderr).splitlines()
    return f"{first[0] if first else '?'} ({Path(binary.path).name} from {binary.kind})"
