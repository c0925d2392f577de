"""Rows times a packed weight, and small products of attention."""

from kernels.compiled import job as j
from kernels.compiled.primitives import compiled, floats, ints
from kernels.compiled.tiles import (
    LANES,
    PANEL,
    ROWS,
    SHORT,
    byte_panel,
    float_line,
    float_panel,
    float_short,
)


@compiled
def multiply_panel(job: int, layer: int, part: int, panel: int) -> None:
    """PANEL columns of the product that ends a part."""
    table, weights = ints(job), ints(layer + 8 * (j.WEIGHTS + 3 * part))
    sizes = ints(table[j.PART_TABLE] + 8 * j.PART_SIZE * part)
    columns, stride, mode = sizes[j.COLUMNS], sizes[j.TARGET_STRIDE], sizes[j.MODE]
    rows, fours = table[j.ROWS], (columns + 3) // 4
    target = sizes[j.TARGET] + 4 * PANEL * panel
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        if table[j.BYTES]:
            byte_panel(
                count,
                table[j.LEVELS] + table[j.LEVELS_STRIDE] * row,
                table[j.LEVELS_STRIDE],
                table[j.SCALES] + 4 * row,
                table[j.CORRECTIONS] + 4 * row,
                weights[0] + 4 * PANEL * fours * panel,
                weights[1] + 4 * PANEL * panel,
                fours,
                target + 4 * stride * row,
                4 * stride,
                mode,
            )
        else:
            float_panel(
                count,
                table[j.WORK] + 4 * table[j.WORK_STRIDE] * row,
                4 * table[j.WORK_STRIDE],
                weights[0] + 4 * PANEL * columns * panel,
                4 * PANEL,
                columns,
                target + 4 * stride * row,
                4 * stride,
                mode,
            )
    if weights[2]:
        add_bias(target, stride, rows, weights[2] + 4 * PANEL * panel)


@compiled
def add_bias(out: int, stride: int, rows: int, bias: int) -> None:
    """out [rows, PANEL] += bias [PANEL]."""
    own = floats(bias)
    for row in range(rows):
        values = floats(out + 4 * stride * row)
        for i in range(PANEL):
            values[i] += own[i]


@compiled
def small_product(
    a: int,
    row_a: int,
    rows: int,
    b: int,
    row_b: int,
    k: int,
    c: int,
    row_c: int,
    columns: int,
    mode: int,
) -> None:
    """c [rows, columns] = or += a times b; strides in bytes, columns a multiple of SHORT."""
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        left, out = a + row_a * row, c + row_c * row
        if columns % LANES == 0:
            for column in range(0, columns, LANES):
                at = 4 * column
                float_line(count, left, row_a, b + at, row_b, k, out + at, row_c, mode)
        else:
            for column in range(0, columns, SHORT):
                at = 4 * column
                float_short(count, left, row_a, b + at, row_b, k, out + at, row_c, mode)
