"""Which experts compute which rows: each row's choice, and the rows in the order of their experts.

Arguments are addresses of float32 values, unless a docstring names another type.
"""

import math
from typing import Any

from numpy import float32

from kernels.compiled import job as j
from kernels.compiled.primitives import compiled, floats, ints
from kernels.compiled.rows import exponentials, maximum

_TAKEN = float32(-1.0)
"""Takes the place of the odds of an expert that the row has chosen."""
_MINUS_INFINITY = float32(-math.inf)


@compiled
def choose_row(job: int, row: int) -> None:
    """Write a row's CHOSEN and GATES from its scores in WIDE, which it overwrites.

    As `kernels.interface.Kernels.route`; the lowest id wins a tie. A row with NaN chooses existing
    experts, with weights of NaN.
    """
    table = ints(job)
    experts, top_k = table[j.EXPERTS], table[j.TOP_K]
    scores = table[j.WIDE] + 4 * table[j.WIDE_STRIDE] * row
    top = maximum(scores, experts, _MINUS_INFINITY)
    total = exponentials(scores, experts, top)
    odds = floats(scores)
    chosen = ints(table[j.CHOSEN] + j.INT64_BYTES * top_k * row)
    gates = floats(table[j.GATES] + 4 * top_k * row)
    for choice in range(top_k):
        at = 0
        while odds[at] == _TAKEN:
            at += 1
        for expert in range(at + 1, experts):
            if odds[expert] > odds[at]:
                at = expert
        chosen[choice] = at
        gates[choice] = odds[at] / total
        odds[at] = _TAKEN
    if table[j.RENORMALISE]:
        sum_of = gates[0]
        for choice in range(1, top_k):
            sum_of += gates[choice]
        for choice in range(top_k):
            gates[choice] /= sum_of


@compiled
def active_experts(job: int, layer: int) -> Any:
    """The layer's row of ACTIVE."""
    table = ints(job)
    return ints(table[j.ACTIVE] + j.INT64_BYTES * (1 + table[j.EXPERTS]) * ints(layer)[j.ROUTED])


@compiled
def group_rows(job: int, layer: int) -> None:
    """Order all rows by expert, and those of an expert as they come.

    Writes PLACES, SOURCES, ENDS and ACTIVE, and the layer's row of COUNTS.
    """
    table = ints(job)
    experts, top_k = table[j.EXPERTS], table[j.TOP_K]
    choices = top_k * table[j.ROWS]
    counts = ints(table[j.COUNTS] + j.INT64_BYTES * experts * ints(layer)[j.ROUTED])
    chosen, places = ints(table[j.CHOSEN]), ints(table[j.PLACES])
    ends, active = ints(table[j.ENDS]), active_experts(job, layer)
    for expert in range(experts):
        counts[expert] = 0
    for choice in range(choices):
        counts[chosen[choice]] += 1
    first, used = 0, 0
    for expert in range(experts):
        ends[expert] = first
        first += counts[expert]
        if counts[expert]:
            used += 1
            active[used] = expert
    active[0] = used
    sources = ints(table[j.SOURCES])
    for choice in range(choices):
        expert = chosen[choice]
        place = ends[expert]
        ends[expert] = place + 1
        places[choice] = place
        sources[place] = choice // top_k
