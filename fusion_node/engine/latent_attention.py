"""Multi-head latent attention (MLA): what is kept of a position is its compressed latent, not the keys of every head.

Modules of that kind expand latents into keys and values by their ``expand_kv``. Here that is put off until after the
cache, which thus holds ``kv_lora_rank + qk_rope_head_dim`` numbers per position (576 instead of 40,960 in DeepSeek-V3).
Few tokens attend to the latents as they are: the half of the expansion that makes keys is applied to the queries, the
other half to the result. Many tokens, as in a prefill, expand the latents that they read. Both are the same up to
rounding (section 2.1.2 of the DeepSeek-V2 report, arXiv 2405.04434).

Sparse attention (DSA, arXiv 2512.02556): an indexer scores all positions and keeps the best ``index_topk``; layers
without one use the choice of the layer before. It is run here per sequence, over the keys of its own in the cache.

Shapes: T packed tokens, S KV slots that a group reads, N query heads, C latent rank, R rotary part of a key,
P other part of a key, V value, I key of the indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from fusion_node.engine.attention import Group, KVSource, PackedBatch, Segment, attend, tree_mask
from fusion_node.engine.numerics import keep_and_read, round_to

LATENT_ATTENTION_NAME = "fusion_latent"


def keep_latents(model: torch.nn.Module) -> None:
    """Lets the attention modules of a model hand their latents on, and its indexers choose per sequence."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = _join  # type: ignore[assignment]
            indexer = getattr(module, "indexer", None)
            if indexer is not None:
                module.register_forward_pre_hook(_tell_indexer, with_kwargs=True)
                indexer.forward = partial(_choose, indexer)


def _join(latents_11TC: torch.Tensor, rotary_11TR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    joined = torch.cat((latents_11TC, rotary_11TR), dim=-1)
    return joined, joined[..., :0]


def latent_attention(
    module: torch.nn.Module,
    query_1NTH: torch.Tensor,
    key_11TC: torch.Tensor,
    value_11T0: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    batch: PackedBatch,
    indices: Choice | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. Returns ``[1, T, N, V]``.

    Args:
        key_11TC: latents and rotary parts, joined.
        indices: what the layer's indexer chose, or that of the layer before.
    """
    layer: int = module.layer_idx - batch.first_layer  # type: ignore[assignment, operator]
    values = indices.keys_1TI if indices is not None and indices.layer_idx == module.layer_idx else value_11T0[0]
    batch.pool.write(layer, batch.new_slots, key_11TC[0], values)
    dtype = query_1NTH.dtype
    if batch.query_dtype is not None:
        query_1NTH = round_to(query_1NTH, batch.query_dtype).to(dtype)
    groups = batch.groups(None, layer, dtype) if indices is None else indices.groups(batch, layer, dtype)
    num_heads, num_tokens = query_1NTH.shape[1:3]
    out_1TNV = query_1NTH.new_empty((1, num_tokens, num_heads, module.v_head_dim))  # type: ignore[arg-type]
    for group in groups:
        part_1NTH = query_1NTH[:, :, group.tokens]
        if is_cheaper_absorbed(module, group, part_1NTH.shape[2]):
            part_1TNV = _attend_absorbed(module, part_1NTH, batch.pool, layer, group, scaling)
        else:
            part_1TNV = attend(part_1NTH, _Expanded(batch.pool, module), layer, group, scaling, None, None)
        out_1TNV[:, group.tokens] = part_1TNV
    return out_1TNV, None


def is_cheaper_absorbed(module: Any, group: Group, num_tokens: int) -> bool:
    """Counts products."""
    weight = module.kv_b_proj.weight
    if not weight.is_floating_point() or hasattr(weight, "__tensor_flatten__"):
        return False  # A quantised projection cannot be taken apart.
    num_slots = len(group.slots) if isinstance(group.slots, torch.Tensor) else group.slots.stop - group.slots.start
    expansion = module.kv_lora_rank * (module.qk_nope_head_dim + module.v_head_dim)
    # Several sequences have one token each, and each its own slots.
    num_pairs = num_slots * num_tokens // group.num_sequences
    absorbed = num_pairs * (2 * module.kv_lora_rank + module.qk_rope_head_dim) + num_tokens * expansion
    expanded = num_pairs * (module.qk_head_dim + module.v_head_dim) + num_slots * expansion
    return bool(absorbed < expanded)


def _attend_absorbed(
    module: Any, query_1NTH: torch.Tensor, pool: KVSource, layer: int, group: Group, scaling: float
) -> torch.Tensor:
    weight_NHC = module.kv_b_proj.weight.to(query_1NTH.dtype).view(query_1NTH.shape[1], -1, module.kv_lora_rank)
    to_keys_NPC, to_values_NVC = torch.split(weight_NHC, [module.qk_nope_head_dim, module.v_head_dim], dim=1)
    plain_1NTP, rotary_1NTR = torch.split(query_1NTH, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    absorbed = torch.cat((plain_1NTP @ to_keys_NPC, rotary_1NTR), dim=-1)
    out_1TNC = attend(absorbed, _Latents(pool, module.kv_lora_rank), layer, group, scaling, None, None)
    return torch.einsum("btnc,nvc->btnv", out_1TNC, to_values_NVC)


@dataclass(frozen=True, slots=True)
class _Latents:
    """Reads latents as the keys of one head, and as its values without their rotary part."""

    pool: KVSource
    rank: int

    def read(self, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys_1SC, _ = self.pool.read(layer, slots, dtype)
        return keys_1SC, keys_1SC[..., : self.rank]


@dataclass(frozen=True, slots=True)
class _Expanded:
    """Reads latents as the keys and values of every head."""

    pool: KVSource
    module: Any

    def read(self, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys_1SC, _ = self.pool.read(layer, slots, dtype)
        sizes = [self.module.kv_lora_rank, self.module.qk_rope_head_dim]
        latents, rotary = torch.split(keys_1SC.unsqueeze(0), sizes, dim=-1)
        keys_1NSH, values_1NSV = type(self.module).expand_kv(self.module, latents, rotary)
        return keys_1NSH[0], values_1NSV[0]


# Sparse attention.


class Choice:
    """Which slots the tokens of a packed batch attend to, as one indexer chose them.

    Attributes:
        layer_idx: of the layer that has the indexer.
        keys_1TI: its keys of the new tokens, for the cache.

    Args:
        chosen: per segment what its tokens see, ``[T, S]``; of a single token the slots that it reads; None for all.
    """

    def __init__(self, layer_idx: int, keys_1TI: torch.Tensor, chosen: list[torch.Tensor | None]) -> None:
        self.layer_idx = layer_idx
        self.keys_1TI = keys_1TI
        self._chosen = chosen
        self._groups: list[Group] | None = None

    def groups(self, batch: PackedBatch, layer: int, dtype: torch.dtype) -> list[Group]:
        """How the tokens attend: as ever, where all that they may see is chosen."""
        if all(each is None for each in self._chosen):
            return batch.groups(None, layer, dtype)
        if self._groups is None:
            self._groups = list(self._make_groups(batch, dtype))
        return self._groups

    def _make_groups(self, batch: PackedBatch, dtype: torch.dtype) -> Iterator[Group]:
        for s, chosen in zip(batch.segments, self._chosen, strict=True):
            group = batch.group_of(s, None, dtype)
            if chosen is None:
                yield group
            elif chosen.dtype == torch.bool:
                mask = torch.zeros(chosen.shape, dtype=dtype, device=chosen.device)
                yield Group(group.tokens, group.slots, mask.masked_fill_(~chosen, -torch.inf))
            elif isinstance(group.slots, slice):
                yield Group(group.tokens, group.slots.start + chosen)
            else:
                yield Group(group.tokens, group.slots[chosen])


def _tell_indexer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    module.indexer.batch = kwargs["batch"]
    # Only so that the module can take it apart: each sequence has its own.
    return args, {**kwargs, "attention_mask": torch.empty((1, 1, 0, 0))}


class _Keys:
    """What the indexer takes for its cache: the keys of one sequence so far."""

    def __init__(self, past_1SI: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._past_1SI = past_1SI
        self._dtype = dtype
        self.new_1TI: torch.Tensor

    def update_indexer(self, keys_1TI: torch.Tensor, _layer_idx: int) -> torch.Tensor:
        # As they will be read from the cache later on.
        self.new_1TI = keep_and_read(keys_1TI, self._dtype)
        return self.new_1TI if self._past_1SI is None else torch.cat((self._past_1SI, self.new_1TI), dim=1)


def _choose(
    indexer: Any,
    hidden_1TD: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    _attention_mask: torch.Tensor,
    _position_ids: torch.Tensor | None,
    cache: None = None,
) -> Choice:
    """Stands for the forward of an indexer: runs it per sequence."""
    batch: PackedBatch = indexer.batch
    layer = indexer.layer_idx - batch.first_layer
    keys, chosen = [], list[torch.Tensor | None]()
    for s in batch.segments:
        rows = slice(s.start, s.stop)
        seen = _Keys(_past_keys(batch, s, layer, hidden_1TD.dtype), batch.kv_dtype)
        visible_TS = _visible(s, hidden_1TD.device)
        best = type(indexer).forward(
            indexer,
            hidden_1TD[:, rows],
            q_resid[:, rows],
            (position_embeddings[0][:, rows], position_embeddings[1][:, rows]),
            visible_TS.unsqueeze(0),
            None,
            cache=seen,
        )
        keys.append(seen.new_1TI)
        if s.num_slots <= indexer.index_topk:
            chosen.append(None)
        elif s.num_tokens == 1 and s.visible is None:
            chosen.append(best[0, 0].long())
        else:
            # Where fewer are visible than may be chosen, the rest of the choice is arbitrary.
            chosen.append(torch.zeros_like(visible_TS).scatter_(1, best[0].long(), value=True) & visible_TS)
    return Choice(indexer.layer_idx, torch.cat(keys, dim=1), chosen)


def _past_keys(batch: PackedBatch, s: Segment, layer: int, dtype: torch.dtype) -> torch.Tensor | None:
    if s.first_slot == 0:
        return None
    past, left = [], s.first_slot
    for run in s.runs:
        past.append(run[:left])
        left -= len(past[-1])
    return batch.pool.read(layer, batch.place([run for run in past if run]), dtype)[1]


def _visible(s: Segment, device: torch.device) -> torch.Tensor:
    if s.visible is not None:
        return torch.from_numpy(tree_mask(s, None)).to(device)
    return torch.ones((s.num_tokens, s.num_slots), dtype=torch.bool, device=device).tril_(s.first_slot)


AttentionInterface.register(LATENT_ATTENTION_NAME, latent_attention)
