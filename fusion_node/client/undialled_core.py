"""Which nodes without an address are worth waiting for: those that this user may be about to dial back.

A node announces no address until somebody has dialled it back. Where a swarm begins, its first user does so, within two
seconds (fusion_node.client.connection, DIALLED_BACK_S), and has the address then. It may as well never be: a record is
signed by whom it speaks of, and proves no more than that.

Guarantees: nobody is waited for whose layers others serve who can be dialled; nobody twice while its record lives; and
after a wait there is none for FIRST_PAUSE_S, twice as long each time that one was in vain, up to MAX_PAUSE_S. So an
hour of identities that come one after another costs seven waits. Assumes: whoever looks for a route meanwhile looks
again soon, and takes an address when it comes by itself. Timers: none; times are of the monotonic clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from fusion_node.types import ModelId, MonotonicS
from p2p.records import NodeRecord, ShardRecord, dialled_at

FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 3600.0

_Kind = tuple[str, str, str]
"""What is served: shards of one kind take one another's place where their layers are the same."""


class Undialled:
    """What one user has waited for."""

    def __init__(self) -> None:
        self._waited_for: frozenset[str] = frozenset()
        self._pause_until: MonotonicS | None = None
        self._pause_s = FIRST_PAUSE_S

    def wanted(self, records: Sequence[NodeRecord], model_id: ModelId | None, *, now: MonotonicS) -> frozenset[str]:
        """Peers whose addresses are worth waiting for, among all that were found.

        Args:
            model_id: of which shards count; None: all.
        """
        without = [record for record in records if not dialled_at(record)]
        self._waited_for &= {record.peer for record in without}
        new = [record for record in without if record.peer not in self._waited_for]
        if not new or (self._pause_until is not None and now < self._pause_until):
            return frozenset()
        served = _served((record for record in records if dialled_at(record)), model_id)
        return frozenset(
            record.peer
            for record in new
            if any(not _is_within(shard, served[_kind(shard)]) for shard in _shards(record, model_id))
        )

    def waited(self, wanted: frozenset[str], still_without: Iterable[str], *, now: MonotonicS) -> None:
        """A wait is over.

        Args:
            wanted: whom it was for.
            still_without: those of them that have no address yet.
        """
        in_vain = wanted & frozenset(still_without)
        self._waited_for |= in_vain
        self._pause_until = MonotonicS(now + self._pause_s)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if in_vain else FIRST_PAUSE_S


def _shards(record: NodeRecord, model_id: ModelId | None) -> list[ShardRecord]:
    return [each for each in record.shards if each.is_ready and model_id in (None, each.model_id)]


def _kind(shard: ShardRecord) -> _Kind:
    return shard.model_id, shard.numerics, shard.slice


def _served(records: Iterable[NodeRecord], model_id: ModelId | None) -> defaultdict[_Kind, list[tuple[int, int]]]:
    """Of each kind the layers that these serve together: stretches as long as they get, ascending."""
    ranges: dict[_Kind, list[tuple[int, int]]] = {}
    for record in records:
        for shard in _shards(record, model_id):
            ranges.setdefault(_kind(shard), []).append((shard.start, shard.stop))
    served: defaultdict[_Kind, list[tuple[int, int]]] = defaultdict(list)
    for kind, found in ranges.items():
        stretches = served[kind]
        for start, stop in sorted(found):
            if stretches and start <= stretches[-1][1]:
                stretches[-1] = (stretches[-1][0], max(stretches[-1][1], stop))
            else:
                stretches.append((start, stop))
    return served


def _is_within(shard: ShardRecord, stretches: Sequence[tuple[int, int]]) -> bool:
    return any(start <= shard.start and shard.stop <= stop for start, stop in stretches)
