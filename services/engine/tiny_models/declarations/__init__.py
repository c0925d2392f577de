"""The architectures of which a tiny model can be written, one file per family.

decoder.py     what most decoders have: attention, gated feed-forward, norms, embeddings
dense.py       llama, mistral, qwen2, qwen3
phi3.py        Phi 3: joined projections, a window
gemma3.py      Gemma 3: four norms per layer, a window in some layers
qwen3_moe.py   Qwen3 with experts
mixtral.py     Mixtral: experts in every layer
grouped.py     experts that a router chooses by groups, of the next two
glm4_moe.py    GLM 4.5
gpt_oss.py     gpt-oss: sinks, stacked experts with biases
deepseek.py    DeepSeek-V3 and V3.2: latent attention; V3.2 with an indexer
deepseek_v4.py DeepSeek V4: compressed attention, hyper-connections, a table of experts
deepseek_v41.py  DeepSeek V4.1: shared entries, look-ups by n-gram, sizes that follow from others
"""

from collections.abc import Mapping

from services.engine.tiny_models.declaration import Declaration
from services.engine.tiny_models.declarations.deepseek import DEEPSEEK_V3, DEEPSEEK_V32
from services.engine.tiny_models.declarations.deepseek_v4 import DEEPSEEK_V4
from services.engine.tiny_models.declarations.deepseek_v41 import DEEPSEEK_V41
from services.engine.tiny_models.declarations.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from services.engine.tiny_models.declarations.gemma3 import GEMMA3
from services.engine.tiny_models.declarations.glm4_moe import GLM4_MOE
from services.engine.tiny_models.declarations.gpt_oss import GPT_OSS
from services.engine.tiny_models.declarations.mixtral import MIXTRAL
from services.engine.tiny_models.declarations.phi3 import PHI3
from services.engine.tiny_models.declarations.qwen3_moe import QWEN3_MOE

DECLARATIONS: Mapping[str, Declaration] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "gemma3": GEMMA3,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41": DEEPSEEK_V41,
}
"""By `model_type`; Gemma 3, whose text model alone is written, without its `_text`."""
