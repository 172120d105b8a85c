"""Hole punching: what a stranger can make us dial, how often, and whose turn it is when many want one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from p2p.libp2p_adapter import hole_punching
from p2p.libp2p_adapter.hole_punching import (
    ATTEMPTS_OF_A_PEER,
    MAX_AT_ONCE,
    MAX_REDIALS,
    MAX_TRYING,
    TURN_S,
    HolePuncher,
    _connect,
    _connect_message,
    _targets,
)

LAN = [("192.168.1.1", 8080), ("10.0.0.1", 3306), ("192.168.1.10", 5432)]
US = [("45.1.1.5", 40_000), ("10.0.0.7", 40_000)]


def peer_id(number: int) -> ID:
    return ID.from_pubkey(create_new_key_pair(number.to_bytes(32, "big")).public_key)


def targets(theirs: Sequence[tuple[str, int]], ours: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return _targets(_connect_message(list(theirs)), list(ours))


@pytest.mark.parametrize("outside", [[], [("45.2.2.2", 5000)]])
def test_who_does_not_share_our_outside_address_is_not_dialled_in_our_local_network(
    outside: list[tuple[str, int]],
) -> None:
    assert targets([*outside, *LAN], US) == outside


def test_a_private_address_that_both_name_is_no_sign_of_one_network() -> None:
    assert targets([("10.0.0.7", 5000), ("10.0.0.1", 3306)], US) == []


def test_who_shares_our_outside_address_is_dialled_at_one_local_address() -> None:
    assert targets([("45.1.1.5", 5000), *LAN], US) == [("45.1.1.5", 5000), LAN[0]]


def test_where_nobody_has_an_outside_address_a_local_one_is_dialled() -> None:
    assert targets(LAN, [("10.0.0.7", 40_000)]) == [LAN[0]]


def test_system_services_and_odd_addresses_are_not_dialled() -> None:
    odd = [("45.2.2.2", 22), ("127.0.0.1", 5000), ("224.0.0.1", 5000), ("169.254.1.1", 5000)]
    assert targets(odd, [("10.0.0.7", 40_000)]) == []


def test_a_refused_dial_is_repeated_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = []

    class Refusing:
        async def bind(self, where: tuple[str, int]) -> None: ...

        async def connect(self, where: tuple[str, int]) -> None:
            dials.append(where)
            raise ConnectionRefusedError

        def close(self) -> None: ...

    def refusing(sock: socket.socket) -> Refusing:
        sock.close()
        return Refusing()

    monkeypatch.setattr(hole_punching.trio.socket, "from_stdlib_socket", refusing)

    async def work() -> None:
        with trio.fail_after(3600):
            assert await _connect("127.0.0.1", 5000, 0) is None

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(dials) == MAX_REDIALS + 1


class Puncher(HolePuncher):
    """Attempts that never succeed, and take as long as they are let or no time at all."""

    def __init__(self, tasks: trio.Nursery, *, stalling: frozenset[ID] = frozenset()) -> None:
        swarm = SimpleNamespace(get_connections=lambda peer: [])
        super().__init__(SimpleNamespace(get_network=lambda: swarm, set_stream_handler=lambda *_: None), tasks)
        self.stalling = stalling
        self.attempts: list[ID] = []

    async def _initiate(self, connection: Any, their_id: ID) -> None:
        self.attempts.append(their_id)
        if their_id in self.stalling:
            await trio.sleep_forever()

    async def _respond(self, stream: Any, their_id: ID) -> None:
        await self._initiate(stream, their_id)


def connection_with(peer: ID) -> Any:
    return SimpleNamespace(muxed_conn=SimpleNamespace(peer_id=peer), is_closed=False)


def test_one_peer_gets_a_few_attempts_an_hour() -> None:
    async def work() -> None:
        async with trio.open_nursery() as nursery:
            puncher, peer = Puncher(nursery), peer_id(1)
            for _ in range(20):
                puncher.start(connection_with(peer))
                await trio.sleep(30)
            in_ten_minutes = len(puncher.attempts)
            assert 3 <= in_ten_minutes <= ATTEMPTS_OF_A_PEER.burst + 600 * ATTEMPTS_OF_A_PEER.per_s
            puncher.start(connection_with(peer_id(2)))
            await trio.sleep(30)
            assert puncher.attempts.count(peer_id(2)) == 3  # nobody pays for another
            nursery.cancel_scope.cancel()

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


def test_peers_that_stall_keep_their_turn_for_a_bounded_time_and_few_wait() -> None:
    strangers = frozenset(peer_id(number) for number in range(MAX_TRYING + 20))
    honest = peer_id(10_000)

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            puncher = Puncher(nursery, stalling=strangers)
            for stranger in list(strangers)[:MAX_AT_ONCE]:
                puncher.start(connection_with(stranger))
            await trio.sleep(1)
            assert len(puncher.attempts) == MAX_AT_ONCE
            puncher.start(connection_with(honest))
            await trio.sleep(2 * TURN_S)
            assert honest in puncher.attempts
            for stranger in strangers:
                puncher.start(connection_with(stranger))
            assert len(puncher.trying) == MAX_TRYING
            await trio.sleep(3600)
            assert not puncher.trying
            nursery.cancel_scope.cancel()

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("as_responder", [False, True])
def test_socket_whose_handshake_is_cancelled_is_closed(as_responder: bool) -> None:
    """As when another attempt has succeeded. The library closes it for its own dials only."""

    async def hang(*_: Any) -> None:
        await trio.sleep_forever()

    async def cancelled() -> int:
        swarm = SimpleNamespace(psk=None, upgrade_inbound_raw_conn=hang, upgrade_outbound_raw_conn=hang)
        host = SimpleNamespace(get_network=lambda: swarm, set_stream_handler=lambda protocol, handler: None)
        ours, theirs = (trio.socket.from_stdlib_socket(end) for end in socket.socketpair())
        with theirs, trio.CancelScope() as scope:
            async with trio.open_nursery() as tasks:
                puncher = HolePuncher(host, tasks)
                scope.deadline = trio.current_time() + 0.01
                await puncher._upgrade(ours, peer_id(1), as_responder=as_responder)
        return ours.fileno()

    assert trio.run(cancelled) == -1
