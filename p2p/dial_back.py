"""``/fusion/dialback/1``: "dial me there, and bring this". One request of a connected peer, one answer.

A node asks a peer to open fresh connections to some of its addresses and to leave a nonce at each (p2p.reachability).
On the control plane the nonce goes where a security protocol would be negotiated (p2p.libp2p_adapter.reached), on the
data plane it is a header of one HTTP request. Neither makes a connection that lasts, or that is good for anything else.

What is asked of us is a stranger's wish that this machine knock somewhere, so it is granted narrowly:

* only hosts from which the asker itself is seen here, on a direct connection whose identity is proven, are dialled. So
  nobody can be knocked on by order of somebody else, nor what is behind our own router. Names are not looked up:
  whoever has one knows where it leads.
* never loopback, where a tunnel's far end is seen at: but whoever is seen there is on this machine, or a tunnel to it,
  and may have this machine's own addresses dialled.
* at most MAX_ADDRESSES per request, REQUESTS_PER_PEER and REQUESTS_PER_HOST a minute, REQUESTS_PER_WINDOW of all, and
  MAX_DIALS at once, each for DIAL_TIMEOUT_S and some hundred bytes: less than the request itself has cost.

The answer says where the asker is seen and one word per address, and nothing of this side's network. It is a hint: what
counts at the asker is the nonce.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Annotated, TypeAlias, TypeVar

import aiohttp
import msgspec
from yarl import URL

from fusion_node.types import PeerId
from fusion_node.wire import WireError, decode_bounded
from p2p import prefixes
from p2p.control import ConnectionEnds
from p2p.interfaces import read_interfaces
from p2p.prefixes import host_key, ip_of
from p2p.reachability_verdict import Address, Outcome, Plane
from p2p.websocket import NONCE_HEADER

PROTOCOL_ID = "/fusion/dialback/1"
VERSION = 1
MAX_ADDRESSES = 8
NONCE_BYTES = 16
MAX_REQUEST_BYTES = MAX_ADDRESSES * 128 + 64
MAX_ANSWER_BYTES = 512

DIAL_TIMEOUT_S = 3.0
"""For one address: two retransmissions of a lost SYN, or five round trips of a slow line."""

DIAL_BACK_TIMEOUT_S = 6.0
"""For the whole answer, at the asker."""

WINDOW_S = 60.0
REQUESTS_PER_PEER = 8
REQUESTS_PER_HOST = 16
"""Two peers may share an address, and one person may have any number of peers."""

REQUESTS_PER_WINDOW = 120
"""Of all peers: a hundred connected ones that check every eight minutes are 13, and all at once after a restart 100."""

MAX_DIALS = 32

M = TypeVar("M", "DialBackRequest", "DialBackAnswer")

HostText: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class DialMe(msgspec.Struct, frozen=True, array_like=True):
    """One address of the asker, and what to bring there."""

    plane: Plane
    host: HostText
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class DialBackRequest(msgspec.Struct, frozen=True, array_like=True):
    """No addresses: only say where I am seen."""

    version: int
    addresses: Annotated[tuple[DialMe, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class DialBackAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Where the asker is seen (empty and 0 when only through a relay), and an Outcome per address, in order."""

    version: int
    seen_host: Annotated[str, msgspec.Meta(max_length=64)]
    seen_port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    outcomes: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=16)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


def encode_request(nonces: Iterable[tuple[Address, bytes]]) -> bytes:
    """The request for these nonces."""
    addresses = tuple(DialMe(address.plane, address.host, address.port, nonce) for address, nonce in nonces)
    return msgspec.msgpack.encode(DialBackRequest(VERSION, addresses))


def decode_answer(answer: bytes) -> DialBackAnswer:
    """Reads an answer.

    Raises:
        WireError: it is malformed, oversized or of another version.
    """
    return _checked(decode_bounded(answer, DialBackAnswer, limit_bytes=MAX_ANSWER_BYTES))


Deliver = Callable[[str, int, bytes], Awaitable[Outcome]]
"""Brings a nonce to a host and port on a fresh connection; never raises for what a peer does."""


class DialBack:
    """The side that is asked.

    Args:
        ends_of: the direct connections with a peer.
        deliver: by plane.
        own_hosts: of this machine, now.
        is_loopback: another than the default only in tests, which have nothing but loopback.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ends_of: Callable[[PeerId], Awaitable[Sequence[ConnectionEnds]]],
        deliver: dict[Plane, Deliver],
        *,
        own_hosts: Callable[[], set[str]] | None = None,
        is_loopback: Callable[[str], bool] = prefixes.is_loopback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ends_of = ends_of
        self._deliver = deliver
        self._own_hosts = own_hosts or _own_hosts
        self._is_loopback = is_loopback
        self._budget = _Budget(clock)
        self._dials = 0
        self.refused: dict[str, int] = {}
        """How many requests or addresses were not dialled, by outcome."""

    async def answer(self, peer: PeerId, request: bytes) -> bytes:
        """Does what was asked, within the limits.

        Raises:
            WireError: the request is malformed, oversized or of another version.
        """
        asked = _checked(decode_bounded(request, DialBackRequest, limit_bytes=MAX_REQUEST_BYTES))
        ends = list(await self._ends_of(peer))
        # First the connection that the asker has dialled: its port there is what a router made of it.
        ends.sort(key=lambda each: each.is_outgoing)
        seen_host, seen_port = (ends[0].remote_host, ends[0].remote_port) if ends else ("", 0)
        hosts = self._dialable({each.remote_host for each in ends})
        if asked.addresses and not self._budget.take(peer, host_key(seen_host)):
            outcomes = [Outcome.BUSY] * len(asked.addresses)
        else:
            outcomes = await asyncio.gather(*(self._dial(each, hosts) for each in asked.addresses))
        for outcome in outcomes:
            if outcome in (Outcome.BUSY, Outcome.OTHER_HOST):
                self.refused[outcome] = self.refused.get(outcome, 0) + 1
        return msgspec.msgpack.encode(DialBackAnswer(VERSION, seen_host, seen_port, tuple(outcomes)))

    def _dialable(self, seen: set[str]) -> set[str]:
        """The hosts that may be dialled for someone who is seen at these."""
        hosts = {str(ip_of(host)) for host in seen if not self._is_loopback(host)}
        if any(map(self._is_loopback, seen)):
            hosts |= {host for host in self._own_hosts() if not self._is_loopback(host)}
        return hosts

    async def _dial(self, wish: DialMe, hosts: set[str]) -> Outcome:
        host = str(ip_of(wish.host))
        if host not in hosts:
            return Outcome.OTHER_HOST
        if self._dials >= MAX_DIALS:
            return Outcome.BUSY
        self._dials += 1
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                return await self._deliver[wish.plane](host, wish.port, wish.nonce)
        except TimeoutError:
            return Outcome.UNREACHABLE
        finally:
            self._dials -= 1


class _Budget:
    """Requests within the last WINDOW_S, by peer, by host, and of all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken: dict[Hashable, deque[float]] = {}

    def take(self, peer: PeerId, host: str) -> bool:
        now = self._clock()
        limits = {
            ("peer", peer): REQUESTS_PER_PEER,
            ("host", host): REQUESTS_PER_HOST,
            ("all", ""): REQUESTS_PER_WINDOW,
        }
        for key in list(self._taken) if len(self._taken) > 2 * REQUESTS_PER_WINDOW else list(limits):
            taken = self._taken.get(key, deque())
            while taken and taken[0] <= now - WINDOW_S:
                taken.popleft()
            if not taken:
                self._taken.pop(key, None)
        if any(len(self._taken.get(key, ())) >= limit for key, limit in limits.items()):
            return False
        for key in limits:
            self._taken.setdefault(key, deque()).append(now)
        return True


async def deliver_to_data_plane(host: str, port: int, nonce: bytes, *, path: str) -> Outcome:
    """One HTTP request on a connection of its own. Redirects are not followed, and no body is read."""
    timeout = aiohttp.ClientTimeout(total=DIAL_TIMEOUT_S)
    url = URL.build(scheme="http", host=host, port=port, path=path)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session,
            session.get(url, headers={NONCE_HEADER: nonce.hex()}, allow_redirects=False) as response,
        ):
            return Outcome.DELIVERED if response.status == 204 else Outcome.BROKEN
    except (aiohttp.ClientConnectorError, TimeoutError):
        return Outcome.UNREACHABLE
    except (aiohttp.ClientError, ValueError):
        return Outcome.BROKEN


def _own_hosts() -> set[str]:
    return {str(ip) for each in read_interfaces() for ip in each.addresses}


def _checked(message: M) -> M:
    if message.version != VERSION:
        raise WireError(f"dial-back of version {message.version}, not {VERSION}")
    return message
