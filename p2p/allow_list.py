"""The allow-list: peer ids in a text file, and nobody else is talked with.

One peer id a line; ``#`` begins a comment, on a line of its own or behind an id. The file is read again when it has
changed, so that members come and go without a restart. A list that has become unreadable, wrong or empty while the
program runs leaves the last good one in force, and is reported once: a slip of the editor must neither open the swarm
to everybody nor close it to all. At the start it is an error.

An identity is all that is checked here, after the transport has proven it: a stranger learns that somebody listens, and
whose peer id that is. Who shall not learn even that needs a swarm key too (p2p.swarm_key).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from p2p.identity import public_key_of, short

NOT_ALLOWED = "not-on-the-allow-list"
"""The reason that is counted for everybody who is not."""

MAX_FILE_BYTES = 1024 * 1024
"""Some 15,000 members with a comment each."""

_Stamp = tuple[int, int, int]

log = structlog.get_logger(__name__)


class AllowList:
    """Who may connect; a part of p2p.gate.PeerGate. Usable from any thread.

    Raises:
        ConfigError: the file cannot be read, has a line that is no peer id, or names nobody.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._on_change: list[Callable[[], None]] = []
        self._stamp: _Stamp | None = self._stamp_of_file()
        self._peers = read(path)

    @property
    def peers(self) -> frozenset[PeerId]:
        """Those who are allowed now."""
        return self._peers

    def refuse(self, peer: PeerId) -> str | None:
        """Why to have nothing to do with this peer; None when it is on the list."""
        return None if peer in self._peers else NOT_ALLOWED

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back when others are allowed than before, so that what is open can be looked at again."""
        self._on_change.append(callback)

    def refresh(self) -> None:
        """Reads the file again if it has changed. To be called about once a second; costs a look at its date."""
        with self._lock:
            stamp = self._stamp_of_file()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                peers = read(self._path)
            except ConfigError as error:
                log.error("the allow-list is not changed: it holds as it was", reason=str(error))
                return
            before, self._peers = self._peers, peers
        if peers != before:
            log.info(
                "the allow-list has changed",
                members=len(peers),
                added=sorted(short(peer) for peer in peers - before),
                removed=sorted(short(peer) for peer in before - peers),
            )
            for callback in self._on_change:
                callback()

    def _stamp_of_file(self) -> _Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        # The inode too: editors replace a file, and two of them may be of one size and one tick of the clock.
        return found.st_mtime_ns, found.st_size, found.st_ino


def read(path: Path) -> frozenset[PeerId]:
    """The peer ids in an allow-list.

    Raises:
        ConfigError: it cannot be read, has a line that is no peer id, or names nobody.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        lines = data.decode().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the allow-list {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the allow-list {path} is not a text file in UTF-8") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the allow-list {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    peers = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            public_key_of(text)
        except ValueError as error:
            raise ConfigError(f"line {number} of the allow-list {path} is no peer id: {text[:80]!r}") from error
        peers.add(PeerId(text))
    if not peers:
        raise ConfigError(f"the allow-list {path} names nobody: write one peer id a line")
    return frozenset(peers)
