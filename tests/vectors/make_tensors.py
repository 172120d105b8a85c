"""Makes ``tensors.json``: known answers of the tensor encodings, for this and for other implementations.

    python tests/vectors/make_tensors.py

Bytes are hexadecimal; values are given as the bits of a float32, since JSON has no NaN and people have no patience for
17 digits. What a compressor makes of bytes is its own affair: those vectors are for decompressors, and their frames are
kept as they were made once.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from p2p.messages import TensorMeta
from p2p.tensor_wire import compress, decode, encode

PATH = Path(__file__).with_name("tensors.json")


def bits(values: Any) -> list[str]:
    return [f"{bit:08x}" for bit in np.asarray(values, dtype=np.float32).reshape(-1).view(np.uint32).tolist()]


def values(bits: list[str]) -> Any:
    return np.array([int(bit, 16) for bit in bits], dtype=np.uint32).view(np.float32)


def one_block() -> list[float]:
    """Every kind of rounding: the largest value is 127, so that the scale is 1."""
    halves = [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, 0.49999997]
    return [127.0, -127.0, 0.0, -0.0, *halves, *[float(i) for i in range(20)]]


ROWS: list[tuple[str, str, list[list[float]]]] = [
    ("exact values", "f32", [[0.0, -0.0, 1.0], [-2.5, 3.4028234663852886e38, 1e-45]]),
    ("ties to even, the largest finite value, a subnormal one", "f16", [[1.00048828125, 1.00146484375, 65504.0, 6e-8]]),
    ("ties to even", "bf16", [[1.00390625, 1.01171875, -1.0, 3.3895313892515355e38]]),
    ("ties to even", "i8b32", [one_block()]),
    ("a scale that is rounded up, a block of zeros, a last block of one value", "i8b32",
     [[0.1 * i for i in range(32)] + [0.0] * 32 + [-7.3]]),
    ("blocks that are too small to be told from zero", "i8b32", [[1e-37] * 32, [2e-36] * 32]),
]  # fmt: skip

COMPRESSED: list[tuple[str, int, int]] = [("f32", 2, 96), ("bf16", 2, 96), ("f16", 2, 96), ("i8b32", 3, 96)]


def smooth_rows(num_rows: int, row_size: int) -> Any:
    """Compresses a little: like hidden state, most values have one of a few exponents."""
    index = np.arange(num_rows * row_size, dtype=np.int64).reshape(num_rows, row_size)
    return ((index * 7919 % 251 - 125) / 64).astype(np.float32)


def main() -> None:
    encoded = []
    for what, dtype, rows in ROWS:
        table = np.array(rows, dtype=np.float32)
        payload = encode(table, dtype).tobytes()
        meta = TensorMeta(dtype, *table.shape)
        encoded.append(
            {
                "what": what, "dtype": dtype, "num_rows": meta.num_rows, "row_size": meta.row_size,
                "values": bits(table), "payload": payload.hex(), "decoded": bits(decode(meta, payload)),
            }
        )  # fmt: skip
    compressed = []
    for dtype, num_rows, row_size in COMPRESSED:
        payload = encode(smooth_rows(num_rows, row_size), dtype).tobytes()
        stored = compress(payload, dtype, level=1)
        compressed.append(
            {
                "dtype": dtype, "num_rows": num_rows, "row_size": row_size, "codec": "zs1",
                "payload": payload.hex(), "stored": stored.hex(),
            }
        )  # fmt: skip
    refused = [
        {
            "what": what,
            "dtype": "i8b32",
            "num_rows": 1,
            "row_size": 1,
            "payload": (struct.pack("<H", scale) + value).hex(),
        }
        for what, scale, value in [
            ("a scale that is NaN", 0x7FC0, b"\1"),
            ("an infinite scale", 0x7F80, b"\1"),
            ("a negative scale", 0xBF80, b"\1"),
            ("a negative zero as scale", 0x8000, b"\0"),
            ("a subnormal scale", 0x007F, b"\1"),
            ("a scale above 2^120", 0x7B81, b"\1"),
            ("the value -128", 0x3F80, b"\x80"),
        ]
    ]  # fmt: skip
    document = {"encoded": encoded, "compressed": compressed, "refused": refused}
    PATH.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
