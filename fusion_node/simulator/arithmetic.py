"""The model of the simulator: rows that say of themselves whether everything before them was computed as it should be.

A row is 16 bytes: the code of its token, which passes through all layers as a residual stream does, and a sum. A stage
keeps per session a chain over the codes of all positions so far, as its KV, and adds to a row's sum the chain's value
times the weight of its layers. The result of a position thus depends, in every layer, on every input up to it, in
order; and it is the same however the layers are cut into stages. A row that is missing, repeated, swapped or changed on
any stage changes every token from there on. Tokens follow from the result, the seed and the position.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from p2p.messages import TensorMeta

DTYPE = "f32"
ROW_SIZE = 4
ROW_BYTES = 16
VOCABULARY = 50_000

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_PAIR = struct.Struct("<QQ")
_GARBAGE = b"\xff" * ROW_BYTES


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood, 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class Weights:
    """Of all layers; the weight of a range is the difference of two sums."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._sums = [0]
        for layer in range(num_layers):
            digest = hashlib.blake2b(layer.to_bytes(4, "little"), digest_size=8).digest()
            self._sums.append(self._sums[-1] + int.from_bytes(digest, "little") & _MASK)

    def of(self, start: int, stop: int) -> int:
        return self._sums[stop] - self._sums[start] & _MASK


def meta(num_rows: int) -> TensorMeta:
    """Of so many rows."""
    return TensorMeta(DTYPE, num_rows, ROW_SIZE)


def embed(tokens: Iterable[int]) -> bytes:
    """The rows of tokens before the first layer."""
    return b"".join(_PAIR.pack(_mix(token + 1), 0) for token in tokens)


def garbage(num_rows: int) -> bytes:
    """Rows that no model makes: as NaN, they are recognised wherever they come."""
    return _GARBAGE * num_rows


def is_garbage(rows: bytes | memoryview) -> bool:
    return any(rows[at : at + ROW_BYTES] == _GARBAGE for at in range(0, len(rows), ROW_BYTES))


class Chain:
    """What a stage, or an observer, has seen of a session: its value after each position.

    Args:
        values: of a reused prefix.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def forward(self, rows: bytes | memoryview, weight: int) -> bytes:
        """Through layers of this weight; the rows are those of the next positions."""
        values = self.values
        value = values[-1] if values else 0
        out = bytearray()
        for code, total in _PAIR.iter_unpack(rows):
            value = value * _FACTOR + code & _MASK
            values.append(value)
            out += _PAIR.pack(code, total + value * weight & _MASK)
        return bytes(out)


def token_of(row: bytes | memoryview, *, seed: int, position: int) -> int:
    """That follows a row of the last layer."""
    return _mix(_PAIR.unpack(row)[1] ^ _mix(seed * _FACTOR + position & _MASK)) % VOCABULARY


class Undisturbed:
    """What a user would be told if nothing ever failed: one chain through all layers, on its own machine."""

    def __init__(self, weights: Weights, prompt: Sequence[int], *, seed: int) -> None:
        self._weight = weights.of(0, weights.num_layers)
        self._seed = seed
        self._position = len(prompt)
        self._chain = Chain()
        self._row = self._chain.forward(embed(prompt), self._weight)[-ROW_BYTES:]

    def next_token(self) -> int:
        token = token_of(self._row, seed=self._seed, position=self._position)
        self._position += 1
        self._row = self._chain.forward(embed([token]), self._weight)
        return token
