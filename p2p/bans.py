"""Who is not to be talked with: bans by peer id and by IP prefix, each with a reason and usually an end.

An operator's bans last as long as told, for ever if told so. The program's own are for repeated breaches of protocol
that it has seen itself, never for what others say: FIRST_BAN_S at first, four times as long for each one that follows,
MAX_BAN_S at most. They never meet an address that is not globally routable, behind which may be everybody (a
container's proxy) or this machine itself; its peers are banned by their id, unless they are on this machine.

The file is ``bans.json`` in the home folder: JSON, mode 0600, replaced atomically under a lock that all nodes of the
home share. One that cannot be read is set aside under another name and reported; it keeps no node from starting.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import msgspec
import structlog

from fusion_node.errors import ConfigError
from fusion_node.wire import printable
from p2p.identity import public_key_of
from p2p.prefixes import Network, host_key, ip_of, is_loopback, subnet_key

FILE_NAME = "bans.json"
MAX_BANS = 10_000
"""Of which the automatic ones that end soonest give way."""

MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_REASON_CHARACTERS = 200

FIRST_BAN_S = 60.0
MAX_BAN_S = 3600.0
"""An hour: what a mistake of ours can cost a peer at most, and enough to make an attack slow."""

ESCALATION = 4.0
FORGIVEN_AFTER_S = 600.0
"""Breaches with a longer pause between them are not counted together."""

TRUSTED_AFTER_S = 4 * MAX_BAN_S
"""Without a breach: the next ban is a first one again."""

BREACHES_OF_A_PEER = 3
"""A bit flips, a version has a bug: one breach is no attack."""

BREACHES_OF_A_HOST = 10
"""A host may have many people behind it, and port scanners and browsers knock too."""

MAX_OFFENDERS = 10_000

LOCK_TIMEOUT_S = 5.0

_DURATION = re.compile(r"(\d{1,9})([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_log = structlog.get_logger(__name__)


class Ban(msgspec.Struct, frozen=True):
    """One ban.

    Attributes:
        target: a peer id, or an IP network in its canonical form (``203.0.113.0/24``; a single address is a ``/32``).
        made_at, until: Unix time in seconds; ``until`` None means for ever.
        is_automatic: made by the program, not by its operator.
    """

    target: str
    made_at: float
    until: float | None
    reason: str = ""
    is_automatic: bool = False

    def is_over(self, now: float) -> bool:
        return self.until is not None and self.until <= now

    @property
    def network(self) -> Network | None:
        """The prefix; None when the target is a peer."""
        return _network(self.target)


class BanFile(msgspec.Struct):
    """What ``bans.json`` holds."""

    version: int = 1
    bans: list[Ban] = []


@dataclass(slots=True)
class _Offender:
    num_breaches: int = 0
    last_breach: float = 0.0
    num_bans: int = 0


@dataclass
class BanList:
    """The bans of one process, in memory. Every method is handed Unix time."""

    _peers: dict[str, Ban] = field(default_factory=dict)
    _networks: dict[str, tuple[Network, Ban]] = field(default_factory=dict)
    _offenders: OrderedDict[str, _Offender] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._peers) + len(self._networks)

    def add(self, ban: Ban, *, now: float) -> None:
        """Adds a ban, in place of one with the same target."""
        if len(self) >= MAX_BANS:
            self._make_room(now)
        network = ban.network
        if network is None:
            self._peers[ban.target] = ban
        else:
            self._networks[ban.target] = (network, ban)

    def remove(self, target: str) -> bool:
        """Lifts the ban of exactly this target, and forgives its breaches; False when there is none."""
        self._offenders.pop(target, None)
        return self._peers.pop(target, None) is not None or self._networks.pop(target, None) is not None

    def replace_all(self, bans: Iterable[Ban], *, now: float) -> None:
        """Takes these instead of those that were there."""
        self._peers.clear()
        self._networks.clear()
        for ban in bans:
            if not ban.is_over(now):
                self.add(ban, now=now)

    def current(self, *, now: float) -> list[Ban]:
        """The bans that are not over, the last made first. Drops the others."""
        for target in [ban.target for ban in self._all() if ban.is_over(now)]:
            self._peers.pop(target, None)
            self._networks.pop(target, None)
        return sorted(self._all(), key=lambda ban: (-ban.made_at, ban.target))

    def of_peer(self, peer: str, *, now: float) -> Ban | None:
        ban = self._peers.get(peer)
        return ban if ban is not None and not ban.is_over(now) else None

    def of_host(self, host: str, *, now: float) -> Ban | None:
        """The ban of a prefix that the host is in. A linear search: an operator has tens of them."""
        if not self._networks:
            return None
        ip = ip_of(host)
        if ip is None:
            return None
        for network, ban in self._networks.values():
            if ip.version == network.version and ip in network and not ban.is_over(now):
                return ban
        return None

    def breach(self, peer: str | None, host: str | None, why: str, *, now: float) -> list[Ban]:
        """Counts a breach of protocol that this process has seen, and returns the bans that follow from it.

        Args:
            peer: whose identity is proven; None before.
            host: whom the connection comes from; None when it came through a relay, which is not to blame.
        """
        if host is not None and is_loopback(host):
            return []
        made = []
        if peer is not None and self._is_due(peer, BREACHES_OF_A_PEER, now):
            made.append(self._ban(peer, peer, why, now))
        if host is not None and subnet_key(host) is not None and self._is_due(host_key(host), BREACHES_OF_A_HOST, now):
            made.append(self._ban(canonical_target(host_key(host)), host_key(host), why, now))
        return made

    def _is_due(self, who: str, at: int, now: float) -> bool:
        offender = self._offenders.setdefault(who, _Offender())
        self._offenders.move_to_end(who)
        while len(self._offenders) > MAX_OFFENDERS:
            self._offenders.popitem(last=False)
        quiet_s = now - offender.last_breach
        if quiet_s > FORGIVEN_AFTER_S:
            offender.num_breaches = 0
        if quiet_s > TRUSTED_AFTER_S:
            offender.num_bans = 0
        offender.num_breaches += 1
        offender.last_breach = now
        if offender.num_breaches < at:
            return False
        offender.num_breaches = 0
        return True

    def _ban(self, target: str, who: str, why: str, now: float) -> Ban:
        offender = self._offenders[who]
        length_s = min(FIRST_BAN_S * ESCALATION ** min(offender.num_bans, 10), MAX_BAN_S)
        offender.num_bans += 1
        ban = Ban(target, now, now + length_s, printable(why, limit=MAX_REASON_CHARACTERS), is_automatic=True)
        before = self._peers.get(target) or (self._networks.get(target) or (None, None))[1]
        if before is None or before.is_over(now) or before.is_automatic:  # an operator's word stands
            self.add(ban, now=now)
        return ban

    def _make_room(self, now: float) -> None:
        self.current(now=now)
        if len(self) < MAX_BANS:
            return
        automatic = [ban for ban in self._all() if ban.is_automatic]
        given = min(automatic or self._all(), key=lambda ban: (ban.until is None, ban.until or 0.0))
        self._peers.pop(given.target, None)
        self._networks.pop(given.target, None)

    def _all(self) -> list[Ban]:
        return [*self._peers.values(), *(ban for _, ban in self._networks.values())]


def canonical_target(text: str) -> str:
    """Reads a peer id, an IP address or an IP prefix.

    Raises:
        ConfigError: it is none of them, or a prefix so short that it bans most of the world.
    """
    text = text.strip()
    try:
        public_key_of(text)
    except ValueError:
        network = _network(text)
    else:
        return text
    if network is None:
        raise ConfigError(
            f"{printable(text, limit=80)!r} cannot be banned: write a whole peer id, an IP address, "
            "or a prefix like 203.0.113.0/24"
        )
    if network.prefixlen < 8:
        raise ConfigError(f"{network} is most of the Internet: ban a prefix of at least 8 bits")
    return str(network)


def parse_duration(text: str) -> float:
    """Reads ``90``, ``90s``, ``10m``, ``1h``, ``2d`` or ``1w``; in seconds.

    Raises:
        ConfigError: it is no duration, or none above zero.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= 10 * 365 * 86_400:
        raise ConfigError(f"{printable(text, limit=40)!r} is not a duration: write for example 90s, 10m, 1h, 2d or 1w")
    return float(seconds)


# the file


def load(path: Path) -> list[Ban]:
    """The bans of a file, those that are over among them; none when there is no file.

    One that cannot be understood is renamed to ``bans.json.unreadable``, with a warning.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("bans cannot be read: nobody is banned by them", path=str(path), reason=error.strerror)
        return []
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError("the file is too large")
        bans = msgspec.json.decode(data, type=BanFile).bans
        return [msgspec.structs.replace(ban, target=canonical_target(ban.target)) for ban in bans]
    except (msgspec.MsgspecError, ConfigError) as error:
        aside = path.with_name(f"{path.name}.unreadable")
        with contextlib.suppress(OSError):
            path.replace(aside)
        _log.warning("the file of bans was damaged: nobody is banned by it", moved_to=str(aside), reason=str(error))
        return []


def change(path: Path, *, add: Iterable[Ban] = (), remove: Iterable[str] = (), now: float) -> list[Ban]:
    """Reads the file, changes it, writes it if need be, and returns its bans: one step for all processes of the home.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=LOCK_TIMEOUT_S, mode=0o600):
            before = load(path)
            bans = BanList()
            bans.replace_all(before, now=now)
            for target in remove:
                bans.remove(target)
            for ban in add:
                bans.add(ban, now=now)
            after = bans.current(now=now)
            if after != before or not path.exists():
                _write(path, after)
            return after
    except (OSError, filelock.Timeout) as error:
        why = getattr(error, "strerror", None) or "another process holds it"
        raise ConfigError(f"cannot write {path}: {why}") from error


def _write(path: Path, bans: list[Ban]) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(BanFile(bans=bans)), indent=1))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _network(text: str) -> Network | None:
    ip = None if "/" in text else ip_of(text)
    try:
        return ipaddress.ip_network(text if ip is None else ip, strict=False)
    except ValueError:
        return None
