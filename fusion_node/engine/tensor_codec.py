"""Rows of hidden state to canonical wire bytes and back. Shapes: T rows, D hidden size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_node.engine.numerics import WIRE_DTYPES
from p2p.messages import TensorMeta


class RowsNotFinite(ValueError):
    """A row holds NaN or infinity. Which value, the message does not say."""


def encode_rows(rows_TD: torch.Tensor, wire_dtype: str) -> tuple[TensorMeta, memoryview]:
    """Encodes rows; the bytes share memory with the tensor when no conversion is needed.

    Raises:
        RowsNotFinite: a receiver would blame the sender for it.
    """
    rows = rows_TD.detach().to(device="cpu", dtype=WIRE_DTYPES[wire_dtype]).contiguous()
    if not torch.isfinite(rows).all():
        raise RowsNotFinite(f"a row became NaN, or larger than {wire_dtype} can hold")
    meta = TensorMeta(wire_dtype, rows.shape[0], rows.shape[1])
    # numpy has no bfloat16, so the bytes are taken through an integer view.
    return meta, rows.view(torch.uint8).numpy().reshape(-1).data


def decode_rows(meta: TensorMeta, payload: memoryview) -> torch.Tensor:
    """Decodes rows whose length was checked against ``meta`` (p2p.messages.decode_message does).

    Returns:
        ``[T, D]`` on the CPU, a copy that may be written to.

    Raises:
        RowsNotFinite: when a value is NaN or infinite.
    """
    flat = torch.frombuffer(bytearray(payload), dtype=WIRE_DTYPES[meta.dtype])
    rows = flat.view(meta.num_rows, meta.row_size)
    if not torch.isfinite(rows).all():
        raise RowsNotFinite("a row holds NaN or infinity")
    return rows


class StepTensors:
    """The rows of one step on their way through a node: decoded once, computed in parts, encoded once.

    Rows that are dead in the session's log are not computed, but keep their place on the way to the next stage, so that
    every stage reads the same table of nodes.

    Args:
        payload: as received, checked against ``meta``.
        live: indices of the rows that are not dead.
    """

    def __init__(self, meta: TensorMeta, payload: memoryview, live: Sequence[int]) -> None:
        self._meta = meta
        self._payload: memoryview | None = payload
        self._live = live
        self._rows_TD: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        self._encoded: tuple[TensorMeta, memoryview] | None = None
        self.returned: tuple[int, ...] = ()

    @property
    def _is_whole(self) -> bool:
        return len(self._live) == self._meta.num_rows

    def live_rows(self, start: int, stop: int) -> torch.Tensor:
        """Live rows ``[start, stop)`` to compute with.

        Raises:
            RowsNotFinite: one of the step's rows is not.
        """
        if self._rows_TD is None and self._payload is not None:
            rows_TD = decode_rows(self._meta, self._payload)
            self._rows_TD = rows_TD if self._is_whole else rows_TD[list(self._live)]
            self._payload = None
        if self._rows_TD is None:
            raise ValueError("rows are asked for after the step was done")
        return self._rows_TD[start:stop]

    def keep(self, start: int, rows_TD: torch.Tensor) -> None:
        """Takes computed rows from ``start`` on. Those that were kept from there on before are computed anew."""
        self._parts = {first: part for first, part in self._parts.items() if first < start}
        self._parts[start] = rows_TD

    def finish_wanted(self, nodes: Sequence[int], want: Sequence[int], wire_dtype: str) -> None:
        """All rows are there: encodes those of the wanted nodes that are alive; ``returned`` says which.

        Raises:
            RowsNotFinite: a computed row is not.
        """
        row_of = {node: row for row, node in enumerate(nodes)}
        self.returned = tuple(node for node in want if node in row_of)
        self._encode(self._whole()[[row_of[node] for node in self.returned]], wire_dtype)

    def finish_all(self, wire_dtype: str) -> None:
        """All rows are there: encodes them, dead ones as zeros.

        Raises:
            RowsNotFinite: a computed row is not.
        """
        rows_TD = self._whole()
        if not self._is_whole:
            padded = rows_TD.new_zeros((self._meta.num_rows, self._meta.row_size))
            padded[list(self._live)] = rows_TD
            rows_TD = padded
        self._encode(rows_TD, wire_dtype)

    def encoded(self) -> tuple[TensorMeta, memoryview]:
        """What the step was finished with."""
        if self._encoded is None:
            raise ValueError("the step is not finished")
        return self._encoded

    def _whole(self) -> torch.Tensor:
        parts = list(self._parts.values())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _encode(self, rows_TD: torch.Tensor, wire_dtype: str) -> None:
        self._encoded = encode_rows(rows_TD, wire_dtype)
        self._rows_TD, self._parts = None, {}
