"""Who may connect: limits and bans behind one pair of questions, asked by every listener and before every dial.

``refuse_host`` is asked when somebody connects, before anything is spent on it, and counts the attempt; ``refuse_peer``
when an identity is proven, before a dial, and for each request. Both answer with a reason of a few words, or None.
Whoever accepts a connection says so with ``connected``, ``proven`` and ``disconnected``, so that what is open is known.

Breaches of protocol are reported here and lead to short bans (p2p.bans). What hears of a new ban closes what is open.

One object per process, used from the event loop and from libp2p's thread: a lock makes each call one step. The file
of bans is read once at the start, and written in another thread by ``save`` and ``change``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog

from fusion_node.errors import ConfigError, ProtocolVersionMismatch, RemoteProtocolError
from fusion_node.types import PeerId
from p2p import bans as ban_file
from p2p.allow_list import AllowList
from p2p.bans import Ban, BanList
from p2p.limits_core import Limits
from p2p.prefixes import ip_of, is_loopback

BANNED = "banned"
"""The reason that is given and counted for every ban. Who was banned why is the operator's business, not the peer's."""

MAX_NEIGHBOURS = 1000

_log = structlog.get_logger(__name__)


class PeerGate:
    """See the head of this file.

    Args:
        path: of the file of bans; None keeps them in memory only.
        limits: None for the default ones.
        allow_list: everybody else is refused; None lets in whoever is not banned.
        clock: monotonic seconds, for the limits.
        wall_clock: Unix time, for the bans.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        limits: Limits | None = None,
        allow_list: AllowList | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """What was refused, by reason; breaches that were reported, as ``breach``."""
        self._path = path
        self._limits = limits or Limits()
        self._allow_list = allow_list
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._bans = BanList()
        self._unsaved: list[Ban] = []
        self._neighbours: OrderedDict[PeerId, None] = OrderedDict()
        """Peers on this machine, as they have connected: none is banned by itself, on whatever path it erred."""
        self._on_ban: list[Callable[[Ban], None]] = []
        self._on_change: list[Callable[[], None]] = []
        if allow_list is not None:
            allow_list.on_change(self._tell_changed)
        self._version_read = None if path is None else _version(path)
        if path is not None:
            self._bans.replace_all(ban_file.load(path), now=wall_clock())

    # what is asked

    def refuse_host(self, host: str) -> str | None:
        """Somebody connects from this address: why it is to be refused, if it is."""
        with self._lock:
            if self._bans.of_host(host, now=self._wall_clock()) is not None:
                return self._refuse(BANNED)
            excess = self._limits.connecting(host, now=self._clock())
            return None if excess is None else self._refuse(excess)

    def refuse_peer(self, peer: PeerId, host: str) -> str | None:
        """Whether to have nothing to do with a peer that is proven to be at this address, and why."""
        if host and is_loopback(host):
            with self._lock:
                self._note_neighbour(peer)
        return self.refuse_dial(peer, host)

    def refuse_dial(self, peer: PeerId, host: str) -> str | None:
        """Whether to have nothing to do with a peer that is said to be there. ``host`` may be a name, or empty."""
        with self._lock:
            now = self._wall_clock()
            if self._bans.of_peer(peer, now=now) is not None or self._bans.of_host(host, now=now) is not None:
                return self._refuse(BANNED)
            return self._refuse_stranger(peer)

    def refuse_stream(self, peer: PeerId) -> str | None:
        """A peer asks for something on the control plane. Unless refused, ``stream_closed`` follows."""
        with self._lock:
            if self._bans.of_peer(peer, now=self._wall_clock()) is not None:
                return self._refuse(BANNED)
            if (stranger := self._refuse_stranger(peer)) is not None:
                return stranger
            excess = self._limits.stream_opened(peer, now=self._clock())
            return None if excess is None else self._refuse(excess)

    def refuse_request(self, peer: PeerId, num_bytes: int) -> str | None:
        """A request of so many bytes has arrived."""
        with self._lock:
            excess = self._limits.requested(peer, num_bytes, now=self._clock())
            return None if excess is None else self._refuse(excess)

    def refuse_traffic(self, peer: PeerId, num_messages: int, num_bytes: int) -> str | None:
        """A peer has sent so much on the data plane since this was last asked."""
        with self._lock:
            excess = self._limits.received(peer, num_messages, num_bytes, now=self._clock())
            return None if excess is None else self._refuse(excess)

    def reason_against(self, peer: PeerId) -> str | None:
        """As ``refuse_peer``, for people: nothing is counted."""
        with self._lock:
            if self._bans.of_peer(peer, now=self._wall_clock()) is not None:
                return BANNED
            return None if self._allow_list is None else self._allow_list.refuse(peer)

    # what is told

    def connected(self, host: str) -> None:
        """A connection from there was accepted."""
        with self._lock:
            self._limits.connected(host)

    def proven(self, host: str) -> None:
        """It has proven its identity, or has ended without."""
        with self._lock:
            self._limits.proven(host)

    def disconnected(self, host: str) -> None:
        """It has ended."""
        with self._lock:
            self._limits.disconnected(host)

    def stream_closed(self, peer: PeerId) -> None:
        with self._lock:
            self._limits.stream_closed(peer)

    def report(self, peer: PeerId | None, host: str | None, why: str) -> None:
        """A breach of protocol that this process has seen itself. See BanList.breach."""
        with self._lock:
            self.refused["breach"] += 1
            if host is None and peer in self._neighbours:
                return
            made = self._bans.breach(peer, host, why, now=self._wall_clock())
            self._unsaved += made
        for ban in made:
            _log.warning("banned for breaches of protocol", target=ban.target, for_s=_length_s(ban), reason=ban.reason)
        self._tell(made)

    def report_failure(self, peer: PeerId | None, host: str | None, failure: BaseException) -> None:
        """``report``, if what failed is a breach: another version is none, and neither is a lost connection."""
        if isinstance(failure, RemoteProtocolError) and not isinstance(failure, ProtocolVersionMismatch):
            self.report(peer, host, str(failure))

    def is_neighbour(self, peer: str) -> bool:
        """Whether the peer has connected from this machine."""
        with self._lock:
            return peer in self._neighbours

    def on_ban(self, callback: Callable[[Ban], None]) -> None:
        """Calls back with every new ban, from whichever thread made it, so that what is open can be closed."""
        self._on_ban.append(callback)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back when others are refused than before, by a ban or by the allow-list, from whichever thread."""
        self._on_change.append(callback)

    # the operator

    def refresh(self) -> None:
        """Reads the allow-list and the file of bans again if they have changed. To be called about once a second."""
        if self._allow_list is not None:
            self._allow_list.refresh()
        if self._path is None or self._version_read == (version := _version(self._path)):
            return
        self._version_read = version
        found = ban_file.load(self._path)
        with self._lock:
            before = {ban.target for ban in self._bans.current(now=self._wall_clock())}
            self._bans.replace_all([*found, *self._unsaved], now=self._wall_clock())
            new = [ban for ban in self._bans.current(now=self._wall_clock()) if ban.target not in before]
        self._tell(new)

    def bans(self) -> list[Ban]:
        """Those that are not over, the last made first."""
        with self._lock:
            return self._bans.current(now=self._wall_clock())

    async def change(self, *, ban: Iterable[Ban] = (), lift: Iterable[str] = ()) -> int:
        """Bans and lifts bans, here and in the file, and returns how many were lifted. Effective when this returns.

        Raises:
            ConfigError: the file cannot be written; the change holds until the process ends.
        """
        added, targets = list(ban), list(lift)
        with self._lock:
            num_lifted = sum([self._bans.remove(target) for target in targets])
            self._unsaved = [unsaved for unsaved in self._unsaved if unsaved.target not in targets]
            for each in added:
                self._bans.add(each, now=self._wall_clock())
        self._tell(added)
        if self._path is not None:
            after = await asyncio.to_thread(
                ban_file.change, self._path, add=added, remove=targets, now=self._wall_clock()
            )
            with self._lock:
                self._bans.replace_all([*after, *self._unsaved], now=self._wall_clock())
        return num_lifted

    async def save(self) -> None:
        """Writes the automatic bans made since the last time. A file that cannot be written is reported, not raised."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, []
        if not unsaved or self._path is None:
            return
        try:
            await asyncio.to_thread(ban_file.change, self._path, add=unsaved, now=self._wall_clock())
        except ConfigError as error:
            _log.warning("automatic bans are not saved", reason=str(error))

    def _note_neighbour(self, peer: PeerId) -> None:
        self._neighbours[peer] = None
        self._neighbours.move_to_end(peer)
        if len(self._neighbours) > MAX_NEIGHBOURS:
            self._neighbours.popitem(last=False)

    def _refuse_stranger(self, peer: PeerId) -> str | None:
        reason = None if self._allow_list is None else self._allow_list.refuse(peer)
        return None if reason is None else self._refuse(reason)

    def _refuse(self, reason: str) -> str:
        self.refused[str(reason)] += 1
        return str(reason)

    def _tell(self, made: Sequence[Ban]) -> None:
        for ban in made:
            for callback in self._on_ban:
                callback(ban)
        if made:
            self._tell_changed()

    def _tell_changed(self) -> None:
        for callback in self._on_change:
            callback()


def _version(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def matches(ban: Ban, peer: str, host: str) -> bool:
    """Whether a ban is about this peer at this address."""
    network, ip = ban.network, ip_of(host)
    if network is None:
        return ban.target == peer
    return ip is not None and ip.version == network.version and ip in network


def _length_s(ban: Ban) -> int | None:
    return None if ban.until is None else round(ban.until - ban.made_at)
