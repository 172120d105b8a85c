"""A slow line between processes of one machine, without root: messages wait in the sender before they are sent.

A network that was given an EmulatedLine puts each of its channels behind it (p2p.link_emulation_core says when a
message goes on), below the seal and above the socket, on the dialling and on the accepting side. So whatever is said on
links is delayed, with the handshake, pings and acknowledgements, and everybody measures the emulated line as if it were
there. Without one, nothing of this module is in the way. A process with several SwarmConnections has a line for each.

Not delayed: the control plane of libp2p (discovery, records, reachability), the TCP connection and the HTTP upgrade
below a WebSocket, and the end of a connection beyond what was written before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random, SystemRandom

import structlog

from fusion_node.errors import PeerClosed, PeerError
from p2p.link_emulation_core import LineShape, OneWay, Uplink
from p2p.seam import Channel, ChannelReceiver, PathKind

POLL_S = 0.0005
"""Event loops on epoll wake up to a millisecond late: the last half of one is waited for turn by turn, which takes an
eighth of a millisecond of CPU for a delivery in the mean."""

DRAIN_S = 1.0
"""How long a closing channel waits for its own messages. As long again for the peer's answer, in the transport."""

_log = structlog.get_logger(__name__)


class EmulatedLine:
    """The line of one process, which all its channels share.

    Args:
        chance: draws the jitter. None: other jitter in every run.
        poll_s: see POLL_S; 0 under a clock that jumps (p2p.virtual_time).
    """

    def __init__(self, shape: LineShape, *, chance: Random | None = None, poll_s: float = POLL_S) -> None:
        self.shape = shape
        self._uplink = Uplink(shape.rate_Bps)
        self._chance = chance or SystemRandom()
        self._poll_s = poll_s
        _log.warning(
            "EMULATES A SLOW LINE: all that this process sends to peers waits",
            rtt_ms=shape.rtt_ms,
            jitter_ms=shape.jitter_ms,
            rate_Mbps=shape.rate_Mbps,
        )

    def over(self, channel: Channel) -> Channel:
        """A channel that sends over this line, and then over ``channel``."""
        return _SlowChannel(channel, OneWay(self.shape, self._uplink, self._chance), self._poll_s)


class _SlowChannel:
    def __init__(self, channel: Channel, way: OneWay, poll_s: float) -> None:
        self._channel = channel
        self._way = way
        self._poll_s = poll_s
        self._loop = asyncio.get_running_loop()
        self._receiver: ChannelReceiver | None = None
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        self._is_full = False
        self._closed = False
        self._drained: asyncio.Future[None] | None = None

    # Channel

    @property
    def remote_address(self) -> str:
        return self._channel.remote_address

    @property
    def path(self) -> PathKind:
        return self._channel.path

    def set_receiver(self, receiver: ChannelReceiver) -> None:
        self._receiver = receiver
        self._channel.set_receiver(self)

    def write(self, data: bytes) -> bool:
        if self._closed:
            raise PeerClosed(self.remote_address, f"the connection with {self.remote_address} is closed")
        now = self._loop.time()
        self._way.put(data, now)
        self._deliver(now)
        self._is_full = self._way.is_full(now)
        self._arm(now)
        return not self._is_full

    def limit_unsent(self, num_bytes: int) -> None:
        """See LimitsUnsent."""
        self._way.limit_unsent(num_bytes)

    def pause_reading(self) -> None:
        self._channel.pause_reading()

    def resume_reading(self) -> None:
        self._channel.resume_reading()

    def abort(self) -> None:
        self._end()
        self._channel.abort()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if self._way:
                self._drained = self._loop.create_future()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await self._drained
            self._end()
        await self._channel.aclose()

    # ChannelReceiver, for the channel below

    def message_received(self, data: bytes | memoryview) -> None:
        assert self._receiver is not None  # noqa: S101 - who called us was told of it by ``set_receiver``
        self._receiver.message_received(data)

    def channel_writable(self) -> None:
        self._way.go_on()
        self._run()

    def channel_closed(self, error: PeerError) -> None:
        self._end()
        if self._receiver is not None:
            self._receiver.channel_closed(error)

    # inside

    def _run(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        self._deliver(now)
        if self._is_full and not self._way.is_full(now):
            self._is_full = False
            if self._receiver is not None and not self._closed:
                self._receiver.channel_writable()  # who may write
        self._arm(now)

    def _deliver(self, now: float) -> None:
        try:
            while (message := self._way.take(now)) is not None:
                if not self._channel.write(message):
                    self._way.stall()
        except PeerClosed:
            self._end()  # the channel below says so itself
        if self._drained is not None and not self._way and not self._drained.done():
            self._drained.set_result(None)

    def _arm(self, now: float) -> None:
        due = self._way.get_timer()
        if due is None or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        if due - now > self._poll_s:
            self._timer = self._loop.call_at(due - self._poll_s, self._run)
        else:
            self._timer = self._loop.call_soon(self._run)

    def _end(self) -> None:
        """Nothing is delivered any more, and nobody is woken for it."""
        self._closed = True
        self._way.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
