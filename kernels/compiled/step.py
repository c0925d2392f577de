"""A round of the whole decoder as one compiled call on every thread of a team.

A phase is a number of pieces of work: rows, tiles, panels. Threads take the next piece until none
is left and go on when all are done, so nobody waits for a thread that has nothing in hand: one that
the system has put aside costs its help, not the round.
"""

from kernels.compiled import job as j
from kernels.compiled.attention import attend, place_row
from kernels.compiled.primitives import (
    compiled,
    entry,
    fetch_add,
    floats,
    give_way,
    ints,
    load,
    pause,
    sem_post,
    sem_wait,
)
from kernels.compiled.products import multiply_panel
from kernels.compiled.rows import quantise, rms_norm, silu_mul
from kernels.compiled.tiles import PANEL

_PATIENCE = 2000
"""Turns of a waiting loop before the core is offered to someone else."""


@compiled
def wait_for(address: int, least: int) -> None:
    """Until the word there has grown to `least`."""
    turns = 0
    while load(address) < least:
        pause()
        turns += 1
        if turns > _PATIENCE:
            give_way()


@compiled
def prepare_rows(job: int, layer: int, part: int, phase: int) -> None:
    """WORK, and in int8 LEVELS, as the part's product reads them."""
    table = ints(job)
    rows, chunk = table[j.ROWS], table[j.CHUNK]
    chunks = (rows + chunk - 1) // chunk
    columns = ints(table[j.PART_TABLE] + 8 * j.PART_SIZE * part)[j.COLUMNS]
    taken = fetch_add(phase, 1)
    while taken < chunks:
        for row in range(taken * chunk, min(rows, (taken + 1) * chunk)):
            prepare_row(job, layer, part, row)
            if table[j.BYTES]:
                to_levels(job, row, columns)
        fetch_add(phase + 8, 1)
        taken = fetch_add(phase, 1)
    wait_for(phase + 8, chunks)


@compiled
def prepare_row(job: int, layer: int, part: int, row: int) -> None:
    """One row of WORK: normed X, or the activation of WIDE; attention has already left its own."""
    table = ints(job)
    work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
    if part == j.DOWN:
        gate = table[j.WIDE] + 4 * table[j.WIDE_STRIDE] * row
        silu_mul(gate, gate + 4 * table[j.MIDDLE], table[j.MIDDLE], work)
    elif part != j.OUTPUT:
        norm = ints(layer)[j.NORM if part == j.QKV else j.NORM_2]
        x = table[j.X] + 4 * table[j.X_STRIDE] * row
        rms_norm(x, norm, table[j.HIDDEN], floats(table[j.CONSTANTS])[0], work)


@compiled
def to_levels(job: int, row: int, count: int) -> None:
    """A row of WORK in int8."""
    table = ints(job)
    work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
    levels = table[j.LEVELS] + table[j.LEVELS_STRIDE] * row
    quantise(work, count, levels, table[j.SCALES] + 4 * row, table[j.CORRECTIONS] + 4 * row)


@compiled
def place_rows(job: int, layer: int, phase: int) -> None:
    """Keys and values of all rows to their blocks."""
    table = ints(job)
    rows, chunk = table[j.ROWS], table[j.CHUNK]
    chunks = (rows + chunk - 1) // chunk
    taken = fetch_add(phase, 1)
    while taken < chunks:
        for row in range(taken * chunk, min(rows, (taken + 1) * chunk)):
            place_row(job, layer, row)
        fetch_add(phase + 8, 1)
        taken = fetch_add(phase, 1)
    wait_for(phase + 8, chunks)


@compiled
def attend_rows(job: int, layer: int, scratch: int, phase: int) -> None:
    """WORK = attention, every tile of rows with every key head."""
    table = ints(job)
    kv_heads = table[j.KV_HEADS]
    units = table[j.TILE_COUNT] * kv_heads
    taken = fetch_add(phase, 1)
    while taken < units:
        attend(job, layer, taken // kv_heads, taken % kv_heads, scratch)
        fetch_add(phase + 8, 1)
        taken = fetch_add(phase, 1)
    wait_for(phase + 8, units)


@compiled
def multiply(job: int, layer: int, part: int, phase: int) -> None:
    """The product that ends a part."""
    table = ints(job)
    sizes = ints(table[j.PART_TABLE] + 8 * j.PART_SIZE * part)
    panels = (sizes[j.OUTPUTS] + PANEL - 1) // PANEL
    taken = fetch_add(phase, 1)
    while taken < panels:
        multiply_panel(job, layer, part, taken)
        fetch_add(phase + 8, 1)
        taken = fetch_add(phase, 1)
    wait_for(phase + 8, panels)


@compiled
def run(job: int, thread: int) -> None:
    """One thread's part of a job."""
    table = ints(job)
    scratch = table[j.SCRATCH] + 4 * table[j.SCRATCH_STRIDE] * thread
    phase = table[j.SYNC] + j.PHASE_BYTES
    for index in range(table[j.LAYERS]):
        layer = table[j.LAYER_TABLE] + 8 * j.LAYER_SIZE * index
        for part in range(table[j.PARTS]):
            if part == j.OUTPUT:
                place_rows(job, layer, phase)
                attend_rows(job, layer, scratch, phase + j.PHASE_BYTES)
                phase += 2 * j.PHASE_BYTES
            if part != j.OUTPUT or table[j.BYTES]:
                prepare_rows(job, layer, part, phase)
            multiply(job, layer, part, phase + j.PHASE_BYTES)
            phase += 2 * j.PHASE_BYTES


@entry("void(int64, int64, int64)")
def take_part(job: int, thread: int, semaphores: int) -> None:
    """Thread 0 runs a job with all helpers and returns when every one of them is done with it.

    The others stay: they run their part of each job until one says QUIT. One function for both,
    since machine code is made for each that Python can call.
    """
    table = ints(job)
    helpers = table[j.THREADS] - 1
    if thread == 0:
        for helper in range(helpers):
            sem_post(semaphores + 64 * helper)
    while True:
        while thread != 0 and sem_wait(semaphores + 64 * (thread - 1)) != 0:
            pass
        if table[j.QUIT]:
            return
        run(job, thread)
        if thread == 0:
            wait_for(table[j.SYNC], helpers)
            return
        fetch_add(table[j.SYNC], 1)
