"""Known peers, kept in the home folder: whoever has been in a swarm once finds back without being given an address.

Guarantees: only peers that this machine has dialled, and that have proven their key there and answered, get in; the
addresses of a peer are those where that happened or that its own signed record names. At most MAX_PEERS are kept. A
file that cannot be read is set aside under another name, with a warning, and never keeps a program from starting.

Assumes: nothing of the file. What stands in it is where to dial and whom to expect, as a ``--peer`` is; who answers has
to prove its key. It tells with whom this machine has been in touch, hence mode 0600.

The file is shared by all nodes and users of a home: a user then finds the swarm that its own node is in, and a book
that is used more often is fresher. Whoever writes merges with what the file holds by then; of two that write in the
same moment one is lost, and writes again a minute later. Each swarm has a file of its own, named by the tag of its key:
a private swarm's peers must not be shown to the public one by dialling them from there.

Loopback addresses are never kept: the next process that gets that port is somebody else's, and the nodes of this
machine are found otherwise (p2p.local_nodes).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from fusion_node.types import PeerId, UnixS
from p2p.prefixes import diversity_key, is_loopback
from p2p.records import AddressText, PeerText, Time

if TYPE_CHECKING:
    from random import Random

MAX_PEERS = 500
"""Some hundred bytes each. A few would do to find back; more make it dear to fill the book with one's own."""

MAX_ADDRESSES = 8
MAX_FILE_BYTES = 2 * 1024 * 1024
"""500 peers with 8 addresses of 256 characters, and a margin."""

FORGET_AFTER_S = 28 * 86_400.0
"""Since it was last met: longer than a holiday. Addresses of homes change sooner than that."""

FORGET_FAILURES = 10
"""Failed dials in a row after which a peer is dropped, unless it was met within SURE_FOR_S or few others are left."""

KEPT_PEERS = 20
"""So many are never dropped for failures: it may be our own line that is down, and without them nothing leads back."""

SURE_FOR_S = 2 * 86_400.0
"""A weekend: nothing is dropped within it, because it may be our own line that is down."""

_VERSION = 1

log = logging.getLogger(__name__)


class KnownPeer(msgspec.Struct, frozen=True):
    """One entry. ``num_failures`` is of failed dials since the last success."""

    peer: PeerText
    addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    last_seen: Time
    num_successes: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    num_failures: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0

    @property
    def neighbourhood(self) -> str | None:
        """The /16 or /48 of its first address, None when that says nothing (a name, a private address)."""
        return diversity_key(host_of(self.addresses[0]))


class _File(msgspec.Struct, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=_VERSION, le=_VERSION)]
    peers: Annotated[list[KnownPeer], msgspec.Meta(max_length=4 * MAX_PEERS)]


class PeerBook:
    """The entries, without the file. No clock: ``now`` is Unix time, handed in."""

    def __init__(self, peers: Iterable[KnownPeer] = ()) -> None:
        self._peers: dict[str, KnownPeer] = {}
        self._touched: set[str] = set()
        self.is_changed = False
        """Since it was written; whoever writes it sets this."""
        self.merge(peers)

    def entries(self) -> list[KnownPeer]:
        return list(self._peers.values())

    def get(self, peer: PeerId) -> KnownPeer | None:
        return self._peers.get(peer)

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def met(self, peer: PeerId, addresses: Sequence[str], *, now: UnixS) -> None:
        """A peer that was dialled has proven its key and answered."""
        kept = tuple(dict.fromkeys(text for text in addresses if not is_loopback(host_of(text))))[:MAX_ADDRESSES]
        before = self._peers.get(peer)
        if not kept:
            return
        self._put(KnownPeer(peer, kept, max(0.0, now), (before.num_successes if before else 0) + 1, 0))
        self._bound(now)

    def failed(self, peer: PeerId, *, now: UnixS) -> None:
        """A dial of a peer in the book has failed, and not because of our own line."""
        before = self._peers.get(peer)
        if before is None:
            return
        after = msgspec.structs.replace(before, num_failures=before.num_failures + 1)
        self._put(after)
        if len(self._peers) > KEPT_PEERS and _has_failed(after, now):
            del self._peers[peer]

    def merge(self, peers: Iterable[KnownPeer]) -> None:
        """Takes entries of the file, where they are newer than ours. Who was dropped here does not come back so."""
        for other in peers:
            ours = self._peers.get(other.peer)
            is_news = other.peer not in self._touched if ours is None else ours.last_seen < other.last_seen
            if is_news:
                self._peers[other.peer] = other

    def expire(self, *, now: UnixS) -> None:
        """Drops who has not been met for weeks, and who is dated ahead of the clock; of the others those who failed too
        often, until KEPT_PEERS are left."""
        stale = [entry for entry in self._peers.values() if _is_stale(entry, now)]
        num_spare = len(self._peers) - len(stale) - KEPT_PEERS
        failed = [entry for entry in self._peers.values() if entry not in stale and _has_failed(entry, now)]
        failed.sort(key=lambda entry: entry.last_seen)
        for entry in [*stale, *failed[: max(0, num_spare)]]:
            del self._peers[entry.peer]
            self.is_changed = True

    def choose(self, num: int, chance: Random, *, without: Iterable[str] = ()) -> list[KnownPeer]:
        """Whom to try first: those with the fewest failures and, among equals, by chance; of different neighbourhoods
        first, so that no single network decides on the way into the swarm."""
        excluded = set(without)
        pool = [entry for entry in self._peers.values() if entry.peer not in excluded]
        chance.shuffle(pool)
        pool.sort(key=lambda entry: entry.num_failures)
        seen: set[str] = set()
        first: list[KnownPeer] = []
        rest: list[KnownPeer] = []
        for entry in pool:
            place = entry.neighbourhood
            (rest if place is not None and place in seen else first).append(entry)
            if place is not None:
                seen.add(place)
        return [*first, *rest][:num]

    def copy(self) -> PeerBook:
        """For writing in another thread."""
        other = PeerBook(self._peers.values())
        other._touched = set(self._touched)
        return other

    def _put(self, entry: KnownPeer) -> None:
        self._peers[entry.peer] = entry
        self._touched.add(entry.peer)
        self.is_changed = True

    def _bound(self, now: UnixS) -> None:
        if len(self._peers) > MAX_PEERS:
            self.expire(now=now)
        while len(self._peers) > MAX_PEERS:
            worst = max(self._peers.values(), key=lambda entry: (entry.num_failures, -entry.last_seen))
            del self._peers[worst.peer]


def path_of(home: Path, swarm_tag: str) -> Path:
    """The file of one swarm: ``swarm_tag`` is p2p.swarm_key.swarm_tag, which may be shown."""
    return home / f"peers-{swarm_tag}.json"


def load(path: Path, *, now: UnixS) -> PeerBook:
    """The book of a file; an empty one when there is none, or none that can be read."""
    book = PeerBook(_read(path))
    book.expire(now=now)
    return book


def save(book: PeerBook, path: Path, *, now: UnixS) -> None:
    """Merges with the file and replaces it. Failing to write is no reason not to go on: it is logged."""
    book.merge(_read(path))
    book.expire(now=now)
    peers = sorted(book.entries(), key=lambda entry: -entry.last_seen)[:MAX_PEERS]
    data = msgspec.json.format(msgspec.json.encode(_File(_VERSION, peers)), indent=1)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        log.warning("known peers cannot be written to %s: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def host_of(address: str) -> str:
    """The host of a multiaddr; empty when it has none."""
    parts = address.split("/", 3)
    return parts[2] if len(parts) > 2 else ""


def _read(path: Path) -> list[KnownPeer]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("known peers cannot be read from %s: %s", path, error.strerror)
        return []
    try:
        if len(data) > MAX_FILE_BYTES:
            raise msgspec.ValidationError("the file is too large")
        return msgspec.json.decode(data, type=_File).peers
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        aside = path.with_name(f"{path.name}.unreadable")
        log.warning("known peers in %s cannot be understood (%s); the file is now %s", path, error, aside.name)
        try:
            path.replace(aside)
        except OSError:
            log.warning("known peers in %s cannot be set aside either", path)
        return []


def _is_stale(entry: KnownPeer, now: UnixS) -> bool:
    age_s = now - entry.last_seen
    return age_s > FORGET_AFTER_S or age_s < -SURE_FOR_S  # a clock that was wrong


def _has_failed(entry: KnownPeer, now: UnixS) -> bool:
    return entry.num_failures >= FORGET_FAILURES and now - entry.last_seen > SURE_FOR_S
