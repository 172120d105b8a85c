"""What the core tells of its connections: ages that are those of the facts."""

from __future__ import annotations

import random

from fusion_node.types import MonotonicS, UnixS
from p2p.identity import Identity
from p2p.membership_core import HEARTBEAT_S, Connection, Membership, Moment, Silence, WayIn
from p2p.peer_book import PeerBook
from p2p.record_exchange import RecordExchange
from p2p.records import RecordTable

US, THEM = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))
ADDRESS = f"/ip4/192.0.2.7/tcp/4600/p2p/{THEM}"


def at(seconds: float) -> Moment:
    return Moment(MonotonicS(seconds), UnixS(1_800_000_000.0 + seconds))


def membership() -> Membership:
    chance = random.Random(1)
    return Membership(
        US,
        serve=True,
        named=[WayIn(THEM, (ADDRESS,))],
        book=PeerBook(),
        exchange=RecordExchange(RecordTable(), chance),
        chance=chance,
    )


def test_a_connection_is_as_old_as_it_is_and_says_who_made_it() -> None:
    core = membership()
    core.start(at(0.0))
    assert core.connections(at(0.0)) == []
    core.connection_opened(THEM, at(1.0))
    core.dialled(THEM, at(1.5))
    assert core.connections(at(11.0)) == [Connection(THEM, 10.0, 10.0, False, True, (ADDRESS,))]
    core.connection_closed(THEM, at(12.0))
    assert core.connections(at(12.0)) == []


def test_a_peer_that_was_not_heard_again_looks_older_and_then_suspect() -> None:
    core = membership()
    core.start(at(0.0))
    core.connection_opened(THEM, at(0.0))
    token = core.ask(THEM, None, at(1.0))
    core.not_answered(token, Silence.TIMEOUT, "silent", at(6.0))
    (silent,) = core.connections(at(10.0))
    assert silent.heard_s == 10.0
    assert silent.is_suspect
    core.suspect(THEM, at(11.0))
    (hearsay,) = core.connections(at(11.0))
    assert hearsay.heard_s >= HEARTBEAT_S
