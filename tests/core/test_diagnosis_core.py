"""What doctor concludes from a report of the network."""

from __future__ import annotations

import msgspec
import pytest

from fusion_node.daemon.diagnosis_core import Finding, Level, SLOW_UPLOAD_Bps, diagnose
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
from p2p.reachability_verdict import AddressState, NatClass, Overall, Plane, Source

PEER = "12D3KooW" + "x" * 44
CONTROL, DATA = "45.1.0.1:4600", "45.1.0.1:4601"


def address(text: str, plane: Plane, state: AddressState, **other: object) -> AddressReport:
    is_announced = state is AddressState.CONFIRMED
    return msgspec.structs.replace(AddressReport(text, plane, Source.INTERFACE, state, is_announced), **other)


HEALTHY = NetworkReport(
    peer=PEER,
    software="fusion-node 0.1.0",
    protocol_version=2,
    is_node=True,
    listen=("0.0.0.0:4600",),
    data_listen=("0.0.0.0:4601",),
    bootstrap=(BootstrapReport(PEER, (CONTROL,), is_connected=True),),
    num_peers=3,
    num_nodes=4,
    has_swarm_key=False,
    addresses=(
        address(CONTROL, Plane.CONTROL, AddressState.CONFIRMED, num_confirmed=3),
        address(DATA, Plane.DATA, AddressState.CONFIRMED, num_confirmed=3),
    ),
    overall=Overall.PUBLIC,
    nat=NatClass.NONE,
    port_mapping=PortMappingReport(is_mapped=False, problem="no router answered"),
    hole_punches=HolePunchReport(0, 0),
    clock=ClockReport(0.1, 3),
    bandwidth=(BandwidthView(PEER, 2e6, 4e6, 1 << 20),),
    links=(LinkReport(PEER, "direct", DATA, 3.0),),
)
BEHIND_NAT = msgspec.structs.replace(
    HEALTHY,
    addresses=(
        address("192.168.1.10:4600", Plane.CONTROL, AddressState.FAILED, num_failed=3),
        address("192.168.1.10:4601", Plane.DATA, AddressState.FAILED, num_failed=3),
    ),
    overall=Overall.BEHIND_NAT,
    nat=NatClass.ENDPOINT_INDEPENDENT,
    relays=(RelayReport(PEER, CONTROL),),
)


def found(check: str, **changes: object) -> list[Finding]:
    return [f for f in diagnose(msgspec.structs.replace(HEALTHY, **changes)) if f.check == check]


def only(check: str, **changes: object) -> Finding:
    findings = found(check, **changes)
    assert len(findings) == 1, findings
    return findings[0]


def test_a_healthy_node_has_nothing_to_fix() -> None:
    findings = diagnose(HEALTHY)
    assert {finding.level for finding in findings} == {Level.OK}
    assert not [finding.fix for finding in findings if finding.fix]


def test_whatever_is_not_in_order_says_what_to_do() -> None:
    reports = [
        BEHIND_NAT,
        msgspec.structs.replace(
            BEHIND_NAT, relays=(), nat=NatClass.ENDPOINT_DEPENDENT, hole_punches=HolePunchReport(3, 0)
        ),
        msgspec.structs.replace(HEALTHY, num_peers=0, listen=("127.0.0.1:4600",), clock=ClockReport(99.0, 5)),
        msgspec.structs.replace(
            HEALTHY, num_other_versions=2, listen=(), bandwidth=(BandwidthView(PEER, 1e4, 1e4, 9),)
        ),
    ]
    for report in reports:
        bad = [finding for finding in diagnose(report) if finding.level in (Level.WARNING, Level.PROBLEM)]
        assert bad
        assert all(finding.fix for finding in bad), bad


def test_a_listener_on_loopback_is_told_how_to_serve_others() -> None:
    finding = only("listening", listen=("127.0.0.1:4600",))
    assert finding.level is Level.WARNING
    assert "--listen 0.0.0.0:4600" in finding.fix
    assert not found("dialability", listen=("127.0.0.1:4600",)), "nobody else is expected to reach it"


def test_a_node_that_nobody_can_dial_and_no_relay_takes_has_a_problem() -> None:
    report = msgspec.structs.replace(BEHIND_NAT, relays=())
    problems = [finding for finding in diagnose(report) if finding.level is Level.PROBLEM]
    assert [finding.check for finding in problems] == ["relay"]
    assert "4600 and 4601" in problems[0].fix


def test_a_node_behind_nat_with_a_relay_works_and_is_told_how_to_be_faster() -> None:
    findings = diagnose(BEHIND_NAT)
    assert Level.PROBLEM not in {finding.level for finding in findings}
    assert [finding.check for finding in findings if finding.level is Level.WARNING] == ["upnp", "relay"]


def test_a_data_port_that_the_firewall_keeps_is_named() -> None:
    addresses = (HEALTHY.addresses[0], address(DATA, Plane.DATA, AddressState.FAILED, num_failed=2))
    findings = found("dialability", addresses=addresses)
    assert any("TCP port 4601" in finding.fix for finding in findings)


def test_an_announced_address_that_nobody_can_dial_is_a_problem() -> None:
    announced = address(
        "node.example.org:4600", Plane.CONTROL, AddressState.FAILED, num_failed=3, source=Source.OPERATOR
    )
    findings = found("dialability", addresses=(*HEALTHY.addresses, announced))
    assert [finding.level for finding in findings] == [Level.OK, Level.OK, Level.PROBLEM]


@pytest.mark.parametrize(
    ("offset_s", "num_peers", "level"),
    [
        (2.0, 5, Level.OK),
        (-2.0, 5, Level.OK),
        (15.0, 5, Level.WARNING),
        (-45.0, 5, Level.PROBLEM),
        (45.0, 1, Level.WARNING),
    ],
)
def test_a_clock_is_judged_by_the_median_of_enough_peers(offset_s: float, num_peers: int, level: Level) -> None:
    assert only("clock", clock=ClockReport(offset_s, num_peers)).level is level


def test_what_is_not_known_is_said_to_be_unknown_and_why() -> None:
    finding = only("clock", clock=None, unknown={"clock": "no peer has told its time"})
    assert finding.level is Level.UNKNOWN
    assert "no peer has told its time" in finding.what
    for change in ({"nat": NatClass.UNKNOWN}, {"port_mapping": None}, {"hole_punches": None}, {"addresses": ()}):
        assert Level.UNKNOWN in {finding.level for finding in diagnose(msgspec.structs.replace(HEALTHY, **change))}
    assert only("bandwidth", bandwidth=()).level is Level.UNKNOWN


def test_a_bootstrap_peer_that_is_down_matters_only_when_it_is_the_only_way() -> None:
    down = (BootstrapReport(PEER, (CONTROL,), is_connected=False, problem="connection refused"),)
    assert only("bootstrap", bootstrap=down).level is Level.WARNING
    alone = only("bootstrap", bootstrap=down, num_peers=0)
    assert alone.level is Level.PROBLEM
    assert "connection refused" in alone.what


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    report = msgspec.structs.replace(
        HEALTHY,
        bootstrap=(BootstrapReport(PEER, (CONTROL,), is_connected=False, problem="\x1b[2J"),),
        port_mapping=PortMappingReport(is_mapped=False, problem="\x1b]0;x\x07"),
        hole_punches=HolePunchReport(1, 0, "\x1b[31m"),
        bandwidth=(BandwidthView(PEER, None, None, 0, "\x1b[5m"),),
    )
    assert not any("\x1b" in finding.what + finding.fix for finding in diagnose(report))


def test_a_slow_upload_is_a_warning() -> None:
    slow = only("bandwidth", bandwidth=(BandwidthView(PEER, SLOW_UPLOAD_Bps / 2, 1e7, 1 << 18),))
    assert slow.level is Level.WARNING
    assert "1.0 Mbit/s up" in slow.what
