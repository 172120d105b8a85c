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
    if not _all_finite(rows):
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
    if not _all_finite(rows):
        raise RowsNotFinite("a row holds NaN or infinity")
    return rows


class StepTensors:
    """The rows of one step on their way through a node: computed and encoded part by part.

    Rows that are dead in the session's log are not computed, but keep their place on the way to the next stage, so that
    every stage reads the same table of nodes.

    Args:
        rows_TD: as decoded.
        live: indices of the rows that are not dead.
        returned: indices into the live rows of those that go out; None for all rows, dead ones as zeros.
        wire_dtype: encoding of what goes out.
    """

    def __init__(
        self, rows_TD: torch.Tensor, live: Sequence[int], returned: Sequence[int] | None, wire_dtype: str
    ) -> None:
        self._rows_TD = rows_TD if len(live) == len(rows_TD) else rows_TD[list(live)]
        num_out, places = (len(rows_TD), live) if returned is None else (len(returned), range(len(returned)))
        self.meta = TensorMeta(wire_dtype, num_out, rows_TD.shape[1])
        self._row_bytes = WIRE_DTYPES[wire_dtype].itemsize * rows_TD.shape[1]
        self._out = bytearray(num_out * self._row_bytes)
        self._place = dict(zip(range(len(live)) if returned is None else returned, places, strict=True))
        """Where a live row goes in what goes out."""
        self._num_kept = 0

    @property
    def is_complete(self) -> bool:
        """Whether all live rows were computed."""
        return self._num_kept == len(self._rows_TD)

    @property
    def payload(self) -> memoryview:
        """What goes out, in the form that ``meta`` says."""
        return memoryview(self._out)

    def live_rows(self, start: int, stop: int) -> torch.Tensor:
        """Live rows ``[start, stop)`` to compute with, ``[T, D]``."""
        return self._rows_TD[start:stop]

    def keep(self, start: int, rows_TD: torch.Tensor) -> None:
        """Takes computed rows from ``start`` on; again, when they are computed anew.

        Rows that do not follow those before them are not taken: they were computed behind a forward that failed.

        Raises:
            RowsNotFinite: a row that goes out is not.
        """
        if start > self._num_kept:
            return
        self._num_kept = start + len(rows_TD)
        going = [(row, self._place[start + row]) for row in range(len(rows_TD)) if start + row in self._place]
        if not going:
            return
        is_all = len(going) == len(rows_TD)
        _, encoded = encode_rows(rows_TD if is_all else rows_TD[[row for row, _ in going]], self.meta.dtype)
        size, first, last = self._row_bytes, going[0][1], going[-1][1]
        if last - first == len(going) - 1:
            self._out[first * size : (last + 1) * size] = encoded
            return
        for index, (_, place) in enumerate(going):
            self._out[place * size : (place + 1) * size] = encoded[index * size : (index + 1) * size]


def _all_finite(rows: torch.Tensor) -> bool:
    """One pass and no copy: both ends of a range with a NaN in it are NaN."""
    if rows.numel() == 0:
        return True
    least, most = rows.aminmax()
    return bool(torch.isfinite(least) & torch.isfinite(most))
