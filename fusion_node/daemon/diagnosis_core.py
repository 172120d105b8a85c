"""What is right and wrong with a process' place in the network, what it means, and what to do about it.

Guarantees: one finding per thing that is looked at, in the order in which they depend on one another, so that the first
problem is the one to solve first. What is not known is said to be unknown, and why; it is never taken for good or bad.
Every finding that is not in order has a fix: a command of this program, a setting of the router, or of the machine.

Assumes a report as network_report describes it. No I/O, no clock, no state.

Source of the limits: beside each.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from ipaddress import ip_address

import msgspec

from fusion_node.daemon.network_report import AddressReport, BandwidthView, NetworkReport
from fusion_node.wire import printable
from p2p.reachability_verdict import AddressState, NatClass, Overall, Plane, Source
from p2p.records import MAX_CLOCK_SKEW_S

CLOCK_WARNING_S = MAX_CLOCK_SKEW_S / 3
"""A third of what others tolerate: still accepted, and a clock that drifts will get there."""

MIN_CLOCK_PEERS = 3
"""The median of fewer can be one peer's word."""

SLOW_UPLOAD_Bps = 250_000
"""2 Mbit/s. One decoded token of a model of hidden size 8,192 leaves a stage as 16 KiB in fp16: fifteen tokens a second
for all users together."""


class Level(enum.StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    WARNING = "warning"
    """It works, and less well than it could."""
    PROBLEM = "problem"
    """Something does not work."""
    UNKNOWN = "unknown"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        check: its name, stable, for scripts.
        what: how it is and what that means, in one line.
        fix: what to do; empty when nothing needs to be done.
    """

    check: str
    level: Level
    what: str
    fix: str = ""


def diagnose(report: NetworkReport) -> list[Finding]:
    """All findings on one process, those first on which others depend."""
    checks = (
        _listening, _swarm, _peers, _bootstrap, _clock, _versions,
        _dialability, _nat, _port_mapping, _relay, _hole_punching, _links, _bandwidth,
    )  # fmt: skip
    return [finding for check in checks for finding in check(report)]


_SOURCES = {
    Source.INTERFACE: "of this machine",
    Source.UPNP: "mapped by the router",
    Source.OBSERVED: "where peers see it",
    Source.OPERATOR: "from --announce",
    Source.LOOPBACK: "of this machine only",
}


def _ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def _unknown(check: str, report: NetworkReport, field: str, fix: str = "") -> Finding:
    return Finding(check, Level.UNKNOWN, f"unknown: {report.why_unknown(field)}", fix)


def _listening(report: NetworkReport) -> Iterator[Finding]:
    if not report.listen:
        yield Finding(
            "listening",
            Level.WARNING,
            "nothing listens: as a user this is enough, but nobody can be served",
            "fusion-node doctor --listen 0.0.0.0:4600 examines what a node there would meet",
        )
    elif _is_local_only(report):
        yield Finding(
            "listening",
            Level.WARNING,
            f"listens on {', '.join(report.listen)}: only programs on this machine can reach it",
            "fusion-node join MODEL --listen 0.0.0.0:4600 serves everybody",
        )
    else:
        ports = ", ".join([*report.listen, *report.data_listen])
        yield _ok("listening", f"listens on {ports}")


def _swarm(report: NetworkReport) -> Iterator[Finding]:
    if not report.has_swarm_key:
        yield _ok("swarm", "public: whoever has an address can connect")
    elif report.num_allowed is None:
        yield _ok("swarm", "private: only those who have the swarm's key can connect")
    else:
        yield _ok("swarm", f"private: only those who have its key, and are one of {report.num_allowed} peers")


def _peers(report: NetworkReport) -> Iterator[Finding]:
    if report.num_peers:
        yield _ok("peers", f"{_count(report.num_peers, 'peer')} connected, {_count(report.num_nodes, 'node')} known")
    elif report.bootstrap:
        yield Finding(
            "peers",
            Level.PROBLEM,
            "no peer is connected: this process is alone",
            "check that the nodes named with --peer run, and that this machine has a connection to them",
        )
    else:
        yield Finding(
            "peers",
            Level.WARNING,
            "no peer is connected, and none was named: this is a swarm of its own until somebody joins it",
            "give an address or an invite with --peer; `fusion-node invite` on a node of the swarm prints one",
        )


def _bootstrap(report: NetworkReport) -> Iterator[Finding]:
    for peer in report.bootstrap:
        name = f"…{peer.peer[-8:]} at {', '.join(peer.addresses)}"
        if peer.is_connected:
            yield _ok("bootstrap", f"{name} answers")
        else:
            problem = printable(peer.problem, limit=300) or "it was not tried yet"
            yield Finding(
                "bootstrap",
                Level.WARNING if report.num_peers else Level.PROBLEM,
                f"{name} does not answer: {problem}",
                "check that its node runs and that its address is still the one given; others are enough to stay in "
                "the swarm"
                if report.num_peers
                else "check that its node runs, that its address is still the one given, and that no firewall between "
                "here and there drops TCP to its port",
            )


def _clock(report: NetworkReport) -> Iterator[Finding]:
    clock = report.clock
    if clock is None:
        yield _unknown("clock", report, "clock")
        return
    side = "behind" if clock.offset_s > 0 else "ahead of"
    off = f"{abs(clock.offset_s):.1f} s {side} {_count(clock.num_peers, 'peer')}"
    if abs(clock.offset_s) < CLOCK_WARNING_S:
        yield _ok("clock", f"this clock is {off}")
        return
    is_refused = abs(clock.offset_s) > MAX_CLOCK_SKEW_S
    if clock.num_peers < MIN_CLOCK_PEERS:
        off += ", which are too few to tell whose clock is wrong"
    yield Finding(
        "clock",
        Level.PROBLEM if is_refused and clock.num_peers >= MIN_CLOCK_PEERS else Level.WARNING,
        f"this clock is {off}; "
        f"{'others refuse' if is_refused else f'beyond {MAX_CLOCK_SKEW_S:.0f} s others refuse'} what is signed here",
        "set the clock: `timedatectl set-ntp true` on Linux, Date & Time in the settings of macOS",
    )


def _versions(report: NetworkReport) -> Iterator[Finding]:
    ours = f"{report.software}, protocol version {report.protocol_version}"
    if not report.num_other_versions:
        yield _ok("version", ours)
    else:
        yield Finding(
            "version",
            Level.WARNING,
            f"{ours}; {_count(report.num_other_versions, 'connection')} ended because the other side speaks another",
            "update the older one: pip install --upgrade fusion-node",
        )


def _dialability(report: NetworkReport) -> Iterator[Finding]:
    if not report.listen or _is_local_only(report):
        return
    if not report.addresses:
        yield _unknown("dialability", report, "addresses")
        return
    dialable = {plane: _confirmed(report, plane) for plane in Plane}
    for address in report.addresses:
        yield _address(report, address, others_confirmed=len(dialable[address.plane]))
    if dialable[Plane.CONTROL] and not dialable[Plane.DATA] and _has_failed(report, Plane.DATA):
        port = _port_of(report.data_listen)
        yield Finding(
            "dialability",
            Level.WARNING,
            "the control port can be dialled and the data port cannot: users get a slower path to this node",
            f"let TCP port {port} in as well, in the router and in this machine's firewall",
        )


def _address(report: NetworkReport, address: AddressReport, *, others_confirmed: int) -> Finding:
    name = f"{address.address} ({address.plane} plane, {_SOURCES[address.source]})"
    told = f"{_count(address.num_confirmed, 'peer')} reached it, {address.num_failed} did not"
    why = f": {printable(address.why, limit=200)}" if address.why else ""
    match address.state:
        case AddressState.CONFIRMED:
            return _ok("dialability", f"{name}: {told}")
        case AddressState.FAILED if address.source is Source.OPERATOR:
            port = address.address.rpartition(":")[2]
            return Finding(
                "dialability",
                Level.PROBLEM,
                f"{name}: {told}{why}; it is announced all the same, because --announce says so",
                f"forward TCP port {port} of the router to this machine, or take --announce away",
            )
        case AddressState.FAILED:
            # An address of the home network is not expected to be dialled from elsewhere.
            is_expected = others_confirmed > 0 or _is_private_address(address.address)
            return Finding(
                "dialability",
                Level.OK if is_expected else Level.WARNING,
                f"{name}: {told}{why}; it is not announced",
                "" if is_expected else _open_ports(report),
            )
        case AddressState.UNCONFIRMED if _is_private_address(address.address):
            return _ok(
                "dialability", f"{name}: not tried, because no peer is on this local network; it is not announced"
            )
        case AddressState.CHECKING:
            return Finding("dialability", Level.UNKNOWN, f"{name}: is being tried; {told}")
        case _:
            return Finding("dialability", Level.UNKNOWN, f"{name}: not tried yet{why}")


def _nat(report: NetworkReport) -> Iterator[Finding]:
    seen = f"; peers see it at {', '.join(map(_text, report.seen_hosts))}" if report.seen_hosts else ""
    match report.nat:
        case NatClass.UNKNOWN if report.listen and _is_local_only(report):
            return
        case NatClass.UNKNOWN:
            yield _unknown("nat", report, "nat")
        case NatClass.NONE:
            yield _ok("nat", f"no NAT{seen}")
        case NatClass.ENDPOINT_INDEPENDENT:
            kept = {True: ", and the port is kept", False: "", None: ""}[report.is_port_preserving]
            yield _ok("nat", f"a NAT that maps a port alike for every peer{kept}: holes can be punched in it{seen}")
        case NatClass.ENDPOINT_DEPENDENT:
            yield Finding(
                "nat",
                Level.WARNING,
                f"a NAT with another port for every peer (symmetric): connections through relays stay relayed{seen}",
                _open_ports(report),
            )


def _port_mapping(report: NetworkReport) -> Iterator[Finding]:
    mapping = report.port_mapping
    if mapping is None:
        if report.listen and not _is_local_only(report):
            yield _unknown("upnp", report, "port_mapping")
    elif mapping.is_mapped:
        where = f" at {mapping.external_address}" if mapping.external_address else ""
        yield _ok("upnp", f"the router{where} forwards the ports to this machine")
    else:
        needed = report.nat not in (NatClass.UNKNOWN, NatClass.NONE) and not _confirmed(report, Plane.CONTROL)
        yield Finding(
            "upnp",
            Level.WARNING if needed else Level.OK,
            f"no port is mapped: {printable(mapping.problem, limit=200) or 'no router answered'}",
            "switch UPnP on in the router, or forward the ports by hand" if needed else "",
        )


def _relay(report: NetworkReport) -> Iterator[Finding]:
    if report.is_relay:
        yield _ok("relay", "this node relays for others")
    if not report.listen or _is_local_only(report):
        return
    names = ", ".join(f"…{relay.peer[-8:]}" for relay in report.relays)
    if _confirmed(report, Plane.CONTROL):
        yield _ok("relay", f"none needed{f'; {names} is used' if names else ''}")
    elif report.relays:
        yield Finding(
            "relay",
            Level.WARNING,
            f"reached through {names}: everybody can connect, more slowly where no hole can be punched",
            _open_ports(report),
        )
    elif "relays" in report.unknown:
        yield _unknown("relay", report, "relays")
    elif _has_failed(report, Plane.CONTROL) or report.overall is Overall.BEHIND_NAT:
        yield Finding(
            "relay",
            Level.PROBLEM,
            "this node cannot be dialled and no relay takes it: nobody can use it; "
            f"{_count(report.num_known_relays, 'node')} known to relay",
            f"{_open_ports(report)}; or let the owner of a reachable node start it with --relay",
        )


def _hole_punching(report: NetworkReport) -> Iterator[Finding]:
    punched = report.hole_punches
    if punched is None:
        yield _unknown("hole-punching", report, "hole_punches")
    elif not punched.num_tried:
        yield _ok("hole-punching", "was not needed yet")
    else:
        told = f"{punched.num_succeeded} of {punched.num_tried} attempts gave a direct connection"
        if punched.num_succeeded:
            yield _ok("hole-punching", told)
        else:
            problem = printable(punched.last_problem, limit=200)
            yield Finding(
                "hole-punching",
                Level.WARNING,
                f"{told}{f': {problem}' if problem else ''}; those connections stay relayed",
                _open_ports(report),
            )


def _links(report: NetworkReport) -> Iterator[Finding]:
    if not report.links:
        return
    kinds = [link.path for link in report.links]
    told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    resumed = sum(link.num_resumed for link in report.links)
    yield _ok("links", f"data-plane links: {told}{f'; resumed {resumed} times after a break' if resumed else ''}")


def _bandwidth(report: NetworkReport) -> Iterator[Finding]:
    if not report.bandwidth:
        yield _unknown("bandwidth", report, "bandwidth")
    for line in report.bandwidth:
        yield _line(line)


def _line(line: BandwidthView) -> Finding:
    name = f"with …{line.peer[-8:]}"
    if line.up_Bps is None or line.down_Bps is None:
        return Finding("bandwidth", Level.UNKNOWN, f"unknown {name}: {printable(line.problem, limit=200)}")
    told = f"{name}: {_speed(line.up_Bps)} up, {_speed(line.down_Bps)} down, timed by who received"
    if line.up_Bps >= SLOW_UPLOAD_Bps:
        return _ok("bandwidth", told)
    return Finding(
        "bandwidth",
        Level.WARNING,
        f"{told}; a large model's users would wait for this upload",
        "use a cable instead of Wi-Fi, end other uploads, or serve a model with a smaller hidden size",
    )


def _is_local_only(report: NetworkReport) -> bool:
    return all(_host_of(text) in ("127.0.0.1", "::1", "localhost") for text in report.listen)


def _confirmed(report: NetworkReport, plane: Plane) -> list[AddressReport]:
    return [a for a in report.addresses if a.plane is plane and a.state is AddressState.CONFIRMED]


def _has_failed(report: NetworkReport, plane: Plane) -> bool:
    return any(a.plane is plane and a.state is AddressState.FAILED for a in report.addresses)


def _open_ports(report: NetworkReport) -> str:
    ports = [port for port in (_port_of(report.listen), _port_of(report.data_listen)) if port]
    which = " and ".join(ports) or "of --listen and the next one"
    return (
        f"forward TCP ports {which} of the router to this machine (or switch on UPnP there), let them through this "
        "machine's firewall, and name the router's address with --announce if it is not found"
    )


def _port_of(addresses: tuple[str, ...]) -> str:
    return addresses[0].rpartition(":")[2] if addresses else ""


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _is_private_address(address: str) -> bool:
    try:
        return not ip_address(_host_of(address)).is_global
    except ValueError:
        return False


def _text(text: str) -> str:
    return printable(text, limit=64)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _speed(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.1f} Mbit/s"
