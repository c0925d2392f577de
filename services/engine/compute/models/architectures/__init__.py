"""The served architectures, one declaration per file; `ARCHITECTURES` finds them by name.

llama.py      Llama, Mistral, Qwen2, Qwen3
qwen3_moe.py  Qwen3 with experts
mixtral.py    Mixtral: Mistral with experts under names of its own
phi3.py       Phi 3 and 4: joined projections
glm4_moe.py   GLM 4.5 and 4.6: sigmoid routing, a shared expert
deepseek.py   DeepSeek-V3 and V3.2: GLM's experts behind latent attention; V4's experts
gpt_oss.py    gpt-oss: attention sinks, experts with biases and a clamped gate
gemma3.py     Gemma 3: norms after each half of a layer, GELU
"""

from collections.abc import Mapping

from services.engine.compute.models.architecture import Architecture
from services.engine.compute.models.architectures.deepseek import DEEPSEEK, DEEPSEEK_V4
from services.engine.compute.models.architectures.gemma3 import GEMMA3
from services.engine.compute.models.architectures.glm4_moe import GLM4_MOE
from services.engine.compute.models.architectures.gpt_oss import GPT_OSS
from services.engine.compute.models.architectures.llama import LLAMA
from services.engine.compute.models.architectures.mixtral import MIXTRAL
from services.engine.compute.models.architectures.phi3 import PHI3
from services.engine.compute.models.architectures.qwen3_moe import QWEN3_MOE

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "gemma3": GEMMA3,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41": DEEPSEEK_V4,
}
"""By `ModelConfig.architecture`."""
