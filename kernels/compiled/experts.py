"""The feed-forward of a layer with experts: phases that follow the norm of its rows.

Rows are copied side by side in the order of their experts. So each expert's products read adjacent
rows, and each panel of an expert is read once a round. A row's result does not depend on the rows
that share its experts.
"""

from kernels.compiled import job as j
from kernels.compiled.phases import wait_for
from kernels.compiled.primitives import compiled, fetch_add, floats, ints, signed_bytes, words
from kernels.compiled.products import float_rows, multiply_rows
from kernels.compiled.routing import active_experts, choose_row, group_rows
from kernels.compiled.rows import end_row, quantize, silu_mul
from kernels.compiled.tiles import PANEL, STORE

_CHOOSE, _GATHER, _ACTIVATE, _COMBINE = 0, 1, 2, 3
"""Kinds of work on single rows."""


@compiled
def run_experts(job: int, layer: int, phase: int) -> None:
    """X += the output of each row's experts, of rows that are prepared for GATE_UP.

    Args:
        phase: the first of EXPERT_PHASES phases.
    """
    table = ints(job)
    rows, hidden, size = table[j.ROWS], table[j.HIDDEN], table[j.EXPERT_SIZE]
    places = rows * table[j.TOP_K]
    score_rows(job, layer, phase)
    each_row(job, _CHOOSE, rows, phase + j.PHASE_BYTES)
    group_once(job, layer, phase + 2 * j.PHASE_BYTES)
    each_row(job, _GATHER, places, phase + 3 * j.PHASE_BYTES)
    multiply_experts(job, layer, j.GATE_UP, hidden, 2 * size, phase + 4 * j.PHASE_BYTES)
    each_row(job, _ACTIVATE, places, phase + 5 * j.PHASE_BYTES)
    multiply_experts(job, layer, j.DOWN, size, hidden, phase + 6 * j.PHASE_BYTES)
    each_row(job, _COMBINE, rows, phase + 7 * j.PHASE_BYTES)


@compiled
def score_rows(job: int, layer: int, phase: int) -> None:
    """WIDE = the router's scores of all rows, in float32 in every format."""
    table = ints(job)
    hidden = table[j.HIDDEN]
    panels = (table[j.EXPERTS] + PANEL - 1) // PANEL
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < panels:
        float_rows(
            table[j.ROWS],
            table[j.WORK],
            4 * table[j.WORK_STRIDE],
            ints(layer)[j.ROUTER] + 4 * PANEL * hidden * taken,
            hidden,
            table[j.WIDE] + 4 * PANEL * taken,
            4 * table[j.WIDE_STRIDE],
            STORE,
            table[j.THREADS],
        )
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, panels)


@compiled
def group_once(job: int, layer: int, phase: int) -> None:
    """Order the rows by expert, on one thread: it takes as long as two such phases."""
    if fetch_add(phase + j.PHASE_TAKEN, 1) == 0:
        group_rows(job, layer)
        fetch_add(phase + j.PHASE_DONE, 1)
    wait_for(phase + j.PHASE_DONE, 1)


@compiled
def each_row(job: int, work: int, count: int, phase: int) -> None:
    """Do one kind of work on `count` rows, or places of GATHERED."""
    chunk = ints(job)[j.CHUNK]
    chunks = (count + chunk - 1) // chunk
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < chunks:
        for row in range(taken * chunk, min(count, (taken + 1) * chunk)):
            if work == _CHOOSE:
                choose_row(job, row)
            elif work == _GATHER:
                gather_row(job, row)
            elif work == _ACTIVATE:
                activate_row(job, row)
            else:
                combine_row(job, row)
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, chunks)


@compiled
def multiply_experts(
    job: int, layer: int, part: int, columns: int, outputs: int, phase: int
) -> None:
    """GATHERED_WIDE = each row of GATHERED times its expert's weight, panel by panel.

    Args:
        part: GATE_UP or DOWN.
        columns: inputs of the product.
        outputs: outputs of the product.
    """
    table = ints(job)
    weights = layer + j.INT64_BYTES * (j.WEIGHTS + j.WEIGHT_SIZE * part)
    counts = ints(table[j.COUNTS] + j.INT64_BYTES * table[j.EXPERTS] * ints(layer)[j.ROUTED])
    active, ends = active_experts(job, layer), ints(table[j.ENDS])
    stride, source = table[j.GATHERED_WIDE_STRIDE], job + j.INT64_BYTES * j.GATHERED
    panels = (outputs + PANEL - 1) // PANEL
    pieces = active[0] * panels
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < pieces:
        expert, panel = active[1 + taken // panels], taken % panels
        rows = counts[expert]
        first = ends[expert] - rows
        target = table[j.GATHERED_WIDE] + 4 * (stride * first + PANEL * panel)
        place = panels * expert + panel
        form, skip = table[j.FORMAT], table[j.THREADS]
        multiply_rows(
            form, source, first, rows, weights, place, columns, target, stride, STORE, skip
        )
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, pieces)


@compiled
def gather_row(job: int, place: int) -> None:
    """Copy the row of a place from WORK, or from QUANTIZED with its scale, to GATHERED."""
    table = ints(job)
    row = ints(table[j.SOURCES])[place]
    whole = (table[j.HIDDEN] + 3) // 4 * 4
    if table[j.FORMAT] == j.BYTES:
        source = signed_bytes(table[j.QUANTIZED] + table[j.QUANTIZED_STRIDE] * row)
        target = signed_bytes(table[j.GATHERED_BYTES] + table[j.GATHERED_BYTES_STRIDE] * place)
        for i in range(whole):
            target[i] = source[i]
        floats(table[j.GATHERED_SCALES])[place] = floats(table[j.SCALES])[row]
        words(table[j.GATHERED_CORRECTIONS])[place] = words(table[j.CORRECTIONS])[row]
    else:
        given = floats(table[j.WORK] + 4 * table[j.WORK_STRIDE] * row)
        copied = floats(table[j.GATHERED] + 4 * table[j.GATHERED_STRIDE] * place)
        for i in range(whole):
            copied[i] = given[i]


@compiled
def activate_row(job: int, place: int) -> None:
    """GATHERED = the activation of a place in GATHERED_WIDE, quantized if products are of bytes."""
    table = ints(job)
    size, form = table[j.EXPERT_SIZE], table[j.FORMAT]
    gate = table[j.GATHERED_WIDE] + 4 * table[j.GATHERED_WIDE_STRIDE] * place
    out = table[j.GATHERED] + 4 * table[j.GATHERED_STRIDE] * place
    silu_mul(gate, gate + 4 * size, size, out)
    end_row(form, out, size)
    if form == j.BYTES:
        quantize(
            out,
            size,
            table[j.GATHERED_BYTES] + table[j.GATHERED_BYTES_STRIDE] * place,
            table[j.GATHERED_SCALES] + 4 * place,
            table[j.GATHERED_CORRECTIONS] + 4 * place,
        )


@compiled
def combine_row(job: int, row: int) -> None:
    """X += the weighted outputs of a row's experts, summed in WORK in the order of CHOSEN."""
    table = ints(job)
    hidden, top_k = table[j.HIDDEN], table[j.TOP_K]
    places = ints(table[j.PLACES] + j.INT64_BYTES * top_k * row)
    gates = floats(table[j.GATES] + 4 * top_k * row)
    total = floats(table[j.WORK] + 4 * table[j.WORK_STRIDE] * row)
    for choice in range(top_k):
        at = table[j.GATHERED_WIDE] + 4 * table[j.GATHERED_WIDE_STRIDE] * places[choice]
        made, gate = floats(at), gates[choice]
        if choice == 0:
            for i in range(hidden):
                total[i] = made[i] * gate
        else:
            for i in range(hidden):
                total[i] += made[i] * gate
    x = floats(table[j.X] + 4 * table[j.X_STRIDE] * row)
    for i in range(hidden):
        x[i] += total[i]
