"""A round of the whole decoder as one compiled call on every thread of a team.

Threads run the same phases side by side and wait for one another between them; within a phase they
share out rows evenly, panels and tiles as they come.
"""

from numba import types

from kernels.jit import job as j
from kernels.jit.attention import attend, place_row
from kernels.jit.primitives import (
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
from kernels.jit.products import multiply
from kernels.jit.rows import quantise, rms_norm, silu_mul

_PATIENCE = 2000
"""Turns of a waiting loop before the core is offered to someone else."""


@compiled
def wait_for(address, least):
    """Until the word there has grown to `least`."""
    turns = 0
    while load(address) < least:
        pause()
        turns += 1
        if turns > _PATIENCE:
            give_way()


@compiled
def meet(job, met):
    """Wait until all threads are here; returns how often they have met."""
    table = ints(job)
    met += 1
    barrier = table[j.SYNC] + 8 * j.BARRIER
    fetch_add(barrier, 1)
    wait_for(barrier, met * table[j.THREADS])
    return met


@compiled
def norm_rows(job, thread, norm):
    """WORK = normed X; in int8, LEVELS too."""
    table = ints(job)
    eps = floats(table[j.CONSTANTS])[0]
    for row in range(thread, table[j.ROWS], table[j.THREADS]):
        x = table[j.X] + 4 * table[j.X_STRIDE] * row
        work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
        rms_norm(x, norm, table[j.HIDDEN], eps, work)


@compiled
def activate_rows(job, thread):
    """WORK = silu(gate) * up of WIDE."""
    table = ints(job)
    middle = table[j.MIDDLE]
    for row in range(thread, table[j.ROWS], table[j.THREADS]):
        gate = table[j.WIDE] + 4 * table[j.WIDE_STRIDE] * row
        work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
        silu_mul(gate, gate + 4 * middle, middle, work)


@compiled
def to_levels(job, thread, count):
    """LEVELS = WORK in int8."""
    table = ints(job)
    for row in range(thread, table[j.ROWS], table[j.THREADS]):
        work = table[j.WORK] + 4 * table[j.WORK_STRIDE] * row
        levels = table[j.LEVELS] + table[j.LEVELS_STRIDE] * row
        quantise(work, count, levels, table[j.SCALES] + 4 * row, table[j.CORRECTIONS] + 4 * row)


@compiled
def attend_all(job, layer, thread, turn, met):
    """WORK = attention of all rows, every tile with every key head."""
    table = ints(job)
    for row in range(thread, table[j.ROWS], table[j.THREADS]):
        place_row(job, layer, row)
    met = meet(job, met)
    kv_heads = table[j.KV_HEADS]
    scratch = table[j.SCRATCH] + 4 * table[j.SCRATCH_STRIDE] * thread
    while True:
        unit = fetch_add(turn, 1)
        if unit >= table[j.TILE_COUNT] * kv_heads:
            return meet(job, met)
        attend(job, layer, unit // kv_heads, unit % kv_heads, scratch)


@compiled
def run(job, thread):
    """One thread's part of a job."""
    table, met = ints(job), 0
    for index in range(table[j.LAYERS]):
        layer = table[j.LAYER_TABLE] + 8 * j.LAYER_SIZE * index
        turns = table[j.SYNC] + 8 * (j.COUNTERS + j.HANDED_OUT * index)
        for part in range(table[j.PARTS]):
            if part == j.OUTPUT:
                met = attend_all(job, layer, thread, turns + 32, met)
            elif part == j.DOWN:
                activate_rows(job, thread)
            else:
                norm_rows(job, thread, ints(layer)[j.NORM if part == j.QKV else j.NORM_2])
            if table[j.BYTES]:
                to_levels(job, thread, ints(table[j.PART_TABLE])[j.PART_SIZE * part + j.COLUMNS])
            met = meet(job, met)
            multiply(job, layer, part, turns + 8 * part)
            met = meet(job, met)


@entry(types.void(types.int64, types.int64, types.int64))
def take_part(job, thread, semaphores):
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
            wait_for(table[j.SYNC] + 8 * j.DONE, helpers)
            return
        fetch_add(table[j.SYNC] + 8 * j.DONE, 1)
