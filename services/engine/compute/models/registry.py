"""Which class serves which architecture."""

from collections.abc import Mapping

from services.engine.compute.models.decoder import Decoder
from services.engine.compute.models.llama import LlamaModel
from services.engine.compute.models.qwen3 import Qwen3Model
from services.engine.compute.models.qwen3_moe import Qwen3MoeModel

MODELS: Mapping[str, type[Decoder]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": Qwen3Model,
    "qwen3_moe": Qwen3MoeModel,
}
