"""The shell around p2p.reachability_core: asks connected peers, watches the network, and says what may be announced.

One object per process. A process without listeners, as a user's, has nothing to ask but answers others all the same: in
a swarm of one node and one user nobody else could confirm the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fusion_node.errors import FusionError
from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p import prefixes
from p2p.control import ConnectionEnds, ControlNode
from p2p.dial_back import (
    DIAL_BACK_TIMEOUT_S,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL_ID,
    DialBack,
    DialBackAnswer,
    decode_answer,
    deliver_to_data_plane,
    encode_request,
)
from p2p.interfaces import Interface, candidate_hosts, read_interfaces, watch_addresses
from p2p.reachability_core import NONCE_BYTES, Ask, ReachabilityCore
from p2p.reachability_verdict import Address, AddressState, Observation, Outcome, Plane, Source, Verdict
from p2p.upnp import Mapping, PortMapper, PortMapping

MAX_PROBED = 4
"""Peers that are connected to from the listener's port, on each network: two tell the class of NAT, others may lie."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class ControlPlane(Protocol):
    """What reachability needs of discovery."""

    async def call(self, command: Callable[[ControlNode], Awaitable[T]]) -> T: ...

    async def request(
        self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int, timeout_s: float
    ) -> bytes: ...


class Reachability:
    """See the head of this file.

    Args:
        control: for requests to peers.
        data_path: of the data plane's HTTP requests.
        mapper: asks the router to forward the ports; None does not.
        is_loopback: another than the default only in tests, which have nothing but loopback.

    Attributes:
        on_change: each is called in the event loop when what may be announced has changed, or the verdict has, or what
            addresses there may be.
        dial_back: the side that is asked; its ``answer`` is for PROTOCOL_ID.
    """

    max_request_bytes = MAX_REQUEST_BYTES
    protocol_id = PROTOCOL_ID

    def __init__(
        self,
        control: ControlPlane,
        *,
        data_path: str,
        mapper: PortMapper | None = None,
        is_loopback: Callable[[str], bool] = prefixes.is_loopback,
        read: Callable[[], list[Interface]] = read_interfaces,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._by_operator: tuple[tuple[str, int], ...] = ()
        self._mapper = mapper
        self._is_loopback = is_loopback
        self._read = read
        self._clock = clock
        self._core = ReachabilityCore(
            lambda: secrets.token_bytes(NONCE_BYTES), secrets.SystemRandom(), is_loopback=is_loopback
        )
        self._listeners: dict[Plane, tuple[tuple[str, int], ...]] = {}
        self._mappings: tuple[Mapping, ...] = ()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stepped = asyncio.Event()
        self._told: tuple[object, ...] = ()
        self._met: set[PeerId] = set()
        self._probed: set[PeerId] = set()
        self.on_change: list[Callable[[], None]] = []
        self.dial_back = DialBack(
            self._ends_of,
            {Plane.CONTROL: self._bring, Plane.DATA: lambda *where: deliver_to_data_plane(*where, path=data_path)},
            is_loopback=is_loopback,
        )

    # What is known.

    def verdict(self) -> Verdict:
        """All that is known now, for people and other parts of the program."""
        return self._core.verdict(self._clock())

    @property
    def mapping(self) -> PortMapping | None:
        """What the router was asked for, and said; None when it was not asked."""
        if self._mapper is None:
            return None
        state, seen = self._mapper.state, self.verdict().seen_hosts
        if state.is_mapped and not state.problem and seen and state.external_host not in seen:
            problem = (
                f"the router says that its address is {state.external_host}, and peers see {', '.join(seen)}: "
                "there is another router, or the provider's NAT, behind it"
            )
            return replace(state, problem=problem)
        return state

    def announced(self, plane: Plane) -> list[tuple[str, int]]:
        """Host and port of what the swarm may be told, best first."""
        return [(each.host, each.port) for each in self._core.announced() if each.plane is plane]

    def best_known(self, plane: Plane) -> list[tuple[str, int]]:
        """For people and for this machine: what is confirmed, or else what has not failed, or whatever there is."""
        return self.announced(plane) if self._is_confirmed(plane) else self.possible(plane)

    def possible(self, plane: Plane) -> list[tuple[str, int]]:
        """For this machine and its networks, where an address that is confirmed from outside may lead nowhere: all that
        has not failed, or whatever there is."""
        candidates = [(each.host, each.port) for each in self._core.candidates(plane)]
        return list(dict.fromkeys([*self.announced(plane), *candidates]))

    def _is_confirmed(self, plane: Plane) -> bool:
        states = (each.state for each in self._core.verdict(self._clock()).addresses if each.plane is plane)
        return AddressState.CONFIRMED in states

    async def settled(self, plane: Plane, *, timeout_s: float) -> bool:
        """Returns when something may be announced, when nobody is there to ask, or all has failed; False in no time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_open(plane):
                    self._stepped.clear()
                    await self._stepped.wait()
        except TimeoutError:
            return False
        return True

    def _is_open(self, plane: Plane) -> bool:
        if not self._met or self.announced(plane):
            return False
        found = [each for each in self.verdict().addresses if each.plane is plane]
        return any(
            each.state is AddressState.CHECKING or (each.state is AddressState.UNCONFIRMED and not each.failed_by)
            for each in found
        )

    # What happens.

    def operator_says(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Host and port where the control plane is reached; the data plane's port is one more."""
        self._by_operator = tuple(addresses)

    def bound(self, plane: Plane, sockets: Sequence[tuple[str, int]]) -> None:
        """Listeners are there, and their addresses are candidates from now on."""
        if not sockets:
            return
        self._listeners[plane] = tuple(sockets)
        self._set_candidates()
        if self._mapper is not None and not self._is_local_only():
            self._mapper.want(self._ports())

    def reached(self, plane: Plane, nonce: bytes, local_host: str) -> None:
        """Somebody has brought a nonce to a listener."""
        if self._core.reached(plane, nonce, local_host, now=self._clock()):
            log.debug("dialled back at %s, %s plane", local_host, plane.value)
            self._tell_changes()
        self._wake.set()

    def peer_met(self, peer: PeerId) -> None:
        """The peer answers requests on its present connection."""
        self._met.add(peer)
        if self._listeners:
            self._spawn(self._take_in(peer))

    def path_found(self, peer: PeerId) -> None:
        """There is a better connection with it: one that was reached through a relay may be direct now, and see us."""
        if peer in self._met:
            self.peer_met(peer)

    def peer_gone(self, peer: PeerId) -> None:
        """It is not connected any more."""
        self._met.discard(peer)
        self._core.peer_gone(peer, now=self._clock())
        self._wake.set()

    def peers_gone(self) -> None:
        """All of them: the libp2p thread has ended."""
        for peer in list(self._met):
            self.peer_gone(peer)

    async def run(self) -> None:
        """Until cancelled; then gives back what the router was asked for."""
        try:
            if self._mapper is not None:
                self._spawn(self._mapper.run(self._take_mappings))
            if self._listeners and not self._is_local_only():
                self._spawn(watch_addresses(self._network_changed, read=self._read))
            while True:
                self._wake.clear()
                now = self._clock()
                self._core.handle_timer(now)
                for ask in self._core.requests(now):
                    self._spawn(self._ask(ask))
                self._tell_changes()
                timer = self._core.next_timer(now)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if timer is None else max(0.0, timer - now)):
                        await self._wake.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # Asking.

    async def _take_in(self, peer: PeerId) -> None:
        with contextlib.suppress(FusionError):
            ends = await self._ends_of(peer)
            if ends and peer in self._met:  # whom only a relay connects cannot see where this machine is
                self._core.peer_met(peer, ends[0].remote_host, now=self._clock())
                self._wake.set()

    async def _ask(self, ask: Ask) -> None:
        answer: DialBackAnswer | None = None
        try:
            reply = await self._control.request(
                ask.peer,
                PROTOCOL_ID,
                encode_request([(await _as_ip_address(address), nonce) for address, nonce in ask.nonces]),
                limit_bytes=MAX_ANSWER_BYTES,
                timeout_s=DIAL_BACK_TIMEOUT_S,
            )
            answer = decode_answer(reply)
            ends = await self._ends_of(ask.peer)
        except (FusionError, WireError) as error:
            log.debug("peer %s does not dial back: %s", ask.peer, error)
            self._core.unanswered(ask.peer, now=self._clock())
        else:
            observation = _observation(answer, ends)
            self._core.answered(ask.peer, answer.outcomes, observation, now=self._clock())
            if observation is not None and observation.seen_host != observation.local_host:
                self._spawn(self._probe(ask.peer, ends[0]))
        self._wake.set()

    async def _probe(self, peer: PeerId, ends: ConnectionEnds) -> None:
        """There is a NAT: what it does with the listener's port shows whether holes can be punched."""
        if not ends.is_outgoing or peer in self._probed or len(self._probed) >= MAX_PROBED:
            return
        self._probed.add(peer)
        source = self._listeners[Plane.CONTROL][0]
        with contextlib.suppress(FusionError):
            seen = await self._control.call(lambda node: node.probe(ends.remote_host, ends.remote_port, source))
            if seen is not None and peer in self._met:
                self._core.probed(peer, seen)
                self._tell_changes()

    async def _ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        """What this side has dialled comes first: that end's port is the one that a router may have changed."""
        ends = await self._control.call(lambda node: node.ends_of(peer))
        return sorted(ends, key=lambda each: not each.is_outgoing)

    async def _bring(self, host: str, port: int, nonce: bytes) -> Outcome:
        try:
            return await self._control.call(lambda node: node.bring_nonce(host, port, nonce))
        except FusionError:  # the libp2p thread is being started again
            return Outcome.BUSY

    # Candidates.

    def _network_changed(self) -> None:
        log.info("this machine's addresses have changed; peers are asked which of them can be dialled")
        self._probed.clear()
        self._set_candidates()
        self._core.network_changed(now=self._clock())
        if self._mapper is not None:
            self._mapper.renew()
        self._wake.set()
        self._spawn(self._drop_dead_connections())

    async def _drop_dead_connections(self) -> None:
        """Those from an address that this machine has no more: TCP would notice in minutes, a heartbeat in half of one.

        Whoever keeps connections makes new ones at once.
        """
        own = {str(ip) for each in self._read() for ip in each.addresses}
        for peer in list(self._met):
            with contextlib.suppress(FusionError):
                ends = await self._ends_of(peer)
                if ends and all(each.local_host not in own for each in ends):
                    await self._control.call(lambda node, peer=peer: node.disconnect(peer))  # type: ignore[misc]

    def _take_mappings(self, mappings: tuple[Mapping, ...]) -> None:
        self._mappings = mappings
        self._set_candidates()

    def _set_candidates(self) -> None:
        self._core.set_candidates(dict(self._candidates()), self._ports(), now=self._clock())
        self._tell_changes()
        self._wake.set()

    def _candidates(self) -> Iterator[tuple[Address, Source]]:
        """Later ones replace earlier ones of the same address."""
        interfaces = self._read()
        for mapping in self._mappings:
            yield Address(mapping.plane, mapping.external_host, mapping.external_port), Source.UPNP
        for plane, sockets in self._listeners.items():
            for listen_host, port in sockets:
                for host in candidate_hosts(listen_host, interfaces):
                    yield Address(plane, host, port), Source.LOOPBACK if self._is_loopback(host) else Source.INTERFACE
            for host, control_port in self._by_operator:
                yield Address(plane, host, control_port + (plane is Plane.DATA)), Source.OPERATOR

    def _ports(self) -> dict[Plane, int]:
        return {plane: sockets[0][1] for plane, sockets in self._listeners.items()}

    def _is_local_only(self) -> bool:
        return all(self._is_loopback(host) for sockets in self._listeners.values() for host, _ in sockets)

    # Telling.

    def addresses_changed(self) -> None:
        """Others than these, as those at a relay, which are announced with them."""
        for listener in self.on_change:
            listener()

    def _tell_changes(self) -> None:
        self._stepped.set()
        verdict = self._core.verdict(self._clock())
        candidates = {(each.plane, each.host, each.port) for each in verdict.addresses}
        now = (tuple(self._core.announced()), verdict.overall, verdict.nat, candidates)
        if now == self._told:
            return
        self._told = now
        log.debug("reachability: %s, announced: %s", verdict.overall.value, ", ".join(map(str, now[0])) or "nothing")
        self.addresses_changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _as_ip_address(address: Address) -> Address:
    """The operator's name is looked up here: who is asked does not look up names for strangers."""
    if prefixes.ip_of(address.host) is not None:
        return address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return replace(address, host="0.0.0.0")  # noqa: S104  # which nobody dials
    return replace(address, host=str(found[0][4][0]))


def _observation(answer: DialBackAnswer, ends: Sequence[ConnectionEnds]) -> Observation | None:
    if not ends or not answer.seen_host:
        return None
    ours = ends[0]
    return Observation(ours.local_host, ours.local_port, answer.seen_host, answer.seen_port, ours.is_outgoing)
