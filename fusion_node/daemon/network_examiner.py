"""Makes a NetworkReport of a process from what its parts know, and measures bandwidth if asked to.

A node has one for as long as it runs. Where no node runs, `visit` enters the swarm for some seconds to find out what a
node would meet, and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fusion_node
from fusion_node.client.connection import ways_in
from fusion_node.daemon.config import DEFAULT_LISTEN, check_ports
from fusion_node.daemon.network_report import (
    AddressReport,
    BandwidthView,
    BootstrapReport,
    ClockReport,
    HolePunchReport,
    LinkReport,
    NetworkReport,
    PortMappingReport,
    RelayReport,
)
from fusion_node.errors import FusionError, NoPeers
from fusion_node.types import PeerId, UnixS
from p2p.addresses import parse_listen
from p2p.allow_list import AllowList
from p2p.bandwidth import BandwidthMeter
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.invite import swarm_key_of
from p2p.libp2p_network import Libp2pNetwork
from p2p.links import LinkPool
from p2p.messages import AnyMessage, BandwidthProbe, BandwidthReport
from p2p.paths import RoutedNetwork
from p2p.reachability_verdict import AddressState, NatClass, Overall, Plane
from p2p.records import PROTOCOL_VERSION, NodeRecord, Refusal
from p2p.relays import Relays
from p2p.swarm_key import SwarmKey
from p2p.upnp import PortMapping
from p2p.websocket import WebSocketNetwork, join_address

NUM_MEASURED = 2
"""Peers with which bandwidth is measured: one of the two may have the slower line."""

NUM_TRIED = 6
"""Nodes that are asked until so many have measured."""

MEASURE_S = 40.0
"""After which no further node is asked; one that is silent costs half of it."""

LINK_TIMEOUT_S = 6.0

ENTER_S = 15.0
"""How long a visitor tries to enter the swarm."""

SETTLE_S = 25.0
"""How long a visitor waits for the verdict on its addresses: two rounds of dial-back, and a router's answer."""

_POLL_S = 0.25


class NetworkExaminer:
    """See the head of this file.

    Args:
        discovery: of the process; started.
        is_node: whether it serves, or listens to find out how that would be.
        swarm_key: of the private swarm; only that there is one is told.
        gate, allow_list, relays: None when the process has none.
        is_relay: whether it carries the connections of others.
    """

    def __init__(
        self,
        peer: PeerId,
        discovery: Discovery,
        *,
        is_node: bool,
        swarm_key: SwarmKey | None = None,
        gate: PeerGate | None = None,
        allow_list: AllowList | None = None,
        relays: Relays | None = None,
        is_relay: bool = False,
    ) -> None:
        self._peer = peer
        self._discovery = discovery
        self._is_node = is_node
        self._is_private = swarm_key is not None
        self._gate = gate
        self._allow_list = allow_list
        self._relays = relays
        self._is_relay = is_relay
        self._pool: LinkPool | None = None
        self._meter: BandwidthMeter | None = None
        self._data_listen: tuple[str, ...] = ()

    def has_links(self, pool: LinkPool, meter: BandwidthMeter | None, listen: Sequence[str] = ()) -> None:
        """The data plane is there, too; ``listen`` is where, as ``host:port``."""
        self._pool, self._meter, self._data_listen = pool, meter, tuple(listen)

    async def report(self, *, measure: bool) -> NetworkReport:
        """The facts as they are now. With ``measure``, after having measured the bandwidth with some peers."""
        discovery, unknown = self._discovery, dict[str, str]()
        bandwidth = await self._measure(unknown) if measure else ()
        if not measure:
            unknown["bandwidth"] = "it was not to be measured"
        hole_punches = await self._hole_punches(unknown)
        verdict = discovery.reachability.verdict()
        if verdict.nat is NatClass.UNKNOWN:
            unknown["nat"] = "no peer has said yet where it sees this machine"
        if not verdict.addresses:
            unknown["addresses"] = "nothing listens"
        return NetworkReport(
            peer=self._peer,
            software=f"fusion-node {fusion_node.__version__}",
            protocol_version=PROTOCOL_VERSION,
            is_node=self._is_node,
            listen=tuple(join_address(host, port) for host, port in discovery.listening),
            data_listen=self._data_listen,
            bootstrap=tuple(
                BootstrapReport(named.peer, named.addresses, named.is_connected, named.problem)
                for named in discovery.named_peers
            ),
            num_peers=discovery.num_peers,
            num_nodes=discovery.num_nodes_estimated,
            has_swarm_key=self._is_private,
            num_allowed=None if self._allow_list is None else len(self._allow_list.peers),
            num_banned=0 if self._gate is None else len(self._gate.bans()),
            num_other_versions=self._num_other_versions(),
            is_relay=self._is_relay,
            addresses=tuple(map(AddressReport.of, verdict.addresses)),
            overall=verdict.overall,
            nat=verdict.nat,
            is_port_preserving=verdict.is_port_preserving,
            seen_hosts=verdict.seen_hosts,
            port_mapping=self._port_mapping(unknown),
            relays=self._held_relays(unknown),
            num_known_relays=0 if self._relays is None else self._relays.num_candidates,
            hole_punches=hole_punches,
            clock=self._clock(unknown),
            bandwidth=bandwidth,
            links=self._links(unknown),
            unknown=unknown,
        )

    def _num_other_versions(self) -> int:
        links = 0 if self._pool is None else self._pool.counters.get("refused_wrong-version", 0)
        return links + self._discovery.table.refused.get(Refusal.WRONG_VERSION, 0)

    def _port_mapping(self, unknown: dict[str, str]) -> PortMappingReport | None:
        mapping = self._discovery.reachability.mapping
        if mapping is None:
            unknown["port_mapping"] = "the router is not asked (--no-upnp)"
        elif not mapping.is_mapped and not mapping.problem:
            unknown["port_mapping"] = "the router was asked, and has not answered yet"
        else:
            return PortMappingReport(mapping.is_mapped, mapping.external_host, mapping.problem)
        return None

    def _held_relays(self, unknown: dict[str, str]) -> tuple[RelayReport, ...]:
        if self._relays is None:
            unknown["relays"] = "this process asks no relay"
            return ()
        addresses = {str(address).partition("/p2p-circuit")[0] for address in self._relays.circuit_addresses()}
        return tuple(
            RelayReport(relay, next((text for text in sorted(addresses) if text.endswith(relay)), ""))
            for relay in self._relays.held
        )

    def _clock(self, unknown: dict[str, str]) -> ClockReport | None:
        offset_s, num_clocks = self._discovery.clock_offset_s, self._discovery.num_clocks
        if offset_s is None:
            unknown["clock"] = f"{num_clocks} of the three peers that it takes have told their time"
            return None
        return ClockReport(round(offset_s, 3), num_clocks)

    async def _hole_punches(self, unknown: dict[str, str]) -> HolePunchReport | None:
        try:
            tried = await self._discovery.call(lambda node: node.hole_punching())
        except FusionError as error:
            unknown["hole_punches"] = str(error)
            return None
        return HolePunchReport(len(tried), sum(each.is_direct for each in tried.values()))

    def _links(self, unknown: dict[str, str]) -> tuple[LinkReport, ...]:
        if self._pool is None:
            unknown["links"] = "the data plane is not up yet"
            return ()
        return tuple(
            LinkReport(
                link.peer,
                link.path.value,
                link.remote_address,
                None if link.round_trip_s is None else round(1000 * link.round_trip_s, 2),
                link.num_resumed,
            )
            for link in self._pool.links()
        )

    # Bandwidth.

    async def _measure(self, unknown: dict[str, str]) -> tuple[BandwidthView, ...]:
        if self._pool is None or self._meter is None:
            unknown["bandwidth"] = "the data plane is not up yet"
            return ()
        views: list[BandwidthView] = []
        until = time.monotonic() + MEASURE_S
        for peer, addresses in self._candidates(self._pool)[:NUM_TRIED]:
            views.append(await self._measure_with(self._pool, self._meter, peer, addresses))
            if sum(not view.problem for view in views) == NUM_MEASURED or time.monotonic() > until:
                break
        if not views:
            unknown["bandwidth"] = "no node is known to measure it with"
        # One that refuses says nothing of this line when others have measured.
        return tuple(view for view in views if not view.problem) or tuple(views[:1])

    def _candidates(self, pool: LinkPool) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Nodes to measure with: those with a link first, then by chance."""
        linked = {record.peer for record in _live(self._discovery) if pool.is_connected(PeerId(record.peer))}
        records = [record for record in _live(self._discovery) if record.peer != self._peer]
        secrets.SystemRandom().shuffle(records)
        records.sort(key=lambda record: record.peer not in linked)
        return [(PeerId(record.peer), _addresses_of(record)) for record in records]

    async def _measure_with(
        self, pool: LinkPool, meter: BandwidthMeter, peer: PeerId, addresses: Sequence[str]
    ) -> BandwidthView:
        try:
            await pool.connect(peer, addresses, timeout_s=LINK_TIMEOUT_S)
            found = await meter.measure(peer)
        except FusionError as error:
            return BandwidthView(peer, None, None, 0, str(error))
        return BandwidthView(peer, round(found.up_Bps), round(found.down_Bps), found.num_bytes)


@dataclass(frozen=True, slots=True)
class Visit:
    """How to look at a swarm without a node: as NodeConfig has it, and ``measure`` as in NetworkExaminer.report."""

    peers: tuple[str, ...] = field(repr=False)  # an invite may be a secret
    listen: str | None
    announce: tuple[str, ...]
    mdns: bool
    home: Path
    measure: bool
    swarm_key: SwarmKey | None = None


async def visit(wish: Visit) -> NetworkReport:
    """Enters the swarm under an identity of the moment, listens if so wished, waits for what peers find, and leaves.

    Raises:
        ConfigError, AddressInUse: as `fusion-node join` would.
    """
    check_ports(wish.listen or DEFAULT_LISTEN, wish.announce)
    identity = Identity.generate()
    key = swarm_key_of(wish.peers, wish.swarm_key, now=UnixS(time.time()))
    discovery = Discovery(
        identity,
        DiscoveryConfig(
            listen=() if wish.listen is None else (wish.listen,),
            bootstrap=ways_in(wish.peers, mdns=wish.mdns, home=wish.home, swarm_key=key),
            mdns=wish.mdns,
            serve=False,
            announce=wish.announce,
            upnp=wish.listen is not None,
        ),
        swarm_key=key,
    )
    websocket = WebSocketNetwork(identity, psk=None if key is None else key.noise_psk)
    network = RoutedNetwork(websocket, Libp2pNetwork(identity, discovery, psk=None if key is None else key.noise_psk))
    pool = LinkPool(
        network, identity.peer_id, on_frame=lambda *frame: take(*frame), on_closed=lambda peer, _: gone(peer)
    )
    meter = BandwidthMeter(pool)

    def take(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, BandwidthProbe | BandwidthReport):
            meter.receive(peer, message, len(payload))

    def gone(peer: PeerId) -> None:
        meter.forget(peer)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(discovery.aclose)
        stack.push_async_callback(pool.aclose)
        await discovery.start()
        relays = Relays(identity.peer_id, discovery, records=lambda: _live(discovery))
        stack.push_async_callback(relays.aclose)
        examiner = NetworkExaminer(identity.peer_id, discovery, is_node=False, swarm_key=key, relays=relays)
        listen = await _listen(wish, discovery, websocket, pool)
        examiner.has_links(pool, meter, listen)
        with contextlib.suppress(NoPeers):
            await discovery.wait_for_peer(ENTER_S)
            await discovery.find(None, timeout_s=LINK_TIMEOUT_S)
            await _settle(discovery, relays)
        return await examiner.report(measure=wish.measure)


async def _listen(wish: Visit, discovery: Discovery, websocket: WebSocketNetwork, pool: LinkPool) -> list[str]:
    """Opens the data plane beside the control plane, as a node does."""
    if wish.listen is None:
        return []
    host, port = parse_listen(wish.listen)
    websocket.on_nonce = lambda nonce, at: discovery.reachability.reached(Plane.DATA, nonce, at)
    bound = await pool.listen(join_address(host, port + 1 if port else 0))
    discovery.reachability.bound(Plane.DATA, [(host, int(bound.rpartition(":")[2]))])
    return [bound]


async def _settle(discovery: Discovery, relays: Relays) -> None:
    """Waits until it is known what this machine is to others, and how it is reached if not by itself; for SETTLE_S."""
    if not discovery.listening:
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    while loop.time() < deadline:
        verdict, mapping = discovery.reachability.verdict(), discovery.reachability.mapping
        is_told = verdict.overall is not Overall.UNKNOWN and mapping is not None and mapping != PortMapping()
        if is_told and not any(address.state is AddressState.CHECKING for address in verdict.addresses):
            if verdict.overall is not Overall.BEHIND_NAT or relays.held:
                return
            relays.want(True)
            if not relays.num_candidates:
                return
        await asyncio.sleep(_POLL_S)


def _live(discovery: Discovery) -> list[NodeRecord]:
    return discovery.table.live(now=UnixS(time.time()))


def _addresses_of(record: NodeRecord) -> tuple[str, ...]:
    return (*record.data_addresses, *record.libp2p_addresses)
