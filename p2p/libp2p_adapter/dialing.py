"""Dialling: every address of a peer, not only the first, and not somebody who did not answer a moment ago."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import multiaddr
import trio
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.transport.exceptions import SecurityUpgradeFailure

from fusion_node.errors import PeerClosed, PeerUnreachable
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.libp2p_adapter.circuits import Circuits
from p2p.libp2p_adapter.connections import best_first, direct, relay_of
from p2p.libp2p_adapter.messages import translated
from p2p.libp2p_adapter.multiaddrs import is_circuit, multiaddr_of, parts_of
from p2p.seam import Gate

DIAL_TIMEOUT_S = 5.0
"""TCP, Noise and yamux take four round trips: 1.2 s over the longest path on Earth, and a margin for a busy node."""

DIAL_STAGGER_S = 0.25
"""Between starting to dial one address and the next (RFC 8305 "Happy Eyeballs", §5: Connection Attempt Delay)."""

DIRECT_ALONE_S = 1.0
"""The head start of direct addresses over those through relays: a dial over 300 ms of round trip fits."""

CIRCUIT_TIMEOUT_S = 10.0
"""To the relay, through it, and the handshake."""

UNREACHABLE_S = 10.0
"""How long a look-up skips a peer that did not answer (trap 10). The library's 60 s hide a peer that is back."""

GONE_S = 0.1
"""Between the error on a stream of a connection that is reset, and the removal of the connection."""

MAX_REMEMBERED = 10_000

log = logging.getLogger(__name__)


class Dialer:
    """Dials for everybody in this host: the library's own look-ups go through it too (traps 5, 10)."""

    def __init__(self, host: Any, circuits: Circuits, gate: Gate) -> None:
        self._gate = gate
        self._host = host
        self._swarm = host.get_network()
        self._circuits = circuits
        self._dialing: dict[ID, trio.Event] = {}
        self._unreachable_until: dict[ID, float] = {}
        self._unanswered: Counter[int] = Counter()
        """Connections, by ``id``, on which somebody waits for an answer just now."""
        self._swarm.dial_peer = self._dial_known_peer

    async def dial_now(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> None:
        """Dials also a peer that did not answer a moment ago. Returns at once when it is connected.

        Raises:
            SwarmException: none of the addresses answers.
        """
        self._unreachable_until.pop(their_id, None)
        await self._dial(their_id, addresses)

    @contextmanager
    def waiting_for(self, connection: Any) -> Iterator[None]:
        """For as long as somebody waits for an answer on it, it may be dead: whoever names a relay gets the relay."""
        self._unanswered[id(connection)] += 1
        try:
            yield
        finally:
            self._unanswered[id(connection)] -= 1
            if not self._unanswered[id(connection)]:
                del self._unanswered[id(connection)]

    async def connection_for(self, their_id: ID, address: PeerAddress | None) -> Any:
        """The best connection that an address stands for: a direct one where there is one, or else as it says.

        Args:
            address: None for the connections that there are.

        Raises:
            SwarmException, FusionError, trio.TooSlowError: there is none, and none can be made.
        """
        if their_id == self._host.get_id():
            raise SwarmException("this is the own peer id")
        connections = best_first(self._swarm.get_connections(their_id))
        through_relay = address is not None and address.via is not None
        if connections and through_relay and id(connections[0]) in self._unanswered:
            connections = [each for each in connections if relay_of(each) is not None]
        if connections and (address is None or relay_of(connections[0]) is None):
            return connections[0]
        if address is None:
            raise SwarmException("there is no connection with it")
        if address.via is not None:
            via = ID.from_base58(address.via)
            for connection in connections:
                if relay_of(connection) == via:
                    return connection
        return await self._dial_one(multiaddr_of(address), their_id)

    async def _dial_one(self, address: multiaddr.Multiaddr, their_id: ID) -> Any:
        before, circuit, _ = str(address).partition("/p2p-circuit")
        if not circuit:
            self._check_allowed(their_id, parts_of(address)[1])
            with trio.fail_after(DIAL_TIMEOUT_S):
                return await self._swarm.dial_addr(address, their_id)
        to_relay, _, relay = before.rpartition("/p2p/")
        relay_id = ID.from_base58(relay)
        self._check_allowed(their_id, "")
        self._check_allowed(relay_id, parts_of(multiaddr.Multiaddr(to_relay))[1])
        if direct(self._swarm.get_connections(relay_id)):
            try:
                with translated(relay):
                    return await self._circuits.dial(relay_id, their_id)
            except (PeerClosed, PeerUnreachable):
                await trio.sleep(GONE_S)
                if direct(self._swarm.get_connections(relay_id)):
                    raise
            # That connection had died, which nobody knew until something was sent: a router has another address now.
        with trio.fail_after(DIAL_TIMEOUT_S):
            await self._swarm.dial_addr(multiaddr.Multiaddr(to_relay), relay_id)
        return await self._circuits.dial(relay_id, their_id)

    async def _dial_known_peer(self, their_id: ID) -> list[Any]:
        """Replaces Swarm.dial_peer, through which the DHT dials whom it has heard of."""
        if trio.current_time() < self._unreachable_until.get(their_id, 0.0):
            raise SwarmException("did not answer a moment ago")
        # A look-up asks tens of peers: not worth a relay's time, and those who need one do not serve the DHT.
        known = self._host.get_peerstore().addrs(their_id)
        await self._dial(their_id, [address for address in known if not is_circuit(address)])
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
        self._check_allowed(their_id, "")
        self._dialing[their_id] = over = trio.Event()
        try:
            hung_up = await self._dial_staggered(their_id, addresses)
        finally:
            del self._dialing[their_id]
            over.set()
        if not self._swarm.get_connections(their_id):
            if len(self._unreachable_until) > MAX_REMEMBERED:
                self._unreachable_until.clear()
            self._unreachable_until[their_id] = trio.current_time() + UNREACHABLE_S
            raise SwarmException(self._why_not() if hung_up else f"none of its {len(addresses)} addresses answers")
        self._unreachable_until.pop(their_id, None)
        self._host.get_peerstore().add_addrs(their_id, list(addresses), 3600)

    def _check_allowed(self, their_id: ID, host: str) -> None:
        refusal = self._gate.refuse_dial(PeerId(their_id.to_base58()), host)
        if refusal is not None:
            raise SwarmException(f"not dialled: {refusal}")

    def _why_not(self) -> str:
        # Who has another key is told nothing, so nobody can say more than this.
        swarm = "a private swarm, whose key is needed" if self._swarm.psk is None else "another swarm than this key's"
        return f"whoever is at its address hangs up: it belongs to {swarm}, or somebody else is there now"

    async def _dial_staggered(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> bool:
        """Those through relays only after DIRECT_ALONE_S, or when all direct ones have failed.

        Returns whether a connection was made that the other side, or the proof of its identity, ended.
        """
        hung_up = False
        ordered = sorted(addresses, key=is_circuit)
        with trio.move_on_after(DIAL_TIMEOUT_S + DIAL_STAGGER_S * len(addresses) + CIRCUIT_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                direct_left = [address for address in ordered if not is_circuit(address)]
                directs_failed = trio.Event()
                for address in ordered:
                    failed = trio.Event()

                    async def attempt(address: multiaddr.Multiaddr = address, failed: trio.Event = failed) -> None:
                        nonlocal hung_up
                        try:
                            await self._dial_one(address, their_id)
                        except Exception as error:  # noqa: BLE001  # the library raises whatever its parts raise
                            log.debug("dialling %s failed: %r", address, error)
                            hung_up |= isinstance(error.__cause__, SecurityUpgradeFailure)
                            failed.set()
                            if address in direct_left:
                                direct_left.remove(address)
                            if not direct_left:
                                directs_failed.set()
                        else:
                            nursery.cancel_scope.cancel()

                    if is_circuit(address) and direct_left:
                        with trio.move_on_after(DIRECT_ALONE_S):
                            await directs_failed.wait()
                    nursery.start_soon(attempt)
                    with trio.move_on_after(DIAL_STAGGER_S):
                        await failed.wait()
        return hung_up
