"""Attention over a packed batch, registered through the attention interface of transformers.

Every decoder class that looks its attention function up by name can thus run T packed tokens of any number of
sequences in one call, each sequence with its own KV: ``model(inputs_embeds=[1, T, D], position_ids=[1, T],
use_cache=False, batch=PackedBatch)``. What a family asks for beyond the plain form comes as keyword arguments of its
attention module: a sliding window, a soft cap of the scores, attention sinks, values of another size than keys.

A sequence whose slots lie side by side is read in place. Single tokens of short sequences attend together, gathered
and padded: there the calls cost more than the copies.

Shapes: T packed tokens, S KV slots that a group reads, B sequences of a group, N query heads, K KV heads, G = N / K,
H head dim, P slots of the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from fusion_node.engine.flash_attention import VarlenFunction, varlen_function
from fusion_node.engine.numerics import round_to

ATTENTION_NAME = "fusion_packed"

_PAD_BELOW_BYTES = {"cpu": 384 * 1024, "cuda": 4 * 1024 * 1024}
"""KV of one sequence in one layer, up to which single tokens attend together. Measured on two CPU cores, 16 sequences
of 80 to 200 positions (120 to 300 KiB each): 0.6 to 0.75 of the time. On a GPU, launches dominate for longer."""

_PAD_GROUP_BYTES = {"cpu": 5 * 2**19, "cuda": 256 * 2**20}
"""KV that one such group gathers at most: on a CPU what its cache holds."""

MAX_SCORES = 2**24
"""Scores of one attention call that needs them or a mask in memory: 64 MiB in float32. More rows are taken one part
after the other, so that memory stays flat however long the sequence is."""

_KEPT_SHARE = 4
"""Masks of a whole batch are kept for all layers up to this part of MAX_SCORES: 512 rows of 8,192 positions. What is
beyond is made anew for every layer. Measured on a CPU, 512 rows at the end of 32,768 positions, 9 query and 3 KV heads:
114 MiB and 1.2 s per layer instead of 267 MiB and 0.85 s."""


class KVSource(Protocol):
    """Where keys and values ``[K, S, H]`` of slots are read from."""

    def read(
        self, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class KVReader(KVSource, Protocol):
    """The part of a KV pool that attention needs (fusion_node.engine.kv_cache.KVPool)."""

    device: torch.device

    def write(
        self, layer: int, slots: slice | torch.Tensor, keys_KTH: torch.Tensor, values_KTH: torch.Tensor
    ) -> None: ...

    def bytes_per_slot_of(self, layer: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a packed batch: tokens ``[start, stop)``, which take the slots from ``first_slot`` on.

    Slots are counted within the sequence; ``runs`` says where in the pool they lie.

    Attributes:
        runs: the sequence's places in the pool up to the last token's, in order.
        positions: of the tokens.
        visible: per token a bit mask of the slots from ``num_committed`` on that it sees; None means causal, and then
            slot and position are the same.
        num_committed: slots in front that every token sees; their positions are their slots.
        live_positions: of the slots from ``num_committed`` on, unless causal.
    """

    start: int
    stop: int
    first_slot: int
    runs: tuple[range, ...]
    positions: Sequence[int]
    visible: Sequence[int] | None = None
    num_committed: int = 0
    live_positions: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_slots(self) -> int:
        return self.first_slot + self.num_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens that attend in one call.

    Attributes:
        tokens: which of the packed tokens; an index ``[B]`` when they are of different sequences.
        slots: the pool's slots that they read; ``[B * S]`` when they are of different sequences.
        mask: added to the scores, ``[T, S]`` or ``[B, 1, 1, S]``.
        make_mask: that of the tokens ``[first, stop)`` of the group alone, where the whole would be too large.
        max_scores: of one call.
    """

    tokens: slice | torch.Tensor
    slots: slice | torch.Tensor
    mask: torch.Tensor | None = None
    is_causal: bool = False
    num_sequences: int = 1
    make_mask: Callable[[int, int], torch.Tensor] | None = None
    max_scores: int = MAX_SCORES
    _folded: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_folded(self) -> int:
        """Elements of the repeated masks that are kept."""
        return sum(mask.numel() for mask in self._folded.values())

    def mask_of(self, first: int, stop: int) -> torch.Tensor | None:
        """The mask of the tokens ``[first, stop)``."""
        if self.make_mask is not None:
            return self.make_mask(first, stop)
        return self.mask if self.mask is None or self.mask.dim() == 4 else self.mask[first:stop]

    def folded_mask(self, times: int) -> torch.Tensor | None:
        """The mask for so many query heads that stand one after the other as queries of one, ``[times * T, S]``."""
        if self.mask is None or times == 1 or self.mask.shape[-2] == 1:
            return self.mask
        if times not in self._folded:
            self._folded[times] = self.mask.repeat(times, 1)
        return self._folded[times]


@dataclass(frozen=True, slots=True)
class Chains:
    """All chains of a batch for a kernel that takes sequences of different lengths.

    Attributes:
        tokens, slots: theirs, one sequence after the other.
        first_tokens, first_slots: where each begins among them, and the end, as int32.
    """

    tokens: slice | torch.Tensor
    slots: slice | torch.Tensor
    first_tokens: torch.Tensor
    first_slots: torch.Tensor
    most_tokens: int
    most_slots: int


@dataclass(slots=True)
class PackedBatch:
    """What the attention needs to know of a packed call.

    Attributes:
        first_layer: what the first layer of the pool calls itself.
        query_dtype: to which queries are rounded before the scores, when it is not their own type.
        kv_dtype: of the pool.
        max_scores: of one attention call, where it needs them or a mask in memory.
        find_varlen: gives the kernel for chains of different lengths, if there is one.
    """

    pool: KVReader
    segments: tuple[Segment, ...]
    first_layer: int = 0
    query_dtype: torch.dtype | None = None
    kv_dtype: torch.dtype = torch.float32
    max_scores: int = MAX_SCORES
    find_varlen: Callable[[torch.device, torch.dtype, int], VarlenFunction | None] = varlen_function
    new_slots: slice | torch.Tensor = field(init=False)
    """Where in the pool the new tokens go."""
    _groups: dict[tuple[int | None, int, torch.dtype, bool], list[Group]] = field(default_factory=dict)
    _chains: dict[int | None, Chains | None] = field(default_factory=dict)
    _num_kept: int = 0
    """Elements of the masks that are kept."""

    def __post_init__(self) -> None:
        self.new_slots = self.place([r for s in self.segments for r in _cut(s.runs, s.first_slot)])

    def chains(self, window: int | None) -> Chains | None:
        """The chains of the batch, as far back as this sliding window reaches; None when there is none."""
        if window not in self._chains:
            chains = [s for s in self.segments if s.visible is None]
            self._chains[window] = self._chains_of(chains, window) if chains else None
        return self._chains[window]

    def _chains_of(self, chains: list[Segment], window: int | None) -> Chains:
        num_tokens = [s.num_tokens for s in chains]
        num_slots = [s.num_slots - _first_seen(s, window) for s in chains]
        return Chains(
            self.place([range(s.start, s.stop) for s in chains]),
            self.place([run for s in chains for run in _cut(s.runs, _first_seen(s, window))]),
            torch.tensor([0, *itertools.accumulate(num_tokens)], dtype=torch.int32, device=self.pool.device),
            torch.tensor([0, *itertools.accumulate(num_slots)], dtype=torch.int32, device=self.pool.device),
            max(num_tokens),
            max(num_slots),
        )

    def groups(self, window: int | None, layer: int, dtype: torch.dtype, *, only_trees: bool = False) -> list[Group]:
        """How the tokens attend in a layer with this sliding window; made once per batch and kind of layer."""
        device = self.pool.device
        short_slots = _PAD_BELOW_BYTES.get(device.type, 0) // self.pool.bytes_per_slot_of(layer)
        key = (window, short_slots, dtype, only_trees)
        if key not in self._groups:
            slot_bytes = self.pool.bytes_per_slot_of(layer)
            alone: list[Segment] = []
            short: list[Segment] = []
            for s in self.segments:
                if only_trees and s.visible is None:
                    continue
                num_seen = s.num_slots - _first_seen(s, window)
                is_short = s.num_tokens == 1 and s.visible is None and num_seen <= short_slots
                (short if is_short else alone).append(s)
            together: list[list[Segment]] = []
            # By length, so that little is padded.
            for s in sorted(short, key=lambda s: s.num_slots):
                gathered_bytes = (s.num_slots - _first_seen(s, window)) * slot_bytes
                if not together or (len(together[-1]) + 1) * gathered_bytes > _PAD_GROUP_BYTES.get(device.type, 0):
                    together.append([])
                together[-1].append(s)
            alone += [group[0] for group in together if len(group) == 1]
            groups = [self.group_of(s, window, dtype) for s in alone]
            groups += [self._padded(group, window, dtype) for group in together if len(group) > 1]
            self._groups[key] = groups
        return self._groups[key]

    def group_of(self, s: Segment, window: int | None, dtype: torch.dtype) -> Group:
        first = _first_seen(s, window)
        tokens, slots = slice(s.start, s.stop), self.place(_cut(s.runs, first))
        if s.visible is None and s.num_tokens == 1:
            return Group(tokens, slots, max_scores=self.max_scores)
        if s.visible is None and s.first_slot == 0 and (window is None or s.num_slots <= window):
            return Group(tokens, slots, is_causal=True, max_scores=self.max_scores)

        def make_mask(start: int, stop: int) -> torch.Tensor:
            return self._mask_of(s, window, start, stop, dtype)

        num_elements = s.num_tokens * (s.num_slots - first)
        if self._num_kept + num_elements > self.max_scores // _KEPT_SHARE:
            return Group(tokens, slots, make_mask=make_mask, max_scores=self.max_scores)
        self._num_kept += num_elements
        return Group(tokens, slots, make_mask(0, s.num_tokens), max_scores=self.max_scores)

    def _mask_of(self, s: Segment, window: int | None, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Of the tokens ``[start, stop)`` of a segment, for the slots from the first seen on."""
        device = self.pool.device
        if s.visible is not None:
            return self._mask(torch.from_numpy(tree_mask(s, window, start, stop)).to(device), dtype)
        # Made where it is needed: to move it there would take longer than the attention.
        first = _first_seen(s, window)
        if window is None:
            # All see what was there before, which is most of a long sequence.
            mask = torch.zeros((stop - start, s.num_slots), dtype=dtype, device=device)
            mask[:, s.first_slot :] = torch.full_like(mask[:, s.first_slot :], -torch.inf).triu_(start + 1)
            return mask
        own = torch.arange(s.first_slot + start, s.first_slot + stop, device=device)[:, None]
        seen = torch.arange(first, s.num_slots, device=device)
        return self._mask((seen <= own) & (seen > own - window), dtype)

    def _padded(self, segments: list[Segment], window: int | None, dtype: torch.dtype) -> Group:
        rows = [np.concatenate([_arange(r) for r in _cut(s.runs, _first_seen(s, window))]) for s in segments]
        longest = max(map(len, rows))
        slots = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
        sees = np.arange(longest) < np.array([len(row) for row in rows])[:, None]
        return Group(
            torch.tensor([s.start for s in segments], device=self.pool.device),
            torch.from_numpy(slots.reshape(-1)).to(self.pool.device),
            None if sees.all() else self._mask(torch.from_numpy(sees[:, None, None]).to(self.pool.device), dtype),
            num_sequences=len(segments),
        )

    def place(self, runs: Sequence[range]) -> slice | torch.Tensor:
        if all(after.start == before.stop for before, after in itertools.pairwise(runs)):
            return slice(runs[0].start, runs[-1].stop)
        return torch.from_numpy(np.concatenate([_arange(r) for r in runs])).to(self.pool.device)

    def _mask(self, sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf)


def packed_attention(
    module: torch.nn.Module,
    query_1NTH: torch.Tensor,
    key_1KTH: torch.Tensor,
    value_1KTH: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    batch: PackedBatch,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. Returns ``[1, T, N, H]``.

    Args:
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        s_aux: ``[N]``, per head a score that takes its share of the softmax and has no value: an attention sink.
        more: ``sliding_window``: how many positions up to its own a token sees; None for all.
    """
    layer: int = module.layer_idx - batch.first_layer  # type: ignore[assignment, operator]
    # A class that never hands its window on relies on transformers' masks, which take it from the configuration.
    window: int | None = more["sliding_window"] if "sliding_window" in more else getattr(module, "sliding_window", None)
    batch.pool.write(layer, batch.new_slots, key_1KTH[0], value_1KTH[0])
    dtype = query_1NTH.dtype
    if batch.query_dtype is not None:
        query_1NTH = round_to(query_1NTH, batch.query_dtype).to(dtype)
    varlen = None
    if s_aux is None and key_1KTH.shape[3] == value_1KTH.shape[3]:
        varlen = batch.find_varlen(query_1NTH.device, dtype, key_1KTH.shape[3])
    chains = None if varlen is None else batch.chains(window)
    groups = batch.groups(window, layer, dtype, only_trees=chains is not None)
    if chains is None and len(groups) == 1 and isinstance(groups[0].tokens, slice):
        return attend(query_1NTH, batch.pool, layer, groups[0], scaling, softcap, s_aux), None
    parts: list[tuple[slice | torch.Tensor, torch.Tensor]] = [
        (group.tokens, attend(query_1NTH[:, :, group.tokens], batch.pool, layer, group, scaling, softcap, s_aux))
        for group in groups
    ]
    if varlen is not None and chains is not None:
        parts.append(
            (chains.tokens, _attend_chains(varlen, query_1NTH, batch.pool, layer, chains, window, scaling, softcap))
        )
    out_1TNH = parts[0][1].new_empty((1, query_1NTH.shape[2], *parts[0][1].shape[2:]))
    for tokens, part_1TNH in parts:
        out_1TNH[:, tokens] = part_1TNH
    return out_1TNH, None


def _attend_chains(
    varlen: VarlenFunction,
    query_1NTH: torch.Tensor,
    pool: KVSource,
    layer: int,
    chains: Chains,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """All chains of a batch in one call. Returns ``[1, T, N, H]``."""
    keys_KSH, values_KSH = pool.read(layer, chains.slots, query_1NTH.dtype)
    return varlen(
        query_1NTH[0, :, chains.tokens].transpose(0, 1).contiguous(),
        keys_KSH.transpose(0, 1).contiguous(),
        values_KSH.transpose(0, 1).contiguous(),
        chains.first_tokens,
        chains.first_slots,
        chains.most_tokens,
        chains.most_slots,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
    ).unsqueeze(0)


def attend(
    query_1NTH: torch.Tensor,
    pool: KVSource,
    layer: int,
    group: Group,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """One group. Returns ``[1, T, N, H]``."""
    keys_KSH, values_KSH = pool.read(layer, group.slots, query_1NTH.dtype)
    num_heads, num_tokens, num_kv_heads = query_1NTH.shape[1], query_1NTH.shape[2], keys_KSH.shape[0]
    num_sequences = group.num_sequences
    keys_BKSH, values_BKSH = (
        t.unsqueeze(0) if num_sequences == 1 else t.view(num_kv_heads, num_sequences, -1, t.shape[2]).transpose(0, 1)
        for t in (keys_KSH, values_KSH)
    )
    if num_sequences > 1:
        # Each sequence has one token: the sequences become the batch.
        query_BNTH = query_1NTH.permute(2, 1, 0, 3)
        num_tokens = 1
    else:
        query_BNTH = query_1NTH
    # No fused kernel takes values of another size than keys for fewer heads: torch would repeat both for every head.
    is_fused = num_kv_heads == num_heads or keys_KSH.shape[2] == values_KSH.shape[2]
    if softcap is None and s_aux is None and (is_fused or num_tokens == 1):
        out = _attend_fused(query_BNTH, keys_BKSH, values_BKSH, group, scaling)
    else:
        out = _attend_manually(query_BNTH, keys_BKSH, values_BKSH, group, scaling, softcap, s_aux)
    # Contiguous, as some classes take it for granted.
    return (out.permute(2, 0, 1, 3) if num_sequences > 1 else out.transpose(1, 2)).contiguous()


def _attend_fused(
    query_BNTH: torch.Tensor, keys_BKSH: torch.Tensor, values_BKSH: torch.Tensor, group: Group, scaling: float
) -> torch.Tensor:
    """Returns ``[B, N, T, H]``.

    Never by ``enable_gqa`` where there is a mask, nor on a CPU: torch then takes no fused kernel.
    """
    num_sequences, num_heads, num_tokens, _ = query_BNTH.shape
    num_kv_heads = keys_BKSH.shape[1]
    num_groups = num_heads // num_kv_heads
    if group.is_causal and num_groups > 1:
        is_repeated = query_BNTH.device.type == "cpu"
        if is_repeated:
            # Little, as a causal group has no more slots than tokens.
            keys_BKSH, values_BKSH = (t.repeat_interleave(num_groups, dim=1) for t in (keys_BKSH, values_BKSH))
        return F.scaled_dot_product_attention(
            query_BNTH, keys_BKSH, values_BKSH, is_causal=True, scale=scaling, enable_gqa=not is_repeated
        )
    rows = max(1, group.max_scores // (num_groups * keys_BKSH.shape[2]))
    if group.make_mask is not None or (group.mask is not None and rows < num_tokens):
        parts = [
            _attend_fused(
                query_BNTH[:, :, first : first + rows],
                keys_BKSH,
                values_BKSH,
                replace(group, mask=group.mask_of(first, min(first + rows, num_tokens)), make_mask=None, _folded={}),
                scaling,
            )
            for first in range(0, num_tokens, rows)
        ]
        return torch.cat(parts, dim=2)
    # The G query heads of a KV head stand as G times as many queries: no key is repeated.
    folded = query_BNTH.reshape(num_sequences, num_kv_heads, num_groups * num_tokens, -1)
    out = F.scaled_dot_product_attention(
        folded,
        keys_BKSH,
        values_BKSH,
        attn_mask=group.folded_mask(num_groups),
        is_causal=group.is_causal,
        scale=scaling,
    )
    return out.reshape(num_sequences, num_heads, num_tokens, -1)


def _attend_manually(
    query_BNTH: torch.Tensor,
    keys_BKSH: torch.Tensor,
    values_BKSH: torch.Tensor,
    group: Group,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """For what the fused kernels lack. Softmax in float32. Returns ``[B, N, T, H]``."""
    num_sequences, num_heads, num_tokens, _ = query_BNTH.shape
    num_kv_heads, num_slots = keys_BKSH.shape[1], keys_BKSH.shape[2]
    rows = max(1, group.max_scores // (num_sequences * num_heads * num_slots))
    outs = []
    for first in range(0, num_tokens, rows):
        part = query_BNTH[:, :, first : first + rows]
        folded = part.reshape(num_sequences, num_kv_heads, -1, part.shape[3])
        scores = (folded @ keys_BKSH.transpose(2, 3) * scaling).float()
        scores = scores.view(num_sequences, num_heads, part.shape[2], num_slots)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask = group.mask_of(first, first + part.shape[2])
        if mask is not None:
            scores = scores + mask
        elif group.is_causal:
            causal = torch.ones((part.shape[2], num_slots), dtype=torch.bool, device=scores.device).tril_(first)
            scores = scores.masked_fill(~causal, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.float().view(1, num_heads, 1, 1).expand(num_sequences, -1, part.shape[2], 1)
            scores = torch.cat((scores, sinks), dim=3)
        shares = torch.softmax(scores, dim=3)[..., :num_slots].to(values_BKSH.dtype)
        out = shares.reshape(num_sequences, num_kv_heads, -1, num_slots) @ values_BKSH
        outs.append(out.view(num_sequences, num_heads, part.shape[2], -1))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _first_seen(s: Segment, window: int | None) -> int:
    """The first slot that any token of the segment may see."""
    if window is None:
        return 0
    if s.visible is None:
        return max(0, s.first_slot - window + 1)
    # Positions of a tree do not follow its slots; what is committed does.
    return min(max(0, min(s.positions) - window + 1), s.num_committed)


def _cut(runs: Sequence[range], first: int) -> list[range]:
    """The runs without their first ``first`` slots."""
    kept = []
    for run in runs:
        if first < len(run):
            kept.append(run[first:])
        first = max(0, first - len(run))
    return kept


def _arange(run: range) -> npt.NDArray[np.int64]:
    return np.arange(run.start, run.stop)


def tree_mask(s: Segment, window: int | None, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
    """What each of a tree's tokens ``[start, stop)`` sees of the slots from the first seen on, ``[T, S]``."""
    visible, num_live = (s.visible or ())[start:stop], s.num_slots - s.num_committed
    num_bytes = (num_live + 7) // 8
    packed = np.frombuffer(b"".join(v.to_bytes(num_bytes, "little") for v in visible), dtype=np.uint8)
    tree = np.unpackbits(packed.reshape(len(visible), num_bytes), axis=1, bitorder="little")[:, :num_live]
    sees = np.ones((len(visible), s.num_slots), dtype=bool)
    sees[:, s.num_committed :] = tree.astype(bool)
    if window is not None:
        seen = np.concatenate([np.arange(s.num_committed), np.asarray(s.live_positions[:num_live], dtype=np.int64)])
        sees &= np.asarray(s.positions[start:stop])[:, None] - seen < window
    mask: npt.NDArray[np.bool_] = sees[:, _first_seen(s, window) :]
    return mask


AttentionInterface.register(ATTENTION_NAME, packed_attention)
