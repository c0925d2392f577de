"""The Qwen3 architecture (Qwen Team 2025): Llama with normed queries and keys."""

from services.engine.models.attention import Attention
from services.engine.models.decoder import Decoder
from services.engine.models.weights import Taker


class Qwen3Model(Decoder):
    """Queries and keys pass a norm per head before they are rotated."""

    def _attention(self, take: Taker, at: str) -> Attention:
        return Attention(self.config, self._kernels, take, at, head_norms=True)
