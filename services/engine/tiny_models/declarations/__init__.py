"""The architectures of which a tiny model can be written, one file per family.

decoder.py     what most decoders have: attention, gated feed-forward, norms, embeddings
dense.py       llama, mistral, qwen2, qwen3
qwen3_moe.py   Qwen3 with experts
"""

from collections.abc import Mapping

from services.engine.tiny_models.declaration import Declaration
from services.engine.tiny_models.declarations.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from services.engine.tiny_models.declarations.qwen3_moe import QWEN3_MOE

DECLARATIONS: Mapping[str, Declaration] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}
"""By `model_type`."""
