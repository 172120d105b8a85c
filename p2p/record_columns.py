"""What digests need of a record table, as columns: one table is compared with a digest in some array operations.

Guarantees: the columns hold exactly the peers that were put and not removed; each change takes O(1). No clock, no I/O.
Why: a loop over the records costs a microsecond or more for each, at every request and every answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.uint32]
Times: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Indices: TypeAlias = npt.NDArray[np.intp]


class RecordColumns:
    """Rows in no order; a removed one is replaced by the last.

    Attributes:
        peers: peer ids by row.
    """

    def __init__(self) -> None:
        self.peers: list[str] = []
        self._row_of: dict[str, int] = {}
        self._keys = np.empty(64, np.uint64)
        self._sequences = np.empty(64, np.uint32)
        self._issued_at = np.empty(64, np.float64)
        self._expires_at = np.empty(64, np.float64)
        self._models = np.empty(64, np.uint64)
        self._several_of: dict[str, Collection[str]] = {}
        """The models of peers that serve several; a row has room for one."""
        self._peers_of: dict[str, dict[str, None]] = {}
        """The same by model."""

    def put(
        self, peer: str, key: int, sequence: int, issued_at: float, expires_at: float, model_ids: Collection[str]
    ) -> None:
        """Sets a peer's row: the 64 bits that stand for it in digests, and what its record says."""
        row = self._row_of.get(peer)
        if row is None:
            row = self._row_of[peer] = len(self.peers)
            self.peers.append(peer)
            if row == len(self._keys):
                self._keys = np.resize(self._keys, 2 * row)
                self._sequences = np.resize(self._sequences, 2 * row)
                self._issued_at = np.resize(self._issued_at, 2 * row)
                self._expires_at = np.resize(self._expires_at, 2 * row)
                self._models = np.resize(self._models, 2 * row)
            self._keys[row] = key
        self._sequences[row] = sequence % 2**32
        self._issued_at[row] = issued_at
        self._expires_at[row] = expires_at
        self._models[row] = _NONE if not model_ids else _tag(next(iter(model_ids))) if len(model_ids) == 1 else _SEVERAL
        self._set_several(peer, tuple(model_ids) if len(model_ids) > 1 else ())

    def _set_several(self, peer: str, model_ids: Collection[str]) -> None:
        for model_id in self._several_of.pop(peer, ()):
            peers = self._peers_of[model_id]
            del peers[peer]
            if not peers:
                del self._peers_of[model_id]
        if model_ids:
            self._several_of[peer] = model_ids
            for model_id in model_ids:
                self._peers_of.setdefault(model_id, {})[peer] = None

    def remove(self, peer: str) -> None:
        self._set_several(peer, ())
        row, last = self._row_of.pop(peer), len(self.peers) - 1
        moved = self.peers.pop()
        if row != last:
            self.peers[row] = moved
            self._row_of[moved] = row
            for column in (self._keys, self._sequences, self._issued_at, self._expires_at, self._models):
                column[row] = column[last]

    def row_of(self, peer: str | None) -> int | None:
        return None if peer is None else self._row_of.get(peer)

    def live(self, now: float) -> Indices:
        """Rows of records that have not expired."""
        return np.flatnonzero(self._expires_at[: len(self.peers)] > now)

    def bits(self, rows: Indices, salt: int) -> Numbers:
        """The 32 bits that stand for each peer under a salt: multiply-shift hashing."""
        return ((self._keys[rows] * np.uint64(salt)) >> np.uint64(32)).astype(np.uint32)

    def sequences(self, rows: Indices) -> Numbers:
        """The low 32 bits of each sequence."""
        return self._sequences[rows]

    def issued_at(self, rows: Indices) -> Times:
        """The date of each record, by its author's clock."""
        return self._issued_at[rows]

    def serve(self, rows: Indices) -> Flags:
        """Whether each holds a shard at all; the others are tombstones."""
        return np.not_equal(self._models[rows], _NONE)

    def serve_model(self, rows: Indices, model_id: str) -> Flags:
        """Whether each holds a shard of the model."""
        serves = np.equal(self._models[: len(self.peers)], _tag(model_id))
        peers = self._peers_of.get(model_id, {})
        serves[np.fromiter(map(self._row_of.__getitem__, peers), np.intp, len(peers))] = True
        return serves[rows]


_NONE, _SEVERAL = np.uint64(0), np.uint64(1)


def _tag(model_id: str) -> np.uint64:
    """64 of the bits of a model id, which is a hash."""
    return np.uint64(int(model_id[:16], 16) | 2)
