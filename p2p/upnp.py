"""Asking the router to forward the ports of this node (UPnP Internet Gateway Device), beside everything else.

Nothing waits for it: looking takes four seconds when there is no such router, and some answer slowly or wrongly.
Every call of miniupnpc blocks, so each runs in a thread of its own that nobody joins. What a router says makes an
address a candidate, never more: peers find out whether it can be dialled (p2p.reachability_core).

A mapping has a lease, is renewed at half of it, and is given back at the end; on a router that knows no leases one of a
node that was killed stays, and is taken over when the node is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import miniupnpc
import structlog

from p2p.prefixes import ip_of
from p2p.reachability_verdict import Plane

SEARCH_S = 1.0
"""For answers to the search for one kind of device. miniupnpc asks for four kinds, one after the other, and takes
nothing between one and two seconds. UPnP Device Architecture 1.1 §1.3.2: the searcher chooses how long."""

LEASE_S = 3600
"""A node that dies leaves a hole for an hour at most."""

RETRY_S = 900.0
"""After a failure, and for a network without such a router: both may change, and asking costs one multicast."""

GIVE_BACK_S = 2.0
"""For deleting all mappings at the end, all together."""

NUM_OTHER_PORTS = 3
"""External ports that are tried when somebody else has the wanted one."""

_OTHER_PORTS_BY = 1000
"""Beside the wanted one; not the next, which is the other plane's."""

_SEARCHED_AT = ("239.255.255.250", 1900)
"""UPnP Device Architecture 1.1 §1.3.2."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One port that the router says it forwards."""

    plane: Plane
    internal_port: int
    external_host: str
    external_port: int


@dataclass(frozen=True, slots=True)
class PortMapping:
    """What the router was asked for, and what came of it.

    Attributes:
        mappings: that are in force, by its word.
        external_host: of the router; empty while none has answered.
        problem: for people; empty when all is well, or nothing is known yet.
    """

    mappings: tuple[Mapping, ...] = ()
    external_host: str = ""
    problem: str = ""

    @property
    def is_mapped(self) -> bool:
        return bool(self.mappings)


@dataclass(slots=True)
class _Router:
    """A router that has answered, as miniupnpc knows it."""

    client: Any
    external_host: str
    taken: dict[tuple[Plane, int], int] = field(default_factory=dict)
    """Plane and internal port to the external one."""


class _Refused(Exception):
    """A router did not do what it was asked; the text says why."""


class PortMapper:
    """Keeps ports mapped while ``run`` runs.

    Args:
        description_url: of the router's description; None searches for it.
        lease_s, retry_s: see the constants; a router may know only endless leases.
    """

    def __init__(
        self,
        *,
        description_url: str | None = None,
        lease_s: int = LEASE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._description_url = description_url
        self._lease_s = lease_s
        self._retry_s = retry_s
        self._wanted: dict[Plane, int] = {}
        self._wake = asyncio.Event()
        self._router: _Router | None = None
        self.state = PortMapping()

    def want(self, ports: MappingOf[Plane, int]) -> None:
        """The ports that are listened on."""
        self._wanted = dict(ports)
        self._wake.set()

    def renew(self) -> None:
        """The network has changed: there may be another router."""
        self._router = None
        self._wake.set()

    async def run(self, on_mappings: Callable[[tuple[Mapping, ...]], None]) -> None:
        """Until cancelled. ``on_mappings`` is told of every change."""
        try:
            patience_s: float | None = None
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await self._wake.wait()
                self._wake.clear()
                before = self.state.mappings
                self.state = await self._map()
                self._tell(before)
                if self.state.mappings != before:
                    on_mappings(self.state.mappings)
                patience_s = self._lease_s / 2 if self.state.is_mapped else self._retry_s
        finally:
            router = self._router
            if router is not None and router.taken:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GIVE_BACK_S):
                        await _in_thread(lambda: _give_back(router))

    async def _map(self) -> PortMapping:
        router, wanted = self._router, dict(self._wanted)
        try:
            if router is None:
                router = await _in_thread(lambda: _find(self._description_url))
                self._router = router
            found = router
            mappings = await _in_thread(lambda: _take(found, wanted, self._lease_s))
        except _Refused as error:
            self._router = None
            return PortMapping((), "" if router is None else router.external_host, str(error))
        return replace(PortMapping(mappings, router.external_host), problem=_problem(router.external_host))

    def _tell(self, before: Sequence[Mapping]) -> None:
        if self.state.mappings and self.state.mappings != tuple(before):
            ports = [f"{each.external_port} to {each.internal_port}" for each in self.state.mappings]
            log.info("the router forwards ports", external=self.state.external_host, ports=ports)
        if self.state.problem:
            log.debug("UPnP", problem=self.state.problem)


def _find(description_url: str | None) -> _Router:
    if description_url is None and not _has_route():
        raise _Refused("no router is looked for: this machine has no route to one over IPv4")
    client = miniupnpc.UPnP()
    client.discoverdelay = round(SEARCH_S * 1000)
    if description_url is None:
        _ask("no router answers to UPnP: it has none, or it is switched off there", client.discover)
        _ask("no router answers to UPnP: it has none, or it is switched off there", client.selectigd)
    else:
        _ask("the router's description cannot be read", client.selectigd, description_url)
    external = str(_ask("the router does not tell its external address", client.externalipaddress))
    if ip_of(external) is None:
        raise _Refused("the router does not tell its external address: is it connected?")
    return _Router(client, external)


def _has_route() -> bool:
    """Whether a search would leave this machine. Asked because the library writes to standard error when it would not.

    Connecting a UDP socket sends nothing, and fails as sending would.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_SEARCHED_AT)
        except OSError:
            return False
    return True


def _take(router: _Router, wanted: MappingOf[Plane, int], lease_s: int) -> tuple[Mapping, ...]:
    taken = []
    for plane, port in wanted.items():
        external = _take_one(router, plane, port, lease_s)
        router.taken[plane, port] = external
        taken.append(Mapping(plane, port, router.external_host, external))
    return tuple(taken)


def _take_one(router: _Router, plane: Plane, port: int, lease_s: int) -> int:
    before = router.taken.get((plane, port))
    others = [port + _OTHER_PORTS_BY * n for n in range(1, NUM_OTHER_PORTS + 1)]
    why = ""
    for external in [before] if before is not None else [port, *(each for each in others if each <= 65_535)]:
        for lease in (lease_s, 0):
            try:
                _ask(
                    "the router refuses to map a port",
                    router.client.addportmapping, external, "TCP", router.client.lanaddr, port,
                    f"fusion-node {plane}", "", lease,
                )  # fmt: skip
            except _Refused as error:
                why = str(error)
                if "OnlyPermanentLeases" not in why:
                    break
            else:
                return external
    raise _Refused(why)


def _give_back(router: _Router) -> None:
    for external in router.taken.values():
        with contextlib.suppress(_Refused):
            _ask("", router.client.deleteportmapping, external, "TCP", "")
    router.taken.clear()


def _ask(what: str, call: Callable[..., T], *arguments: object) -> T:
    try:
        return call(*arguments)
    except Exception as error:  # the library raises no other class
        reason = str(error)
        is_telling = reason not in ("", "Success", "No UPnP device discovered")
        raise _Refused(f"{what}: {reason}" if is_telling else what) from error


def _problem(external_host: str) -> str:
    ip = ip_of(external_host)
    if ip is not None and not ip.is_global:
        return (
            f"the router's own external address {external_host} is not a public one: "
            "there is another router, or the provider's NAT, behind it"
        )
    return ""


async def _in_thread(work: Callable[[], T]) -> T:
    """Not in the shared pool, which a silent router would take threads from, and which is joined at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # it is a T when there is no error
        else:
            future.set_exception(error)

    def body() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except _Refused as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=body, name="upnp", daemon=True).start()
    return await future
