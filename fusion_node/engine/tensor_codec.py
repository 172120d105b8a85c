"""Rows of hidden state to canonical wire bytes and back. Shapes: T rows, D hidden size."""

from __future__ import annotations

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
        raise RowsNotFinite("a row became NaN or infinite")
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
