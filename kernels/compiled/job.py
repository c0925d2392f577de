"""The tables through which Python describes a round to compiled code.

All tables are int64. A constant here is the index of a field in its table; its docstring gives what
the field holds. `Program` and `Team` write the tables, compiled code reads them.

- The job table describes the round: sizes, buffers and the other tables.
- The layer table has a row per layer: addresses of weights and cache.
- The part table has a row per part of a layer: sizes and target of its product.
- The sync area holds the counters that threads share.

An address is that of a tensor's first element; 0 stands for no tensor. Strides count elements, and
a stride named X_STRIDE is that of the rows of X. Letters in shapes are those of
`kernels.interface`. Numba compiles these constants into the code, so they cost nothing there.
`tests/kernels/compiled/test_job.py` checks the numbering, and that every field is filled.
"""

INT64_BYTES = 8

# Job table -----------------------------------------------------------------------------------

SYNC = 0
"""Address of the sync area (below)."""
THREADS = 1
"""Threads that run the job, the caller's included."""
QUIT = 2
"""1: helper threads end instead of running the job."""
LAYERS = 3
"""Rows of the layer table."""
LAYER_TABLE = 4
"""Address: [LAYERS, LAYER_SIZE] int64."""
PARTS = 5
"""Rows of the part table: PARTS_PER_LAYER, or 1 for the head."""
PART_TABLE = 6
"""Address: [PARTS, PART_SIZE] int64."""
ROWS = 7
"""T: rows (token positions) of the round."""
CHUNK = 8
"""Rows that a thread takes at a time in a phase over rows."""
HIDDEN = 9
"""Hidden size, in elements."""
HEADS = 10
"""H: query heads."""
KV_HEADS = 11
"""G: key/value heads."""
DIM = 12
"""D: size of a head, in elements."""
INTERMEDIATE = 13
"""F: rows of the gate, and of the up projection."""
BLOCK = 14
"""Positions of a KV-cache block."""
FORMAT = 15
"""Number format of the weights: FLOATS, BYTES or HALVES (below)."""
X = 16
"""Address: [T, hidden] float32, the residual stream."""
X_STRIDE = 17
WORK = 18
"""Address: [T, inputs of the part's product] float32, what the product reads. This field and the
next five are the source (below) of a layer's products."""
WORK_STRIDE = 19
QUANTIZED = 20
"""Address: [T, inputs of the part's product] int8, the quantized rows of WORK."""
QUANTIZED_STRIDE = 21
SCALES = 22
"""Address: [T] float32, the scale of each row of QUANTIZED."""
CORRECTIONS = 23
"""Address: [T] int32, 128 times the sum of each row of QUANTIZED."""
WIDE = 24
"""Address: [T, (H + 2 G) * D or 2 F or E] float32, results of the QKV and GATE_UP products and of
the router's."""
WIDE_STRIDE = 25
COS_SIN = 26
"""Address: [T, D / 2, 2] float32, contiguous: cosine and sine of each pair's angle."""
SLOTS = 27
"""Address: [T] int64, where each row's key and value go: block * BLOCK + offset."""
SEQS = 28
"""Address: [sequences, SEQ_SIZE] int64: first row, rows, positions computed before."""
TABLES = 29
"""Address: [sequences, TABLES_STRIDE] int64, the block tables."""
TABLES_STRIDE = 30
TILES = 31
"""Address: [TILE_COUNT, TILE_SIZE] int64: sequence, and first row counted from its first one."""
TILE_COUNT = 32
"""Attention tiles of the round."""
TILE_ROWS = 33
"""Rows of an attention tile, at most."""
SCRATCH = 34
"""Address: [threads, SCRATCH_STRIDE] float32, working memory of each thread's attention."""
SCRATCH_STRIDE = 35
CONSTANTS = 36
"""Address: [2] float32: eps of the norms, and the score scale 1 / sqrt(D)."""
CACHE_BYTES = 37
"""Bytes of a value in the caches: 4 for float32, 2 for bfloat16."""
EXPERTS = 38
"""E: experts of a layer that has some. This field and those that follow are 0 without experts."""
TOP_K = 39
"""k: experts of a row."""
EXPERT_SIZE = 40
"""F: rows of an expert's gate, and of its up projection."""
RENORMALISE = 41
"""1: the weights of a row's experts are divided by their sum."""
CHOSEN = 42
"""Address: [T, k] int64, the experts of each row, the likeliest first."""
GATES = 43
"""Address: [T, k] float32, the weight of each."""
PLACES = 44
"""Address: [T, k] int64, where the row is among those of GATHERED, for each of its experts."""
SOURCES = 45
"""Address: [T * k] int64, the row that each place of GATHERED holds."""
ENDS = 46
"""Address: [E] int64, the place behind each expert's last one."""
ACTIVE = 47
"""Address: [layers with experts, 1 + E] int64: how many experts have rows, then these experts,
ascending. Each layer has its own, because a thread that comes late to a layer must read its count:
by then others may have grouped the rows of later layers."""
COUNTS = 48
"""Address: [layers with experts, E] int64, rows of each expert in this round."""
GATHERED = 49
"""Address: [T * k, inputs of an expert's product] float32, rows in the order of their experts. This
field and the next five are the source of the experts' products."""
GATHERED_STRIDE = 50
GATHERED_BYTES = 51
"""Address: [T * k, inputs of an expert's product] int8, quantized."""
GATHERED_BYTES_STRIDE = 52
GATHERED_SCALES = 53
"""Address: [T * k] float32."""
GATHERED_CORRECTIONS = 54
"""Address: [T * k] int32."""
GATHERED_WIDE = 55
"""Address: [T * k, 2 F or hidden] float32, results of the experts' products."""
GATHERED_WIDE_STRIDE = 56
SIZE = 57
"""Fields of the job table."""

# Number formats of weights -------------------------------------------------------------------

FLOATS = 0
"""float32."""
BYTES = 1
"""int8 weights times int8 activations."""
HALVES = 2
"""bfloat16 weights times float32 activations."""

# Source of a product: six fields of the job table, from WORK or from GATHERED on ---------------

SOURCE_FLOATS = 0
SOURCE_STRIDE = 1
SOURCE_BYTES = 2
SOURCE_BYTES_STRIDE = 3
SOURCE_SCALES = 4
SOURCE_CORRECTIONS = 5

SEQ_SIZE = 3
SEQ_BYTES = SEQ_SIZE * INT64_BYTES
TILE_SIZE = 2
TILE_BYTES = TILE_SIZE * INT64_BYTES

# Parts of a layer ----------------------------------------------------------------------------
# A part prepares WORK and ends with one product. The head is a single part, like QKV.

QKV = 0
OUTPUT = 1
"""Attention and its output projection."""
GATE_UP = 2
DOWN = 3
PARTS_PER_LAYER = 4

# Part table: the same for all layers ---------------------------------------------------------

COLUMNS = 0
"""Inputs of the product: columns of WORK that it reads."""
OUTPUTS = 1
"""Outputs of the product."""
TARGET = 2
"""Address: [T, OUTPUTS] float32, where the result goes."""
TARGET_STRIDE = 3
MODE = 4
"""`tiles.STORE`: TARGET = product; `tiles.ADD`: TARGET += product."""
PART_SIZE = 5
"""Fields of a row of the part table."""
PART_BYTES = PART_SIZE * INT64_BYTES

# Layer table ---------------------------------------------------------------------------------

NORM = 0
"""Address: [hidden] float32, the norm before attention (of the head: the last norm)."""
NORM_2 = 1
"""Address: [hidden] float32, the norm before the feed-forward."""
Q_NORM = 2
"""Address: [D] float32, the norm of query heads; 0 if the model has none."""
K_NORM = 3
"""Address: [D] float32, the norm of key heads; 0 if the model has none."""
CACHE = 4
"""Address of the layer's cache: [blocks, 2 G, D * BLOCK] float32 or bfloat16; see `attention`."""
WINDOW = 5
"""Sliding window in positions; 0 for full attention."""
ROUTER = 6
"""Address of the router's packed panels, float32 in every format; 0 for a dense layer. GATE_UP and
DOWN are then the weights of all experts, one after another, each padded to whole panels."""
ROUTED = 7
"""Index among the layers with experts; 0 for a dense layer."""
WEIGHTS = 8
"""First field of the weights: for each part WEIGHT_SIZE addresses, see below."""
WEIGHT_SIZE = 3
LAYER_SIZE = WEIGHTS + WEIGHT_SIZE * PARTS_PER_LAYER
"""Fields of a row of the layer table."""
LAYER_BYTES = LAYER_SIZE * INT64_BYTES

PANELS = 0
"""Within a part's weights: address of the packed panels."""
PANEL_SCALES = 1
"""Within a part's weights: address of the scales [outputs] float32; 0 unless BYTES."""
BIAS = 2
"""Within a part's weights: address of the bias [outputs] float32, whole panels; 0 for none."""

# Sync area -----------------------------------------------------------------------------------
# Counters that threads add to atomically, a cache line for each phase. The first line counts the
# helpers that are done with the whole job.

PHASE_BYTES = 64
"""Bytes between phases: a cache line."""
PHASE_TAKEN = 0
"""Offset in bytes of the phase's counter of pieces that threads have taken."""
PHASE_DONE = INT64_BYTES
"""Offset in bytes of the phase's counter of pieces that are done."""
PHASES_PER_PART = 2
"""Prepare, multiply."""
ATTENTION_PHASES = 2
"""Store keys and values, attend; they come before the phases of OUTPUT."""
PHASES = PHASES_PER_PART * PARTS_PER_LAYER + ATTENTION_PHASES
"""Phases of a dense layer."""
EXPERT_PHASES = 8
"""Router, choose, group, gather, gate and up, activate, down, combine; they replace the product of
GATE_UP, and all of DOWN."""
ROUTED_PHASES = PHASES - PHASES_PER_PART - 1 + EXPERT_PHASES
"""Phases of a layer with experts."""
SEMAPHORE_BYTES = 64
"""Bytes between the helpers' semaphores: a cache line, which is larger than a `sem_t`."""
