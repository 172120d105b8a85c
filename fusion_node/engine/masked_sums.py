"""Sums of contributions of which the owner learns the sum of the others, and none of them alone.

A contribution is written in fixed point modulo 2^64. Every two senders i < j share a key, and with it a stream that
nobody else can foretell: to what goes to an owner who is neither of them, i adds the stream and j subtracts it. So each
contribution that an owner is sent is uniformly random to it, and their sum is what it was. It adds its own in the same
form, so that all who are sent the same sums have the same bits, whatever of them is their own.

A value is a multiple of 2^-32 below 2^26 in absolute value, hence float32 of 2^-9 and more without a loss. Sums of
squares span more: they are two values, the whole number below 2^58 and the rest in multiples of 2^-40. Sixteen of the
largest stay below 2^62, which is half of what the ring holds: masks that do not cancel are found out, since some value
of a row is soon in the other half.

The stream is ChaCha20 (RFC 8439) from block 0 under the key of the pair, with the nonce ``epoch u32, node u32, layer
u16, exchange u8, 0``: as many words of 64 bits as there are values for all owners but the two, owner by owner, each row
by row. ``node`` names the unit, which is cut at the same rows by all members, is computed once in an epoch, and whose
rows are never those of another one. Keys are of one session and one epoch. So no two values ever have one mask.

Shapes: T rows, W values of a row that go to one owner, V the same as they are written.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, section 4
(pairwise masks; nobody drops out here, whose loss ends the epoch).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fusion_node.errors import LocalProtocolError
from fusion_node.slices import (
    MASK_KEY_BYTES,
    MIN_MASKED_MEMBERS,
    Dims,
    Exchange,
    SliceBounds,
    exchange_width,
    exchanges,
    has_squares,
    masked_width,
)

Words: TypeAlias = NDArray[np.int64]

FRACTION_BITS = 32
MAX_BITS = 26
"""Of a value. Sums before a norm reach some thousands in published models."""

SQUARE_FRACTION_BITS = 40
WORD_BITS = 58
"""Of what is written for one value of one contribution; with 4 more for MAX_MEMBERS of them."""

_NONCE = struct.Struct("<IIIHBB")
"""The block counter before it, as cryptography has it."""

_BLOCK_VALUES = 1 << 14
"""That are converted at once: what lies between float32 and words stays in the cache."""


class BeyondRing(ValueError):
    """A value that masked sums cannot hold, or a sum of them that cannot be. Which value, the message does not say."""


class MaskedSums:
    """What one member of a group adds to its contributions, in one session under one plan.

    Args:
        own: its place in the group.
        keys: that it shares with each of the others, in their order, one behind the other.

    Raises:
        LocalProtocolError: there is another number of keys, or nobody to hide behind.
    """

    def __init__(self, dims: Dims, bounds: Sequence[SliceBounds], own: int, *, keys: bytes, epoch: int) -> None:
        others = [member for member in range(len(bounds)) if member != own]
        if len(keys) != MASK_KEY_BYTES * len(others) or len(bounds) < MIN_MASKED_MEMBERS:
            raise LocalProtocolError(f"{len(keys)} bytes of keys for a group of {len(bounds)}")
        self._own = own
        self._epoch = epoch
        self._num_members = len(bounds)
        self._keys = {
            member: keys[place * MASK_KEY_BYTES : (place + 1) * MASK_KEY_BYTES] for place, member in enumerate(others)
        }
        self._dims = dims
        self._widths = {
            exchange: [(exchange_width(dims, b, exchange), masked_width(dims, b, exchange)) for b in bounds]
            for exchange in exchanges(dims)
        }

    def contributions(self, parts: Sequence[torch.Tensor], *, node: int, layer: int, exchange: Exchange) -> list[Words]:
        """What goes to each member, ``[T, V]``; to itself it goes without a mask.

        Call it once for what is sent: another value under the same names would show the difference of the two.

        Args:
            parts: by owner ``[T, W]`` in float32 on the CPU.
            node: the first node of the unit.

        Raises:
            BeyondRing: a value is not finite, or larger than masked sums hold.
        """
        is_squared = has_squares(self._dims, exchange)
        words = [_encode(part.numpy(), is_squared) for part in parts]
        num_rows = len(words[0])
        for other, key in self._keys.items():
            owners = [owner for owner in range(self._num_members) if owner not in (self._own, other)]
            sizes = [words[owner].size for owner in owners]
            stream = self._stream(key, node, layer, exchange, sum(sizes))
            start = 0
            for owner, size in zip(owners, sizes, strict=True):
                mask = stream[start : start + size].reshape(num_rows, -1)
                (np.add if self._own < other else np.subtract)(words[owner], mask, out=words[owner])
                start += size
        return words

    def total(self, contributions: Sequence[Any], num_rows: int, exchange: Exchange) -> torch.Tensor:
        """The sum of what all members have sent this one, ``[T, W]`` in float32.

        Args:
            contributions: of each member, bytes as they came or words; the own one as ``contributions`` made it.

        Raises:
            BeyondRing: it is none that contributions within bounds have, whoever has sent another.
        """
        width, num_words = self._widths[exchange][self._own]
        shape = (num_rows, num_words)
        total = np.zeros(shape, dtype=np.int64)
        for part in contributions:
            words = part if isinstance(part, np.ndarray) else np.frombuffer(part, dtype="<i8")
            np.add(total, words.reshape(shape), out=total)
        limit = self._num_members << WORD_BITS
        if total.size and (int(total.min()) < -limit or int(total.max()) > limit):
            raise BeyondRing("contributions do not add up to what they may: one of them, or a mask, is another")
        rows_TW = np.empty((num_rows, width), dtype=np.float32)
        is_squared = has_squares(self._dims, exchange)
        plain = width - is_squared
        for start, stop in _blocks(num_rows, num_words):
            rows_TW[start:stop, :plain] = total[start:stop, :plain] * 2.0**-FRACTION_BITS
        if is_squared:
            rows_TW[:, -1] = total[:, -2] + total[:, -1] * 2.0**-SQUARE_FRACTION_BITS
        return torch.from_numpy(rows_TW)

    def _stream(self, key: bytes, node: int, layer: int, exchange: Exchange, num_words: int) -> Words:
        nonce = _NONCE.pack(0, self._epoch, node, layer, int(exchange), 0)
        cipher = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        return np.frombuffer(cipher.update(bytes(8 * num_words)), dtype="<i8")


def encode_words(parts: Sequence[Words]) -> memoryview:
    """Contributions of several units, ``[T, V]`` each, one after another as they travel."""
    words = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return words.view(np.uint8).reshape(-1).data


def _encode(rows_TW: NDArray[np.float32], is_squared: bool) -> Words:
    """Rows in fixed point, without a mask. A sum of squares, which stands last, becomes two values."""
    num_rows, width = rows_TW.shape
    plain = width - is_squared
    _check(rows_TW[:, :plain], 2.0**MAX_BITS)
    words = np.empty((num_rows, width + is_squared), dtype=np.int64)
    for start, stop in _blocks(num_rows, width):
        scaled = np.multiply(rows_TW[start:stop, :plain], 2.0**FRACTION_BITS, dtype=np.float64)
        words[start:stop, :plain] = np.rint(scaled, out=scaled)
    if is_squared:
        squares_T = rows_TW[:, -1].astype(np.float64)
        _check(squares_T, 2.0**WORD_BITS)
        whole_T = np.floor(squares_T)
        words[:, -2] = whole_T
        words[:, -1] = np.rint((squares_T - whole_T) * 2.0**SQUARE_FRACTION_BITS)
    return words


def _check(values: NDArray[Any], limit: float) -> None:
    if values.size:
        least, most = float(values.min()), float(values.max())
        # What is not a number is not within either.
        if not (math.isfinite(least) and -limit < least and most < limit):
            raise BeyondRing("a contribution is not finite, or larger than masked sums can hold")


def _blocks(num_rows: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows of about _BLOCK_VALUES values."""
    size = max(1, _BLOCK_VALUES // max(width, 1))
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
