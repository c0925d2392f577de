"""The Llama architecture (Touvron et al. 2023): the decoder as it stands."""

from services.engine.models.decoder import Decoder


class LlamaModel(Decoder):
    """Grouped-query attention without biases or head norms, and a dense SwiGLU in every layer."""
