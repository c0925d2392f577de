"""The same work in transformers: sdpa attention, its own cache, greedy."""

from collections.abc import Callable

import torch
import transformers

from services.engine.loader import ModelSource


class Peer:
    """LlamaForCausalLM with our weights, unpacked."""

    def __init__(self, source: ModelSource, dtype: str) -> None:
        own = source.config
        config = transformers.LlamaConfig(
            vocab_size=own.vocab_size,
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_hidden_layers=own.num_layers,
            num_attention_heads=own.num_heads,
            num_key_value_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            max_position_embeddings=own.max_position,
            rms_norm_eps=own.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
            tie_word_embeddings=own.tie_embeddings,
            attn_implementation="sdpa",
        )
        self._model = transformers.LlamaForCausalLM(config).eval()
        self._model.load_state_dict(source.weights, strict=False)
        self._model.tie_weights()
        self._model.to(getattr(torch, dtype))

    @torch.inference_mode()
    def _forward(
        self, ids: torch.Tensor, cache: transformers.Cache | None
    ) -> tuple[torch.Tensor, transformers.Cache]:
        result = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return result.logits[:, -1].argmax(-1, keepdim=True), result.cache

    def prefill(self, length: int) -> Callable[[], int]:
        """One prompt and its first token."""
        ids = torch.arange(5, 5 + length).unsqueeze(0)

        def work() -> int:
            self._forward(ids, None)
            return length

        return work

    def decode(self, batch: int, length: int, steps: int) -> Callable[[], int]:
        """Steps of a batch after its prompts."""
        ids = torch.arange(length).unsqueeze(0) + torch.arange(5, 5 + batch).unsqueeze(1)
        first, cache = self._forward(ids, None)

        def work() -> int:
            tokens, filled = first, cache
            for _ in range(steps):
                tokens, filled = self._forward(tokens, filled)
            cache.crop(-steps)
            return batch * steps

        return work
