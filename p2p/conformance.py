"""What every Network must do: one suite, run over the WebSocket and over the in-memory twin alike.

After trio's ``check_two_way_stream``: a check gets a Bench, which makes networks that can reach one another, and
raises AssertionError when the implementation is wrong. A new transport is right when it passes CHECKS.
"""

# ruff: noqa: S101 - asserting is the job of this library

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    LocalProtocolError,
    PeerClosed,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.wire import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES
from p2p.identity import Identity
from p2p.messages import AnyMessage, Ping, StepResult, TensorMeta
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Link, Listener, Network

PATIENCE_S = 20.0
"""For what happens in milliseconds, on a machine that does much else."""

E = TypeVar("E", bound=BaseException)


class Bench(Protocol):
    """What a check needs of an implementation."""

    def network(self, identity: Identity, *, version: int = PROTOCOL_VERSION) -> Network:
        """A network on a host of its own, or on this one."""
        ...

    def listen_address(self, network: Network) -> str:
        """Where that network can listen on any free port."""
        ...

    def dead_address(self) -> str:
        """Where nobody listens."""
        ...


Check = Callable[[Bench], Awaitable[None]]


@dataclass(slots=True)
class Pair:
    """Two ends of one link, with all that belongs to them."""

    us: Identity
    them: Identity
    our_network: Network
    their_network: Network
    listener: Listener
    ours: Link
    theirs: Link


@asynccontextmanager
async def connected_pair(bench: Bench) -> AsyncIterator[Pair]:
    """A link between two fresh identities; everything is closed afterwards."""
    us, them = Identity.generate(), Identity.generate()
    our_network, their_network = bench.network(us), bench.network(them)
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    finished = asyncio.Event()

    async def keep(link: Link) -> None:
        accepted.set_result(link)
        await finished.wait()

    listener = await their_network.listen(bench.listen_address(their_network), keep)
    ours = await our_network.dial(listener.address, expect=them.peer_id, timeout_s=PATIENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            theirs = await accepted
        yield Pair(us, them, our_network, their_network, listener, ours, theirs)
    finally:
        finished.set()
        await ours.aclose()
        await listener.aclose()


def tensor_frame(number: int, num_bytes: int) -> tuple[AnyMessage, bytes]:
    """A result with ``num_bytes`` of random payload that carries ``number``."""
    num_rows = max(1, -(-num_bytes // 2**20))
    assert num_bytes % (4 * num_rows) == 0
    tensor = TensorMeta("f32", num_rows, num_bytes // 4 // num_rows)
    return StepResult(bytes(16), 0, number, tuple(range(num_rows)), tensor, ()), os.urandom(num_bytes)


async def _raises(kind: type[E], awaitable: Awaitable[object]) -> E:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await awaitable
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def _receive(link: Link) -> tuple[AnyMessage, memoryview]:
    async with asyncio.timeout(PATIENCE_S):
        return await link.receive()


async def _flood(link: Link) -> None:
    """Sends until the link ends."""
    message, payload = tensor_frame(0, 1 << 20)
    while True:
        await link.send(message, payload)


async def check_order(bench: Bench) -> None:
    """Frames of all sizes arrive in the order sent, in both directions at once."""
    sizes = [4, 4096, 65_500, 65_536, 70_000, 4, 300_000, 8] * 8
    async with connected_pair(bench) as pair:

        async def send_all(link: Link) -> None:
            for number, size in enumerate(sizes):
                await link.send(*tensor_frame(number, size))

        async def receive_all(link: Link) -> None:
            for number, size in enumerate(sizes):
                message, payload = await _receive(link)
                assert isinstance(message, StepResult)
                assert (message.sequence, len(payload)) == (number, size)

        await asyncio.gather(
            send_all(pair.ours), send_all(pair.theirs), receive_all(pair.ours), receive_all(pair.theirs)
        )
        for link in (pair.ours, pair.theirs):
            assert link.counters.frames_in == link.counters.frames_out == len(sizes)


async def check_large_frames(bench: Bench) -> None:
    """1 MiB and the largest permitted payload arrive unchanged; the payload is read-only and outlives the link."""
    async with connected_pair(bench) as pair:
        kept = []
        for size in (1 << 20, MAX_PAYLOAD_BYTES):
            message, sent = tensor_frame(1, size)
            sending = asyncio.create_task(pair.ours.send(message, bytearray(sent)))
            received, payload = await _receive(pair.theirs)
            await sending
            assert received == message
            assert payload == sent
            assert payload.readonly
            kept.append((payload, sent))
    assert all(payload == sent for payload, sent in kept)


async def check_posted_payload_is_free(bench: Bench) -> None:
    """A payload may be overwritten as soon as ``post`` has returned, also when it is still queued."""
    async with connected_pair(bench) as pair:
        message, sent = tensor_frame(1, 8 << 20)
        payload = bytearray(sent)
        pair.ours.post(message, payload)
        assert pair.ours.queued_bytes > 0
        payload[:] = bytes(len(payload))
        assert (await _receive(pair.theirs))[1] == sent
        async with asyncio.timeout(PATIENCE_S):
            await pair.ours.drain()
        assert pair.ours.queued_bytes == 0


async def check_oversized_refused(bench: Bench) -> None:
    """A frame above the limit is refused by its sender, and the link lives on."""
    async with connected_pair(bench) as pair:
        message, _ = tensor_frame(1, 4)
        await _raises(LocalProtocolError, pair.ours.send(message, bytes(MAX_FRAME_BYTES)))
        await pair.ours.send(Ping(1))
        assert (await _receive(pair.theirs))[0] == Ping(1)


async def check_malformed_closes(bench: Bench) -> None:
    """A frame whose header contradicts its payload closes the link and is counted."""
    async with connected_pair(bench) as pair:
        message, _ = tensor_frame(1, 4096)
        await pair.ours.send(message, bytes(4095))
        await _raises(RemoteProtocolError, pair.theirs.receive())
        assert pair.their_network.refused["malformed"] == 1
        await _raises(PeerClosed, pair.ours.receive())
        await _raises(PeerClosed, pair.theirs.receive())


async def check_identities_proven(bench: Bench) -> None:
    """Both sides know the other's peer id."""
    async with connected_pair(bench) as pair:
        assert pair.ours.peer == pair.them.peer_id
        assert pair.theirs.peer == pair.us.peer_id
        link = await pair.our_network.dial(pair.listener.address, expect=pair.them.peer_id, timeout_s=PATIENCE_S)
        await link.aclose()


async def check_wrong_identity_refused(bench: Bench) -> None:
    """A dial that expects somebody else fails and is counted; the listener's accepted links never see it."""
    async with connected_pair(bench) as pair:
        stranger = Identity.generate().peer_id
        dial = pair.our_network.dial(pair.listener.address, expect=stranger, timeout_s=PATIENCE_S)
        assert not isinstance(await _raises(RemoteProtocolError, dial), ProtocolVersionMismatch)
        assert pair.our_network.refused["wrong-key"] == 1
        await pair.ours.send(Ping(1))
        assert (await _receive(pair.theirs))[0] == Ping(1)


async def check_version_mismatch(bench: Bench) -> None:
    """Both sides learn of another version, before any identity is shown."""
    older, newer = bench.network(Identity.generate()), bench.network(Identity.generate(), version=PROTOCOL_VERSION + 1)

    async def never(link: Link) -> None:
        raise AssertionError("a link between versions")

    for listening, dialling in ((older, newer), (newer, older)):
        listener = await listening.listen(bench.listen_address(listening), never)
        try:
            error = await _raises(
                ProtocolVersionMismatch, dialling.dial(listener.address, expect=None, timeout_s=PATIENCE_S)
            )
            for version in (PROTOCOL_VERSION, PROTOCOL_VERSION + 1):
                assert f"version {version}" in str(error)
        finally:
            await listener.aclose()
        assert listening.refused["wrong-version"] >= 1
        assert dialling.refused["wrong-version"] >= 1


async def check_close_while_busy(bench: Bench) -> None:
    """Closing either side, while both send and receive, gives PeerClosed everywhere and hangs nobody."""
    for closes_ours in (True, False):
        async with connected_pair(bench) as pair:
            closing, other = (pair.ours, pair.theirs) if closes_ours else (pair.theirs, pair.ours)
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_flood(link)) for link in (closing, other)]
            tasks.append(asyncio.create_task(closing.receive()))
            await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE_S):
                await closing.aclose()
                await closing.aclose()
            while not isinstance(await _outcome(other.receive()), PeerClosed):
                pass
            for task in tasks:
                outcome = await _outcome(task)
                assert isinstance(outcome, PeerClosed | tuple), outcome
            for link in (closing, other):
                await _raises(PeerClosed, link.send(Ping(1)))
                await _raises(PeerClosed, link.receive())
                await _raises(PeerClosed, link.drain())


async def check_abort_wakes_both(bench: Bench) -> None:
    """A cut ends a waiting receive on both sides."""
    async with connected_pair(bench) as pair:
        waiting = [asyncio.create_task(link.receive()) for link in (pair.ours, pair.theirs)]
        await asyncio.sleep(0)
        pair.ours.abort("for a reason")
        error = await _raises(PeerClosed, waiting[0])
        assert "for a reason" in str(error)
        await _raises(PeerClosed, waiting[1])


async def check_concurrent_senders(bench: Bench) -> None:
    """Frames of many senders on one link do not mix; each sender's order is kept."""
    async with connected_pair(bench) as pair:

        async def send(sender: int) -> None:
            for number in range(20):
                await pair.ours.send(*tensor_frame(100 * sender + number, 100_000))

        senders = [asyncio.create_task(send(sender)) for sender in range(8)]
        seen: dict[int, list[int]] = {}
        for _ in range(8 * 20):
            message, _ = await _receive(pair.theirs)
            assert isinstance(message, StepResult)
            seen.setdefault(message.sequence // 100, []).append(message.sequence % 100)
        await asyncio.gather(*senders)
        assert seen == {sender: list(range(20)) for sender in range(8)}


async def check_cancelled_receive_loses_nothing(bench: Bench) -> None:
    """A receive that is cancelled, also in the middle of a long frame, loses no frame."""
    async with connected_pair(bench) as pair:
        sent = [tensor_frame(number, 1 << 20) for number in range(6)]
        sending = asyncio.create_task(_send_all(pair.ours, sent))
        received: list[tuple[AnyMessage, memoryview]] = []
        turn = 0
        async with asyncio.timeout(PATIENCE_S):
            while len(received) < len(sent):
                receiving = asyncio.create_task(pair.theirs.receive())
                turn += 1
                if turn % 4:
                    await asyncio.sleep(0)
                    receiving.cancel()
                outcome = await _outcome(receiving)
                if not isinstance(outcome, BaseException):
                    received.append(outcome)
        await sending
        assert [(message, bytes(payload)) for message, payload in received] == sent


async def check_cancelled_send_is_whole(bench: Bench) -> None:
    """A frame whose sender is cancelled arrives whole or not at all, and the link stays usable."""
    async with connected_pair(bench) as pair:
        message, payload = tensor_frame(7, 16 << 20)
        sending = asyncio.create_task(pair.ours.send(message, payload))
        await asyncio.sleep(0)
        sending.cancel()
        await _outcome(sending)
        last = asyncio.create_task(pair.ours.send(Ping(9)))
        received, data = await _receive(pair.theirs)
        if received == message:
            assert data == payload
            received, data = await _receive(pair.theirs)
        assert received == Ping(9)
        await last


async def check_cancelled_dial(bench: Bench) -> None:
    """A dial can be cancelled at any point, and the next one works."""
    async with connected_pair(bench) as pair:
        for turns in range(8):
            dialling = asyncio.create_task(
                pair.our_network.dial(pair.listener.address, expect=None, timeout_s=PATIENCE_S)
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            dialling.cancel()
            outcome = await _outcome(dialling)
            if not isinstance(outcome, BaseException):
                await outcome.aclose()
        await pair.ours.send(Ping(1))
        assert (await _receive(pair.theirs))[0] == Ping(1)


async def check_dial_to_nobody(bench: Bench) -> None:
    """An address where nobody listens, and one that is no address, are unreachable peers."""
    network = bench.network(Identity.generate())
    for address in (bench.dead_address(), "no address", "host:notaport"):
        await _raises(PeerUnreachable, network.dial(address, expect=None, timeout_s=PATIENCE_S))


async def check_listen_errors(bench: Bench) -> None:
    """A port in use and an address that is not ours are told apart; a closed listener frees its port."""
    async with connected_pair(bench) as pair:

        async def ignore(link: Link) -> None:
            await _outcome(link.receive())

        taken = pair.listener.address
        await _raises(AddressInUse, pair.their_network.listen(taken, ignore))
        for address in ("198.51.100.7:0", "nonsense"):  # TEST-NET-2 belongs to nobody
            error = await _raises(ConfigError, pair.their_network.listen(address, ignore))
            assert not isinstance(error, AddressInUse)
        await pair.listener.aclose()
        again = await pair.their_network.listen(taken, ignore)
        assert again.address == taken
        await again.aclose()


async def check_listener_close_ends_links(bench: Bench) -> None:
    """Closing a listener closes the links that it accepted."""
    async with connected_pair(bench) as pair:
        await pair.listener.aclose()
        await _raises(PeerClosed, pair.ours.receive())
        await _raises(PeerUnreachable, pair.our_network.dial(pair.listener.address, expect=None, timeout_s=PATIENCE_S))


async def _send_all(link: Link, frames: Sequence[tuple[AnyMessage, bytes]]) -> None:
    for message, payload in frames:
        await link.send(message, payload)


R = TypeVar("R")


async def _outcome(awaitable: Awaitable[R]) -> R | FusionError | asyncio.CancelledError:
    """The result, or what was raised: a cancelled task is an outcome here."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await awaitable
    except (FusionError, asyncio.CancelledError) as error:
        return error


CHECKS: tuple[Check, ...] = (
    check_order,
    check_large_frames,
    check_posted_payload_is_free,
    check_oversized_refused,
    check_malformed_closes,
    check_identities_proven,
    check_wrong_identity_refused,
    check_version_mismatch,
    check_close_while_busy,
    check_abort_wakes_both,
    check_concurrent_senders,
    check_cancelled_receive_loses_nothing,
    check_cancelled_send_is_whole,
    check_cancelled_dial,
    check_dial_to_nobody,
    check_listen_errors,
    check_listener_close_ends_links,
)
