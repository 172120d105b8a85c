"""Rows of hidden state as bytes: the canonical encodings, and their compression. The tensor half of the data plane.

Guarantees: equal rows become equal bytes on every machine; what decodes is finite. Decompression allocates exactly the
bytes that the header announces, which p2p.messages has bounded, and only once the frame announces the same number.

``f32``, ``f16`` and ``bf16`` are IEEE 754 and bfloat16, rounded to nearest, ties to even. ``i8b32`` is lossy: the
values of a row in blocks of INT8_BLOCK, the last one shorter where the row ends, and for each block one bfloat16 scale
that is its largest absolute value / 127, rounded *up* to bfloat16 so that no value is cut off. A row is its scales,
then its values as signed bytes: ``round(value / scale)`` in float32, ties to even. The product of the two is exact in
float32, so that every receiver reads the same number. docs/protocol-data-plane.md, "Tensors", is written for other
implementations.

``zs1`` is one Zstandard frame (RFC 8878) over the payload's byte planes: the first byte of every element, then the
second one, and so on. Signs and exponents are then neighbours. A plane ends its block, so that each has its own Huffman
code: for one row, a ratio of 1.15 instead of 1.05 in float32, of 1.36 instead of 1.19 in bfloat16
(benchmarks/compression.py).

Shapes: T rows, D hidden size, B blocks of a row.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from fusion_node.wire import MAX_PAYLOAD_BYTES, WireError
from p2p.messages import DTYPE_BYTES, INT8, INT8_BLOCK, TensorMeta

Buffer: TypeAlias = bytes | bytearray | memoryview
FloatArray: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]

_SMALLEST_SCALE, _LARGEST_SCALE = 0x0080, 0x7B80
"""2^-126, below which arithmetic differs between machines, and 2^120, whose 127-fold is still finite; as bfloat16."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_WINDOW_BYTES = MAX_PAYLOAD_BYTES


class RowsNotFinite(ValueError):
    """A row holds NaN or infinity, or a value that its encoding cannot hold. Which value, the message does not say."""


def encode(rows_TD: FloatArray, dtype: str) -> ByteArray:
    """Encodes rows, one after the other without padding.

    Raises:
        RowsNotFinite: a receiver would blame the sender for it.
    """
    match dtype:
        case "f32":
            encoded = np.ascontiguousarray(rows_TD, dtype="<f4")
            _check_finite(encoded)
        case "f16":
            with np.errstate(over="ignore"):
                encoded = np.ascontiguousarray(rows_TD, dtype="<f2")
            _check_finite(encoded)
        case "bf16":
            encoded = _to_bf16(np.ascontiguousarray(rows_TD, dtype="<f4"))
        case _ if dtype == INT8:
            encoded = _to_int8(np.ascontiguousarray(rows_TD, dtype="<f4"))
        case _:
            raise ValueError(f"unknown tensor encoding {dtype!r}")
    return encoded.reshape(-1).view(np.uint8)


def decode(meta: TensorMeta, payload: Buffer | ByteArray) -> FloatArray:
    """Decodes rows that are not compressed, whose length was checked against ``meta``. Returns ``[T, D]``.

    Raises:
        RowsNotFinite: when a value is NaN or infinite.
        WireError: when bytes are not what ``encode`` could have made of any rows.
    """
    match meta.dtype:
        case "f32" | "f16":
            rows_TD = np.frombuffer(payload, dtype="<f4" if meta.dtype == "f32" else "<f2").astype(np.float32)
        case "bf16":
            rows_TD = (np.frombuffer(payload, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        case _ if meta.dtype == INT8:
            return _from_int8(np.frombuffer(payload, dtype=np.uint8), meta.num_rows, meta.row_size)
        case _:
            raise ValueError(f"unknown tensor encoding {meta.dtype!r}")
    _check_finite(rows_TD)
    return rows_TD.reshape(meta.num_rows, meta.row_size)


def compress(payload: Buffer, dtype: str, *, level: int) -> bytes:
    """Encoded rows as ``zs1``. Whether the result is smaller, the caller looks.

    Args:
        dtype: the encoding, which says how many byte planes there are.
        level: of Zstandard. Higher than 1 has gained nothing on rows of hidden state.
    """
    planes = np.frombuffer(payload, dtype=np.uint8).reshape(-1, _num_planes(dtype)).T
    stream = _contexts.compressor(level).compressobj(size=planes.size)
    parts = []
    for plane in np.ascontiguousarray(planes):
        parts += [stream.compress(plane), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, stream.flush()])


def decompress(stored: Buffer, meta: TensorMeta) -> ByteArray:
    """The encoded rows that ``compress`` was given; may be read-only.

    Raises:
        WireError: when this is not one frame, or not of as many bytes as ``meta`` says.
    """
    num_bytes = meta.num_bytes
    try:
        if bytes(stored[:4]) != _ZSTD_MAGIC:
            raise WireError("a compressed tensor is not a Zstandard frame")
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != num_bytes or frame.window_size > _MAX_WINDOW_BYTES or frame.dict_id:
            raise WireError(f"a compressed tensor does not announce its {num_bytes} bytes")
        shuffled = _contexts.decompressor.decompress(stored, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError("a compressed tensor cannot be decompressed") from error
    planes = np.frombuffer(shuffled, dtype=np.uint8).reshape(_num_planes(meta.dtype), -1)
    if len(planes) == 1:
        only: ByteArray = planes[0]
        return only
    payload = np.empty(planes.shape[::-1], dtype=np.uint8)
    for index, plane in enumerate(planes):  # four times as fast as a transposed copy
        payload[:, index] = plane
    return payload.reshape(-1)


class _Contexts(threading.local):
    """Zstandard's working memory, kept per thread: making it anew costs more than a row does."""

    def __init__(self) -> None:
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self._compressors:
            # Without a checksum: the link authenticates what it carries.
            self._compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=False)
        return self._compressors[level]


_contexts = _Contexts()


def _num_planes(dtype: str) -> int:
    return DTYPE_BYTES.get(dtype, 1)


def _check_finite(values: npt.NDArray[Any]) -> None:
    if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):  # NaN is both
        raise RowsNotFinite("a row holds NaN, or a value that is too large")


def _to_bf16(rows_TD: FloatArray) -> npt.NDArray[np.uint16]:
    _check_finite(rows_TD)
    bits = rows_TD.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype("<u2")
    if (rounded & 0x7FFF).max(initial=0) >= 0x7F80:
        raise RowsNotFinite("a row holds a value that is too large")
    return rounded


def _to_int8(rows_TD: FloatArray) -> ByteArray:
    num_rows, row_size = rows_TD.shape
    num_blocks = -(-row_size // INT8_BLOCK)
    if row_size % INT8_BLOCK:
        rows_TD = np.pad(rows_TD, ((0, 0), (0, num_blocks * INT8_BLOCK - row_size)))
    blocks = rows_TD.reshape(num_rows, num_blocks, INT8_BLOCK)
    largest_TB = np.abs(np.maximum(blocks.max(axis=2), -blocks.min(axis=2)))  # abs: of two zeros, one is negative
    if not np.isfinite(largest_TB).all():
        raise RowsNotFinite("a row holds NaN or infinity")
    bits_TB = (largest_TB / np.float32(127)).view(np.uint32)
    scales_TB = (bits_TB + np.uint32(0xFFFF) >> 16).astype("<u2")
    if scales_TB.max(initial=0) > _LARGEST_SCALE:
        raise RowsNotFinite("a row holds a value that is too large")
    scales_TB[scales_TB < _SMALLEST_SCALE] = 0
    scale_TB = (scales_TB.astype(np.uint32) << 16).view(np.float32)
    scaled = blocks / np.where(scale_TB > 0, scale_TB, np.float32(1))[:, :, None]
    values_TD = np.rint(scaled, out=scaled).astype(np.int8).reshape(num_rows, -1)[:, :row_size]
    return np.concatenate([scales_TB.view(np.uint8), values_TD.view(np.uint8)], axis=1)


def _from_int8(payload: ByteArray, num_rows: int, row_size: int) -> FloatArray:
    num_blocks = -(-row_size // INT8_BLOCK)
    table = payload.reshape(num_rows, 2 * num_blocks + row_size)
    scales_TB = np.ascontiguousarray(table[:, : 2 * num_blocks]).view("<u2")
    values_TD = table[:, 2 * num_blocks :].view(np.int8)
    if ((scales_TB != 0) & ((scales_TB < _SMALLEST_SCALE) | (scales_TB > _LARGEST_SCALE))).any():
        raise RowsNotFinite("a scale is not finite, or out of range")  # or negative: the sign is the highest bit
    if values_TD.min(initial=0) == -128:
        raise WireError("a value of -128, which no rounding gives")
    scale_TB = (scales_TB.astype(np.uint32) << 16).view(np.float32)
    return values_TD * np.repeat(scale_TB, INT8_BLOCK, axis=1)[:, :row_size]


__all__ = ["RowsNotFinite", "compress", "decode", "decompress", "encode"]
