"""What a process knows of its own place in the network: facts for `fusion-node doctor`, which judges them.

Only what was measured or was told by others is in here, and by whom. What is not known is None, and `unknown` says why.
"""

from __future__ import annotations

import msgspec

from p2p.reachability_verdict import AddressState, AddressVerdict, NatClass, Overall, Plane, Source


class AddressReport(msgspec.Struct, frozen=True):
    """One address at which this process might be dialled, as p2p.reachability_core judges it.

    Attributes:
        num_confirmed, num_failed: distinct peers in the last check.
        age_s: since it is in this state.
    """

    address: str
    plane: Plane
    source: Source
    state: AddressState
    is_announced: bool
    num_confirmed: int = 0
    num_failed: int = 0
    age_s: float = 0.0
    why: str = ""

    @classmethod
    def of(cls, verdict: AddressVerdict) -> AddressReport:
        host = f"[{verdict.host}]" if ":" in verdict.host else verdict.host
        return cls(
            f"{host}:{verdict.port}",
            verdict.plane,
            verdict.source,
            verdict.state,
            verdict.is_announced,
            len(verdict.confirmed_by),
            len(verdict.failed_by),
            round(verdict.age_s, 1),
            verdict.why,
        )


class BootstrapReport(msgspec.Struct, frozen=True):
    """A peer that this process was told to enter the swarm by; ``problem`` is why it does not answer."""

    peer: str
    addresses: tuple[str, ...]
    is_connected: bool
    problem: str = ""


class PortMappingReport(msgspec.Struct, frozen=True):
    """What the router was asked for over UPnP.

    Attributes:
        is_mapped: whether it forwards both ports.
        external_address: of the router, by its own word; empty when it did not say.
        problem: why it is not mapped.
    """

    is_mapped: bool
    external_address: str = ""
    problem: str = ""


class RelayReport(msgspec.Struct, frozen=True):
    """A peer that passes on connections to this process."""

    peer: str
    address: str


class HolePunchReport(msgspec.Struct, frozen=True):
    """How attempts to turn a relayed connection into a direct one went."""

    num_tried: int
    num_succeeded: int
    last_problem: str = ""


class ClockReport(msgspec.Struct, frozen=True):
    """The median of what peers' clocks say, less this one's."""

    offset_s: float
    num_peers: int


class BandwidthView(msgspec.Struct, frozen=True):
    """One peer's line and ours, each direction timed by who received; None where ``problem`` says why not."""

    peer: str
    up_Bps: float | None
    down_Bps: float | None
    num_bytes: int
    problem: str = ""


class LinkReport(msgspec.Struct, frozen=True):
    """A data-plane link."""

    peer: str
    path: str
    remote_address: str
    round_trip_ms: float | None
    num_resumed: int = 0


class NetworkReport(msgspec.Struct, frozen=True):
    """See the head of this file.

    Attributes:
        listen: ``HOST:PORT`` of the control plane, as bound; empty for a process that only dials.
        data_listen: the same of the data plane.
        num_peers: connected on the control plane.
        num_nodes: of whom a live record is known.
        num_allowed: peers on the allow-list; None when everybody who has the key may connect.
        num_other_versions: handshakes that ended because the other side speaks another version of the protocol.
        has_swarm_key: whether the swarm is private.
        num_known_relays: nodes whose records say that they relay.
        seen_hosts: where peers see this process' connections come from.
        unknown: name of a field to why it is None or empty.
    """

    peer: str
    software: str
    protocol_version: int
    is_node: bool
    listen: tuple[str, ...]
    data_listen: tuple[str, ...]
    bootstrap: tuple[BootstrapReport, ...]
    num_peers: int
    num_nodes: int
    has_swarm_key: bool
    num_allowed: int | None = None
    num_banned: int = 0
    num_other_versions: int = 0
    is_relay: bool = False
    addresses: tuple[AddressReport, ...] = ()
    overall: Overall = Overall.UNKNOWN
    nat: NatClass = NatClass.UNKNOWN
    is_port_preserving: bool | None = None
    seen_hosts: tuple[str, ...] = ()
    port_mapping: PortMappingReport | None = None
    relays: tuple[RelayReport, ...] = ()
    num_known_relays: int = 0
    hole_punches: HolePunchReport | None = None
    clock: ClockReport | None = None
    bandwidth: tuple[BandwidthView, ...] = ()
    links: tuple[LinkReport, ...] = ()
    unknown: dict[str, str] = {}

    def why_unknown(self, field: str) -> str:
        """Why a field holds nothing, for people."""
        return self.unknown.get(field, "nothing has told it yet")
