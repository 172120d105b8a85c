"""Rows of hidden state to canonical wire bytes and back. Shapes: T rows, D hidden size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusion_node.engine.numerics import WIRE_DTYPES, round_to
from p2p import tensor_wire
from p2p.messages import INT8, TensorMeta
from p2p.tensor_wire import RowsNotFinite


def encode_rows(rows_TD: torch.Tensor, wire_dtype: str) -> tuple[TensorMeta, memoryview]:
    """Encodes rows; the bytes share memory with the tensor when no conversion is needed.

    Lossless encodings are made by torch, on the device of the rows and ten times as fast as by p2p.tensor_wire, which
    makes the same bytes and defines them.

    Raises:
        RowsNotFinite: a receiver would blame the sender for it.
    """
    meta = TensorMeta(wire_dtype, rows_TD.shape[0], rows_TD.shape[1])
    if wire_dtype == INT8:
        return meta, tensor_wire.encode(rows_TD.detach().to(device="cpu", dtype=torch.float32).numpy(), INT8).data
    rows = rows_TD.detach().to(device="cpu", dtype=WIRE_DTYPES[wire_dtype]).contiguous()
    if not _all_finite(rows):
        raise RowsNotFinite(f"a row became NaN, or larger than {wire_dtype} can hold")
    # numpy has no bfloat16, so the bytes are taken through an integer view.
    return meta, rows.view(torch.uint8).numpy().reshape(-1).data


def decode_rows(meta: TensorMeta, payload: memoryview, *, as_dtype: str = "f32") -> torch.Tensor:
    """Decodes rows whose length was checked against ``meta`` (p2p.messages.decode_message does).

    Args:
        as_dtype: the lossless encoding of the session's numerics class: what is int8 is rounded to it.

    Returns:
        ``[T, D]`` on the CPU, a copy that may be written to.

    Raises:
        RowsNotFinite: when a value is NaN or infinite.
        WireError: when the payload is compressed and does not decompress to what ``meta`` says, or is not canonical.
    """
    if not meta.num_rows:  # of an entry whose nodes are all dead
        return torch.empty(0, meta.row_size, dtype=WIRE_DTYPES[as_dtype if meta.dtype == INT8 else meta.dtype])
    plain = bytearray(payload) if not meta.codec else tensor_wire.decompress(payload, meta)
    if meta.dtype == INT8:
        return round_to(torch.from_numpy(tensor_wire.decode(meta, plain)), WIRE_DTYPES[as_dtype])
    flat = torch.frombuffer(plain, dtype=WIRE_DTYPES[meta.dtype])
    rows = flat.view(meta.num_rows, meta.row_size)
    if not _all_finite(rows):
        raise RowsNotFinite("a row holds NaN or infinity")
    return rows


def join_columns(parts_Td: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of which the columns have come in parts, side by side."""
    return torch.cat(list(parts_Td), dim=1)


def encode_partials(parts_TW: Sequence[torch.Tensor]) -> memoryview:
    """Contributions of several units to one exchange, ``[T, W]`` each, one after another in float32.

    Raises:
        RowsNotFinite: a receiver would blame the sender for it.
    """
    rows_TW = parts_TW[0] if len(parts_TW) == 1 else torch.cat(list(parts_TW))
    rows_TW = rows_TW.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if not _all_finite(rows_TW):
        raise RowsNotFinite("a contribution became NaN, or larger than f32 can hold")
    return rows_TW.view(torch.uint8).numpy().reshape(-1).data


def decode_partials(data: bytearray, num_rows: int) -> torch.Tensor:
    """One contribution as ``[T, W]``, a view of what came.

    Raises:
        RowsNotFinite: when a value is NaN or infinite.
    """
    rows_TW = torch.frombuffer(data, dtype=torch.float32).view(num_rows, -1)
    if not _all_finite(rows_TW):
        raise RowsNotFinite("a contribution holds NaN or infinity")
    return rows_TW


class StepTensors:
    """The rows of one step on their way through a node: computed and encoded part by part.

    Rows that are dead or skipped in the session's log are neither computed nor sent on.

    Args:
        rows_TD: as decoded.
        live: indices of the rows to compute, ascending.
        returned: indices into those of what goes out; None for all of them.
        wire_dtype: encoding of what goes out.
    """

    def __init__(
        self, rows_TD: torch.Tensor, live: Sequence[int], returned: Sequence[int] | None, wire_dtype: str
    ) -> None:
        self._live = tuple(live)
        self._rows_TD = rows_TD if len(live) == len(rows_TD) else rows_TD[list(live)]
        going = range(len(live)) if returned is None else returned
        self.meta = TensorMeta(wire_dtype, len(going), rows_TD.shape[1])
        self._out = bytearray(self.meta.num_bytes)
        self._row_bytes = len(self._out) // len(going) if going else 0
        self._place = {row: place for place, row in enumerate(going)}
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

    def narrowed(self, live: Sequence[int], returned: Sequence[int] | None) -> StepTensors:
        """The same, of which nothing has been computed yet, with fewer live rows.

        Args:
            live: indices of the rows as they were decoded, each of which was live before.
            returned: indices into ``live``; as when it was made.
        """
        rank_of = {row: rank for rank, row in enumerate(self._live)}
        rows_TD = self._rows_TD[[rank_of[row] for row in live]]
        narrowed = StepTensors(rows_TD, range(len(live)), returned, self.meta.dtype)
        narrowed._live = tuple(live)
        return narrowed

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
    return math.isfinite(least.item()) and math.isfinite(most.item())


__all__ = [
    "RowsNotFinite",
    "StepTensors",
    "decode_partials",
    "decode_rows",
    "encode_partials",
    "encode_rows",
    "join_columns",
]
