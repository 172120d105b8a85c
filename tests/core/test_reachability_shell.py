"""The shell around the judge of addresses, over a control plane of this test."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from fusion_node.errors import PeerClosed
from fusion_node.types import PeerId
from p2p.control import ConnectionEnds
from p2p.dial_back import VERSION, DialBackAnswer, DialBackRequest
from p2p.interfaces import Interface
from p2p.reachability import Reachability
from p2p.reachability_verdict import Outcome, Overall, Plane
from p2p.upnp import Mapping, PortMapper, PortMapping

EVERYWHERE = "0.0.0.0"  # noqa: S104
FIRST, SECOND = "198.18.0.7", "198.18.0.8"
PATIENCE_S = 20.0


class Control:
    """Peers that see this machine at its own address, and bring every nonce to it, or none."""

    def __init__(self) -> None:
        self.host = FIRST
        self.answers = True
        self.delivers = True
        self.disconnected: list[PeerId] = []
        self.reachability: Reachability | None = None

    async def ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        return [ConnectionEnds(self.host, 50_000, "203.0.113.1", 4600, True)]

    async def disconnect(self, peer: PeerId) -> None:
        self.disconnected.append(peer)

    async def call(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        return await command(self)

    async def request(self, peer: PeerId, protocol: str, request: bytes, **limits: float) -> bytes:
        if not self.answers:
            raise PeerClosed(peer, "it does not know this protocol")
        asked = msgspec.msgpack.decode(request, type=DialBackRequest).addresses
        if self.delivers:
            for each in asked:
                assert self.reachability is not None
                self.reachability.reached(each.plane, each.nonce, self.host)
        outcome = Outcome.DELIVERED if self.delivers else Outcome.UNREACHABLE
        answer = DialBackAnswer(VERSION, self.host, 50_000, tuple(str(outcome) for _ in asked))
        return msgspec.msgpack.encode(answer)


class Machine:
    """One that listens on all addresses, of which it has one at a time."""

    def __init__(self, control: Control | None = None, *, mapper: PortMapper | None = None) -> None:
        self.control = control or Control()
        self.reachability = self.control.reachability = Reachability(
            self.control, data_path="/fusion", mapper=mapper, read=self.read
        )
        self.reachability.bound(Plane.CONTROL, [(EVERYWHERE, 4600)])
        self.reachability.bound(Plane.DATA, [(EVERYWHERE, 4601)])

    def read(self) -> list[Interface]:
        return [Interface("eth0", (ipaddress.ip_address(self.control.host),))]

    def announced(self) -> list[str]:
        return [host for plane in Plane for host, _ in self.reachability.announced(plane)]


@asynccontextmanager
async def running(machine: Machine) -> AsyncIterator[None]:
    task = asyncio.create_task(machine.reachability.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(machine: Machine, condition: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    machine.reachability.on_change.append(changed.set)
    while not condition():
        changed.clear()
        await changed.wait()


async def test_peer_that_is_met_is_asked_at_once() -> None:
    machine = Machine()
    async with running(machine):
        assert await machine.reachability.settled(Plane.DATA, timeout_s=PATIENCE_S)  # nobody is there to ask
        assert machine.announced() == []
        assert machine.reachability.best_known(Plane.DATA) == [(FIRST, 4601)]
        machine.reachability.peer_met(PeerId("peer"))
        assert await machine.reachability.settled(Plane.DATA, timeout_s=PATIENCE_S)
        await until(machine, lambda: machine.announced() == [FIRST, FIRST])
        assert machine.reachability.verdict().overall is Overall.PUBLIC


async def test_new_address_is_told_of_before_anybody_has_confirmed_it() -> None:
    """People, this machine and the local network are told of it at once."""
    machine = Machine()
    told: list[list[tuple[str, int]]] = []
    machine.reachability.on_change.append(lambda: told.append(machine.reachability.best_known(Plane.CONTROL)))
    machine.control.host = SECOND
    machine.reachability._network_changed()
    assert told == [[(SECOND, 4600)]]
    await asyncio.gather(*machine.reachability._tasks)


async def test_address_of_a_network_is_known_there_though_another_one_is_confirmed() -> None:
    machine = Machine()
    machine.reachability.operator_says([("203.0.113.9", 4600)])
    machine.reachability.bound(Plane.CONTROL, [(EVERYWHERE, 4600)])
    async with running(machine):
        machine.reachability.peer_met(PeerId("peer"))
        await until(machine, lambda: ("203.0.113.9", 4600) in machine.reachability.announced(Plane.CONTROL))
        machine.control.host = SECOND
        machine.reachability._network_changed()
        assert (SECOND, 4600) in machine.reachability.possible(Plane.CONTROL)


async def test_what_fails_is_settled_too_and_what_nobody_answers_is_not() -> None:
    machine = Machine()
    machine.control.delivers = False
    async with running(machine):
        machine.reachability.peer_met(PeerId("peer"))
        assert await machine.reachability.settled(Plane.DATA, timeout_s=PATIENCE_S)
        assert machine.announced() == []
    machine = Machine()
    machine.control.answers = False
    async with running(machine):
        machine.reachability.peer_met(PeerId("peer"))
        assert not await machine.reachability.settled(Plane.DATA, timeout_s=0.05)


async def test_change_of_network_drops_dead_connections_and_is_announced() -> None:
    machine = Machine()
    async with running(machine):
        machine.reachability.peer_met(PeerId("peer"))
        await until(machine, lambda: machine.announced() == [FIRST, FIRST])
        ends = await machine.control.ends_of(PeerId("peer"))
        machine.control.host = SECOND
        machine.control.ends_of = lambda peer: asyncio.sleep(0, ends)  # type: ignore[method-assign]  # of the old address
        machine.reachability._network_changed()
        assert machine.announced() == []
        while not machine.control.disconnected:  # noqa: ASYNC110  # a task's doing
            await asyncio.sleep(0)
        del machine.control.ends_of
        machine.reachability.peer_gone(PeerId("peer"))
        machine.reachability.peer_met(PeerId("peer"))
        await until(machine, lambda: machine.announced() == [SECOND, SECOND])


async def test_all_peers_are_gone_with_the_libp2p_thread_and_what_they_have_confirmed_is_not() -> None:
    machine = Machine()
    async with running(machine):
        machine.reachability.peer_met(PeerId("peer"))
        await until(machine, lambda: machine.announced() == [FIRST, FIRST])
        machine.reachability.peers_gone()
        assert machine.reachability.verdict().num_answering == 0
        assert machine.announced() == [FIRST, FIRST]


async def test_routers_word_that_differs_from_what_peers_see_is_told() -> None:
    mapper = PortMapper(description_url="http://127.0.0.1:1/")
    machine = Machine(mapper=mapper)
    mapper.state = PortMapping((Mapping(Plane.CONTROL, 4600, "8.8.8.8", 4600),), "8.8.8.8")
    assert machine.reachability.mapping == mapper.state
    mapper.want({})
    machine.reachability.peer_met(PeerId("peer"))
    mapper._wake.clear()
    async with running(machine):
        await until(machine, lambda: machine.announced() == [FIRST, FIRST])
        await until(machine, lambda: bool(machine.reachability.verdict().seen_hosts))
        mapping = machine.reachability.mapping
        assert mapping is not None
        assert "its address is 8.8.8.8, and peers see 198.18.0.7" in mapping.problem
