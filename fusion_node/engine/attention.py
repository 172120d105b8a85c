"""Attention over a packed batch, registered through the attention interface of transformers.

Every decoder class that looks its attention function up by name can thus run T packed tokens of any number of
sequences in one call, each sequence with its own KV: ``model(inputs_embeds=[1, T, D], position_ids=[1, T],
use_cache=False, batch=PackedBatch)``.

Shapes: T packed tokens, S KV slots in use, N query heads, K KV heads, G = N / K, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from fusion_node.engine.kv_cache import SessionKV

ATTENTION_NAME = "fusion_packed"


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a packed batch: tokens ``[start, stop)``, whose KV goes to ``first_slot`` onwards.

    Attributes:
        mask_TS: which slots each token sees; None means all slots up to its own (causal).
    """

    start: int
    stop: int
    kv: SessionKV
    first_slot: int
    mask_TS: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What the attention needs to know of a packed call."""

    segments: tuple[Segment, ...]


def packed_attention(
    module: torch.nn.Module,
    query_1NTH: torch.Tensor,
    key_1KTH: torch.Tensor,
    value_1KTH: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    batch: PackedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. Returns ``[1, T, N, H]``."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    outputs = [
        _attend(
            query_1NTH[:, :, s.start : s.stop], key_1KTH[:, :, s.start : s.stop], value_1KTH[:, :, s.start : s.stop],
            s, layer, scaling,
        )
        for s in batch.segments
    ]  # fmt: skip
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _attend(
    query_1NTH: torch.Tensor, key_1KTH: torch.Tensor, value_1KTH: torch.Tensor, s: Segment, layer: int, scaling: float
) -> torch.Tensor:
    keys_1KSH, values_1KSH = s.kv.append(layer, s.first_slot, key_1KTH, value_1KTH)
    _, num_heads, num_tokens, head_dim = query_1NTH.shape
    num_kv_heads = keys_1KSH.shape[1]
    if num_tokens == 1 and s.mask_TS is None:
        # One token sees every slot, so the G query heads of a KV head can stand as G queries: no repeated keys.
        grouped = query_1NTH.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, keys_1KSH, values_1KSH, scale=scaling).view(
            1, 1, num_heads, head_dim
        )
    mask = s.mask_TS
    first_chunk = s.first_slot == 0 and mask is None
    if mask is None and not first_chunk:
        num_slots = keys_1KSH.shape[2]
        slots = torch.arange(num_slots, device=query_1NTH.device)
        mask = slots[None, :] <= slots[s.first_slot :, None]
    out_1NTH = F.scaled_dot_product_attention(
        query_1NTH,
        keys_1KSH,
        values_1KSH,
        attn_mask=mask,
        is_causal=first_chunk,
        scale=scaling,
        enable_gqa=num_kv_heads != num_heads,
    )
    return out_1NTH.transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
