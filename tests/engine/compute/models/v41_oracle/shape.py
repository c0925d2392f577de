"""The shape of a V4.1 text model, by its published config keys."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Fields are named as in the published `text_config`; the values are a tiny model's.

    Nine layers stand for forty: two with the window alone, two sources of positions by two with a
    layer between that borrows, then the source by one that all later layers read. The clamp of
    the experts is low enough to act.
    """

    vocab_size: int = 96
    hidden_size: int = 32
    num_hidden_layers: int = 9
    num_attention_heads: int = 4
    head_dim: int = 32
    qk_rope_head_dim: int = 8
    q_lora_rank: int = 16
    o_groups: int = 2
    o_lora_rank: int = 8
    sliding_window: int = 8
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 2, 1, 1, 1, 1)
    kv_source_layer_ids: tuple[int, ...] = (2, 4, 5)
    index_source_layer_ids: tuple[int, ...] = (2, 4, 5, 7)
    candidate_source_layer_id: int = 5
    candidate_topk_blocks: int = 3
    candidate_block_size: int = 4
    index_n_heads: int = 16
    index_head_dim: int = 32
    index_topk: int = 5
    moe_intermediate_size: int = 16
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 1.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original_positions: int = 64
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    max_position_embeddings: int = 512
    engram_layer_ids: tuple[int, ...] = (1, 3)
    engram_vocab_size: int = 60
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 2
    engram_head_dim: int = 8
    engram_pad_token_id: int = 2

    @property
    def last_source(self) -> int:
        """The layer whose compressed entries all later layers read: the decoder begins here."""
        return self.kv_source_layer_ids[-1]

    def source_of(self, layer: int) -> int | None:
        """The layer whose compressed entries `layer` reads; None where the window is all."""
        if not self.compress_ratios[layer]:
            return None
        return max(source for source in self.kv_source_layer_ids if source <= layer)
