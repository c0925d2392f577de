"""Draws the table as one SVG: p90 TTFT and hit rate over the load, a line per policy."""

from collections.abc import Callable, Sequence
from html import escape
from math import log10

from benchmarks.route_trace.fleet import Result

WIDTH, HEIGHT = 860, 340
_PANEL = (300, 230)
_TOP = 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")


def svg(results: Sequence[Result], pooled: float, title: str) -> str:
    """A whole SVG document."""
    policies = list(dict.fromkeys(r.policy for r in results))
    loads = [r.load for r in results]
    low, high = min(loads), max(loads)
    across = _scale(low, high if high > low else low + 1, _PANEL[0])
    tops = [log10(max(r.ttft_p90_s, 1e-3)) for r in results]
    bottom, top = int(min(tops) - 1), int(max(tops) + 1)
    seconds = _scale(bottom, top, _PANEL[1])
    share = _scale(0, 1, _PANEL[1])
    left = [
        _grid(
            60, "TTFT p90 (s, log)", [(f"{10.0**n:g}", seconds(n)) for n in range(bottom, top + 1)]
        ),
        *_lines(60, results, policies, across, lambda r: seconds(log10(max(r.ttft_p90_s, 1e-3)))),
        *_loads(60, sorted(set(loads)), across),
    ]
    y = _y(share(pooled))
    right = [
        _grid(420, "hit rate", [(f"{n / 5:g}", share(n / 5)) for n in range(6)]),
        f'<line x1="420" x2="{420 + _PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="#000" '
        f'stroke-dasharray="5 4"/>',
        f'<text x="424" y="{y - 5:.1f}">one pooled LRU</text>',
        *_lines(420, results, policies, across, lambda r: share(r.hit_rate)),
        *_loads(420, sorted(set(loads)), across),
    ]
    legend = [
        f'<text x="740" y="{_TOP + 20 * i}" fill="{_colour(i)}">{escape(name)}</text>'
        for i, name in enumerate(policies)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="60" y="20" font-size="14">{escape(title)}</text>',
            *left,
            *right,
            *legend,
            "</svg>\n",
        ]
    )


def _scale(low: float, high: float, length: float) -> Callable[[float], float]:
    return lambda value: (value - low) / (high - low) * length


def _y(up: float) -> float:
    return _TOP + _PANEL[1] - up


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _grid(left: int, name: str, ticks: Sequence[tuple[str, float]]) -> str:
    parts = [f'<text x="{left}" y="{_TOP - 10}" font-weight="bold">{escape(name)}</text>']
    for label, up in ticks:
        y = _y(up)
        parts.append(
            f'<line x1="{left}" x2="{left + _PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return "\n".join(parts)


def _loads(left: int, loads: Sequence[float], across: Callable[[float], float]) -> list[str]:
    under = _TOP + _PANEL[1]
    return [
        f'<text x="{left + across(load):.1f}" y="{under + 18}" text-anchor="middle">{load:g}</text>'
        for load in loads
    ] + [f'<text x="{left}" y="{under + 36}">load, as a share of saturation</text>']


def _lines(
    left: int,
    results: Sequence[Result],
    policies: Sequence[str],
    across: Callable[[float], float],
    up: Callable[[Result], float],
) -> list[str]:
    drawn = []
    for index, policy in enumerate(policies):
        own = sorted((r for r in results if r.policy == policy), key=lambda r: r.load)
        points = [(left + across(r.load), _y(up(r))) for r in own]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{_colour(index)}" stroke-width="2"/>'
        )
        drawn += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(index)}"/>' for x, y in points
        ]
    return drawn
