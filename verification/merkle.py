"""Merkle trees over a list of leaves, exactly as RFC 9162 §2.1 (Certificate Transparency) defines them.

Guarantees: the hash is SHA-256; a leaf is ``H(0x00 || data)`` and an inner node ``H(0x01 || left || right)``, so that
no inner node can be passed off as a leaf. A tree of n leaves splits at the largest power of two below n, which is the
same as pairing neighbours level by level and carrying an odd last node up unchanged. The tree of no leaves is
``H("")``.

The RFC is followed instead of a rule of our own because its second-preimage argument, its test vectors and independent
implementations exist. SHA-256 is the fastest secure 256-bit hash of the standard library on processors with SHA
instructions (all ARMv8, AMD since 2017, Intel since 2019): 1.5 GB/s on one core against 0.8 GB/s for BLAKE2b in
64 KiB blocks.

Leaves travel as one ``bytes`` of concatenated 32-byte hashes: two million Python objects for a 140 GB model would cost
more memory than the hashes themselves.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

ByteBuffer: TypeAlias = bytes | bytearray | memoryview

HASH_BYTES = 32
"""Bytes of a SHA-256 digest."""

EMPTY_ROOT = hashlib.sha256(b"").digest()
"""Root of the tree of no leaves (RFC 9162 §2.1.1)."""

_LEAF = b"\x00"
_INNER = b"\x01"


def leaf_hash(data: ByteBuffer) -> bytes:
    """Hash of one leaf's data. The data is not copied."""
    digest = hashlib.sha256(_LEAF)
    digest.update(data)
    return digest.digest()


def inner_hash(left: bytes, right: bytes) -> bytes:
    """Hash of the node above ``left`` and ``right``."""
    return hashlib.sha256(_INNER + left + right).digest()


def tree_root(leaves: ByteBuffer) -> bytes:
    """Root of the tree over concatenated leaf hashes.

    Raises:
        ValueError: when the length is not a multiple of 32.
    """
    level = _split(leaves)
    while len(level) > 1:
        level = _level_above(level)
    return level[0] if level else EMPTY_ROOT


def inclusion_path(leaves: ByteBuffer, index: int) -> tuple[bytes, ...]:
    """The siblings of leaf ``index`` from the bottom up: ⌈log2 n⌉ hashes or fewer (RFC 9162 §2.1.3.1).

    Raises:
        ValueError: when there is no leaf ``index``.
    """
    level = _split(leaves)
    if not 0 <= index < len(level):
        raise ValueError(f"leaf {index} is outside a tree of {len(level)} leaves")
    path = []
    while len(level) > 1:
        sibling = index ^ 1
        # The last node of a level of odd length has no sibling: it is carried up and adds nothing to the path.
        if sibling < len(level):
            path.append(level[sibling])
        level = _level_above(level)
        index //= 2
    return tuple(path)


def root_of_path(leaf: bytes, index: int, num_leaves: int, path: tuple[bytes, ...]) -> bytes | None:
    """The root that ``leaf`` at ``index`` leads to, or None when the path's length does not fit the tree.

    A caller compares the result with the root it trusts; everything here may come from a stranger
    (RFC 9162 §2.1.3.2).
    """
    if not 0 <= index < num_leaves:
        return None
    node, last, rest = leaf, num_leaves - 1, list(path)
    while last > 0:
        if index % 2 == 1 or index < last:
            if not rest or len(rest[0]) != HASH_BYTES:
                return None
            sibling = rest.pop(0)
            node = inner_hash(sibling, node) if index % 2 == 1 else inner_hash(node, sibling)
        index //= 2
        last //= 2
    return None if rest else node


def _split(leaves: ByteBuffer) -> list[bytes]:
    if len(leaves) % HASH_BYTES:
        raise ValueError(f"{len(leaves)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return [bytes(leaves[start : start + HASH_BYTES]) for start in range(0, len(leaves), HASH_BYTES)]


def _level_above(level: list[bytes]) -> list[bytes]:
    above = [inner_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    if len(level) % 2:
        above.append(level[-1])
    return above
