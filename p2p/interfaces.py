"""This machine's own addresses: which of them could be dialled by others, and when they change.

An address of an interface is a *candidate*, nothing more: whether others can dial it, p2p.reachability_core finds out.
What cannot be one is left out here: unspecified, loopback, link-local and multicast addresses, and those of bridges
that containers and virtual machines hang on. Such a bridge's 172.17.0.1 exists on every machine with Docker, so whoever
is told of it finds their own machine there, or nobody. A bridge with a real network card in it is a real network.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2p.prefixes import Ip, ip_of

WATCH_EVERY_S = 2.5
"""Reading all addresses takes 1 ms: 0.04 % of a core. A change of network breaks connections for longer."""

_VIRTUAL_NAMES = re.compile(
    r"""^(
      docker\d* | docker_gwbridge | br-[0-9a-f]{12}             # Docker's default and named networks
    | podman\d* | cni-podman\d* | cni\d* | nerdctl\d*           # Podman, CNI, containerd
    | flannel\.\d+ | cali[0-9a-z]* | weave | kube-.* | cilium_.* | lxc[0-9a-f]{8,}  # Kubernetes
    | virbr\d+(-nic)? | vnet\d+ | lxcbr\d+ | lxdbr\d+ | incusbr\d+ | vmnet\d+ | vboxnet\d+  # machines
    | veth.* | bridge1\d\d | vEthernet.*                        # ends of container links; macOS, Windows
    )$""",
    re.VERBOSE,
)

_NETWORK_CLASS = Path("/sys/class/net")
"""Linux' description of its interfaces; other systems have none and are judged by names."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface that is up.

    Attributes:
        is_virtual_bridge: it is a bridge without any real network card in it.
    """

    name: str
    addresses: tuple[Ip, ...]
    is_virtual_bridge: bool = False


def read_interfaces() -> list[Interface]:
    """The interfaces of this machine that are up, as they are now."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        texts = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        ips = tuple(ip for ip in map(ip_of, texts) if ip is not None)
        if name in up and ips:
            found.append(Interface(name, ips, _is_virtual_bridge(_NETWORK_CLASS / name)))
    return found


def candidate_hosts(listen_host: str, interfaces: Iterable[Interface]) -> list[str]:
    """The hosts at which others might reach a listener on ``listen_host``, best first.

    A listener on one address has that one. A listener on all of them (0.0.0.0, ::) has those of the interfaces, and
    loopback only when there is no other: on another machine it would lead to that machine itself.
    """
    wanted = ip_of(listen_host)
    if wanted is None or not wanted.is_unspecified:
        return [listen_host]
    interfaces = list(interfaces)
    outside = {ip for each in interfaces if not _is_virtual(each) for ip in each.addresses if _is_candidate(ip)}
    loopback = {ip for each in interfaces for ip in each.addresses if ip.is_loopback}
    found = [ip for ip in outside or loopback if ip.version == wanted.version]
    return [str(ip) for ip in sorted(found, key=preference)]


def dialable_hosts(host: str) -> list[str]:
    """``candidate_hosts`` of this machine, now."""
    return candidate_hosts(host, read_interfaces())


def preference(ip: Ip) -> tuple[bool, str]:
    """Sorts addresses: a public one helps everybody, a private one only the neighbours."""
    return not ip.is_global, str(ip)


async def watch_addresses(
    on_change: Callable[[], None],
    *,
    read: Callable[[], list[Interface]] = read_interfaces,
    every_s: float = WATCH_EVERY_S,
) -> None:
    """Calls ``on_change`` whenever the candidates of this machine are others than before. Runs until cancelled."""
    known = _candidates(read())
    while True:
        await asyncio.sleep(every_s)
        found = _candidates(read())
        if found != known:
            known = found
            on_change()


def _candidates(interfaces: Iterable[Interface]) -> set[Ip]:
    return {ip for each in interfaces if not _is_virtual(each) for ip in each.addresses if _is_candidate(ip)}


def _is_virtual(interface: Interface) -> bool:
    return interface.is_virtual_bridge or _VIRTUAL_NAMES.match(interface.name) is not None


def _is_candidate(ip: Ip) -> bool:
    # Link-local IPv6 addresses need a zone, which means something on this machine only.
    return not (ip.is_unspecified or ip.is_loopback or ip.is_link_local or ip.is_multicast)


def _is_virtual_bridge(path: Path) -> bool:
    """Whether Linux says that it is a bridge, and none of its members is a device that exists outside the kernel."""
    members = path / "brif"
    if not members.is_dir():
        return False
    # What is below a bond or a VLAN is a device too, and such a member has a link to it.
    return not any(
        (member / "device").exists() or any(member.glob("lower_*"))
        for member in (path.parent / each.name for each in members.iterdir())
    )
