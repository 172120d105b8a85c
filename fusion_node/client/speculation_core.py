"""The loop of speculative decoding: drafting, sending and receiving, none of which waits for another.

What it takes for one answer is three flows. The drafter is asked for candidates below the most probable nodes that have
none, one batch after another. The most probable nodes that are worth a row leave in frames, one per pass of the slowest
stage. Rows that come back move the root: the row of the last committed token says the next one; where that is in the
tree, what is below it goes on being valid, and where it is not, it leaves in the very call that found out.

Guarantees: tokens are committed in order, each chosen from the row of the path before it, so that nothing a drafter, a
stage's clock or price, or a delay does can change them. A frame names its nodes' parents, which were sent before or are
in it; ids go up without gaps. Nothing is sent below a token that ends the answer. Rows uncommitted at the stages never
exceed ``max_in_flight``, nor positions ``max_positions``; what is known to come next always finds room.

Assumes: a shell that does what the events say in their order, answers each Expand and each Choose once, and hands every
frame's rows to ``returned`` in the order of frames; the stages apply the log of docs/protocol-data-plane.md. The prompt
is sent and committed by the shell.

States: waiting for the prompt's row; going on; paused (nothing is sent, while stages are replaced); over.
Timer: when the next frame is due, or the draft that a chain waits for is late, in seconds of the monotonic clock.

Source: docs/speculation.md. Still ugly: the pace is that of the slowest stage as the results tell it, one round trip
late.

Above 600 lines, a third of them the words that core and shell have in common and bounds with their reasons; the three
flows change the same tree and counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fusion_node.client.speculation_timeline import TimelineRecorder, Totals
from fusion_node.client.token_tree import NodeState, TokenTree, TreeNode
from fusion_node.errors import LocalProtocolError
from fusion_node.types import MonotonicS
from scheduler.speculation import (
    LEAST_PROBABILITY,
    MAX_CHAIN,
    Guess,
    Mode,
    ModePolicy,
    StepCosts,
    least_worth,
)

MAX_IN_FLIGHT = 384
"""Rows uncommitted at the stages. 256 cost 2 % of the speed at round trips of 100 ms, 512 bring nothing more."""

FIRST_IN_FLIGHT = 32
"""Until a stage has said what a row costs, and a frame how long it takes: many who begin at once must not bury a ring
under what is worth nothing."""

FRAME_ROWS = 16
FRAME_LATENCY_S = 0.1
MIN_FRAME_ROWS, MAX_FRAME_ROWS = 12, 32
"""Of a frame: so many at so long a ring latency, and more as the square root of it. More rows add to the latency of
all that comes behind, which is the less of it the longer it is: at 65 ms 16 rows bring 4 % more than 24, at 290 ms 2 %
less."""

SLOW_FRAME_ROWS = 4
"""Of a frame where the wire is slower than the stages: the first rows leave before the last are there."""

WIRE_SHARE = 0.9
"""Of a slow wire that is used: what waits for it is late, and what it measures as has an error."""

SLOW_WIRE_ROWS = 16
"""A wire is slow that takes longer for so many rows than the slowest stage for a pass."""

EXPAND_NODES = (16, 8, 4, 2, 1)
MAX_EXPAND_RATIO = 1.5
"""Nodes of one forward of the drafter: the most that take no longer than so many times one. On a GPU all 16 do, which
bring 2 % more than 8; a drafter whose time goes by nodes is asked for few at a time, or else its answer is late."""

FIRST_EXPAND_NODES = 8

MAX_SHADOW_TOKENS = 64
"""Of plain decode between two drafts that nothing comes of but knowledge, however long one takes."""

WIDTH = 8
"""Candidates per node."""

MAX_TREE_NODES = 4096
"""Live nodes; beyond, nothing is drafted. Reached only by drafters that are sure of everything."""

FIRST_PACE_S = 0.01
"""Between frames until a stage has said how long a pass takes."""

MAX_PACE_S = 1.0
"""A stage that claims longer passes is not waited for."""

MAX_PRICE_S = 0.05
"""Of one row on one stage: what a slow CPU takes with a dozen sessions waiting. A stage that claims more is not
believed; it can make its users send little, never nothing."""

IDLE_SHARE = 0.25
BUSY_SHARE = 0.75
"""Of a row's price that a node must be worth: of what a row costs while nobody else waits, and of what it costs others
beyond that. The first is small because most rows fill passes that would be made anyway: at four times of it the
speed of one user falls by 5 %. Less of the second has 48 users of a ring send three times the rows, for no more
tokens."""

DEAR_ROWS = 72
DEAR_SHARE = 1.5
"""So many rows take a ring latency where rows are dear, as on CPUs: there every row makes a pass longer, and costs the
user's side something as well. The share grows as the fourth power of how near they come to that. With the guesses of a
head trained for half an hour, over CPU stages at round trips of 50 ms, a quarter of the price brings 1.45 times plain
decode where each machine has cores of its own and 0.95 times where they share two, 1.5 of it 1.48 and 1.42 times."""

PASS_WORTH = 0.4
"""Tokens that a frame must bring by its guesses where rows are dear, if it holds nothing that is known: it has a pass
to itself, and takes the cores for it from what else they have to do. What is withheld leaves with the next frame. At
round trips of 50 ms it saves a fifth of what all cores compute; with two cores for all processes nothing else comes of
it, and with 1.3 a tenth of the time."""

SHARED_PRICE_RATIO = 1.5
"""Of what a row costs to what it costs while nobody else waits, from which on others do: two frames of one's own double
it now and then."""

DRAFT_SHARE = 0.2
"""Of the probability from which on nodes are sent, that they must have to be drafted from: they become five times as
probable within a few tokens, or never. All of it where rows are dear: so is drafting."""

TAP_PROBABILITY = 0.15
"""From which on rows of other layers are asked for: of two or three nodes per token. Of a drafter that is right in one
case of three these are its first guess and perhaps the second."""

MAX_DRAFT_RATIO = 3.0
FIRST_DRAFT_WAIT_S = 0.25
"""A chain waits for a draft for so many times as long as one takes, and for so long before one has come: the drafting
thread may be at another answer's prompt, or never come back, and plain decode would not wait for it."""

SHARED_PASS_SHARE = 0.2
"""Of a pass: frames whose results come within it of one another were in the same one, if they say the same of it."""

SEND_AHEAD_S = 0.0005
"""How long before a pass is expected to begin a frame is to be there: who comes just after it waits for all of it."""

RATE_TOKENS = 24
"""Over which the tokens per second are averaged that a row's price is compared with."""

_WEIGHT = 0.125
"""Of a new measurement in a running mean: that of TCP's round-trip time (RFC 6298)."""

_RISE_WEIGHT = _WEIGHT / 8
MAX_LEAST_RATIO = 2.0
"""Of a higher price in the least one: prices are double where another frame waits, and fall by mistake. By more than so
many times it is others that wait, for as long as they do."""


# what the core asks of its shell, and tells it


@dataclass(frozen=True, slots=True)
class Frame:
    """To be sent to the first stage as one entry of the session's log.

    Attributes:
        sequence: of the entry.
        first_node: id of the first node; the others follow.
        tokens: per node. Their embeddings are the rows.
        parents: per node, the id of the node that it hangs on.
        positions: per node.
        advance: the last committed node, if that was not said before; else 0.
        want: nodes whose rows are to come back.
        tap: nodes of which rows of other layers are wanted as well.
    """

    sequence: int
    first_node: int
    tokens: tuple[int, ...] = field(repr=False)
    parents: tuple[int, ...]
    positions: tuple[int, ...]
    advance: int
    want: tuple[int, ...]
    tap: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Expand:
    """Candidates are wanted: answered by ``drafted`` or ``not_drafted`` with this number. At most one is out at a time.

    Attributes:
        position: of the token that follows the empty path: all before it were committed by earlier events.
        paths: per node, tokens beyond those.
        width: candidates per path, at most.
    """

    number: int
    position: int
    paths: tuple[tuple[int, ...], ...] = field(repr=False)
    width: int


@dataclass(frozen=True, slots=True)
class Choose:
    """The token at ``position`` is to be chosen from this row: answered by ``chosen``. At most one is out at a time.

    Attributes:
        ahead: rows that will probably be next, should the text go on as it was guessed; to be computed with it where
            several cost hardly more than one.
    """

    position: int
    row: Any = field(repr=False)
    ahead: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A token of the answer.

    Attributes:
        is_last: it ends the answer; nothing is sent any more.
    """

    token: int = field(repr=False)
    position: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class CancelDead:
    """Rows that are on their way have become useless; stages may be told beside the log, and need not be.

    Attributes:
        root: id of a committed node. Nodes that neither lead to it nor descend from it are dead.
    """

    root: int


SpeculationEvent: TypeAlias = "Frame | Expand | Choose | Commit | CancelDead"


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage says of a frame.

    Attributes:
        pass_s: of the forward that it was in.
        price_s: by how much one more row would have delayed all that wait there.
    """

    pass_s: float
    price_s: float


@dataclass(slots=True)
class SpeculationStats:
    """Of one answer.

    Attributes:
        num_tokens: committed.
        num_rows, num_frames: sent.
        num_corrections: tokens that were not in the tree, or not sent yet, when they were chosen.
        num_candidates: tokens for whose place there had been candidates when they were chosen.
        num_first: of them, tokens that had been the first candidate.
        depths: sum over tokens of the depth below them of what was on its way or back, along the best guesses.
        latency_s: of a frame, from sending it until its rows were there; a running mean.
        price_s: of one row, over all stages and the wire; a running mean.
        least: the probability that a node needs now to be sent.
        mode: the present one.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_frames: int = 0
    num_corrections: int = 0
    num_candidates: int = 0
    num_first: int = 0
    depths: int = 0
    latency_s: float = 0.0
    price_s: float = 0.0
    least: float = LEAST_PROBABILITY
    mode: Mode = Mode.PLAIN


@dataclass(slots=True)
class _SentFrame:
    sent_at: MonotonicS
    num_rows: int
    is_alone: bool
    want: tuple[int, ...]


class _TimeByRows:
    """Seconds of a pass by its rows: a line through what was measured, lately above all."""

    def __init__(self) -> None:
        self._rows = self._seconds = self._rows2 = self._product = 0.0
        self.is_known = False

    def learn(self, num_rows: int, seconds: float) -> None:
        seconds = min(max(seconds, 0.0), MAX_PACE_S)
        new = (float(num_rows), seconds, float(num_rows * num_rows), num_rows * seconds)
        old = (self._rows, self._seconds, self._rows2, self._product)
        if self.is_known:
            new = tuple(o + _WEIGHT * (n - o) for o, n in zip(old, new, strict=True))  # type: ignore[assignment]
        self._rows, self._seconds, self._rows2, self._product = new
        self.is_known = True

    def predict(self, num_rows: int) -> float:
        variance = self._rows2 - self._rows**2
        if variance < 1.0:
            return self._seconds
        slope = min(max((self._product - self._rows * self._seconds) / variance, 0.0), self._seconds / self._rows)
        return max(0.0, self._seconds + slope * (num_rows - self._rows))


class _PassTime(_TimeByRows):
    """The same of a stage, told frame by frame; of one row for itself, since on CPUs the second costs most.

    Frames that shared a pass tell the same time and come back together: their rows count as one pass's. Taken for a
    pass of its own, a row that met others would seem to take as long as they did.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_rows, self._last_s, self._came_at = 0, 0.0, MonotonicS(0.0)
        """Of the last pass, which is not learned yet."""
        self._alone_s = 0.0

    def learn(self, num_rows: int, seconds: float) -> None:
        super().learn(num_rows, seconds)
        if num_rows == 1:
            seconds = min(max(seconds, 0.0), MAX_PACE_S)
            self._alone_s += (_WEIGHT if self._alone_s else 1.0) * (seconds - self._alone_s)

    def frame_came(self, num_rows: int, pass_s: float, *, now: MonotonicS) -> None:
        is_shared = self._last_rows and pass_s == self._last_s and now - self._came_at < SHARED_PASS_SHARE * pass_s
        if self._last_rows and not is_shared:
            self.learn(self._last_rows, self._last_s)
        self._last_rows = num_rows + (self._last_rows if is_shared else 0)
        self._last_s, self._came_at = pass_s, now

    def predict(self, num_rows: int) -> float:
        if num_rows == 1 and self._alone_s:
            return self._alone_s
        return super().predict(num_rows) if self.is_known else min(max(self._last_s, 0.0), MAX_PACE_S)


def _believed(price_s: float) -> float:
    return min(max(0.0, price_s), MAX_PRICE_S)


class SpeculationCore:
    """One answer.

    Args:
        last_token: of the prompt.
        num_prompt: positions of the prompt. It was sent as one node per position, node of position p being p + 1, and
            its last row is awaited: it is the row of node ``num_prompt``.
        stop_position: the answer ends before it.
        stop_tokens: that end it when they are committed.
        max_positions: that the stages have reserved, at least ``stop_position``.
        next_sequence: of the first frame.
        policy: decides on the mode; kept by the caller where it serves several answers.
        max_in_flight: see MAX_IN_FLIGHT.
        has_drafter: whether Expand is ever answered.
        wants_taps: whether the drafter reads rows of other layers, of nodes that are probable.

    Attributes:
        stats: what has happened so far.
        recorder: of the same over time, and by depth.
        max_positions: see above; set before a session is opened that reserves more or fewer.
        is_over: the last token was committed, or it was closed.
    """

    def __init__(
        self,
        *,
        last_token: int,
        num_prompt: int,
        stop_position: int,
        stop_tokens: frozenset[int],
        max_positions: int,
        next_sequence: int,
        policy: ModePolicy | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        has_drafter: bool = True,
        wants_taps: bool = False,
    ) -> None:
        if not 1 <= num_prompt < stop_position:
            raise LocalProtocolError(f"an answer of {stop_position - num_prompt} tokens after {num_prompt} positions")
        self.stats = SpeculationStats()
        self.recorder = TimelineRecorder()
        self.is_over = False
        self._stop_position = stop_position
        self._stop_tokens = stop_tokens
        self.max_positions = max_positions
        self._policy = ModePolicy() if policy is None else policy
        self._max_in_flight = max_in_flight
        self._has_drafter = has_drafter
        self._wants_taps = wants_taps
        self._tree = TokenTree(last_token, num_prompt - 1)
        self._decision = self._policy.decide(now=MonotonicS(0.0))
        self._first_committed = num_prompt
        """Position of ``_committed[0]``."""
        self._committed: list[tuple[int, int]] = []
        """Token and id of each committed position of the answer; 0 where it was not sent yet."""
        self._num_resend = 0
        """Committed positions before the root that the stages have lost."""
        self._is_paused = False
        self._is_choosing = False
        self._has_row = False
        """Any row has come back: the prompt is through."""
        self._next_sequence = next_sequence
        self._last_id = num_prompt
        self._log_positions = num_prompt
        """Committed in the log of the stages, once it is applied."""
        self._log_live: list[TreeNode] = []
        """Live in it."""
        self._in_flight: dict[int, TreeNode] = {}
        self._frames: dict[int, _SentFrame] = {}
        self._pass_ends_at = MonotonicS(0.0)
        """When the pass that the last frame but those of ``_waiting_rows`` is in ends, less the time to the stage."""
        self._waiting_rows = 0
        self._is_withheld = False
        """What might be sent is not worth a pass by itself."""
        self._root_known_at = MonotonicS(0.0)
        self._num_expanded = 0
        self._expanding: list[TreeNode] | None = None
        self._expanded_at = MonotonicS(0.0)
        self._draft_time = _TimeByRows()
        self._shadow_s = 0.0
        """Seconds that drafting may still take in plain decode."""
        self._choosing_since: MonotonicS | None = None
        self._choose_s = 0.0
        self._row_s = 0.0
        """By how much a row has delayed the frame that it was in; a running mean."""
        self._passes: list[_PassTime] = []
        self._prices: list[float] = []
        self._least_prices: list[float] = []
        """What a row costs while nobody else waits: near the least that was seen lately."""
        self._lowest_prices: list[float] = []
        self._uplink_row_s = 0.0
        self._commit_times: deque[MonotonicS] = deque(maxlen=RATE_TOKENS + 1)
        self._events: deque[SpeculationEvent] = deque()
        self._expect_root(num_prompt)

    # what the shell says

    def start(self, *, now: MonotonicS) -> None:
        """Drafting may begin; frames follow when the row of the prompt is there."""
        self._go(now)

    def returned(
        self,
        sequence: int,
        rows: Sequence[tuple[int, Any]],
        *,
        costs: Sequence[StageCost] = (),
        now: MonotonicS,
    ) -> None:
        """Rows have come back, with their nodes' ids.

        Raises:
            LocalProtocolError: a row was not awaited.
        """
        sent = self._frames.get(sequence)
        self._measure(sequence, len(rows), costs, now)
        for node_id, row in rows:
            node = self._in_flight.pop(node_id, None)
            if node is None:
                raise LocalProtocolError(f"node {node_id} was not awaited")
            node.state = NodeState.RETURNED
            node.row = row if node.is_live else None
        for node_id in () if sent is None else sent.want:
            self._in_flight.pop(node_id, None)  # dead, and therefore left out
        self._has_row = True
        self._choose(now)
        if not self._is_choosing:
            self._go(now)

    def chosen(self, position: int, token: int, *, now: MonotonicS) -> None:
        """The answer to Choose.

        Raises:
            LocalProtocolError: this position was not to be chosen.
        """
        before = self._tree.root
        if self.is_over:
            return
        if not self._is_choosing or position != before.position + 1:
            raise LocalProtocolError(f"the token at position {position} was not to be chosen")
        self._is_choosing = False
        self._note_choice(before, token, now)
        self._num_resend += before.state is NodeState.UNSENT  # taken back while its row was being chosen from
        root = self._tree.advance(token)
        self._committed.append((token, root.id))
        self.stats.num_tokens += 1
        self.stats.num_corrections += root.state is NodeState.UNSENT
        self.stats.depths += self._depth_sent()
        self.recorder.committed(self._totals(), in_flight=len(self._in_flight), now=now)
        self._commit_times.append(now)
        self._root_known_at = now
        self._policy.committed(now=now)
        self.is_over = token in self._stop_tokens or position + 1 >= self._stop_position
        self._events.append(Commit(token, position, self.is_over))
        if self.is_over:
            return
        self._cancel(root)
        if root.state is NodeState.RETURNED:
            self._choose(now)
            return
        self._decision = self._policy.decide(now=now)
        self.stats.mode = self._decision.mode
        if self._decision.shadow_s is not None:
            self._shadow_s = min(self._decision.shadow_s, self._shadow_s + self._decision.shadow_s)
        self._go(now)

    def drafted(self, number: int, candidates: Sequence[Sequence[tuple[int, float, str]]], *, now: MonotonicS) -> None:
        """The answer to Expand: per path tokens with their calibrated probabilities and sources, best first."""
        nodes = self._end_expansion(number)
        took = now - self._expanded_at
        if number > 1:  # the first may have to read the prompt
            self._draft_time.learn(len(nodes), took)
            if self._decision.shadow_s is not None:
                self._shadow_s = max(self._shadow_s - took, -MAX_SHADOW_TOKENS * self._decision.shadow_s)
        for node, found in zip(nodes, candidates, strict=True):
            if not node.is_live:
                continue
            total = max(1.0, sum(probability for _, probability, _ in found))
            if found:
                node.guess, node.guess_probability = found[0][0], found[0][1] / total
            if node.position + 2 >= self._stop_position:
                continue  # what follows ends the answer, whatever it is, and its row is of no use
            by_token = {t: p / total for t, p, _ in reversed(found) if t not in self._stop_tokens}
            self._tree.expand(node, list(by_token.items()))
        self._go(now)

    def not_drafted(self, number: int, *, is_final: bool, now: MonotonicS) -> None:
        """The drafter has failed; with ``is_final`` the answer goes on without it."""
        for node in self._end_expansion(number):
            if node.is_live:
                self._tree.put_back_unexpanded(node)
        self._has_drafter = self._has_drafter and not is_final
        self._go(now)

    def uplink_changed(self, row_s: float) -> None:
        """How long a row takes on the wire to the first stage, as last measured."""
        self._uplink_row_s = max(0.0, row_s)

    def put_off(self) -> None:
        """The token that is to be chosen waits for its reader: the time until then says nothing of any mode."""
        self._policy.paused()
        self._choosing_since = None
        self._commit_times.clear()

    def pause(self) -> None:
        """The stages are being replaced: nothing is sent until ``restart``."""
        self._is_paused = True
        self._policy.paused()

    def restart(self, num_committed: int, *, next_sequence: int, now: MonotonicS) -> bool:
        """The stages hold the first positions of prompt and answer, node of position p being p + 1, and nothing else.

        Everything else that is live is sent again.

        Returns:
            Whether the row of node ``num_committed`` is awaited: it is the last committed one, and its row has not come
            back. The shell sees to it that it does.

        Raises:
            LocalProtocolError: so many were not committed, or the prompt is not among them.
        """
        root = self._tree.root
        if not self._first_committed <= num_committed <= root.position + 1:
            raise LocalProtocolError(f"the stages cannot hold {num_committed} positions")
        self._is_paused = False
        self._in_flight.clear()
        self._frames.clear()
        self._log_live.clear()
        self._last_id = self._log_positions = num_committed
        self._next_sequence = next_sequence
        self._pass_ends_at, self._waiting_rows = now, 0
        self._num_resend = max(0, root.position - num_committed)
        kept = num_committed - self._first_committed
        self._committed = [
            (token, self._first_committed + index + 1 if index < kept else 0)
            for index, (token, _) in enumerate(self._committed)
        ]
        if root.position >= num_committed:
            self._tree.unsend_root()
        elif root.state is not NodeState.RETURNED:
            self._expect_root(num_committed)
        else:
            root.id = num_committed
        self._tree.unsend()
        self._go(now)
        return bool(self._in_flight.get(num_committed) is root)

    def row_unfit(self, position: int) -> None:
        """The row from which the token at this position was to be chosen cannot be used: it is awaited again.

        Where the stages have lost its node it comes when that is sent again.

        Raises:
            LocalProtocolError: this position was not to be chosen.
        """
        root = self._tree.root
        if not self._is_choosing or position != root.position + 1:
            raise LocalProtocolError(f"the token at position {position} was not to be chosen")
        self._is_choosing = False
        self._choosing_since = None
        root.row = None
        if root.state is not NodeState.UNSENT:
            self._expect_root(root.id)

    @property
    def is_row_awaited(self) -> bool:
        """Whether the row of the last committed token has not come back."""
        return self._tree.root.state is not NodeState.RETURNED

    def committed_ids(self, first_position: int) -> tuple[int, ...]:
        """Ids of the committed nodes from a position on, up to the first that was not sent."""
        ids: list[int] = list(range(first_position + 1, self._first_committed + 1))
        for _, node_id in self._committed[max(0, first_position - self._first_committed) :]:
            if not node_id:
                break
            ids.append(node_id)
        return tuple(ids)

    def close(self) -> None:
        """The answer is over for the user."""
        self.is_over = True
        self._events.clear()

    # time and what comes out

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        if self._decision.mode is Mode.CHAIN and self._may_send and self._tree.root.state is NodeState.UNSENT:
            return self._draft_late_at if self._expanding is not None else None
        if self._decision.mode is Mode.TREE and self._may_send and self._tree.root.state is NodeState.UNSENT:
            return self._draft_near_until
        return self._next_send_at if self._may_send_more() else None

    @property
    def _draft_late_at(self) -> MonotonicS:
        known = self._draft_time.is_known
        wait_s = MAX_DRAFT_RATIO * self._draft_time.predict(1) if known else FIRST_DRAFT_WAIT_S
        return MonotonicS(self._expanded_at + wait_s)

    @property
    def _next_send_at(self) -> MonotonicS:
        """So that a frame is there shortly before the next pass begins."""
        ahead = self._pass_s(self._waiting_rows) if self._waiting_rows else 0.0
        return MonotonicS(self._pass_ends_at + ahead - SEND_AHEAD_S)

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early."""
        self._go(now)

    def next_event(self) -> SpeculationEvent | None:
        """Drained one by one, in order."""
        return self._events.popleft() if self._events else None

    @property
    def num_positions(self) -> int:
        """Of prompt and answer so far."""
        return self._tree.root.position + 1

    # receiving

    def _expect_root(self, node_id: int) -> None:
        root = self._tree.root
        root.state, root.id = NodeState.SENT, node_id
        self._in_flight[node_id] = root

    def _choose(self, now: MonotonicS) -> None:
        root = self._tree.root
        if self._is_choosing or self.is_over or root.state is not NodeState.RETURNED:
            return
        self._is_choosing = True
        self._choosing_since = now
        ahead: list[Any] = []
        node = root
        while node.children:
            node = max(node.children.values(), key=lambda child: child.log_p)
            if node.state is not NodeState.RETURNED:
                break
            ahead.append(node.row)
        self._events.append(Choose(root.position + 1, root.row, tuple(ahead)))

    def _note_choice(self, before: TreeNode, token: int, now: MonotonicS) -> None:
        if self._choosing_since is not None:
            took = now - self._choosing_since
            self._choose_s += (_WEIGHT if self._choose_s else 1.0) * (took - self._choose_s)
        if before.guess is None:
            if before.is_expanded and self._expanding is None:
                self._policy.guessed(Guess(False, False, 0.0, 0))
            return
        is_first = before.guess == token
        self.stats.num_candidates += 1
        self.stats.num_first += is_first
        self.recorder.guessed(before.guess_depth, is_right=is_first)
        least = least_worth(self._rate(now), self._delay_s())
        worth = [candidate for candidate, probability in before.candidates if probability >= least]
        self._policy.guessed(Guess(is_first, is_first or token in worth, before.guess_probability, len(worth)))

    def _depth_sent(self) -> int:
        node, depth = self._tree.root, 0
        while node.children:
            node = max(node.children.values(), key=lambda child: child.log_p)
            if node.state is NodeState.UNSENT:
                break
            depth += 1
        return depth

    def _totals(self) -> Totals:
        stats = self.stats
        return Totals(
            self._decision.mode.value,
            stats.num_tokens,
            stats.num_rows,
            stats.num_candidates,
            stats.num_first,
            stats.depths,
            stats.latency_s,
            stats.price_s,
        )

    def _cancel(self, root: TreeNode) -> None:
        # A root that was not sent is told by the frame that it leaves in.
        if root.id and not all(node.is_live for node in self._in_flight.values()):
            self._events.append(CancelDead(root.id))

    def _measure(self, sequence: int, num_rows: int, costs: Sequence[StageCost], now: MonotonicS) -> None:
        if len(costs) != len(self._passes):
            self._passes = [_PassTime() for _ in costs]
            self._prices = [_believed(cost.price_s) for cost in costs]
            self._least_prices = list(self._prices)
            self._lowest_prices = list(self._prices)
        for index, cost in enumerate(costs):
            price = _believed(cost.price_s)
            self._prices[index] += _WEIGHT * (price - self._prices[index])
            self._lowest_prices[index] = min(self._lowest_prices[index], price)
            rise = price - self._least_prices[index]
            least = self._least_prices[index] + rise * (_WEIGHT if rise < 0.0 else _RISE_WEIGHT)
            self._least_prices[index] = min(least, MAX_LEAST_RATIO * self._lowest_prices[index])
        stats = self.stats
        stats.price_s = sum(self._prices) + self._uplink_row_s
        draft_s = self._draft_time.predict(1)
        price_s = max(stats.price_s, min(self._row_s, len(costs) * MAX_PRICE_S))
        self._policy.costs_are(StepCosts(price_s, self._pass_s(1), self._choose_s, draft_s))
        sent = self._frames.pop(sequence, None)
        if sent is None:
            return  # the prompt's, which says nothing of how long a frame takes
        if num_rows == len(sent.want):  # else some have died on the way, and nobody says where
            for passes, cost in zip(self._passes, costs, strict=True):
                passes.frame_came(sent.num_rows, cost.pass_s, now=now)
        took = now - sent.sent_at
        stats.latency_s = took if not stats.latency_s else stats.latency_s + _WEIGHT * (took - stats.latency_s)
        if self._decision.mode is not Mode.PLAIN:
            self._policy.step_at_most(self._as_plain(sent.num_rows, took))
            if sent.is_alone:
                self._note_alone(sent.num_rows, took)

    def _note_alone(self, num_rows: int, took: float) -> None:
        """A frame that met no other of this session: a plain step, or what its rows cost beyond one.

        Stages tell the slope of their times over many rows; on a CPU the second row alone may cost twice that.
        """
        plain_s = self._policy.plain_s
        if num_rows == 1 or plain_s is None:
            self._policy.plain_step(self._as_plain(num_rows, took))
        else:
            extra_s = (took + self._choose_s - plain_s) / (num_rows - 1)
            self._row_s = max(0.0, self._row_s + _WEIGHT * (extra_s - self._row_s))

    def _as_plain(self, num_rows: int, took: float) -> float:
        """A plain step by a frame of more rows, as far as their price is believed."""
        return max(took / 2, took - (num_rows - 1) * self.stats.price_s) + self._choose_s

    # sending

    def _go(self, now: MonotonicS) -> None:
        self._is_withheld = False
        if self._may_send:
            self._send(now)
        self._draft(now)

    @property
    def _may_send(self) -> bool:
        return self._has_row and not self._is_paused and not self.is_over

    def _may_send_more(self) -> bool:
        """Whether a frame is only waiting for its time."""
        if not self._may_send or self._decision.mode is not Mode.TREE or self._room() < 1:
            return False
        return not self._is_withheld and self._tree.has_unsent(self.stats.least)

    def _send(self, now: MonotonicS) -> None:
        root = self._tree.root
        is_urgent = root.state is NodeState.UNSENT
        nodes: list[TreeNode] = []
        match self._decision.mode:
            case Mode.PLAIN:
                nodes = [root] if is_urgent else []
            case Mode.CHAIN:
                nodes = self._chain_to_send() if is_urgent and self._is_chain_ready(now) else []
            case Mode.TREE if is_urgent:
                nodes = [] if self._is_draft_near(now) else self._most_probable(now)
            case Mode.TREE if now >= self._next_send_at:
                nodes = self._worth_a_pass(self._most_probable(now))
        if nodes:
            self._emit(nodes, now)

    def _is_draft_near(self, now: MonotonicS) -> bool:
        """Whether a token that nobody guessed waits for what may follow it, to share a pass: where rows are dear."""
        root = self._tree.root
        is_asked = root in (self._expanding or ()) or not root.is_expanded
        return is_asked and now < self._draft_near_until and self._has_drafter and self._pass_dearness() >= 1.0

    @property
    def _draft_near_until(self) -> MonotonicS:
        draft_s, pass_s = self._draft_time.predict(1), self._pass_s(1)
        is_short = self._draft_time.is_known and draft_s <= pass_s
        return MonotonicS(self._root_known_at + min(pass_s, MAX_DRAFT_RATIO * draft_s) * is_short)

    def _worth_a_pass(self, nodes: list[TreeNode]) -> list[TreeNode]:
        if sum(map(self._tree.probability, nodes)) >= PASS_WORTH * self._pass_dearness():
            return nodes
        for node in reversed(nodes):
            self._tree.put_back_unsent(node)
        self._is_withheld = True
        return []

    def _most_probable(self, now: MonotonicS) -> list[TreeNode]:
        least = self.stats.least = least_worth(self._rate(now), self._delay_s())
        nodes: list[TreeNode] = []
        root = self._tree.root
        if root.state is NodeState.UNSENT:
            root.state = NodeState.SENT
            nodes.append(root)
        room = min(self._room(), self._frame_rows() - len(nodes))
        while room > 0 and (node := self._tree.pop_unsent(least)) is not None:
            node.state = NodeState.SENT
            nodes.append(node)
            room -= 1
        return nodes

    def _delay_s(self) -> float:
        """By how much a row delays what is committed, here and elsewhere."""
        idle_s = sum(self._least_prices)
        share = IDLE_SHARE + (DEAR_SHARE - IDLE_SHARE) * self._dearness()
        return share * (idle_s + self._uplink_row_s) + BUSY_SHARE * (sum(self._prices) - idle_s)

    def _dearness(self) -> float:
        """Of rows: from 0, where a frame's rows add next to nothing to its latency, to 1, where they are most of it."""
        row_s = sum(self._least_prices) + self._uplink_row_s
        # Not that of frames that wait for one another: who is late himself would take rows for cheap.
        latency_s = self._policy.plain_s or self.stats.latency_s or FRAME_LATENCY_S
        return min(1.0, (DEAR_ROWS * row_s / latency_s) ** 4)

    def _pass_dearness(self) -> float:
        """The same of passes: there is nothing dear about them where it is the wire that makes rows so, or others wait,
        who share them."""
        is_shared = sum(self._prices) > SHARED_PRICE_RATIO * sum(self._least_prices)
        return 0.0 if is_shared or self._is_wire_slow() else self._dearness()

    def _chain(self) -> list[TreeNode]:
        """The root, and below it the first candidates of each as far as they are worth a row."""
        nodes = [self._tree.root]
        for _ in range(min(MAX_CHAIN, self._decision.max_rows)):
            child = self._tree.best_child(nodes[-1])
            if child is None or self._tree.probability(child) < self._decision.least:
                break
            nodes.append(child)
        return nodes

    def _is_chain_ready(self, now: MonotonicS) -> bool:
        if self._expanding is not None and now >= self._draft_late_at:
            return True
        tip = self._chain()[-1]
        is_known = tip.is_expanded and tip not in (self._expanding or ())
        return is_known or not self._has_drafter or self._tree.probability(tip) < self._decision.least_to_draft

    def _chain_to_draft(self) -> list[TreeNode]:
        """The tip of the chain: while its root is awaited, drafting costs nothing."""
        tip = self._chain()[-1]
        is_urgent = self._may_send and self._tree.root.state is NodeState.UNSENT
        least = self._decision.least_to_draft if is_urgent else self._decision.least
        if tip.is_expanded or self._tree.probability(tip) < least:
            return []
        tip.is_expanded = True
        return [tip]

    def _shadow_to_draft(self) -> list[TreeNode]:
        """The token that is awaited, once the one before it has left: what comes of it is only counted."""
        root = self._tree.root
        is_due = self._decision.shadow_s is not None and self._shadow_s >= 0.0
        if not is_due or root.is_expanded or root.state is not NodeState.SENT:
            return []
        root.is_expanded = True
        return [root]

    def _chain_to_send(self) -> list[TreeNode]:
        return self._chain()[: 1 + max(0, self._room())]

    def _room(self) -> int:
        """Rows that may be sent on a guess, one being kept free for what is known."""
        num_live = sum(node.is_live for node in self._log_live)
        slots = self._log_positions + len(self._log_live) + self._num_resend
        is_known = self._prices and self._policy.plain_s is not None
        most = self._max_in_flight if is_known else min(self._max_in_flight, FIRST_IN_FLIGHT)
        num_guessed = len(self._in_flight) - (self._tree.root.id in self._in_flight)
        return min(most - num_live, self.max_positions - 2 - slots, self._decision.max_rows - num_guessed)

    def _frame_rows(self) -> int:
        if self._is_wire_slow():
            return SLOW_FRAME_ROWS
        rows = FRAME_ROWS * math.sqrt(self.stats.latency_s / FRAME_LATENCY_S)
        return min(MAX_FRAME_ROWS, max(MIN_FRAME_ROWS, round(rows)))

    def _is_wire_slow(self) -> bool:
        return SLOW_WIRE_ROWS * self._uplink_row_s > self._pass_s(1)

    def _pass_s(self, num_rows: int) -> float:
        return max((each.predict(num_rows) for each in self._passes), default=0.0) or FIRST_PACE_S

    def _emit(self, nodes: list[TreeNode], now: MonotonicS) -> None:
        root = self._tree.root
        tokens, parents, positions = self._resent()
        first_node = self._last_id + 1
        self._last_id += len(tokens)
        for node in nodes:
            self._last_id += 1
            parent_id = self._id_at(node.position - 1) if node.parent is None else node.parent.id
            node.id, node.state = self._last_id, NodeState.SENT if node.row is None else NodeState.RETURNED
            if node is root and self._committed:
                self._committed[-1] = (node.token, node.id)
            tokens.append(node.token)
            parents.append(parent_id)
            positions.append(node.position)
        want = tuple(node.id for node in nodes if node.row is None)
        is_alone = not self._in_flight
        self._in_flight.update((node.id, node) for node in nodes if node.row is None)
        has_advanced = root.position >= self._log_positions
        self._log_live += nodes
        if has_advanced:
            self._log_positions = root.position + 1
            self._log_live = [node for node in self._log_live if node.is_live and node is not root]
        advance = root.id if has_advanced else 0
        frame = Frame(
            self._next_sequence,
            first_node,
            tuple(tokens),
            tuple(parents),
            tuple(positions),
            advance,
            want,
            self._tapped(nodes),
        )
        self._frames[self._next_sequence] = _SentFrame(now, len(tokens), is_alone, want)
        self._next_sequence += 1
        self._note_pass(len(tokens), now)
        self.recorder.sent(len(self._in_flight))
        self.stats.num_frames += 1
        self.stats.num_rows += len(tokens)
        self._events.append(frame)

    def _tapped(self, nodes: Sequence[TreeNode]) -> tuple[int, ...]:
        """Those that are probably on the path; of plain decode all, so that drafters keep knowing the text."""
        if not self._wants_taps:
            return ()
        least = self._tree.root.log_p + math.log(TAP_PROBABILITY)
        return tuple(node.id for node in nodes if node.row is None and node.log_p >= least)

    def _resent(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens, parents and positions of what was committed and lost, which hangs on what was not."""
        num, self._num_resend = self._num_resend, 0
        first = self._tree.root.position - num
        tokens: list[int] = []
        for position in range(first, first + num):
            index = position - self._first_committed
            token, _ = self._committed[index]
            self._committed[index] = (token, position + 1)
            tokens.append(token)
        return tokens, list(range(first, first + num)), list(range(first, first + num))

    def _id_at(self, position: int) -> int:
        if position < self._first_committed:
            return position + 1
        return self._committed[position - self._first_committed][1]

    def _note_pass(self, num_rows: int, now: MonotonicS) -> None:
        """Follows what keeps the first stage, or where that is slower the wire, busy after a frame."""
        if self._is_wire_slow():
            taken_s = num_rows * self._uplink_row_s / WIRE_SHARE
            self._pass_ends_at = MonotonicS(max(now, self._pass_ends_at) + taken_s)
            self._waiting_rows = 0
            return
        if self._waiting_rows and now >= self._pass_ends_at:
            self._pass_ends_at = MonotonicS(self._pass_ends_at + self._pass_s(self._waiting_rows))
            self._waiting_rows = 0
        if now >= self._pass_ends_at:
            self._pass_ends_at = MonotonicS(now + self._pass_s(num_rows))
        else:
            self._waiting_rows += num_rows

    def _rate(self, now: MonotonicS) -> float:
        """Committed tokens per second, lately."""
        times = self._commit_times
        if len(times) > 1 and now > times[0]:
            return (len(times) - 1) / (now - times[0])
        return 1.0 / (self._policy.plain_s or FRAME_LATENCY_S)

    # drafting

    def _draft(self, now: MonotonicS) -> None:
        if self._expanding is not None or self.is_over or not self._has_drafter:
            return
        nodes: list[TreeNode] = []
        match self._decision.mode:
            case Mode.PLAIN:
                nodes = self._shadow_to_draft()
            case Mode.CHAIN:
                nodes = self._chain_to_draft()
            case Mode.TREE:
                room, most = MAX_TREE_NODES - self._tree.num_live, self._nodes_per_draft()
                share = DRAFT_SHARE + (1.0 - DRAFT_SHARE) * self._dearness()
                least = max(LEAST_PROBABILITY, share * self.stats.least)
                while room > 0 and len(nodes) < most:
                    node = self._tree.pop_unexpanded(least)
                    if node is None:
                        break
                    nodes.append(node)
                    room -= WIDTH
        if not nodes:
            return
        self._expanding = nodes
        self._expanded_at = now
        self._num_expanded += 1
        for node in nodes:
            node.guess_depth = node.position - self._tree.root.position + 1
        paths = tuple(self._tree.path(node) for node in nodes)
        self._events.append(Expand(self._num_expanded, self._tree.root.position + 1, paths, WIDTH))

    def _nodes_per_draft(self) -> int:
        if not self._draft_time.is_known:
            return FIRST_EXPAND_NODES
        longest = MAX_EXPAND_RATIO * self._draft_time.predict(1)
        return next((num for num in EXPAND_NODES if self._draft_time.predict(num) <= longest), 1)

    def _end_expansion(self, number: int) -> list[TreeNode]:
        if self._expanding is None or number != self._num_expanded:
            raise LocalProtocolError(f"candidates number {number} were not asked for")
        nodes, self._expanding = self._expanding, None
        return nodes
