"""Measures bandwidth with a peer over the link that there is: the shell on both sides of p2p.bandwidth_core."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fusion_node.errors import PeerClosed, PeerRefused, PeerTimeout, PeerUnreachable, RemoteProtocolError
from fusion_node.types import PeerId
from p2p.bandwidth_core import CHUNK_BYTES, MAX_ROW_BYTES, BandwidthServer
from p2p.identity import short
from p2p.messages import AnyMessage, BandwidthProbe, BandwidthReport

FIRST_ROW_BYTES = 256 * 1024
"""Two seconds on a line of 1 Mbit/s. Where it takes less than ENOUGH_S, a longer row is measured."""

ENOUGH_S = 0.25
ROW_TIMEOUT_S = 20.0

_PAYLOAD = bytes(CHUNK_BYTES)
"""Zeros: no path of ours compresses it, because it is sealed."""


class Sender(Protocol):
    """What is needed of p2p.links.LinkPool."""

    def send(self, peer: PeerId, message: AnyMessage, payload: bytes = b"") -> None: ...


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Payload bytes per second in each direction, timed by who received, and how many were sent for it."""

    up_Bps: float
    down_Bps: float
    num_bytes: int


@dataclass(slots=True)
class _Row:
    """A measurement that we wait for."""

    peer: PeerId
    done: asyncio.Future[tuple[int, float]]
    is_ours_to_time: bool
    next_index: int = 0
    num_bytes: int = 0
    began: float = 0.0


class BandwidthMeter:
    """Both sides for one process. Hand it every BandwidthProbe and BandwidthReport that arrives.

    Args:
        is_busy: whether others' measurements are to be refused just now; None serves nobody, as users do.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        is_busy: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = sender
        self._is_busy = is_busy
        self._clock = clock
        self._server = BandwidthServer()
        self._rows: dict[int, _Row] = {}
        self._asked: deque[tuple[PeerId, int]] = deque(maxlen=64)
        """Who was asked for probes lately: those that come after we gave up waiting are no breach."""

    async def measure(self, peer: PeerId) -> Bandwidth:
        """Both directions, one after the other, with a peer that has a link. At most 4.5 MiB and about a minute.

        Raises:
            PeerRefused: it is busy, or was asked too often.
            PeerTimeout: a direction took longer than ROW_TIMEOUT_S.
            PeerUnreachable: there is no link.
        """
        up_Bps, sent = await self._direction(peer, up=True)
        down_Bps, received = await self._direction(peer, up=False)
        return Bandwidth(up_Bps, down_Bps, sent + received)

    def receive(self, peer: PeerId, message: BandwidthProbe | BandwidthReport, payload_bytes: int) -> None:
        """What a peer sends. An answer that nobody waits for is late, and ignored.

        Raises:
            RemoteProtocolError: probes to a user who did not ask for them: an attempt to fill a line.
        """
        row = self._rows.get(message.number)
        is_awaited = row is not None and row.peer == peer and not row.done.done()
        match message:
            case BandwidthReport(problem="") if row is not None and is_awaited and not row.is_ours_to_time:
                row.done.set_result((message.num_bytes, message.seconds))
            case BandwidthReport() if row is not None and is_awaited:
                problem = message.problem or "it reports on what it was asked to send"
                row.done.set_exception(PeerRefused(peer, f"peer {short(peer)} does not measure: {problem}"))
            case BandwidthProbe() if row is not None and is_awaited and row.is_ours_to_time:
                self._take(row, message, payload_bytes)
            case BandwidthProbe() if (peer, message.number) not in self._asked:
                self._serve(peer, message, payload_bytes)

    def forget(self, peer: PeerId) -> None:
        """The link with this peer is gone."""
        self._server.forget(peer)
        for row in self._rows.values():
            if row.peer == peer and not row.done.done():
                row.done.set_exception(PeerClosed(peer, f"the link with {short(peer)} closed during the measurement"))

    def _serve(self, peer: PeerId, probe: BandwidthProbe, payload_bytes: int) -> None:
        if self._is_busy is None:
            raise RemoteProtocolError(peer, f"{short(peer)} sent probes that were not asked for")
        reply = self._server.receive(peer, probe, payload_bytes, is_busy=self._is_busy(), now=self._clock())
        if reply is None:
            return
        with contextlib.suppress(PeerUnreachable):  # the link is gone meanwhile
            if reply.report is not None:
                self._sender.send(peer, reply.report)
            for index in range(reply.num_probes):
                self._sender.send(peer, BandwidthProbe(probe.number, index, reply.num_probes), _PAYLOAD)

    def _take(self, row: _Row, probe: BandwidthProbe, payload_bytes: int) -> None:
        if not row.is_ours_to_time or probe.index != row.next_index or probe.count > MAX_ROW_BYTES // CHUNK_BYTES:
            row.done.set_exception(RemoteProtocolError(row.peer, f"{short(row.peer)} sent probes out of order"))
            return
        now = self._clock()
        row.next_index += 1
        if probe.index == 0:
            row.began = now
        else:
            row.num_bytes += payload_bytes
        if row.next_index >= probe.count:
            row.done.set_result((row.num_bytes, now - row.began))

    async def _direction(self, peer: PeerId, *, up: bool) -> tuple[float, int]:
        """Bytes per second, and how many bytes were sent for it."""
        sent = 0
        for size in (FIRST_ROW_BYTES, MAX_ROW_BYTES):
            num_bytes, seconds = await self._row(peer, size, up=up)
            sent += size
            if not (seconds > 0 and 0 < num_bytes <= size):
                raise RemoteProtocolError(peer, f"{short(peer)} reports {num_bytes} bytes in {seconds:g} s")
            if seconds >= ENOUGH_S:
                break
        return num_bytes / seconds, sent

    async def _row(self, peer: PeerId, num_bytes: int, *, up: bool) -> tuple[int, float]:
        # By chance: a peer that measures us at the same time numbers its rows too.
        number = secrets.randbelow(2**32)
        row = _Row(peer, asyncio.get_running_loop().create_future(), is_ours_to_time=not up)
        self._rows[number] = row
        try:
            if up:
                count = num_bytes // CHUNK_BYTES
                for index in range(count):
                    self._sender.send(peer, BandwidthProbe(number, index, count), _PAYLOAD)
            else:
                self._asked.append((peer, number))
                self._sender.send(peer, BandwidthProbe(number, 0, 1, num_bytes))
            async with asyncio.timeout(ROW_TIMEOUT_S):
                return await row.done
        except TimeoutError as error:
            raise PeerTimeout(peer, f"{num_bytes} bytes took longer than {ROW_TIMEOUT_S:.0f} s") from error
        finally:
            del self._rows[number]
            row.done.cancel()
