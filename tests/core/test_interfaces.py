"""Which addresses of a machine are candidates, and that their changes are noticed."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

import pytest

from p2p import interfaces
from p2p.interfaces import Interface, candidate_hosts, read_interfaces, watch_addresses

EVERYWHERE = "0.0.0.0"  # noqa: S104

LOOPBACK = ("lo", "127.0.0.1", "::1")


def machine(*rows: tuple[str, ...], bridges: tuple[str, ...] = ()) -> list[Interface]:
    return [Interface(name, tuple(map(ipaddress.ip_address, addresses)), name in bridges) for name, *addresses in rows]


@pytest.mark.parametrize(
    "name",
    ["docker0", "br-0123456789ab", "podman1", "cni0", "cni-podman0", "virbr0", "veth12ab", "vmnet8", "bridge100"],
)
def test_bridge_of_containers_is_no_candidate(name: str) -> None:
    found = machine(LOOPBACK, ("eth0", "192.168.1.5"), (name, "172.17.0.1"))
    assert candidate_hosts(EVERYWHERE, found) == ["192.168.1.5"]


@pytest.mark.parametrize("name", ["eth0", "br0", "wlan0", "br-lan", "enp3s0", "wg0", "tailscale0", "en0", "bridge0"])
def test_network_in_the_range_that_docker_uses_stays_a_candidate(name: str) -> None:
    assert candidate_hosts(EVERYWHERE, machine(LOOPBACK, (name, "172.17.0.1"))) == ["172.17.0.1"]


def test_bridge_of_any_name_without_a_network_card_is_no_candidate() -> None:
    found = machine(LOOPBACK, ("eth0", "10.0.0.2"), ("lan", "172.30.0.1"), bridges=("lan",))
    assert candidate_hosts(EVERYWHERE, found) == ["10.0.0.2"]


def test_public_addresses_come_first_and_what_nobody_can_dial_not_at_all() -> None:
    found = machine(
        LOOPBACK,
        ("eth0", "10.0.0.2", "8.8.8.8", "169.254.3.4", "fe80::1", "2001:4860:4860::8888", "fd00::2", "224.0.0.1"),
    )
    assert candidate_hosts(EVERYWHERE, found) == ["8.8.8.8", "10.0.0.2"]
    assert candidate_hosts("::", found) == ["2001:4860:4860::8888", "fd00::2"]


def test_loopback_is_a_candidate_only_when_there_is_nothing_else_or_when_it_is_asked_for() -> None:
    assert candidate_hosts(EVERYWHERE, machine(LOOPBACK)) == ["127.0.0.1"]
    assert candidate_hosts(EVERYWHERE, machine(LOOPBACK, ("docker0", "172.17.0.1"))) == ["127.0.0.1"]
    assert candidate_hosts("127.0.0.1", machine(LOOPBACK, ("eth0", "10.0.0.2"))) == ["127.0.0.1"]


def test_linux_description_of_bridges_is_read(tmp_path: Path) -> None:
    for name in ("containers/brif/veth1", "veth1", "home/brif/eth0", "eth0/device", "bonded/brif/bond0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bond0/lower_eth1").mkdir(parents=True)
    assert interfaces._is_virtual_bridge(tmp_path / "containers")
    assert not any(interfaces._is_virtual_bridge(tmp_path / name) for name in ("home", "bonded", "eth0", "missing"))


def test_this_machine_has_loopback() -> None:
    assert any(str(ip) == "127.0.0.1" for each in read_interfaces() for ip in each.addresses)


async def test_change_of_addresses_is_told_once() -> None:
    now = machine(LOOPBACK, ("eth0", "10.0.0.2"))
    told: list[list[str]] = []
    changed = asyncio.Event()

    def on_change() -> None:
        told.append(candidate_hosts(EVERYWHERE, now))
        changed.set()

    watching = asyncio.create_task(watch_addresses(on_change, read=lambda: now, every_s=0.001))
    try:
        now = machine(("eth0", "10.0.0.2"), LOOPBACK, ("docker0", "172.17.0.1"))  # nothing that matters
        await asyncio.sleep(0.01)
        now = machine(LOOPBACK, ("eth0", "10.0.0.3"))
        async with asyncio.timeout(10.0):
            await changed.wait()
        await asyncio.sleep(0.01)
    finally:
        watching.cancel()
    assert told == [["10.0.0.3"]]
