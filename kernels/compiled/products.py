"""Products of rows and packed weights, and the small products of attention."""

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
    """Compute PANEL outputs of a part's product for all rows."""
    table, weights = ints(job), ints(layer + j.INT64_BYTES * (j.WEIGHTS + j.WEIGHT_SIZE * part))
    sizes = ints(table[j.PART_TABLE] + j.PART_BYTES * part)
    columns, stride, mode = sizes[j.COLUMNS], sizes[j.TARGET_STRIDE], sizes[j.MODE]
    rows, fours = table[j.ROWS], (columns + 3) // 4
    target = sizes[j.TARGET] + 4 * PANEL * panel
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        if table[j.INT8]:
            byte_panel(
                count,
                table[j.QUANTIZED] + table[j.QUANTIZED_STRIDE] * row,
                table[j.QUANTIZED_STRIDE],
                table[j.SCALES] + 4 * row,
                table[j.CORRECTIONS] + 4 * row,
                weights[j.PANELS] + 4 * PANEL * fours * panel,
                weights[j.PANEL_SCALES] + 4 * PANEL * panel,
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
                weights[j.PANELS] + 4 * PANEL * columns * panel,
                4 * PANEL,
                columns,
                target + 4 * stride * row,
                4 * stride,
                mode,
            )
    if weights[j.BIAS]:
        add_bias(target, stride, rows, weights[j.BIAS] + 4 * PANEL * panel)


@compiled
def add_bias(out: int, stride: int, rows: int, bias: int) -> None:
    """out [rows, PANEL] += bias [PANEL]; `stride` in elements."""
    addends = floats(bias)
    for row in range(rows):
        values = floats(out + 4 * stride * row)
        for i in range(PANEL):
            values[i] += addends[i]


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
    """c = a times b, or c += a times b, as `mode` says.

    Args:
        a: [rows, k] float32; its rows are `row_a` bytes apart.
        b: [k, columns] float32; its rows are `row_b` bytes apart.
        c: [rows, columns] float32; its rows are `row_c` bytes apart.
        columns: a multiple of SHORT.
        mode: STORE or ADD.
    """
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
