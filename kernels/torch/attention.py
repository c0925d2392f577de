"""Paged attention with PyTorch's scaled_dot_product_attention.

Query heads that share a key head are passed as one batch entry with several heads (prefill), or as
one head with several rows (decode). So keys and values are not copied per query head.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.interface import AttentionGroup, KeptRows


def kv_write(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """See kernels.interface.Kernels.kv_write."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, kv)


def attention(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
    """See kernels.interface.Kernels.attention."""
    if group.kept is not None:
        return _decode_kept(q, kv, cache, group, group.kept)
    if q.shape[0] == len(group.starts):
        return _decode(q, kv.shape[1] // 2, cache, group)
    return _prefill(q, kv, cache, group)


def _decode(q: Tensor, kv_heads: int, cache: Tensor, group: AttentionGroup) -> Tensor:
    """One row per sequence; the query heads of a key head are the rows of one product."""
    batch, heads, dim = q.shape
    history = gather(cache, group.block_tables)
    rows = q.view(batch, kv_heads, heads // kv_heads, dim)
    keys = history[:, :, :kv_heads].transpose(1, 2)
    values = history[:, :, kv_heads:].transpose(1, 2)
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
    return out.reshape(batch, heads * dim)


def _decode_kept(
    q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, kept: KeptRows
) -> Tensor:
    batch, heads, dim = q.shape
    keys, values = kept_history(kv, cache, group, kept)
    kv_heads = keys.shape[1]
    rows = q.view(batch, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
    return out.reshape(batch, heads * dim)


def _prefill(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
    """Several rows of one sequence; without history their own keys and values are enough."""
    length, heads, dim = q.shape
    kv_heads = kv.shape[1] // 2
    if not group.causal:
        kv = gather(cache, group.block_tables)[0, : group.starts[0] + length]
    shared = (kv_heads, heads // kv_heads, kv.shape[0], dim)
    keys = kv[:, :kv_heads].transpose(0, 1).unsqueeze(1).expand(shared)
    values = kv[:, kv_heads:].transpose(0, 1).unsqueeze(1).expand(shared)
    rows = q.transpose(0, 1).view(kv_heads, -1, length, dim)
    out = scaled_dot_product_attention(
        rows, keys, values, attn_mask=group.mask, is_causal=group.causal
    )
    return out.flatten(0, 1).transpose(0, 1).reshape(length, heads * dim)


def kept_history(
    kv: Tensor, cache: Tensor, group: AttentionGroup, kept: KeptRows
) -> tuple[Tensor, Tensor]:
    """Keys and values of decodes, each [sequences, G, positions, D], from contiguous copies.

    Only new rows, and rows that joined, are copied.
    """
    store = kept.stores[cache.data_ptr()]
    kv_heads, dim = store.shape[2], store.shape[4]
    for row, table, count in kept.joined:
        past = cache.index_select(0, table).view(-1, 2, kv_heads, dim)[:count]
        store[:, row, :, :count] = past.permute(1, 2, 0, 3)
    store.view(-1, dim).index_copy_(0, kept.slots, kv.reshape(-1, dim))
    keys, values = store[:, : kv.shape[0], :, : max(group.starts) + 1].unbind()
    return keys, values


def gather(cache: Tensor, tables: Tensor) -> Tensor:
    """Copy whole blocks in order: [sequences, positions, 2 G, D]."""
    batch, count = tables.shape
    block = cache.shape[1:]
    flat = cache.view(cache.shape[0], -1).index_select(0, tables.view(-1))
    return flat.view(batch, count * block[0], *block[1:])
