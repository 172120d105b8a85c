"""Dialling: every address of a peer, not only the first, and not somebody who did not answer a moment ago."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import multiaddr
import trio
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID

DIAL_TIMEOUT_S = 5.0
"""TCP, Noise and yamux take four round trips: 1.2 s over the longest path on Earth, and a margin for a busy node."""

DIAL_STAGGER_S = 0.25
"""Between starting to dial one address and the next (RFC 8305 "Happy Eyeballs", §5: Connection Attempt Delay)."""

UNREACHABLE_S = 10.0
"""How long a look-up skips a peer that did not answer (trap 10). The library's 60 s hide a peer that is back."""

MAX_REMEMBERED = 10_000

log = logging.getLogger(__name__)


class Dialer:
    """Dials for everybody in this host: the library's own look-ups go through it too (traps 5, 10)."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._dialing: dict[ID, trio.Event] = {}
        self._unreachable_until: dict[ID, float] = {}
        self._swarm.dial_peer = self._dial_known_peer

    async def dial_now(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> None:
        """Dials also a peer that did not answer a moment ago. Returns at once when it is connected.

        Raises:
            SwarmException: none of the addresses answers.
        """
        self._unreachable_until.pop(their_id, None)
        await self._dial(their_id, addresses)

    async def _dial_known_peer(self, their_id: ID) -> list[Any]:
        """Replaces Swarm.dial_peer, through which the DHT dials whom it has heard of."""
        if trio.current_time() < self._unreachable_until.get(their_id, 0.0):
            raise SwarmException("did not answer a moment ago")
        await self._dial(their_id, self._host.get_peerstore().addrs(their_id))
        return list(self._swarm.get_connections(their_id))

    async def _dial(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> None:
        """Dials every address (the library only the first), each a moment after the one before; the first wins."""
        if their_id == self._host.get_id():
            raise SwarmException("this is the own peer id")
        while not self._swarm.get_connections(their_id):
            under_way = self._dialing.get(their_id)
            if under_way is None:
                break
            await under_way.wait()
        if self._swarm.get_connections(their_id):
            return
        self._dialing[their_id] = over = trio.Event()
        try:
            await self._dial_staggered(their_id, addresses)
        finally:
            del self._dialing[their_id]
            over.set()
        if not self._swarm.get_connections(their_id):
            if len(self._unreachable_until) > MAX_REMEMBERED:
                self._unreachable_until.clear()
            self._unreachable_until[their_id] = trio.current_time() + UNREACHABLE_S
            raise SwarmException(f"none of its {len(addresses)} addresses answers{self._why_not()}")
        self._unreachable_until.pop(their_id, None)
        self._host.get_peerstore().add_addrs(their_id, list(addresses), 3600)

    def _why_not(self) -> str:
        # Who has another key is told nothing, so nobody can say more than this.
        if self._swarm.psk is None:
            return ": it belongs to a private swarm, whose key is needed, or is not there"
        return ": it belongs to another swarm than the one of this key, or is not there"

    async def _dial_staggered(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> None:
        with trio.move_on_after(DIAL_TIMEOUT_S + DIAL_STAGGER_S * len(addresses)):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()

                    async def attempt(address: multiaddr.Multiaddr = address, failed: trio.Event = failed) -> None:
                        try:
                            with trio.fail_after(DIAL_TIMEOUT_S):
                                await self._swarm.dial_addr(address, their_id)
                        except Exception as error:  # noqa: BLE001  # the library raises whatever its parts raise
                            log.debug("dialling %s failed: %r", address, error)
                            failed.set()
                        else:
                            nursery.cancel_scope.cancel()

                    nursery.start_soon(attempt)
                    with trio.move_on_after(DIAL_STAGGER_S):
                        await failed.wait()
