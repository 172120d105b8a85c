"""Who holds up a fusion group, as far as the words of its members tell it; and who has been in too much of the kind.

Members wait for one another, so that one that waits for X and says so may be believed, while X waits for Y. ``judge``
compares how far each of them is. One that is behind and waits for nobody is slow, by its own word. One that says that
it has sent what another says that it lacks contradicts it: one of the two is at fault, or their link, and nobody else.
``Contradictions`` keeps who was in such contradictions together. Who is at fault in them is the one that is in all of
those in which it is, with different others each time.

Guarantees: while one peer lies, every contradiction that it makes has it in it, so that those of any other peer have
that one in common, and only the liar can be convicted. While none lies nor any link fails, nobody is in a
contradiction. Memory is bounded: MAX_CONTRADICTIONS.

Assumes: standings of members are of about the same time, when nothing has moved for longer than messages take.

No states, no timers. Source: docs/protocol-data-plane.md, "Groups". Still ugly: of a group of two nobody can be
convicted alone; two peers that both have bad links to a third make that one look like a liar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_node.types import PeerId
from p2p.messages import Standing

MAX_CONTRADICTIONS = 256
"""That are remembered: an answer is repaired some times."""

WAITED_MS = 300
"""A member that has waited for less may be about to get what it waits for. No link within a group takes as long."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What the standings of a group's members say.

    Attributes:
        behind: others wait for these, and they for nobody, by their own word.
        contradictions: pairs of which one says that it has sent what the other lacks.
        unknown: others wait for these, and they have not said how far they are.
    """

    behind: tuple[PeerId, ...] = ()
    contradictions: tuple[frozenset[PeerId], ...] = ()
    unknown: tuple[PeerId, ...] = ()


class Contradictions:
    """See the head of this file."""

    def __init__(self) -> None:
        self._found: deque[frozenset[PeerId]] = deque(maxlen=MAX_CONTRADICTIONS)

    def add(self, peers: frozenset[PeerId]) -> None:
        """One of these is at fault, two or more."""
        if peers not in self._found:
            self._found.append(peers)

    @property
    def convicted(self) -> frozenset[PeerId]:
        """Who is at fault for sure, unless there are several who are at fault."""
        left, convicted = list(self._found), set[PeerId]()
        while True:
            with_it: dict[PeerId, list[frozenset[PeerId]]] = {}
            for peers in left:
                for peer in peers:
                    with_it.setdefault(peer, []).append(peers)
            alone = [
                peer for peer, sets in with_it.items() if len(sets) > 1 and frozenset.intersection(*sets) == {peer}
            ]
            if not alone:
                return frozenset(convicted)
            worst = min(alone, key=lambda peer: (-len(with_it[peer]), peer))
            convicted.add(worst)
            # What it was in says nothing about the others that were in it.
            left = [peers for peers in left if worst not in peers]


def judge(members: Sequence[PeerId], standings: Mapping[PeerId, Standing]) -> Judged:
    """Compares how far members are.

    Args:
        members: of the group, in its order.
        standings: of those that have said it.
    """
    behind: dict[PeerId, None] = {}
    unknown: dict[PeerId, None] = {}
    contradictions: dict[frozenset[PeerId], None] = {}
    for waiting, own in standings.items():
        for index in own.missing if _waits(own) else ():
            awaited = members[index] if index < len(members) else waiting
            theirs = standings.get(awaited)
            if awaited == waiting:
                behind[waiting] = None  # it waits for itself, or for a member that there is not
            elif theirs is None:
                unknown[awaited] = None
            elif theirs.place >= own.place:
                contradictions[frozenset((waiting, awaited))] = None
            elif not _waits(theirs):
                behind[awaited] = None
    return Judged(tuple(behind), tuple(contradictions), tuple(unknown))


def _waits(standing: Standing) -> bool:
    """Whether it has rows and lacks what others contribute to them, for longer than that may be on its way."""
    return standing.has_rows and bool(standing.missing) and standing.waited_ms >= WAITED_MS
