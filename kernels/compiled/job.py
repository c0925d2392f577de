"""What one round looks like to compiled code: a table of int64, whose places have names here.

Addresses point to memory that `Program` owns. Strides are in elements.
"""

(
    SYNC,
    THREADS,
    QUIT,
    LAYERS,
    LAYER_TABLE,
    PARTS,
    PART_TABLE,
    ROWS,
    CHUNK,
    HIDDEN,
    HEADS,
    KV_HEADS,
    DIM,
    MIDDLE,
    BLOCK,
    BYTES,
    X,
    X_STRIDE,
    WORK,
    WORK_STRIDE,
    WIDE,
    WIDE_STRIDE,
    LEVELS,
    LEVELS_STRIDE,
    SCALES,
    CORRECTIONS,
    TURNS,
    SLOTS,
    SEQS,
    TABLES,
    TABLES_STRIDE,
    TILES,
    TILE_COUNT,
    TILE_ROWS,
    SCRATCH,
    SCRATCH_STRIDE,
    CONSTANTS,
    SIZE,
) = range(38)
"""SYNC: words that threads count on. CHUNK: rows that a thread takes at a time. BYTES: 1 for int8.
WORK: [rows, .] what products read, LEVELS
the same in int8; WIDE: [rows, .] what they give beside X. SEQS: [sequences, 3] first row, rows,
start. TILES: [tiles, 2] sequence and first of its rows. CONSTANTS: eps, score scale."""

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""Parts of a layer: each prepares WORK and ends with a product. A head has the first alone."""

COLUMNS, OUTPUTS, TARGET, TARGET_STRIDE, MODE, PART_SIZE = range(6)
"""Of a part, the same in all layers: TARGET [rows, OUTPUTS] = or += WORK [rows, COLUMNS] times its
weight."""

NORM, NORM_2, Q_NORM, K_NORM, CACHE, WINDOW, WEIGHTS = range(7)
"""Of a layer. Head norms: 0 where there are none. WINDOW: 0 for none. From WEIGHTS on, for each
part, its panels, their scales and its bias; 0 where there are none."""
LAYER_SIZE = WEIGHTS + 3 * 4

PHASE_BYTES = 64
"""Of SYNC, for each phase: how many of its pieces are taken, and how many are done. Its first cache
line counts the helpers that are done with the job."""
PHASES = 10
"""Of a layer, at most."""
