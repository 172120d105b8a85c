"""Reading the header of a safetensors file, and writing such a file tensor by tensor.

The safetensors library writes a file only from tensors that are all in memory and does not tell where in the file a
tensor lies; this program needs both, for a peak memory of one tensor and for reads by byte range. The format is an
8-byte little-endian header length, a JSON header, and the bytes of the tensors.

Guarantees of the reader: the header is bounded, tensors lie inside the file, do not overlap, leave no gap (the format's
own rule against hidden data), and have the length that dtype and shape say.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fusion_node.errors import LocalProtocolError, StoreCorrupted
from verification.manifest import DTYPE_BYTES

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own bound."""

_ALIGNMENT_BYTES = 64
"""The data of our files starts at a multiple of a cache line; the format asks for 8."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies: absolute byte offset in the file and length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=2**62)]], Meta(max_length=16)]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorSlot]:
    """The tensors of a file, by name.

    Raises:
        StoreCorrupted: when the file is not a sound safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise StoreCorrupted(f"{path} is not a safetensors file, or it is cut off")
            header = file.read(length)
    except OSError as error:
        raise StoreCorrupted(f"{path} cannot be read: {error.strerror}") from error
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise StoreCorrupted(f"{path} has a malformed safetensors header: {error}") from error
    slots, expected, base = {}, 0, 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if entry.dtype not in DTYPE_BYTES:
            raise StoreCorrupted(f"{path}: tensor {name} has dtype {entry.dtype}, which this version cannot serve")
        if start != expected or stop - start != math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
            raise StoreCorrupted(f"{path}: the place of tensor {name} contradicts its shape or its neighbours")
        slots[name] = TensorSlot(name, entry.dtype, tuple(entry.shape), base + start, stop - start)
        expected = stop
    if base + expected != size:
        raise StoreCorrupted(f"{path} has {size} bytes where its header describes {base + expected}")
    return slots


def write_safetensors(path: Path, tensors: Iterable[tuple[TensorSpec, Iterator[Any]]]) -> None:
    """Writes a file durably, holding one chunk in memory at a time.

    Args:
        path: where to.
        tensors: what to write, and for each tensor its little-endian bytes in chunks (anything with the buffer
            protocol). The chunks are drawn in the order given.

    Raises:
        LocalProtocolError: when the chunks of a tensor do not add up to its size.
    """
    planned = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec, _ in planned:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.num_bytes],
        }
        position += spec.num_bytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for spec, chunks in planned:
            written = sum(file.write(chunk) for chunk in chunks)
            if written != spec.num_bytes:
                raise LocalProtocolError(f"tensor {spec.name} was written with {written} of {spec.num_bytes} bytes")
        file.flush()
        os.fsync(file.fileno())
