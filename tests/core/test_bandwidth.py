"""Bandwidth, timed by who receives: the node's core, and both sides over an imagined line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fusion_node.errors import PeerClosed, PeerRefused, RemoteProtocolError
from fusion_node.types import PeerId
from p2p.bandwidth import Bandwidth, BandwidthMeter
from p2p.bandwidth_core import (
    ALLOWANCE_BYTES,
    ALLOWANCE_WINDOW_S,
    BUSY,
    CHUNK_BYTES,
    MALFORMED,
    MAX_PEERS,
    MAX_ROW_BYTES,
    SPENT,
    TOTAL_BYTES,
    BandwidthServer,
    Reply,
)
from p2p.messages import AnyMessage, BandwidthProbe, BandwidthReport

USER, NODE = PeerId("user"), PeerId("node")


def feed(
    server: BandwidthServer,
    count: int,
    *,
    peer: PeerId = USER,
    number: int = 1,
    began: float = 0.0,
    is_busy: bool = False,
) -> list[Reply]:
    """A whole row, a hundredth of a second apart."""
    replies = [
        server.receive(
            peer, BandwidthProbe(number, index, count), CHUNK_BYTES, is_busy=is_busy, now=began + 0.01 * index
        )
        for index in range(count)
    ]
    return [reply for reply in replies if reply is not None]


def problem_of(replies: list[Reply]) -> str:
    assert len(replies) == 1
    assert replies[0].report is not None
    return replies[0].report.problem


def test_a_row_is_timed_from_its_first_to_its_last_probe() -> None:
    (reply,) = feed(BandwidthServer(), 11)
    assert reply.report is not None
    assert reply.report.num_bytes == 10 * CHUNK_BYTES, "the first one only starts the clock"
    assert reply.report.seconds == pytest.approx(0.1)


def test_a_busy_node_refuses_a_row_once_and_ignores_the_rest() -> None:
    assert problem_of(feed(BandwidthServer(), 8, is_busy=True)) == BUSY


def test_a_busy_node_sends_nothing_back() -> None:
    reply = BandwidthServer().receive(USER, BandwidthProbe(1, 0, 1, 1 << 20), 0, is_busy=True, now=0.0)
    assert reply == Reply(BandwidthReport(1, 0, 0.0, BUSY))


def test_what_one_peer_may_have_measured_is_bounded_and_comes_back_with_time() -> None:
    server = BandwidthServer()
    row = MAX_ROW_BYTES // CHUNK_BYTES
    for number in range(ALLOWANCE_BYTES // MAX_ROW_BYTES):
        assert problem_of(feed(server, row, number=number)) == ""
    asked = BandwidthProbe(9, 0, 1, MAX_ROW_BYTES)
    refused = server.receive(USER, asked, 0, is_busy=False, now=1.0)
    assert refused is not None
    assert problem_of([refused]) == SPENT
    later = server.receive(USER, asked, 0, is_busy=False, now=ALLOWANCE_WINDOW_S + 5.0)
    assert later == Reply(num_probes=row)


def test_many_identities_do_not_get_more_than_all_may_have() -> None:
    server = BandwidthServer()
    served = 0
    for index in range(2 * TOTAL_BYTES // MAX_ROW_BYTES):
        reply = server.receive(PeerId(f"p{index}"), BandwidthProbe(1, 0, 1, MAX_ROW_BYTES), 0, is_busy=False, now=0.0)
        assert reply is not None
        served += reply.num_probes * CHUNK_BYTES
    assert served == TOTAL_BYTES


def test_more_is_asked_for_than_a_row_may_have_and_a_row_is_sent() -> None:
    reply = BandwidthServer().receive(USER, BandwidthProbe(1, 0, 1, 2**32 - 1), 0, is_busy=False, now=0.0)
    assert reply == Reply(num_probes=MAX_ROW_BYTES // CHUNK_BYTES)


@pytest.mark.parametrize("count", [0, 1, MAX_ROW_BYTES // CHUNK_BYTES + 1, 2**32 - 1])
def test_a_row_of_a_wrong_length_is_refused(count: int) -> None:
    reply = BandwidthServer().receive(USER, BandwidthProbe(1, 0, count), CHUNK_BYTES, is_busy=False, now=0.0)
    assert reply is not None
    assert problem_of([reply]) == MALFORMED


def test_a_row_out_of_order_is_refused() -> None:
    server = BandwidthServer()
    assert server.receive(USER, BandwidthProbe(1, 0, 4), CHUNK_BYTES, is_busy=False, now=0.0) is None
    reply = server.receive(USER, BandwidthProbe(1, 2, 4), CHUNK_BYTES, is_busy=False, now=0.1)
    assert reply is not None
    assert problem_of([reply]) == MALFORMED
    assert server.receive(USER, BandwidthProbe(1, 3, 4), CHUNK_BYTES, is_busy=False, now=0.2) is None


def test_a_lost_link_ends_its_row() -> None:
    server = BandwidthServer()
    server.receive(USER, BandwidthProbe(1, 0, 3), CHUNK_BYTES, is_busy=False, now=0.0)
    server.forget(USER)
    assert server.receive(USER, BandwidthProbe(1, 1, 3), CHUNK_BYTES, is_busy=False, now=0.1) is None


def test_peers_that_are_remembered_are_bounded() -> None:
    server = BandwidthServer()
    for index in range(MAX_PEERS):
        server.receive(PeerId(f"p{index}"), BandwidthProbe(1, 0, 4), 1, is_busy=False, now=0.0)
    assert problem_of(feed(server, 4)) == BUSY
    assert problem_of(feed(server, 4, began=2 * ALLOWANCE_WINDOW_S)) == "", "the others are forgotten by then"


class Line:
    """A user and a node, with an imagined line between them that takes its time for every byte."""

    def __init__(self, *, up_Bps: float, down_Bps: float, is_busy: bool = False) -> None:
        self.now = 0.0
        self._up_Bps, self._down_Bps = up_Bps, down_Bps
        self.user = BandwidthMeter(_Side(self._to_node), clock=lambda: self.now)
        self.node = BandwidthMeter(_Side(self._to_user), is_busy=lambda: is_busy, clock=lambda: self.now)

    def _to_node(self, message: AnyMessage, payload: bytes) -> None:
        assert isinstance(message, BandwidthProbe | BandwidthReport)
        self.now += len(payload) / self._up_Bps
        self.node.receive(USER, message, len(payload))

    def _to_user(self, message: AnyMessage, payload: bytes) -> None:
        assert isinstance(message, BandwidthProbe | BandwidthReport)
        self.now += len(payload) / self._down_Bps
        self.user.receive(NODE, message, len(payload))


class _Side:
    def __init__(self, deliver: Callable[[AnyMessage, bytes], None]) -> None:
        self._deliver = deliver

    def send(self, peer: PeerId, message: AnyMessage, payload: bytes = b"") -> None:
        # Not at once: a network does not call back from within `send`.
        asyncio.get_running_loop().call_soon(self._deliver, message, payload)


@pytest.mark.parametrize(("up_Bps", "down_Bps"), [(2e5, 4e6), (3e7, 1e6), (1e9, 1e9)])
async def test_both_directions_are_measured_as_they_are(up_Bps: float, down_Bps: float) -> None:
    line = Line(up_Bps=up_Bps, down_Bps=down_Bps)
    measured = await line.user.measure(NODE)
    assert isinstance(measured, Bandwidth)
    assert measured.up_Bps == pytest.approx(up_Bps)
    assert measured.down_Bps == pytest.approx(down_Bps)
    assert measured.num_bytes <= 2 * (MAX_ROW_BYTES + (256 << 10)) <= ALLOWANCE_BYTES, "one measurement fits"


async def test_a_refusal_is_the_peers_and_says_why() -> None:
    with pytest.raises(PeerRefused, match=BUSY):
        await Line(up_Bps=1e6, down_Bps=1e6, is_busy=True).user.measure(NODE)


async def test_probes_to_a_user_that_did_not_ask_for_them_are_a_breach() -> None:
    user = Line(up_Bps=1e6, down_Bps=1e6).user
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        user.receive(NODE, BandwidthProbe(0, 0, 4), CHUNK_BYTES)


class _Silent:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []

    def send(self, peer: PeerId, message: AnyMessage, payload: bytes = b"") -> None:
        self.sent.append(message)


async def _first_number(side: _Silent, measuring: asyncio.Task[Bandwidth]) -> int:
    await asyncio.sleep(0)
    assert not measuring.done()
    first = side.sent[0]
    assert isinstance(first, BandwidthProbe)
    return first.number


async def test_a_node_that_claims_more_than_was_sent_is_not_believed() -> None:
    side = _Silent()
    meter = BandwidthMeter(side)
    measuring = asyncio.create_task(meter.measure(NODE))
    meter.receive(NODE, BandwidthReport(await _first_number(side, measuring), 2**32 - 1, 0.001), 0)
    with pytest.raises(RemoteProtocolError, match="reports"):
        await measuring


async def test_a_report_of_somebody_else_is_ignored() -> None:
    side = _Silent()
    meter = BandwidthMeter(side)
    measuring = asyncio.create_task(meter.measure(NODE))
    number = await _first_number(side, measuring)
    meter.receive(PeerId("stranger"), BandwidthReport(number, 1, 1.0), 0)
    meter.forget(PeerId("stranger"))
    await asyncio.sleep(0)
    assert not measuring.done()
    meter.forget(NODE)
    with pytest.raises(PeerClosed):
        await measuring


async def test_two_nodes_measure_each_other_at_the_same_time() -> None:
    line = Line(up_Bps=1e6, down_Bps=1e6)
    line.user = BandwidthMeter(_Side(line._to_node), is_busy=lambda: False, clock=lambda: line.now)
    there, back = await asyncio.gather(line.user.measure(NODE), line.node.measure(USER))
    # Both directions share the imagined clock, so that each sees at least half of the line.
    assert min(there.up_Bps, there.down_Bps, back.up_Bps, back.down_Bps) > 0.3e6
