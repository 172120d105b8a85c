"""The user's tree of tokens: what is committed, what is on its way through the stages, and what may be sent next.

Guarantees: the root is the last committed token; every live node descends from it; a node leaves ``pop_unsent`` and
``pop_unexpanded`` at most once until it is put back, the most probable first and no child before its parent. What dies
when the root moves is never handed out again. Each node is visited once when it dies, so that the cost of a token does
not grow with the size of the tree.

Assumes: one caller; probabilities are those of a token given its parent.

States of a node: UNSENT, SENT (it has an id and its row is awaited), RETURNED (its row is there), each live or dead;
and apart from that expanded or not. No timers. Source: docs/speculation.md.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MIN_PROBABILITY = 1e-9
"""Below it a logarithm is of no use to an order."""

_MIN_GARBAGE = 256
"""Dead entries that a heap may hold before it is built anew."""


class NodeState(enum.Enum):
    UNSENT = "unsent"
    SENT = "sent"
    RETURNED = "returned"


@dataclass(slots=True, eq=False)
class TreeNode:
    """A token at a place in the tree.

    Attributes:
        position: of the token in prompt and answer, from 0.
        log_p: of the path from the first root there ever was; only differences mean anything.
        id: by which the stages know it; 0 unless it was sent.
        row: what came back for it.
        guess: the first of the candidates for what follows it.
    """

    token: int
    position: int
    parent: TreeNode | None = field(repr=False)
    log_p: float
    state: NodeState = NodeState.UNSENT
    id: int = 0
    is_live: bool = True
    is_expanded: bool = False
    row: Any = field(default=None, repr=False)
    guess: int | None = None
    children: dict[int, TreeNode] = field(default_factory=dict, repr=False)


class _Heap:
    """Nodes, the most probable first; of two alike the one that came first. What is not due stays until it surfaces."""

    def __init__(self, is_due: Callable[[TreeNode], bool]) -> None:
        self._is_due = is_due
        self._entries: list[tuple[float, int, TreeNode]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, node: TreeNode) -> None:
        self._num_pushed += 1
        heapq.heappush(self._entries, (-node.log_p, self._num_pushed, node))

    def peek(self) -> TreeNode | None:
        while self._entries and not self._is_due(self._entries[0][2]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def pop(self) -> TreeNode:
        return heapq.heappop(self._entries)[2]

    def prune(self, num_live: int) -> None:
        if len(self._entries) > 2 * num_live + _MIN_GARBAGE:
            self._entries = [entry for entry in self._entries if self._is_due(entry[2])]
            heapq.heapify(self._entries)


def _is_unsent(node: TreeNode) -> bool:
    return node.is_live and node.state is NodeState.UNSENT


def _is_unexpanded(node: TreeNode) -> bool:
    return node.is_live and not node.is_expanded


class TokenTree:
    """The tree below the last committed token.

    Args:
        token, position: of the root.

    Attributes:
        root: the last committed token.
        num_live: nodes in the tree, the root included.
    """

    def __init__(self, token: int, position: int) -> None:
        self.root = TreeNode(token, position, None, 0.0)
        self.num_live = 1
        self._unsent = _Heap(_is_unsent)
        self._unexpanded = _Heap(_is_unexpanded)
        self._unexpanded.push(self.root)
        self._unsent.push(self.root)

    def probability(self, node: TreeNode) -> float:
        """That the text goes through a live node, as far as is known now."""
        return math.exp(min(0.0, node.log_p - self.root.log_p))

    def path(self, node: TreeNode) -> tuple[int, ...]:
        """Tokens from the root, which is not among them, to a live node."""
        tokens: list[int] = []
        above: TreeNode | None = node
        while above is not None and above is not self.root:
            tokens.append(above.token)
            above = above.parent
        return tuple(reversed(tokens))

    def add(self, parent: TreeNode, token: int, probability: float) -> TreeNode:
        """Hangs a token on a live node, or raises its probability where it is there already and not sent.

        Args:
            probability: of the token given its parent, in (0, 1].
        """
        log_p = parent.log_p + math.log(min(1.0, max(probability, MIN_PROBABILITY)))
        child = parent.children.get(token)
        if child is not None:
            return child
        child = TreeNode(token, parent.position + 1, parent, log_p)
        parent.children[token] = child
        self.num_live += 1
        self._unsent.push(child)
        self._unexpanded.push(child)
        return child

    def pop_unsent(self, least: float) -> TreeNode | None:
        """The most probable node that was not sent, unless it is less probable than ``least``.

        It is the caller's to set its state, or to put it back.
        """
        return self._pop(self._unsent, least)

    def pop_unexpanded(self, least: float) -> TreeNode | None:
        """The most probable node for which no candidates were asked; it counts as expanded from now on."""
        node = self._pop(self._unexpanded, least)
        if node is not None:
            node.is_expanded = True
        return node

    def peek_unsent(self) -> TreeNode | None:
        """What ``pop_unsent`` would hand out, whatever its probability."""
        return self._unsent.peek()

    def put_back_unsent(self, node: TreeNode) -> None:
        """It was handed out and could not be sent."""
        self._unsent.push(node)

    def put_back_unexpanded(self, node: TreeNode) -> None:
        """Candidates were asked for and will not come."""
        node.is_expanded = False
        self._unexpanded.push(node)

    def advance(self, token: int) -> tuple[TreeNode, bool]:
        """The root's next token is known: it is the root from now on, and what does not descend from it dies.

        Returns:
            The new root, and whether it had been in the tree.
        """
        before = self.root
        child = before.children.pop(token, None)
        is_new = child is None
        if child is None:
            child = TreeNode(token, before.position + 1, None, before.log_p)
            self._unsent.push(child)
            self._unexpanded.push(child)
            self.num_live += 1
        before.is_live = False
        self.num_live -= 1
        doomed = list(before.children.values())
        before.children.clear()
        while doomed:
            node = doomed.pop()
            node.is_live = False
            self.num_live -= 1
            doomed.extend(node.children.values())
        child.parent = None
        self.root = child
        self._unsent.prune(self.num_live)
        self._unexpanded.prune(self.num_live)
        return child, not is_new

    def unsend(self) -> None:
        """The stages have dropped everything that is not committed: all nodes but the root are to be sent again."""
        self._unsent = _Heap(_is_unsent)
        for node in self.live_nodes():
            if node is not self.root:
                node.state, node.id, node.row = NodeState.UNSENT, 0, None
                self._unsent.push(node)
        if self.root.state is NodeState.UNSENT:
            self._unsent.push(self.root)

    def unsend_root(self) -> None:
        """The root as well; a row that has come back for it stays."""
        self.root.state, self.root.id = NodeState.UNSENT, 0

    def live_nodes(self) -> Iterator[TreeNode]:
        """Parents before children."""
        level = [self.root]
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant of this class is broken. For tests and diagnosis."""
        nodes = list(self.live_nodes())
        if len(nodes) != self.num_live:
            raise ValueError(f"{len(nodes)} nodes are live, and {self.num_live} are counted")
        unsent = {entry[2] for entry in self._unsent._entries}
        unexpanded = {entry[2] for entry in self._unexpanded._entries}
        for node in nodes:
            if not node.is_live:
                raise ValueError(f"{node} hangs on a live one and is dead")
            if node is not self.root and (node.parent is None or node.parent.children.get(node.token) is not node):
                raise ValueError(f"{node} is not its parent's child")
            if node.parent is not None and node.position != node.parent.position + 1:
                raise ValueError(f"{node} is out of place")
            if node.parent is not None and node.log_p > node.parent.log_p:
                raise ValueError(f"{node} is more probable than its parent")
            if not node.is_expanded and node not in unexpanded:
                raise ValueError(f"{node} would never be expanded")
            if node.state is NodeState.UNSENT and node not in unsent:
                raise ValueError(f"{node} would never be sent")

    def _pop(self, heap: _Heap, least: float) -> TreeNode | None:
        node = heap.peek()
        if node is None or self.probability(node) < least:
            return None
        return heap.pop()
