"""The data links of the simulated hosts: made, used, lost.

As of the product's link pool: frames of one direction arrive in order; a peer that is silent for DEAD_AFTER_S is given
up; a process that is killed resets its links at once, and a machine that loses power does not; a process that is
stopped keeps its links until it is given up, and learns of it when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fusion_node.errors import PeerClosed, PeerError, PeerTimeout, PeerUnreachable
from fusion_node.simulator.heap import EventHeap
from fusion_node.simulator.network import SETUP_ROUND_TRIPS, Network, Path, Place, Way
from fusion_node.types import PeerId
from p2p.heartbeat_core import DEAD_AFTER_S
from p2p.identity import short
from p2p.messages import AnyMessage

MESSAGE_BYTES = 120
"""Header, seal, WebSocket, TCP and IP of a frame without rows; an OpenSession has its plan on top."""

FRAME_S = 0.0005
"""Of CPU at both ends together (benchmarks.data_plane)."""

DIAL_TIMEOUT_S = 8.0
"""As a stage waits for its next one."""


@dataclass(slots=True, eq=False)
class Link:
    """One connection; of its two ends, ``one`` dialled.

    Attributes:
        last_one, last_two: when the last frame to that end arrives: none overtakes it.
        held: frames that wait for a partition to heal: to whom, message, payload.
    """

    one: Host
    two: Host
    path: Path
    is_open: bool = True
    last_one: float = 0.0
    last_two: float = 0.0
    held: list[tuple[Host, AnyMessage, Any]] = field(default_factory=list)

    def other(self, host: Host) -> Host:
        return self.two if host is self.one else self.one


class Host:
    """What has a place in the network and a data plane: nodes and users.

    Attributes:
        is_up: its process runs, or is stopped.
        is_frozen: it is stopped; what comes waits in ``inbox``.
        has_power: a machine without answers nobody, not even with a reset.
        bytes_sent: frames and rows.
    """

    def __init__(self, index: int, peer: PeerId, place: Place) -> None:
        self.index = index
        self.peer = peer
        self.place = place
        self.is_up = True
        self.is_frozen = False
        self.has_power = True
        self.links: dict[PeerId, Link] = {}
        self.inbox: list[Callable[[], None]] = []
        self.bytes_sent = 0.0

    def on_message(self, source: PeerId, message: AnyMessage, payload: Any) -> None:
        """A frame has come."""
        raise NotImplementedError

    def on_link_closed(self, peer: PeerId, error: PeerError) -> None:
        """A link is gone."""
        raise NotImplementedError


class Links:
    """All links of a world.

    Args:
        host_of: finds a host by its id; hosts that are gone as well.
    """

    def __init__(self, heap: EventHeap, network: Network, host_of: Callable[[PeerId], Host | None]) -> None:
        self._heap = heap
        self._network = network
        self._host_of = host_of
        self.num_frames = 0

    def connect(self, host: Host, peer: PeerId, then: Callable[[PeerError | None], None]) -> None:
        """Makes a link, or finds that there is one; says so later, never in this call."""
        other = self._host_of(peer)
        if peer in host.links:
            self._heap.after(0.0, self._told, host, then, None)
            return
        if other is None:
            error = PeerUnreachable(peer, f"nobody knows where {short(peer)} is")
            self._heap.after(0.0, self._told, host, then, error)
            return
        path = self._network.path(host.place, other.place)
        round_trip_s = 2 * path.one_way_s
        if path.way is Way.NONE:
            self._heap.after(2 * round_trip_s, self._told, host, then, self._no_way(peer))
        elif not self._hears(host, other):
            # A machine that is there refuses; one without power, or behind a cut line, says nothing.
            is_refused = other.has_power and not other.is_up and host.place.part == other.place.part
            after_s = round_trip_s if is_refused else DIAL_TIMEOUT_S
            error = PeerUnreachable(peer, f"node {short(peer)} cannot be dialled", is_refused=is_refused)
            self._heap.after(after_s, self._told, host, then, error)
        else:
            self._heap.after(SETUP_ROUND_TRIPS * round_trip_s, self._connected, host, other, path, then)

    def send(
        self,
        sender: Host,
        peer: PeerId,
        message: AnyMessage,
        *,
        num_bytes: float = 0.0,
        payload: Any = b"",
    ) -> bool:
        """Sends a frame. False when there is no link.

        Args:
            num_bytes: of the rows, as the model would have them.
        """
        link = sender.links.get(peer)
        if link is None:
            return False
        receiver = link.two if sender is link.one else link.one
        size = num_bytes + MESSAGE_BYTES
        sender.bytes_sent += size
        if sender.place.part != receiver.place.part:
            link.held.append((receiver, message, payload))
            return True
        now = self._heap.now
        delay_s = self._network.delay(sender.place, receiver.place, link.path, size, now) + FRAME_S
        if receiver is link.one:
            arrives = link.last_one = max(now + delay_s, link.last_one)
        else:
            arrives = link.last_two = max(now + delay_s, link.last_two)
        self._heap.at(arrives, self._deliver, link, receiver, message, payload)
        return True

    def backlog_s(self, sender: Host, peer: PeerId) -> float:
        """How long what was sent to a peer before still takes to get there, beyond the way."""
        link = sender.links.get(peer)
        if link is None:
            return 0.0
        last = link.last_two if sender is link.one else link.last_one
        return max(0.0, last - self._heap.now - link.path.one_way_s)

    def reset(self, link: Link) -> None:
        """Both ends learn that the connection was reset."""
        for host in (link.one, link.two):
            self._close_at(link, host, PeerClosed(link.other(host).peer, "the connection was reset"))

    def died(self, host: Host) -> None:
        """A host's process has ended, or its machine has lost power (``has_power``)."""
        for link in list(host.links.values()):
            other = link.other(host)
            del host.links[other.peer]
            if host.has_power:
                error: PeerError = PeerClosed(host.peer, f"node {short(host.peer)} has closed the link")
                self._heap.after(link.path.one_way_s, self._close_at, link, other, error)
            else:
                self._heap.after(DEAD_AFTER_S + link.path.one_way_s, self._close_at, link, other, self._silent(host))

    def froze(self, host: Host) -> None:
        """A host was stopped: if it does not go on in time, the others give it up."""
        for link in list(host.links.values()):
            self._heap.after(DEAD_AFTER_S + link.path.one_way_s, self._give_up, link, host)

    def thawed(self, host: Host) -> None:
        """It goes on: what came meanwhile comes now, and links that the others gave up turn out to be gone."""
        inbox, host.inbox = host.inbox, []
        for happen in inbox:
            if host.is_up:
                happen()
        for peer, link in list(host.links.items()):
            if not link.is_open and host.is_up:
                self._close_at(link, host, PeerClosed(peer, "the connection was reset"))

    def parted(self, hosts: Iterable[Host]) -> None:
        """These hosts have moved to another part of the network, or back."""
        for host in hosts:
            for link in list(host.links.values()):
                if link.one.place.part != link.two.place.part:
                    self._heap.after(DEAD_AFTER_S + link.path.one_way_s, self._give_up_parted, link)
                elif link.held:
                    held, link.held = link.held, []
                    for receiver, message, payload in held:
                        self._heap.after(
                            2 * link.path.one_way_s + FRAME_S, self._deliver, link, receiver, message, payload
                        )

    # inside

    def _hears(self, host: Host, other: Host) -> bool:
        return other.is_up and other.has_power and host.place.part == other.place.part

    @staticmethod
    def _no_way(peer: PeerId) -> PeerError:
        return PeerUnreachable(peer, f"no way leads to {short(peer)}: neither through a hole nor over a relay")

    @staticmethod
    def _silent(host: Host) -> PeerError:
        return PeerTimeout(host.peer, f"nothing was heard of {short(host.peer)} for {DEAD_AFTER_S:.0f} s")

    def _told(self, host: Host, then: Callable[[PeerError | None], None], error: PeerError | None) -> None:
        if not host.is_up:
            return
        if host.is_frozen:
            host.inbox.append(lambda: then(error))
        else:
            then(error)

    def _connected(self, host: Host, other: Host, path: Path, then: Callable[[PeerError | None], None]) -> None:
        if not host.is_up:
            return
        if other.peer in host.links:
            self._told(host, then, None)
        elif not self._hears(host, other) or other.is_frozen:
            error = PeerTimeout(other.peer, f"node {short(other.peer)} does not answer")
            self._heap.after(DIAL_TIMEOUT_S - min(DIAL_TIMEOUT_S, 2 * path.one_way_s), self._told, host, then, error)
        else:
            link = Link(host, other, path)
            host.links[other.peer] = link
            other.links[host.peer] = link
            self._told(host, then, None)

    def _deliver(self, link: Link, receiver: Host, message: AnyMessage, payload: Any) -> None:
        if not link.is_open or not receiver.is_up:
            return
        if receiver.is_frozen:
            receiver.inbox.append(lambda: self._deliver(link, receiver, message, payload))
            return
        sender = link.other(receiver)
        self.num_frames += 1
        self._heap.note(f"{sender.index}>{receiver.index}{type(message).__name__}{len(payload)}")
        receiver.on_message(sender.peer, message, payload)

    def _close_at(self, link: Link, host: Host, error: PeerError) -> None:
        link.is_open = False
        peer = link.other(host).peer
        if host.links.get(peer) is not link or not host.is_up:
            return
        if host.is_frozen:
            host.inbox.append(lambda: self._close_at(link, host, error))
            return
        del host.links[peer]
        self._heap.note(f"{host.index}x{link.other(host).index}")
        host.on_link_closed(peer, error)

    def _give_up(self, link: Link, host: Host) -> None:
        if host.is_frozen and host.is_up and link.is_open:
            self._close_at(link, link.other(host), self._silent(host))

    def _give_up_parted(self, link: Link) -> None:
        if link.one.place.part != link.two.place.part and link.is_open:
            for host in (link.one, link.two):
                self._close_at(link, host, self._silent(link.other(host)))
