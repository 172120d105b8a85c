"""The user's tree of tokens: what is committed, what is on its way through the stages, and what may be sent next.

Guarantees: the root is the last committed token; every live node descends from it; ``pop_unsent`` and
``pop_unexpanded`` hand a node out once, unless it is put back, the most probable first and no child before its parent.
What has died when the root moved is never handed out. The cost of a token grows with the nodes that are handed out, not
with those that might be: a candidate becomes a node when its turn comes.

Assumes: one caller; probabilities are those of a token given its parent.

States of a node: UNSENT, SENT (it has an id and its row is awaited), RETURNED (its row is there), each live or dead;
and apart from that expanded or not. No timers. Source: docs/speculation.md; candidates in turn as in the enumeration of
the k best paths by Huang & Chiang, "Better k-best parsing", 2005, §4.3.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

MIN_PROBABILITY = 1e-9
"""Below it a logarithm is of no use to an order."""

_probability = itemgetter(1)

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
        candidates: for what follows, each with its probability given this node, best first. Some are children already.
        guess: the first token that was proposed for what follows, whether or not it is a candidate.
        guess_probability: of it.
        guess_depth: how many tokens ahead of the last committed one that was then; 1 is the next one.
    """

    token: int = field(repr=False)
    position: int
    parent: TreeNode | None = field(repr=False)
    log_p: float
    state: NodeState = NodeState.UNSENT
    id: int = 0
    is_live: bool = True
    is_expanded: bool = False
    row: Any = field(default=None, repr=False)
    candidates: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    guess: int | None = field(default=None, repr=False)
    guess_probability: float = 0.0
    guess_depth: int = 0
    children: dict[int, TreeNode] = field(default_factory=dict, repr=False)


class _Heap:
    """Nodes that are due, the most probable first, of two alike the one above, and then the one that came first.

    Of a node's candidates only the best that was not handed out yet is in it.
    """

    def __init__(self, is_due: Callable[[TreeNode], bool]) -> None:
        self._is_due = is_due
        self._entries: list[tuple[float, int, int, TreeNode, int | None]] = []
        """Order, and a node, or a parent and which of its candidates."""
        self._num_pushed = 0

    def push(self, node: TreeNode) -> None:
        self._push(node.log_p, node, None)

    def push_candidates(self, parent: TreeNode) -> None:
        if parent.candidates:
            self._push(_log_p(parent, 0), parent, 0)

    def peek(self, make: Callable[[TreeNode, int], TreeNode]) -> TreeNode | None:
        """The best one, which is made where it is not there yet."""
        while self._entries:
            _, _, _, node, rank = self._entries[0]
            if rank is None:
                if self._is_due(node):
                    return node
                heapq.heappop(self._entries)
                continue
            heapq.heappop(self._entries)
            if node.is_live:
                if rank + 1 < len(node.candidates):
                    self._push(_log_p(node, rank + 1), node, rank + 1)
                child = node.children.get(node.candidates[rank][0]) or make(node, rank)
                if self._is_due(child):
                    self._push(child.log_p, child, None)
        return None

    def least_order(self) -> float | None:
        """Minus log_p of what comes first; it may be dead."""
        return self._entries[0][0] if self._entries else None

    def pop(self) -> None:
        heapq.heappop(self._entries)

    def prune(self, num_live: int) -> None:
        if len(self._entries) > 2 * num_live + _MIN_GARBAGE:
            self._entries = [e for e in self._entries if (self._is_due(e[3]) if e[4] is None else e[3].is_live)]
            heapq.heapify(self._entries)

    def _push(self, log_p: float, node: TreeNode, rank: int | None) -> None:
        self._num_pushed += 1
        position = node.position + (rank is not None)
        heapq.heappush(self._entries, (-log_p, position, self._num_pushed, node, rank))


def _log_p(parent: TreeNode, rank: int) -> float:
    return parent.log_p + math.log(min(1.0, max(parent.candidates[rank][1], MIN_PROBABILITY)))


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
        self._unsent.push(self.root)
        self._unexpanded.push(self.root)

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

    def expand(self, node: TreeNode, candidates: Sequence[tuple[int, float]]) -> None:
        """Says what may follow a live node that was expanded and has no candidates yet.

        Args:
            candidates: different tokens, each with its probability given the node, in (0, 1].
        """
        node.candidates = tuple(sorted(candidates, key=_probability, reverse=True))
        self._unsent.push_candidates(node)
        self._unexpanded.push_candidates(node)

    def best_child(self, node: TreeNode) -> TreeNode | None:
        """By the first of a live node's candidates; None where it has none."""
        if not node.candidates:
            return None
        return node.children.get(node.candidates[0][0]) or self._make(node, 0)

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

    def has_unsent(self, least: float) -> bool:
        """Whether ``pop_unsent`` would hand out a node. Asked in logarithms as there: rounding must not tell them
        apart, or else who waits for the one and gets nothing of the other would ask for ever."""
        node = self._unsent.peek(self._make)
        return node is not None and node.log_p >= self._log_least(least)

    def put_back_unsent(self, node: TreeNode) -> None:
        """It was handed out, and is not sent after all."""
        node.state = NodeState.UNSENT
        self._unsent.push(node)

    def put_back_unexpanded(self, node: TreeNode) -> None:
        """Candidates were asked for and will not come."""
        node.is_expanded = False
        self._unexpanded.push(node)

    def advance(self, token: int) -> TreeNode:
        """The root's next token is known: it is the root from now on, and what does not descend from it dies."""
        before = self.root
        child = before.children.pop(token, None)
        if child is None:
            child = TreeNode(token, before.position + 1, None, before.log_p)
            self.num_live += 1
        # What stands for it in a heap may be its parent, which dies.
        if child.state is NodeState.UNSENT:
            self._unsent.push(child)
        if not child.is_expanded:
            self._unexpanded.push(child)
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
        return child

    def unsend(self) -> None:
        """The stages have dropped everything that is not committed: all nodes but the root are to be sent again."""
        for node in list(self.live_nodes()):
            if node is not self.root and node.state is not NodeState.UNSENT:
                node.id, node.row = 0, None
                self.put_back_unsent(node)

    def unsend_root(self) -> None:
        """The root as well; a row that has come back for it stays."""
        self.root.id = 0
        self.put_back_unsent(self.root)

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
        for node in nodes:
            if not node.is_live:
                raise ValueError(f"{node} hangs on a live one and is dead")
            if node is not self.root and (node.parent is None or node.parent.children.get(node.token) is not node):
                raise ValueError(f"{node} is not its parent's child")
            if node.parent is not None and node.position != node.parent.position + 1:
                raise ValueError(f"{node} is out of place")
            if node.parent is not None and node.log_p > node.parent.log_p:
                raise ValueError(f"{node} is more probable than its parent")
            if node.parent is not None and node.parent.state is NodeState.UNSENT is not node.state:
                raise ValueError(f"{node} was sent before its parent")

    def _make(self, parent: TreeNode, rank: int) -> TreeNode:
        token = parent.candidates[rank][0]
        child = parent.children[token] = TreeNode(token, parent.position + 1, parent, _log_p(parent, rank))
        self.num_live += 1
        return child

    def _pop(self, heap: _Heap, least: float) -> TreeNode | None:
        log_least = self._log_least(least)
        order = heap.least_order()
        if order is None or -order < log_least:
            return None
        node = heap.peek(self._make)
        if node is None or node.log_p < log_least:
            return None
        heap.pop()
        return node

    def _log_least(self, least: float) -> float:
        return self.root.log_p + math.log(least) if least > 0.0 else -math.inf
