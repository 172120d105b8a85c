"""What of a token tree is on its way through the stages, and which of its rows may fail to come back.

Guarantees: a node is *dead* exactly when it neither leads to nor descends from a node that its user has committed and
told the stages of, be it by an entry of the log or by a cancel; of all others the stages owe the rows that were asked
for.

Assumes: one caller; entries are answered in their order; roots only go down the tree.

No timers. Source: docs/protocol-data-plane.md, "The session log". The cost of an entry grows with the nodes that are
neither committed nor dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fusion_node.client.speculation_core import Frame
from fusion_node.errors import LocalProtocolError


class _Entry(NamedTuple):
    frame: Frame
    num_positions: int
    """Committed in the log behind it."""


class SentTree:
    """The tree of one session, since its log was last plain.

    Args:
        num_positions: committed then; the node of position p is p + 1.
        next_sequence: of the first entry.

    Attributes:
        num_positions: committed by the entries so far.
        num_answered_positions: by those that were answered.
        next_sequence: of the next entry.
    """

    def __init__(self, num_positions: int, next_sequence: int) -> None:
        self.num_positions = self.num_answered_positions = num_positions
        self.next_sequence = next_sequence
        self._root = self._last_node = num_positions
        self._root_position = num_positions - 1
        self._parents: dict[int, int] = {}
        """Of live nodes below the root, by ascending id."""
        self._positions: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._dead: set[int] = set()
        """Of those that are awaited."""
        self._entries: deque[_Entry] = deque()

    def frame(self, sequence: int) -> Frame:
        """An entry that was not answered."""
        return self._entries[sequence - self._entries[0].frame.sequence].frame

    def add(self, frame: Frame) -> None:
        """One more entry.

        Raises:
            LocalProtocolError: it does not follow those before it.
        """
        if frame.sequence != self.next_sequence or frame.first_node != self._last_node + 1:
            raise LocalProtocolError("a frame that does not follow the one before it")
        for node, (parent, position) in enumerate(zip(frame.parents, frame.positions, strict=True), frame.first_node):
            if parent != self._root and parent not in self._parents:
                raise LocalProtocolError(f"node {node} hangs on {parent}, which is not live")
            self._parents[node], self._positions[node] = parent, position
        self.next_sequence += 1
        self._last_node = frame.first_node + len(frame.tokens) - 1
        self._awaited.update(frame.want)
        if frame.advance:
            self.keep(frame.advance)
            self.num_positions = self._root_position + 1
        self._entries.append(_Entry(frame, self.num_positions))

    def keep(self, root: int) -> None:
        """What neither leads to this committed node nor descends from it is dead."""
        if root not in self._parents:
            return
        self._root, self._root_position = root, self._positions[root]
        gone, above = {root}, self._parents[root]
        while above in self._parents:
            gone.add(above)
            above = self._parents[above]
        descends = {root}
        for node, parent in self._parents.items():
            if parent in descends:
                descends.add(node)
        self._dead |= self._awaited & (self._parents.keys() - descends - gone)
        self._parents = {node: parent for node, parent in self._parents.items() if node in descends and node != root}
        self._positions = {node: self._positions[node] for node in self._parents}

    def is_answer(self, sequence: int, nodes: Sequence[int]) -> bool:
        """Whether these are the nodes of an answer to that entry: in order, and lacking only what is dead."""
        want = self.frame(sequence).want
        have = set(nodes)
        return tuple(node for node in want if node in have) == tuple(nodes) and all(
            node in have or node in self._dead for node in want
        )

    def answered(self) -> None:
        """The first entry that was not answered yet was."""
        entry = self._entries.popleft()
        self.num_answered_positions = entry.num_positions
        self._awaited.difference_update(entry.frame.want)
        self._dead.difference_update(entry.frame.want)
