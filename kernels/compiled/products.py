"""Products of rows and packed weights, and the small products of attention."""

from kernels.compiled import job as j
from kernels.compiled.narrow_tiles import byte_panel, half_panel
from kernels.compiled.primitives import compiled, floats, ints
from kernels.compiled.tiles import (
    LANES,
    PANEL,
    ROWS,
    SHORT,
    float_line,
    float_pair,
    float_panel,
    float_short,
    half_line,
    half_pair,
)

_AHEAD_BYTES = 2048


@compiled
def multiply_panel(job: int, layer: int, part: int, panel: int) -> None:
    """Compute PANEL outputs of a part's product for all rows."""
    table = ints(job)
    weights = layer + j.INT64_BYTES * (j.WEIGHTS + j.WEIGHT_SIZE * part)
    sizes = ints(table[j.PART_TABLE] + j.PART_BYTES * part)
    columns, stride, rows = sizes[j.COLUMNS], sizes[j.TARGET_STRIDE], table[j.ROWS]
    target = sizes[j.TARGET] + 4 * PANEL * panel
    source, form = job + j.INT64_BYTES * j.WORK, table[j.FORMAT]
    mode, skip = sizes[j.MODE], table[j.THREADS]
    multiply_rows(form, source, 0, rows, weights, panel, columns, target, stride, mode, skip)
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
    skip: int,
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
        skip: see `load_ahead`.
    """
    given, own = ints(source), ints(weights)
    pitch = 4 * given[j.SOURCE_STRIDE]
    floats_at = given[j.SOURCE_FLOATS] + pitch * first
    inputs = 4 if form == j.BYTES else 2 if form == j.HALVES else 1  # that share a word
    lines = (columns + inputs - 1) // inputs
    at, pitch_out = own[j.PANELS] + 4 * PANEL * lines * panel, 4 * stride
    if form == j.BYTES:
        byte_rows(
            rows,
            given[j.SOURCE_BYTES] + given[j.SOURCE_BYTES_STRIDE] * first,
            given[j.SOURCE_BYTES_STRIDE],
            given[j.SOURCE_SCALES] + 4 * first,
            given[j.SOURCE_CORRECTIONS] + 4 * first,
            at,
            own[j.PANEL_SCALES] + 4 * PANEL * panel,
            lines,
            target,
            pitch_out,
            mode,
            skip,
        )
    elif form == j.HALVES:
        half_rows(rows, floats_at, pitch, at, lines, target, pitch_out, mode, skip)
    else:
        float_rows(rows, floats_at, pitch, at, lines, target, pitch_out, mode, skip)


@compiled
def float_rows(
    rows: int, a: int, row_a: int, panel: int, k: int, c: int, row_c: int, mode: int, skip: int
) -> None:
    """A panel of a float32 weight, for any number of rows.

    Operands are those of `tiles` and `load_ahead`.
    """
    for row in range(0, rows, ROWS):
        count, left, out = min(ROWS, rows - row), a + row_a * row, c + row_c * row
        ahead = load_ahead(row, rows, panel, 4 * PANEL * k, skip)
        float_panel(count, left, row_a, panel, 4 * PANEL, k, out, row_c, mode, ahead)


@compiled
def half_rows(
    rows: int, a: int, row_a: int, panel: int, pairs: int, c: int, row_c: int, mode: int, skip: int
) -> None:
    """A panel of a bfloat16 weight, for any number of rows.

    Operands are those of `narrow_tiles` and `load_ahead`.
    """
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        ahead = load_ahead(row, rows, panel, 4 * PANEL * pairs, skip)
        half_panel(count, a + row_a * row, row_a, panel, pairs, c + row_c * row, row_c, mode, ahead)


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
    skip: int,
) -> None:
    """A panel of an int8 weight, for any number of rows.

    Operands are those of `narrow_tiles` and `load_ahead`.
    """
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
            load_ahead(row, rows, panel, 4 * PANEL * fours, skip),
        )


@compiled
def load_ahead(row: int, rows: int, panel: int, nbytes: int, skip: int) -> int:
    """Where a tile loads ahead from, while it reads a panel.

    The first tile of a panel reads it from memory: it loads a little ahead of itself. The last of
    several reads it from the caches: it loads the panel that the thread probably takes next.

    Args:
        row: first row of the tile, of `rows`.
        panel: address of the panel.
        nbytes: size of the panel.
        skip: how many panels behind this one the next is.
    """
    if row > 0 and row + ROWS >= rows:
        return panel + nbytes * skip
    return panel + _AHEAD_BYTES


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
    size: int,
    k: int,
    c: int,
    row_c: int,
    columns: int,
    mode: int,
) -> None:
    """c = a times b, or c += a times b, as `mode` says.

    Args:
        a: [rows, k] float32; its rows are `row_a` bytes apart.
        b: [k, columns] float32 or bfloat16; its rows are `row_b` bytes apart.
        size: bytes of a value of b, 4 or 2.
        c: [rows, columns] float32; its rows are `row_c` bytes apart.
        columns: a multiple of SHORT; of LANES if b is bfloat16.
        mode: STORE or ADD.
    """
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        left, out = a + row_a * row, c + row_c * row
        if size == 2:
            half_columns(count, left, row_a, b, row_b, k, out, row_c, columns, mode)
        else:
            float_columns(count, left, row_a, b, row_b, k, out, row_c, columns, mode)


@compiled
def float_columns(
    rows: int,
    a: int,
    row_a: int,
    b: int,
    row_b: int,
    k: int,
    c: int,
    row_c: int,
    columns: int,
    mode: int,
) -> None:
    """`small_product` of at most ROWS rows with b in float32, in the widest tiles that fit."""
    at = 0
    if columns % LANES == 0:
        while at + 2 * LANES <= columns:
            float_pair(rows, a, row_a, b + 4 * at, row_b, k, c + 4 * at, row_c, mode)
            at += 2 * LANES
        if at < columns:
            float_line(rows, a, row_a, b + 4 * at, row_b, k, c + 4 * at, row_c, mode)
        return
    while at < columns:
        float_short(rows, a, row_a, b + 4 * at, row_b, k, c + 4 * at, row_c, mode)
        at += SHORT


@compiled
def half_columns(
    rows: int,
    a: int,
    row_a: int,
    b: int,
    row_b: int,
    k: int,
    c: int,
    row_c: int,
    columns: int,
    mode: int,
) -> None:
    """`small_product` of at most ROWS rows with b in bfloat16, in the widest tiles that fit."""
    at = 0
    while at + 2 * LANES <= columns:
        half_pair(rows, a, row_a, b + 2 * at, row_b, k, c + 4 * at, row_c, mode)
        at += 2 * LANES
    if at < columns:
        half_line(rows, a, row_a, b + 2 * at, row_b, k, c + 4 * at, row_c, mode)
