"""The model of the simulator: rows that say of themselves whether everything before them was computed as it should be.

A row is 16 bytes: the code of its token, which passes through all layers as a residual stream does, and a sum. A stage
keeps per session a chain over the codes of all positions so far, as its KV, and adds to a row's sum the chain's value
times the weight of its layers. The result of a position thus depends, in every layer, on every input up to it, in
order; and it is the same however the layers are cut into stages. A row that is missing, repeated, swapped or changed on
any stage changes every token from there on. Tokens follow from the result, the seed and the position.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2p.messages import TensorMeta

DTYPE = "f32"
ROW_SIZE = 4
ROW_BYTES = 16
VOCABULARY = 50_000

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_PAIR = struct.Struct("<QQ")
_GARBAGE = b"\xff" * ROW_BYTES
_FEW_ROWS = 24
"""Fewer rows are not worth an array."""


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


def embed(tokens: Sequence[int]) -> bytes:
    """The rows of tokens before the first layer."""
    if len(tokens) < _FEW_ROWS:
        return b"".join(_PAIR.pack(_mix(token + 1), 0) for token in tokens)
    value = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    rows = np.zeros((len(tokens), 2), dtype="<u8")
    rows[:, 0] = value ^ value >> np.uint64(31)
    return rows.tobytes()


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Some tokens."""
    return [_mix(seed + index & _MASK) % VOCABULARY for index in range(num_tokens)]


def garbage(num_rows: int) -> bytes:
    """Rows that no model makes: as NaN, they are recognised wherever they come."""
    return _GARBAGE * num_rows


def is_garbage(rows: bytes | memoryview) -> bool:
    whole = bytes(rows)
    at = whole.find(_GARBAGE)
    while at % ROW_BYTES and at >= 0:
        at = whole.find(_GARBAGE, at + 1)
    return at >= 0


class Chain:
    """What a stage, or an observer, has seen of a session: a value after the positions so far, and how many they are.

    The value after a position is ``value * _FACTOR + code``.
    """

    __slots__ = ("_num_positions", "value")

    def __init__(self) -> None:
        self.value = 0
        self._num_positions = 0

    def __len__(self) -> int:
        return self._num_positions

    def forward(self, rows: bytes | memoryview, weight: int) -> bytes:
        """Through layers of this weight; the rows are those of the next positions."""
        num_rows = len(rows) // ROW_BYTES
        self._num_positions += num_rows
        if num_rows >= _FEW_ROWS:
            return self._many(rows, num_rows, weight)
        value = self.value
        out = bytearray()
        for code, total in _PAIR.iter_unpack(rows):
            value = value * _FACTOR + code & _MASK
            out += _PAIR.pack(code, total + value * weight & _MASK)
        self.value = value
        return bytes(out)

    def _many(self, rows: bytes | memoryview, num_rows: int, weight: int) -> bytes:
        """The same for many rows at once: divided by powers of the factor, which is odd, values are sums of codes."""
        powers, inverses = _powers(num_rows)
        out = np.frombuffer(rows, dtype="<u8").reshape(num_rows, 2).copy()
        values = powers * (np.cumsum(out[:, 0] * inverses, dtype=np.uint64) + np.uint64(self.value))
        self.value = int(values[-1])
        out[:, 1] += values * np.uint64(weight)
        return out.tobytes()


@functools.lru_cache(maxsize=1024)
def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of the factor and of its inverse, modulo 2^64, from the first one on."""
    factors = (np.full(count, factor, dtype=np.uint64) for factor in (_FACTOR, pow(_FACTOR, -1, 1 << 64)))
    powers, inverses = (np.cumprod(each, dtype=np.uint64) for each in factors)
    return powers, inverses


def token_of(row: bytes | memoryview, *, seed: int, position: int) -> int:
    """That follows a row of the last layer."""
    return _mix(_PAIR.unpack(row)[1] ^ _mix(seed * _FACTOR + position & _MASK)) % VOCABULARY


class Undisturbed:
    """What a user would be told if nothing ever failed: one chain through all layers, on its own machine."""

    def __init__(self, weights: Weights, prompt: Sequence[int], *, seed: int) -> None:
        self._weight = weights.of(0, weights.num_layers)
        self._seed = seed
        self._position = len(prompt)
        chain = Chain()
        self._total = _PAIR.unpack(chain.forward(embed(prompt), self._weight)[-ROW_BYTES:])[1]
        self._value = chain.value

    def next_token(self) -> int:
        """As ``token_of`` says of the row of the position before, and then the row of this one, in as few steps."""
        return self.next_tokens(1)[0]

    def next_tokens(self, count: int) -> list[int]:
        """So many of them."""
        mix, value, total, weight = _mix, self._value, self._total, self._weight
        first = self._seed * _FACTOR + self._position
        tokens = []
        for number in range(first, first + count):
            token = mix(total ^ mix(number & _MASK)) % VOCABULARY
            tokens.append(token)
            value = value * _FACTOR + mix(token + 1) & _MASK
            total = value * weight & _MASK
        self._position += count
        self._value, self._total = value, total
        return tokens
