"""Port mapping against a router's real protocol: HTTP and SOAP on loopback, without a router's firewall."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import ThreadingHTTPServer

import pytest

from p2p import upnp
from p2p.reachability_verdict import Plane
from p2p.upnp import Mapping, PortMapper
from tests.nat.fake_igd import Control

EXTERNAL = "8.8.4.4"
LIMIT_S = 20.0


class Router(ThreadingHTTPServer):
    """One router, and what it was asked for."""

    daemon_threads = True

    def __init__(self, external: str, *, knows_leases: bool, taken: frozenset[int]) -> None:
        self.external = external
        self.knows_leases = knows_leases
        self.taken = taken
        self.mapped: dict[tuple[str, str], tuple[str, str]] = {}
        self.leases: list[str] = []
        super().__init__(("127.0.0.1", 0), _Control)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/root.xml"


class _Control(Control):
    server: Router

    @property
    def external_address(self) -> str:  # type: ignore[override]
        return self.server.external

    @property
    def mappings(self) -> dict[tuple[str, str], tuple[str, str]]:  # type: ignore[override]
        return self.server.mapped

    def _map(self, fields: dict[str, str]) -> None:
        self.mappings[self._key(fields)] = (fields["NewInternalClient"], fields["NewInternalPort"])

    def _unmap(self, key: tuple[str, str]) -> None:
        del self.mappings[key]

    def _done(self, action: str, **values: str) -> None:
        super()._done(action, **values)

    def do_POST(self) -> None:
        body = self.rfile.peek().decode()  # type: ignore[attr-defined]
        if "AddPortMapping" in self.headers["SOAPAction"]:
            lease = body.partition("<NewLeaseDuration>")[2].partition("<")[0]
            port = body.partition("<NewExternalPort>")[2].partition("<")[0]
            self.server.leases.append(lease)
            if int(port) in self.server.taken:
                return self._refuse(718, "ConflictInMappingEntry")
            if lease != "0" and not self.server.knows_leases:
                return self._refuse(725, "OnlyPermanentLeasesSupported")
        return super().do_POST()

    def _refuse(self, code: int, text: str) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._fail(code, text)


@contextmanager
def running_router(
    external: str = EXTERNAL, *, knows_leases: bool = True, taken: frozenset[int] = frozenset()
) -> Iterator[Router]:
    with Router(external, knows_leases=knows_leases, taken=taken) as router:
        serving = threading.Thread(target=router.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield router
        finally:
            router.shutdown()
            serving.join()


class Told:
    """Every change that a mapper has told of."""

    def __init__(self) -> None:
        self.all: list[tuple[Mapping, ...]] = []
        self._changed = asyncio.Event()

    def __call__(self, mappings: tuple[Mapping, ...]) -> None:
        self.all.append(mappings)
        self._changed.set()

    async def next(self) -> tuple[Mapping, ...]:
        async with asyncio.timeout(LIMIT_S):
            await self._changed.wait()
        self._changed.clear()
        return self.all[-1]


@asynccontextmanager
async def running(mapper: PortMapper) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(mapper.run(told))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until_problem(mapper: PortMapper) -> str:
    async with asyncio.timeout(LIMIT_S):
        while not mapper.state.problem:  # noqa: ASYNC110  # of another thread
            await asyncio.sleep(0.005)
    return mapper.state.problem


async def test_both_ports_are_mapped_and_given_back() -> None:
    with running_router() as router:
        mapper = PortMapper(description_url=router.url)
        mapper.want({Plane.CONTROL: 4600, Plane.DATA: 4601})
        async with running(mapper) as told:
            assert await told.next() == (
                Mapping(Plane.CONTROL, 4600, EXTERNAL, 4600),
                Mapping(Plane.DATA, 4601, EXTERNAL, 4601),
            )
            assert router.mapped == {("tcp", "4600"): ("127.0.0.1", "4600"), ("tcp", "4601"): ("127.0.0.1", "4601")}
            assert router.leases == ["3600", "3600"]
            assert mapper.state.problem == ""
        assert router.mapped == {}


async def test_mapping_is_renewed_at_half_of_its_lease() -> None:
    with running_router() as router:
        mapper = PortMapper(description_url=router.url, lease_s=1)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            await told.next()
            async with asyncio.timeout(LIMIT_S):
                while len(router.leases) < 2:  # noqa: ASYNC110  # of another thread
                    await asyncio.sleep(0.01)
            assert len(told.all) == 1
            assert mapper.state.is_mapped


async def test_port_that_is_bound_later_is_mapped_too() -> None:
    with running_router() as router:
        mapper = PortMapper(description_url=router.url)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            assert len(await told.next()) == 1
            mapper.want({Plane.CONTROL: 4600, Plane.DATA: 4601})
            assert len(await told.next()) == 2


async def test_router_that_knows_only_endless_leases_gets_one() -> None:
    with running_router(knows_leases=False) as router:
        mapper = PortMapper(description_url=router.url)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            await told.next()
            assert router.leases == ["3600", "0"]
        assert router.mapped == {}


async def test_port_that_somebody_else_has_is_replaced_by_another() -> None:
    with running_router(taken=frozenset({4600})) as router:
        mapper = PortMapper(description_url=router.url)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            assert await told.next() == (Mapping(Plane.CONTROL, 4600, EXTERNAL, 5600),)


async def test_router_that_refuses_is_told_of_and_asked_again() -> None:
    with running_router(taken=frozenset(range(4600, 65_536, 1000))) as router:
        mapper = PortMapper(description_url=router.url, retry_s=0.01)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            assert "ConflictInMappingEntry" in await until_problem(mapper)
            assert mapper.state.external_host == EXTERNAL
            router.taken = frozenset()
            assert await told.next() == (Mapping(Plane.CONTROL, 4600, EXTERNAL, 4600),)
            assert mapper.state.problem == ""


async def test_router_behind_a_router_is_told_of() -> None:
    with running_router("100.64.3.4") as router:
        mapper = PortMapper(description_url=router.url)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            await told.next()
            assert "100.64.3.4 is not a public one" in mapper.state.problem


async def test_router_that_does_not_answer_costs_nothing_but_a_sentence() -> None:
    with running_router() as router:
        mapper = PortMapper(description_url=router.url)
    mapper.want({Plane.CONTROL: 4600})
    async with running(mapper) as told:
        assert "description cannot be read" in await until_problem(mapper)
        assert told.all == []


async def test_nobody_is_looked_for_where_no_packet_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutRoute(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    looked_for: list[object] = []
    monkeypatch.setattr(upnp.socket, "socket", WithoutRoute)
    monkeypatch.setattr(upnp.miniupnpc, "UPnP", lambda: looked_for.append(None))
    mapper = PortMapper()
    mapper.want({Plane.CONTROL: 4600})
    async with running(mapper):
        assert "no route" in await until_problem(mapper)
    assert not looked_for  # the library writes to standard error when it has no route


async def test_router_that_disappears_takes_its_mappings_with_it() -> None:
    with running_router() as router:
        mapper = PortMapper(description_url=router.url, lease_s=1, retry_s=0.05)
        mapper.want({Plane.CONTROL: 4600})
        async with running(mapper) as told:
            await told.next()
            router.taken = frozenset(range(65_536))
            assert await told.next() == ()
            assert mapper.state.problem
