"""The keys and values of one session on one stage.

Shapes: L layers of the stage, K KV heads, C capacity in slots, S slots in use, H head dim, T new tokens.
"""

from __future__ import annotations

import torch

from fusion_node.engine.session_log_core import KVMove

_FIRST_CAPACITY = 256
"""Slots. Grows by doubling up to what the session reserved: a reservation is a promise, not an allocation."""


class SessionKV:
    """KV slots of one session, grown as they are used."""

    def __init__(
        self,
        *,
        num_layers: int,
        first_layer: int = 0,
        num_kv_heads: int,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_positions = max_positions
        self._first_layer = first_layer
        self._layout = (num_layers, 2, num_kv_heads, head_dim)
        self._kv_L2KCH = torch.empty(
            (num_layers, 2, num_kv_heads, min(_FIRST_CAPACITY, max_positions), head_dim), dtype=dtype, device=device
        )

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        return self._kv_L2KCH.nbytes

    def reserve(self, num_slots: int) -> None:
        """Makes room for ``num_slots`` in all, keeping what is there."""
        capacity = self._kv_L2KCH.shape[3]
        if num_slots <= capacity:
            return
        num_layers, _, num_kv_heads, head_dim = self._layout
        grown = min(max(num_slots, 2 * capacity), self.max_positions)
        kv = self._kv_L2KCH.new_empty((num_layers, 2, num_kv_heads, grown, head_dim))
        kv[:, :, :, :capacity] = self._kv_L2KCH
        self._kv_L2KCH = kv

    def move(self, move: KVMove) -> None:
        """Closes the gaps that dead branches left, in all layers at once."""
        sources = torch.tensor(move.sources, device=self._kv_L2KCH.device)
        stop = move.first_slot + len(move.sources)
        self._kv_L2KCH[:, :, :, move.first_slot : stop] = self._kv_L2KCH.index_select(3, sources)

    def append(
        self, layer: int, first_slot: int, key_1KTH: torch.Tensor, value_1KTH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new keys and values and returns all in use, ``[1, K, S, H]`` each, as views."""
        stop = first_slot + key_1KTH.shape[2]
        kv_2KCH = self._kv_L2KCH[layer - self._first_layer]
        kv_2KCH[0, :, first_slot:stop] = key_1KTH[0]
        kv_2KCH[1, :, first_slot:stop] = value_1KTH[0]
        kv_2KSH = kv_2KCH[:, :, :stop]
        return kv_2KSH[0].unsqueeze(0), kv_2KSH[1].unsqueeze(0)
