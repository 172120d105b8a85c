"""The keys and values of all sessions on one device: one pool of slots per layer, handed out in blocks.

Which slots belong to whom is decided by fusion_node.engine.block_manager_core; here is only the memory. A slot holds
one position of one session in every layer of the stage. Slots of a sequence mostly lie side by side, and are then read
as a view; scattered ones are gathered.

Shapes: K KV heads, P slots of the pool, S slots of one sequence, H head dim, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion_node.engine.block_manager_core import BlockCopy, SlotMove
from fusion_node.engine.numerics import quantize_rows, round_to
from fusion_node.errors import ConfigError
from fusion_node.types import LayerRange


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one layer keeps per position."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


class _Rows:
    """Rows at rest in one type."""

    def __init__(self, num_heads: int, num_slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows_KPH = torch.empty((num_heads, num_slots, dim), dtype=dtype, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._rows_KPH,)

    def write(self, slots: slice | torch.Tensor, rows_KTH: torch.Tensor) -> None:
        _put(self._rows_KPH, slots, round_to(rows_KTH, self._rows_KPH.dtype))

    def read(self, slots: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _get(self._rows_KPH, slots).to(dtype)


class _Int8Rows:
    """Rows at rest as int8, each with its scale."""

    def __init__(self, num_heads: int, num_slots: int, dim: int, device: torch.device) -> None:
        self._rows_KPH = torch.empty((num_heads, num_slots, dim), dtype=torch.int8, device=device)
        self._scales_KP1 = torch.empty((num_heads, num_slots, 1), dtype=torch.float32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._rows_KPH, self._scales_KP1

    def write(self, slots: slice | torch.Tensor, rows_KTH: torch.Tensor) -> None:
        quantized_KTH, scales_KT1 = quantize_rows(rows_KTH)
        _put(self._rows_KPH, slots, quantized_KTH)
        _put(self._scales_KP1, slots, scales_KT1)

    def read(self, slots: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (_get(self._rows_KPH, slots).float() * _get(self._scales_KP1, slots)).to(dtype)


class KVPool:
    """Keys and values of ``num_slots`` slots in the layers of one stage.

    On the CPU the memory is only promised: a page costs nothing before the first position in it is written.

    Args:
        layouts: one per layer of the stage.
        dtype: of keys and values at rest; int8 keeps a scale per head and position beside them.

    Raises:
        RuntimeError: whatever torch raises when the device is full (see device.memory_errors).
    """

    def __init__(
        self, layouts: Sequence[KVLayout], num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layouts = tuple(layouts)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self._slot_bytes = [bytes_per_slot((layout,), dtype) for layout in self.layouts]
        self._keys = [self._rows(layout.num_heads, layout.key_dim) for layout in layouts]
        self._values = [self._rows(layout.num_heads, layout.value_dim) for layout in layouts]

    @property
    def bytes_per_slot(self) -> int:
        """KV bytes that one position of one session takes on this stage."""
        return bytes_per_slot(self.layouts, self.dtype)

    def bytes_per_slot_of(self, layer: int) -> int:
        """KV bytes of one position in one layer."""
        return self._slot_bytes[layer]

    def write(self, layer: int, slots: slice | torch.Tensor, keys_KTH: torch.Tensor, values_KTH: torch.Tensor) -> None:
        """Writes new keys and values, rounded to the type at rest.

        Args:
            slots: where each of the T tokens goes; a slice when they lie side by side.
        """
        self._keys[layer].write(slots, keys_KTH)
        self._values[layer].write(slots, values_KTH)

    def read(self, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these slots as ``dtype``, ``[K, S, H]`` each: a view for a slice in the type at rest."""
        return self._keys[layer].read(slots, dtype), self._values[layer].read(slots, dtype)

    def copy_block(self, copy: BlockCopy, block_slots: int) -> None:
        """Copies a whole block: what a shared one needs before one of its holders writes to it."""
        source = slice(copy.source * block_slots, (copy.source + 1) * block_slots)
        target = slice(copy.target * block_slots, (copy.target + 1) * block_slots)
        for tensor_KPH in self._tensors():
            tensor_KPH[:, target] = tensor_KPH[:, source]

    def move(self, move: SlotMove) -> None:
        """Closes the gaps that dead branches left. All sources are read before any target is written."""
        sources = torch.tensor(move.sources, device=self.device)
        targets = torch.tensor(move.targets, device=self.device)
        for tensor_KPH in self._tensors():
            tensor_KPH.index_copy_(1, targets, tensor_KPH.index_select(1, sources))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for rows in (*self._keys, *self._values):
            yield from rows.tensors

    def _rows(self, num_heads: int, dim: int) -> _Rows | _Int8Rows:
        if self.dtype == torch.int8:
            return _Int8Rows(num_heads, self.num_slots, dim, self.device)
        return _Rows(num_heads, self.num_slots, dim, self.dtype, self.device)


def _put(pool_KPH: torch.Tensor, slots: slice | torch.Tensor, rows_KTH: torch.Tensor) -> None:
    if isinstance(slots, slice):
        pool_KPH[:, slots] = rows_KTH
    else:
        pool_KPH.index_copy_(1, slots, rows_KTH)


def _get(pool_KPH: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
    return pool_KPH[:, slots] if isinstance(slots, slice) else pool_KPH.index_select(1, slots)


class LayoutProbe:
    """Stands in for a pool in the first call of a stage and notes what each layer wants to keep."""

    def __init__(self, layers: LayerRange, device: torch.device) -> None:
        self.device = device
        self._layers = layers
        self._seen: dict[int, tuple[KVLayout, torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, slots: slice | torch.Tensor, keys_KTH: torch.Tensor, values_KTH: torch.Tensor) -> None:
        layout = KVLayout(keys_KTH.shape[0], keys_KTH.shape[2], values_KTH.shape[2])
        self._seen[layer] = layout, keys_KTH, values_KTH

    def read(self, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        _, keys_KTH, values_KTH = self._seen[layer]
        return keys_KTH.to(dtype), values_KTH.to(dtype)

    def bytes_per_slot_of(self, layer: int) -> int:
        return 1

    def layouts(self) -> tuple[KVLayout, ...]:
        """What was seen, in order of the layers.

        Raises:
            ConfigError: a layer was not heard of.
        """
        if len(self._seen) != len(self._layers):
            raise ConfigError(
                f"only {len(self._seen)} of the layers {self._layers} attend through the attention interface of "
                "transformers: this architecture cannot be served"
            )
        return tuple(self._seen[layer][0] for layer in sorted(self._seen))


def bytes_per_slot(layouts: Sequence[KVLayout], dtype: torch.dtype) -> int:
    """KV bytes of one position in these layers."""
    scales = sum(2 * layout.num_heads for layout in layouts) * torch.float32.itemsize if dtype == torch.int8 else 0
    return dtype.itemsize * sum(layout.num_values for layout in layouts) + scales
