"""Products of rows and packed weights, and the small products of attention."""

from kernels.compiled import job as j
from kernels.compiled.narrow_tiles import byte_panel, half_panel
from kernels.compiled.primitives import compiled, floats, ints
from kernels.compiled.tiles import LANES, PANEL, ROWS, SHORT, float_line, float_panel, float_short


@compiled
def multiply_panel(job: int, layer: int, part: int, panel: int) -> None:
    """Compute PANEL outputs of a part's product for all rows."""
    table = ints(job)
    weights = layer + j.INT64_BYTES * (j.WEIGHTS + j.WEIGHT_SIZE * part)
    sizes = ints(table[j.PART_TABLE] + j.PART_BYTES * part)
    columns, stride, rows = sizes[j.COLUMNS], sizes[j.TARGET_STRIDE], table[j.ROWS]
    target = sizes[j.TARGET] + 4 * PANEL * panel
    source, form = job + j.INT64_BYTES * j.WORK, table[j.FORMAT]
    multiply_rows(form, source, 0, rows, weights, panel, columns, target, stride, sizes[j.MODE])
    bias = ints(weights)[j.BIAS]
    if bias:
        add_bias(target, stride, rows, bias + 4 * PANEL * panel)


@compiled
def multiply_rows(
    form: int,
    source: int,
    first: int,
    rows: int,
    weights: int,
    panel: int,
    columns: int,
    target: int,
    stride: int,
    mode: int,
) -> None:
    """Multiply adjacent rows by one panel.

    Args:
        form: number format of the weights; see `job`.
        source: address of the fields that describe the rows; see `job`.
        first: first row of the source.
        weights: address of the fields PANELS and PANEL_SCALES.
        panel: number of the panel among the weight's.
        columns: inputs of the product.
        target: [rows, PANEL] float32; its rows are `stride` elements apart.
        mode: STORE or ADD.
    """
    given, own = ints(source), ints(weights)
    if form == j.BYTES:
        byte_rows(
            rows,
            given[j.SOURCE_BYTES] + given[j.SOURCE_BYTES_STRIDE] * first,
            given[j.SOURCE_BYTES_STRIDE],
            given[j.SOURCE_SCALES] + 4 * first,
            given[j.SOURCE_CORRECTIONS] + 4 * first,
            own[j.PANELS] + 4 * PANEL * ((columns + 3) // 4) * panel,
            own[j.PANEL_SCALES] + 4 * PANEL * panel,
            (columns + 3) // 4,
            target,
            4 * stride,
            mode,
        )
        return
    pitch = 4 * given[j.SOURCE_STRIDE]
    floats_at = given[j.SOURCE_FLOATS] + pitch * first
    if form == j.HALVES:
        pairs = (columns + 1) // 2
        at = own[j.PANELS] + 4 * PANEL * pairs * panel
        half_rows(rows, floats_at, pitch, at, pairs, target, 4 * stride, mode)
    else:
        at = own[j.PANELS] + 4 * PANEL * columns * panel
        float_rows(rows, floats_at, pitch, at, columns, target, 4 * stride, mode)


@compiled
def float_rows(
    rows: int, a: int, row_a: int, panel: int, k: int, c: int, row_c: int, mode: int
) -> None:
    """A panel of a float32 weight, for any number of rows; operands as in `tiles`."""
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        float_panel(
            count, a + row_a * row, row_a, panel, 4 * PANEL, k, c + row_c * row, row_c, mode
        )


@compiled
def half_rows(
    rows: int, a: int, row_a: int, panel: int, pairs: int, c: int, row_c: int, mode: int
) -> None:
    """A panel of a bfloat16 weight, for any number of rows; operands as in `narrow_tiles`."""
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        half_panel(count, a + row_a * row, row_a, panel, pairs, c + row_c * row, row_c, mode)


@compiled
def byte_rows(
    rows: int,
    a: int,
    row_a: int,
    scales: int,
    corrections: int,
    panel: int,
    panel_scales: int,
    fours: int,
    c: int,
    row_c: int,
    mode: int,
) -> None:
    """A panel of an int8 weight, for any number of rows; operands as in `narrow_tiles`."""
    for row in range(0, rows, ROWS):
        byte_panel(
            min(ROWS, rows - row),
            a + row_a * row,
            row_a,
            scales + 4 * row,
            corrections + 4 * row,
            panel,
            panel_scales,
            fours,
            c + row_c * row,
            row_c,
            mode,
        )


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
