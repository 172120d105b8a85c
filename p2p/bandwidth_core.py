"""How fast bytes arrive from a peer, timed by who receives them: the node's side of a measurement of bandwidth.

A user sends a row of probes; the node answers how many bytes came within how many seconds after the first of them. Or
the user asks for a row of probes, and times them itself. What a sender believes to have sent proves nothing: it may lie
in a buffer.

Guarantees: of one peer, at most ALLOWANCE_BYTES in both directions together count in ALLOWANCE_WINDOW_S, and of all
peers together TOTAL_BYTES; beyond that, and while the node is busy, it refuses and sends nothing but one refusal per
measurement. One measurement per peer at a time; a new one ends the one before. Of peers whose measurements are older
than the window nothing is held, and of at most MAX_PEERS anything.

Assumes: frames of one peer arrive in order. ``now`` is monotonic seconds.

States of a peer: none; receiving (``count`` probes are awaited); refused (the rest of a row is ignored).

Source: the receiver's rate of packet trains (Dovrolis et al., "What do packet dispersion techniques measure?", 2001),
without their filtering: a row is long enough for TCP to leave slow start on a home line.

What is still ugly: other traffic of the same line is measured as if the line were slower, which is true of it just now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fusion_node.types import PeerId
from p2p.messages import BandwidthProbe, BandwidthReport

CHUNK_BYTES = 32 * 1024
"""Payload of one probe: small enough that the first to the last one spans nearly all, large enough to cost no CPU."""

MAX_ROW_BYTES = 2 * 1024 * 1024
"""Of one measurement in one direction: a sixth of a second at 100 Mbit/s, 17 s at 1 Mbit/s."""

ALLOWANCE_BYTES = 6 * 1024 * 1024
ALLOWANCE_WINDOW_S = 60.0
TOTAL_BYTES = 32 * 1024 * 1024
"""Of all peers together in one window: 4 Mbit/s, so that many identities cannot fill a volunteer's line."""

MAX_PEERS = 64

BUSY = "the node is busy"
SPENT = "too much was measured in the last minute"
MALFORMED = "a row of probes that is too long, or out of order"


@dataclass(slots=True)
class _Row:
    """Probes of one measurement that a peer sends us."""

    number: int
    count: int
    next_index: int = 0
    num_bytes: int = 0
    """Without the first one, whose arrival starts the clock."""
    began: float = 0.0
    is_refused: bool = False


@dataclass(slots=True)
class _Peer:
    spent: deque[tuple[float, int]] = field(default_factory=deque)
    row: _Row | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What to send back: a report, or ``num_probes`` probes of CHUNK_BYTES under the number that was asked for."""

    report: BandwidthReport | None = None
    num_probes: int = 0


class BandwidthServer:
    """See the head of this file."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Peer] = {}

    def receive(
        self, peer: PeerId, probe: BandwidthProbe, payload_bytes: int, *, is_busy: bool, now: float
    ) -> Reply | None:
        """One probe has arrived; None when nothing is to be sent."""
        self._forget_old(now)
        state = self._peers.get(peer)
        if state is None:
            if len(self._peers) >= MAX_PEERS:
                return None if probe.index else _refusal(probe, BUSY)
            state = self._peers[peer] = _Peer()
        if probe.reply_bytes:
            return self._ask_back(state, probe, is_busy=is_busy, now=now)
        if probe.index == 0:
            state.row = _Row(probe.number, probe.count, began=now)
            problem = BUSY if is_busy else self._spend(state, 0, now)
            if not 2 <= probe.count <= MAX_ROW_BYTES // CHUNK_BYTES:
                problem = MALFORMED
            if problem:
                state.row.is_refused = True
                return _refusal(probe, problem)
        return self._take(state, probe, payload_bytes, now)

    def forget(self, peer: PeerId) -> None:
        """The link with this peer is gone. What it has spent stays spent."""
        state = self._peers.get(peer)
        if state is not None:
            state.row = None

    def _ask_back(self, state: _Peer, probe: BandwidthProbe, *, is_busy: bool, now: float) -> Reply:
        num_probes = -(-min(probe.reply_bytes, MAX_ROW_BYTES) // CHUNK_BYTES)
        problem = BUSY if is_busy else self._spend(state, num_probes * CHUNK_BYTES, now)
        return _refusal(probe, problem) if problem else Reply(num_probes=max(num_probes, 2))

    def _take(self, state: _Peer, probe: BandwidthProbe, payload_bytes: int, now: float) -> Reply | None:
        row = state.row
        if row is None or row.number != probe.number or row.is_refused:
            return None
        problem = self._spend(state, payload_bytes, now)
        if (probe.index, probe.count) != (row.next_index, row.count):
            problem = MALFORMED
        if problem:
            row.is_refused = True
            return _refusal(probe, problem)
        row.next_index += 1
        if probe.index:
            row.num_bytes += payload_bytes
        if row.next_index < row.count:
            return None
        state.row = None
        return Reply(BandwidthReport(row.number, row.num_bytes, max(now - row.began, 0.0)))

    def _spend(self, state: _Peer, num_bytes: int, now: float) -> str:
        """Counts the bytes, or says why they are too many."""
        spent = sum(size for _, size in state.spent)
        total = sum(size for peer in self._peers.values() for _, size in peer.spent)
        if spent + num_bytes > ALLOWANCE_BYTES or total + num_bytes > TOTAL_BYTES:
            return SPENT
        if num_bytes:
            state.spent.append((now, num_bytes))
        return ""

    def _forget_old(self, now: float) -> None:
        for peer, state in list(self._peers.items()):
            while state.spent and now - state.spent[0][0] > ALLOWANCE_WINDOW_S:
                state.spent.popleft()
            began = state.row.began if state.row is not None else float("-inf")
            if not state.spent and now - began > ALLOWANCE_WINDOW_S:
                del self._peers[peer]


def _refusal(probe: BandwidthProbe, problem: str) -> Reply:
    return Reply(BandwidthReport(probe.number, 0, 0.0, problem))
