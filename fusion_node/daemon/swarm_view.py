"""What a node knows of the swarm around it, put together: how others can enter it, and whom it is in touch with.

For ``fusion-node invite`` and ``fusion-node peers``, over the control socket (fusion_node.daemon.control).
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from fusion_node.daemon.swarm_report import ConnectionView, InviteReply, InviteRequest, PeersReply, PeerView
from fusion_node.errors import ConfigError, FusionError
from fusion_node.types import PeerId, UnixS
from p2p.addresses import PeerAddress, is_loopback
from p2p.control import ConnectionEnds
from p2p.discovery import Discovery
from p2p.invite import Invite
from p2p.links import LinkView
from p2p.membership_core import Connection
from p2p.records import NodeRecord
from p2p.seam import PathKind
from p2p.swarm_key import SwarmKey, swarm_tag
from p2p.websocket import join_address

MAX_INVITE_PEERS = 3
"""Others that an invite names when the node itself cannot be dialled: one may leave, and each costs 50 characters."""


def data_connections(links: Iterable[LinkView]) -> list[tuple[PeerId, ConnectionView]]:
    """Those of the data plane."""
    return [
        (
            link.peer,
            ConnectionView(
                plane="data",
                path=link.path.value,
                address=link.remote_address,
                age_s=round(link.since_s, 1),
                round_trip_ms=None if link.round_trip_s is None else round(1000 * link.round_trip_s, 2),
                heard_s=round(link.heard_s, 1),
                we_dialled=link.we_dialled,
                bytes_in=link.bytes_in,
                bytes_out=link.bytes_out,
                num_resumed=link.num_resumed,
            ),
        )
        for link in links
    ]


Connections: TypeAlias = Callable[[], Awaitable[Iterable[tuple[PeerId, ConnectionView]]]]


class SwarmView:
    """Puts together what the parts of a node know.

    Args:
        addresses: where this node can be dialled or may be, best first.
        announced: of these, those of which it is known.
        records: of the live nodes that it knows.
        connections: each tells of what is open now on one plane, and with whom.
        standing_of: why a peer is refused or suspected; empty when it is not.
        met_at: when peers were last dialled with success, in Unix time.
        clock: Unix time.
    """

    def __init__(
        self,
        peer: PeerId,
        *,
        swarm_key: SwarmKey | None,
        addresses: Callable[[], Sequence[str]],
        announced: Callable[[], Sequence[str]],
        records: Callable[[], Iterable[NodeRecord]],
        connections: Sequence[Connections],
        standing_of: Callable[[PeerId], str],
        met_at: Callable[[], Iterable[tuple[str, float]]],
        clock: Callable[[], float],
    ) -> None:
        self._peer = peer
        self._swarm_key = swarm_key
        self._addresses = addresses
        self._announced = announced
        self._records = records
        self._connections = connections
        self._links: Callable[[], Iterable[LinkView]] = tuple
        self._standing_of = standing_of
        self._met_at = met_at
        self._clock = clock

    def has_links(self, links: Callable[[], Iterable[LinkView]]) -> None:
        """The data plane is up; this tells of its links from now on."""
        self._links = links

    def invite(self, request: InviteRequest) -> InviteReply:
        """An invite to the swarm, by way of this node, and of others if not everybody can dial it.

        What is confirmed comes first: addresses of this node that a peer has dialled, then those of others. Where this
        node has none that is confirmed, it may still be dialled where it listens, so that these come last.
        """
        key, tag = self._swarm_key if request.with_key else None, swarm_tag(self._swarm_key)
        announced = best_for_strangers(map(PeerAddress.parse, self._announced()))
        own = announced or best_for_strangers(map(PeerAddress.parse, self._addresses()))
        others = self._ways_through_others(announced, own)
        chosen = [*own, *others] if announced else [*others, *own]
        chosen = [address for address in chosen if not is_loopback(address.host)] or chosen
        expires_at = None if request.expires_in_s is None else UnixS(self._clock() + request.expires_in_s)
        invite = Invite(tuple(chosen), expires_at, key)
        try:
            text = invite.encode()
        except ConfigError as error:
            return InviteReply(self._peer, tag, problem=str(error))
        return InviteReply(
            peer=self._peer,
            swarm=tag,
            invite=text,
            addresses=tuple(map(str, Invite.parse(text, now=UnixS(0.0)).addresses)),
            has_key=key is not None,
            expires_at=expires_at,
            names_others=bool(others),
            is_unconfirmed=bool(own) and not announced,
            is_local=all(is_loopback(address.host) for address in chosen),
        )

    async def peers(self) -> PeersReply:
        """Everybody that this node is connected with or knows of, but itself."""
        now = self._clock()
        connections: dict[str, list[ConnectionView]] = {}
        told = [each for source in self._connections for each in await source()]
        for peer, connection in [*told, *data_connections(self._links())]:
            connections.setdefault(peer, []).append(connection)
        records = {record.peer: record for record in self._records()}
        met_at = dict(self._met_at())
        views = [
            self._view(PeerId(peer), connections.get(peer, ()), records.get(peer), met_at.get(peer), now)
            for peer in sorted({*connections, *records, *met_at} - {self._peer})
        ]
        views.sort(key=lambda view: not view.connections)
        return PeersReply(self._peer, swarm_tag(self._swarm_key), tuple(views))

    def _view(
        self,
        peer: PeerId,
        connections: Sequence[ConnectionView],
        record: NodeRecord | None,
        met_at: float | None,
        now: float,
    ) -> PeerView:
        return PeerView(
            peer=peer,
            operator="" if record is None else record.operator,
            serves=() if record is None else tuple(f"{s.model_name} {s.start}:{s.stop}" for s in record.shards),
            connections=tuple(sorted(connections, key=lambda connection: connection.plane)),
            standing=self._standing_of(peer) or ("suspect" if any(c.is_suspect for c in connections) else ""),
            record_age_s=None if record is None else round(max(0.0, now - record.issued_at), 1),
            record_left_s=None if record is None else round(record.expires_at - now, 1),
            met_s=None if met_at is None else round(max(0.0, now - met_at), 1),
        )

    def _ways_through_others(self, announced: Sequence[PeerAddress], own: Sequence[PeerAddress]) -> list[PeerAddress]:
        """Those that lead further than this node's own ones: none when a stranger from anywhere can dial it."""
        if not announced:
            farther = _BEYOND if not own else _THIS_MACHINE
        else:
            farther = _remoteness(announced[0]) if _remoteness(announced[0]) > _RELAYED else _PUBLIC
        found: list[PeerAddress] = []
        for record in sorted(self._records(), key=lambda record: -record.issued_at):
            addresses = [each for each in best_for_strangers(_parsed(record)) if _remoteness(each) < farther]
            if record.peer != self._peer and addresses and len({a.peer for a in found}) < MAX_INVITE_PEERS:
                found += addresses[:2]
        return found


def best_for_strangers(addresses: Iterable[PeerAddress]) -> list[PeerAddress]:
    """The addresses in the order in which others may best try them: without loopback unless there is nothing else.

    Names and public addresses help everybody, those behind a relay too but more slowly, private ones the neighbours.
    """
    found = list(addresses)
    outside = [address for address in found if not is_loopback(address.host)]
    return sorted(outside or found, key=_remoteness)


_PUBLIC, _RELAYED, _LOCAL_NETWORK, _THIS_MACHINE, _BEYOND = range(5)
"""From where an address can be dialled; the smaller, the farther."""


def _remoteness(address: PeerAddress) -> int:
    if is_loopback(address.host):
        return _THIS_MACHINE
    if address.kind.startswith("ip") and not ipaddress.ip_address(address.host).is_global:
        return _LOCAL_NETWORK
    return _PUBLIC if address.via is None else _RELAYED


def _parsed(record: NodeRecord) -> list[PeerAddress]:
    found = []
    for text in record.libp2p_addresses:
        try:
            address = PeerAddress.parse(text)
        except ConfigError:
            continue
        if address.peer == record.peer:
            found.append(address)
    return found


async def control_connections(discovery: Discovery) -> list[tuple[PeerId, ConnectionView]]:
    """Those of the control plane, over libp2p."""

    async def view(connection: Connection) -> tuple[PeerId, ConnectionView]:
        peer, ends = connection.peer, list[ConnectionEnds]()
        with contextlib.suppress(FusionError):
            ends = await discovery.call(lambda node: node.ends_of(peer))
        address = (
            join_address(ends[0].remote_host, ends[0].remote_port) if ends else next(iter(connection.addresses), "")
        )
        return peer, ConnectionView(
            plane="control",
            path=(PathKind.STREAM if ends else PathKind.RELAYED).value,
            address=address,
            age_s=round(connection.age_s, 1),
            heard_s=round(connection.heard_s, 1),
            we_dialled=connection.we_dialled,
            is_suspect=connection.is_suspect,
        )

    return [await view(connection) for connection in discovery.connections]
