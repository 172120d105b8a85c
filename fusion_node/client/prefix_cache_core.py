"""Which earlier session of this user a new prompt begins like, so that its nodes need not compute that beginning again.

Guarantees: at most ``max_sessions`` sessions are remembered, and the one that was used longest ago makes way; one that
is over is forgotten RETAIN_S after it ended, as its nodes do, and at once when a later one over the same stages has all
that it could offer. Only positions that every stage has computed are offered, in whole KV blocks, and never all of a
prompt: its last position has to be computed.

Assumes: all sessions are of one model, one numerics class and one identity. Nodes may have dropped what is remembered
here; they say so when a session is opened.

States of an entry: opening or running, over (until RETAIN_S have passed), gone. No timers: what is too old is dropped
when somebody asks. Source: automatic prefix caching as in vLLM, from the user's side. Still ugly: the search compares
the prompt with every entry; there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.messages import RETAIN_S

MAX_SESSIONS = 16
"""What a node keeps for one user (fusion_node.engine.block_manager_core)."""

MIN_POSITIONS = 16
"""A KV block: nodes share nothing less."""


@dataclass(slots=True, eq=False, kw_only=True)
class Remembered:
    """A session that is opening, running or over.

    Attributes:
        ids: token ids of its positions: the prompt's, and the answer's as they come.
        num_prompt: how many of them are the prompt's.
        session: its id; empty until it is open.
        stages: where it is.
        num_computed: positions that every stage has computed.
        ended_at: None until it is over.
    """

    ids: Sequence[int] = field(repr=False)
    num_prompt: int
    session: bytes = b""
    stages: tuple[tuple[PeerId, LayerRange], ...] = ()
    num_computed: int = 0
    ended_at: MonotonicS | None = None


E = TypeVar("E", bound=Remembered)


class PrefixCache(Generic[E]):
    """The sessions that a prompt may begin like."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._entries: list[E] = []
        """Least recently used first."""

    @property
    def entries(self) -> tuple[E, ...]:
        return tuple(self._entries)

    def begin(self, entry: E) -> list[E]:
        """Remembers a session. Returns those that made way and were over: their nodes need not keep them."""
        self._entries.append(entry)
        gone = self._entries[: -self._max_sessions]
        del self._entries[: -self._max_sessions]
        return [each for each in gone if each.ended_at is not None]

    def end(self, entry: E, *, now: MonotonicS) -> list[E]:
        """A session is over and its nodes were asked to keep it. Returns those that need not be kept for it."""
        self.forget(entry)
        superfluous = [
            other
            for other in self._entries
            if other.ended_at is not None
            and other.stages == entry.stages
            and _num_sharable(other, entry.ids[: entry.num_computed]) == _whole_blocks(other.num_computed)
        ]
        for other in superfluous:
            self.forget(other)
        entry.ended_at = now
        return superfluous + self.begin(entry)

    def forget(self, entry: E) -> None:
        """It failed, or its nodes do not have it any more. Does nothing when it is forgotten already."""
        if entry in self._entries:
            self._entries.remove(entry)

    def find(self, ids: Sequence[int], *, now: MonotonicS) -> tuple[E, int] | None:
        """The session with the longest beginning of a prompt, and how many positions of it are there.

        Of several with the same, the one used last.
        """
        self._entries = [e for e in self._entries if e.ended_at is None or now < e.ended_at + RETAIN_S]
        best: E | None = None
        most = 0
        for entry in self._entries:
            num_positions = _num_sharable(entry, ids[:-1])
            if num_positions and num_positions >= most:
                best, most = entry, num_positions
        if best is None:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        return best, most

    def find_opening(self, ids: Sequence[int]) -> E | None:
        """A session whose prompt is still being computed, and which is worth waiting for.

        At least half of what it has yet to compute will be there for this prompt too, and is not there already: to
        compute it a second time side by side takes the devices as long.
        """
        num_there = max((_num_sharable(entry, ids[:-1]) for entry in self._entries), default=0)
        for entry in self._entries:
            if entry.ended_at is None and entry.num_computed < entry.num_prompt:
                gain = _whole_blocks(_num_equal(entry.ids[: entry.num_prompt], ids[:-1])) - num_there
                if gain > 0 and 2 * gain >= entry.num_prompt - entry.num_computed:
                    return entry
        return None


def _num_sharable(entry: Remembered, ids: Sequence[int]) -> int:
    return _whole_blocks(_num_equal(entry.ids[: entry.num_computed], ids))


def _whole_blocks(num_positions: int) -> int:
    return num_positions // MIN_POSITIONS * MIN_POSITIONS


def _num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How long both are the same."""
    num_both = min(len(ours), len(theirs))
    return next((index for index in range(num_both) if ours[index] != theirs[index]), num_both)
