"""A round of the whole decoder as one compiled call on every thread of a team.

A phase is a number of pieces of work: rows, tiles or panels. Threads take the next piece until none
is left, and continue with the next phase when all pieces are done. No thread waits for one that has
taken no piece, so a thread that the scheduler has suspended delays nothing. It may come to a phase
when others are layers ahead: what tells how many pieces a phase has must last as long as the job.
"""

from kernels.compiled import job as j
from kernels.compiled.attention import attend, store_row
from kernels.compiled.experts import run_experts
from kernels.compiled.phases import wait_for
from kernels.compiled.primitives import (
    compiled,
    entry,
    fetch_add,
    floats,
    ints,
    sem_post,
    sem_wait,
)
from kernels.compiled.products import multiply_panel
from kernels.compiled.rows import end_row, quantize, rms_norm, silu_mul
from kernels.compiled.tiles import PANEL


@compiled
def prepare_rows(job: int, layer: int, part: int, phase: int) -> None:
    """Prepare all rows of WORK, and in int8 of QUANTIZED, for the part's product."""
    table = ints(job)
    rows, chunk = table[j.ROWS], table[j.CHUNK]
    chunks = (rows + chunk - 1) // chunk
    columns = ints(table[j.PART_TABLE] + j.PART_BYTES * part)[j.COLUMNS]
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < chunks:
        for row in range(taken * chunk, min(rows, (taken + 1) * chunk)):
            prepare_row(job, layer, part, row)
            if table[j.FORMAT] == j.BYTES:
                quantize_row(job, row, columns)
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, chunks)


@compiled
def prepare_row(job: int, layer: int, part: int, row: int) -> None:
    """Prepare one row of WORK: the norm of X, or the activation of WIDE.

    For OUTPUT there is nothing to do: attention has written the row.
    """
    table = ints(job)
    work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
    if part == j.DOWN:
        gate = table[j.WIDE] + 4 * table[j.WIDE_STRIDE] * row
        silu_mul(gate, gate + 4 * table[j.INTERMEDIATE], table[j.INTERMEDIATE], work)
        end_row(table[j.FORMAT], work, table[j.INTERMEDIATE])
    elif part != j.OUTPUT:
        norm = ints(layer)[j.NORM if part == j.QKV else j.NORM_2]
        x = table[j.X] + 4 * table[j.X_STRIDE] * row
        rms_norm(x, norm, table[j.HIDDEN], floats(table[j.CONSTANTS])[0], work)
        end_row(table[j.FORMAT], work, table[j.HIDDEN])


@compiled
def quantize_row(job: int, row: int, count: int) -> None:
    """Quantize a row of WORK."""
    table = ints(job)
    work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
    quantized = table[j.QUANTIZED] + table[j.QUANTIZED_STRIDE] * row
    quantize(work, count, quantized, table[j.SCALES] + 4 * row, table[j.CORRECTIONS] + 4 * row)


@compiled
def store_rows(job: int, layer: int, phase: int) -> None:
    """Store keys and values of all rows in their blocks."""
    table = ints(job)
    rows, chunk = table[j.ROWS], table[j.CHUNK]
    chunks = (rows + chunk - 1) // chunk
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < chunks:
        for row in range(taken * chunk, min(rows, (taken + 1) * chunk)):
            store_row(job, layer, row)
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, chunks)


@compiled
def attend_rows(job: int, layer: int, scratch: int, phase: int) -> None:
    """WORK = attention, for every tile of rows and every key head."""
    table = ints(job)
    kv_heads = table[j.KV_HEADS]
    units = table[j.TILE_COUNT] * kv_heads
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < units:
        attend(job, layer, taken // kv_heads, taken % kv_heads, scratch)
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, units)


@compiled
def multiply(job: int, layer: int, part: int, phase: int) -> None:
    """Compute the part's product, panel by panel."""
    table = ints(job)
    sizes = ints(table[j.PART_TABLE] + j.PART_BYTES * part)
    panels = (sizes[j.OUTPUTS] + PANEL - 1) // PANEL
    taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    while taken < panels:
        multiply_panel(job, layer, part, taken)
        fetch_add(phase + j.PHASE_DONE, 1)
        taken = fetch_add(phase + j.PHASE_TAKEN, 1)
    wait_for(phase + j.PHASE_DONE, panels)


@compiled
def run(job: int, thread: int) -> None:
    """Run a job on one thread of the team."""
    table = ints(job)
    scratch = table[j.SCRATCH] + 4 * table[j.SCRATCH_STRIDE] * thread
    phase = table[j.SYNC] + j.PHASE_BYTES
    for index in range(table[j.LAYERS]):
        layer = table[j.LAYER_TABLE] + j.LAYER_BYTES * index
        routed = ints(layer)[j.ROUTER] != 0
        for part in range(table[j.PARTS]):
            if part == j.OUTPUT:
                store_rows(job, layer, phase)
                attend_rows(job, layer, scratch, phase + j.PHASE_BYTES)
                phase += j.ATTENTION_PHASES * j.PHASE_BYTES
            if part == j.DOWN and routed:
                continue
            if part != j.OUTPUT or table[j.FORMAT] == j.BYTES:
                prepare_rows(job, layer, part, phase)
            if part == j.GATE_UP and routed:
                run_experts(job, layer, phase + j.PHASE_BYTES)
                phase += (1 + j.EXPERT_PHASES) * j.PHASE_BYTES
            else:
                multiply(job, layer, part, phase + j.PHASE_BYTES)
                phase += j.PHASES_PER_PART * j.PHASE_BYTES


@entry("void(int64, int64, int64)")
def run_thread(job: int, thread: int, semaphores: int) -> None:
    """Run jobs on one thread; the entry point from Python.

    Thread 0 wakes the helpers, runs one job with them, and returns when all helpers are done with
    it. A helper stays in the function: it runs every job until one sets QUIT. Both are one
    function, since each function that Python calls is compiled on its own.

    Args:
        job: address of the job table.
        thread: 0 for the caller, 1 and above for helpers.
        semaphores: address of the helpers' semaphores, SEMAPHORE_BYTES apart.
    """
    table = ints(job)
    helpers = table[j.THREADS] - 1
    if thread == 0:
        for helper in range(helpers):
            sem_post(semaphores + j.SEMAPHORE_BYTES * helper)
    while True:
        while thread != 0 and sem_wait(semaphores + j.SEMAPHORE_BYTES * (thread - 1)) != 0:
            pass
        if table[j.QUIT]:
            return
        run(job, thread)
        if thread == 0:
            wait_for(table[j.SYNC], helpers)
            return
        fetch_add(table[j.SYNC], 1)
