"""Two queues of messages between the event loop, where a Channel lives, and the thread, where its libp2p stream lives.

A call of Bridge for every message would cost as much as the message does. So each side appends to its own queue and
wakes the other one only when that may sleep; everything that gathers meanwhile goes over with the same waking, and into
the same write of the stream.

Guarantees: messages arrive in order, each once, until the end. Assumes: one reader and one writer per queue, and that
appending to a deque and assigning an attribute are atomic, as they are under CPython's lock. Each counter is written by
one side only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fusion_node.errors import PeerError

LENGTH_BYTES = 4
"""On the stream every message has its length in front, little-endian."""


def _nobody() -> None: ...


@dataclass(slots=True, eq=False)
class StreamPipe:
    """See the head of this file."""

    outgoing: deque[bytes] = field(default_factory=deque)
    """Messages for the stream, each with its length in front."""
    incoming: deque[bytes] = field(default_factory=deque)
    """Messages from the stream."""
    wake_thread: Callable[[], None] = _nobody
    """Thread-safe. Called by the loop when it has put something out, made room, or is closing."""
    wake_loop: Callable[[], None] = _nobody
    """Thread-safe. Called by the thread when something has come, room was made, or all is over."""

    put_bytes: int = 0
    """Written by the loop: what it has put out so far."""
    taken_bytes: int = 0
    """Written by the thread: what of that the stream has taken."""
    come_bytes: int = 0
    """Written by the thread: what has come in so far."""
    given_bytes: int = 0
    """Written by the loop: what of that was given to the receiver."""

    closing: bool = False
    """Written by the loop: what was put out is still to be sent, and then the stream closed."""
    aborting: bool = False
    """Written by the loop: the stream is to be reset at once."""
    ended: PeerError | None = None
    """Written by the thread: why the stream is over. Nothing comes any more, and nothing is taken."""

    @property
    def waiting_out_bytes(self) -> int:
        return self.put_bytes - self.taken_bytes

    @property
    def waiting_in_bytes(self) -> int:
        return self.come_bytes - self.given_bytes
