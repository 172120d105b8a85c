"""The words for a node's reachability: addresses, why they are candidates, what is known of them, and the NAT's class.

Pure data and one pure function. Who finds it out is p2p.reachability_core.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fusion_node.types import PeerId
from p2p.prefixes import ip_of


class Plane(enum.StrEnum):
    """Which of a node's two listeners."""

    CONTROL = "control"
    DATA = "data"


class Source(enum.StrEnum):
    """Why an address is a candidate."""

    INTERFACE = "interface"
    """One of this machine's own."""
    UPNP = "upnp"
    """The router says that it forwards it."""
    OBSERVED = "observed"
    """A peer sees this node's connections come from that host."""
    OPERATOR = "operator"
    """The operator says so: announced whatever is found."""
    LOOPBACK = "loopback"
    """The listener serves this machine only, which needs no proof."""


class AddressState(enum.StrEnum):
    """What is known of one address."""

    UNCONFIRMED = "unconfirmed"
    CHECKING = "checking"
    CONFIRMED = "confirmed"
    FAILED = "failed"


class NatClass(enum.StrEnum):
    """How the routers between this node and its peers map the ports of its connections (RFC 4787 §4.1)."""

    NONE = "none"
    ENDPOINT_INDEPENDENT = "endpoint-independent"
    ENDPOINT_DEPENDENT = "endpoint-dependent"
    """Also called symmetric: hole punching does not work."""
    UNKNOWN = "unknown"


class Overall(enum.StrEnum):
    """What a node is to its peers, judged by the control plane, over which everything can be carried."""

    PUBLIC = "public"
    """Who sees it can dial it: at a public address, or all those who were asked at the address at which they see it."""
    BEHIND_NAT = "behind-nat"
    """Some peer sees it at an address at which it cannot be dialled. A relay helps."""
    LOOPBACK_ONLY = "loopback-only"
    UNKNOWN = "unknown"


class Outcome(enum.StrEnum):
    """What a peer says that it did about one address."""

    DELIVERED = "delivered"
    UNREACHABLE = "unreachable"
    """No TCP connection in time."""
    BROKEN = "broken"
    """Connected, but whoever is there did not take the nonce."""
    OTHER_HOST = "other-host"
    """Not dialled: this node is not seen at that host."""
    BUSY = "busy"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where one listener might be dialled; the host is an IP address, or a name that the operator gave."""

    plane: Plane
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Observation:
    """This side's end of a TCP connection: what this machine has bound, and what the peer sees.

    Attributes:
        is_outgoing: this machine has dialled.
    """

    local_host: str
    local_port: int
    seen_host: str
    seen_port: int
    is_outgoing: bool = True


@dataclass(frozen=True, slots=True)
class AddressVerdict:
    """One address, for people and for other parts of the program.

    Attributes:
        is_announced: whether it is told to the swarm.
        confirmed_by: peers through whom a nonce arrived, in the last check that confirmed it.
        failed_by: peers who say that they could not dial it, in the last check.
        age_s: since the state began; confirmed again counts as the same state.
        checked_age_s: since a nonce last arrived; None when none has.
        why: one sentence.
    """

    plane: Plane
    host: str
    port: int
    source: Source
    state: AddressState
    is_announced: bool
    confirmed_by: tuple[PeerId, ...] = ()
    failed_by: tuple[PeerId, ...] = ()
    age_s: float = 0.0
    checked_age_s: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a node's reachability at one moment.

    Attributes:
        is_port_preserving: the router keeps the port of connections where it can; None when nothing is known.
        num_answering: connected peers that have said where they see this node.
        seen_hosts: where they do, most named first.
    """

    overall: Overall
    nat: NatClass = NatClass.UNKNOWN
    is_port_preserving: bool | None = None
    num_answering: int = 0
    seen_hosts: tuple[str, ...] = ()
    addresses: tuple[AddressVerdict, ...] = ()


def is_public(host: str) -> bool:
    """Whether the whole world could dial that host: a public address, or a name that the operator gave."""
    ip = ip_of(host)
    return ip is None or ip.is_global


def classify_nat(
    observations: Iterable[Observation], probes: Iterable[Observation] = ()
) -> tuple[NatClass, bool | None]:
    """The class of NAT, and whether it keeps ports, from what several peers see. For people: any of them may lie.

    Args:
        observations: one per peer, each of a connection of its own local port: libp2p dials from a new one each time,
            also with a listener (only hole punching dials from the listener's). They show a translation, and whether
            it keeps ports; of one that does not, they cannot show on what its choice depends.
        probes: one per peer, all from one local port, which can.
    """
    observations, probes = list(observations), list(probes)
    translated = [each for each in [*observations, *probes] if ip_of(each.seen_host) != ip_of(each.local_host)]
    if not translated:
        return (NatClass.NONE if observations else NatClass.UNKNOWN), None
    # Peers on this side of the last router see another host than the rest of the world.
    beyond = [each for each in translated if is_public(each.seen_host)] or translated
    host, num_named = Counter(each.seen_host for each in beyond).most_common(1)[0]
    seen = [each for each in beyond if each.seen_host == host and each.is_outgoing]
    is_port_preserving = all(each.seen_port == each.local_port for each in seen) if seen else None
    if len(beyond) > 1 and 2 * num_named <= len(beyond):
        return NatClass.ENDPOINT_DEPENDENT, is_port_preserving
    ports: dict[tuple[str, int], list[int]] = {}
    for each in seen:
        ports.setdefault((each.local_host, each.local_port), []).append(each.seen_port)
    several = [mapped for mapped in ports.values() if len(mapped) > 1]
    if any(len(set(mapped)) > 1 for mapped in several):
        return NatClass.ENDPOINT_DEPENDENT, is_port_preserving
    # Who keeps the port of one connection, out of so many, has not chosen it by the destination.
    if several or is_port_preserving:
        return NatClass.ENDPOINT_INDEPENDENT, is_port_preserving
    return NatClass.UNKNOWN, is_port_preserving
