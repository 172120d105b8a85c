"""A price for identities: a record is heeded only with the solution of a memory-hard puzzle over its public key.

The solution is a nonce; its work is Argon2id(password: domain ‖ public key, salt: ``fusion-1`` ‖ nonce, 1 pass, 1 MiB),
and it is worth as many bits as that has zeros in front (Hashcash with a memory-hard function; S/Kademlia §4.1 "crypto
puzzle"). Solving takes 2^bits evaluations on average, checking takes one: 0.9 ms on one core of 2024.

1 MiB and not more, because honest nodes pay for checking: a newcomer checks everybody. It fits a core's second-level
cache, and a GPU computes hundreds at a time; so this makes many identities cost something, and does not make them dear.
docs/protocol-network.md has the table.

``PuzzleChecker`` bounds what strangers can make us check: each identity is checked once, nobody is checked for who
brings more than its share, and those who have paid for an identity themselves have a budget of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import nacl.pwhash
import structlog

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId, UnixS
from p2p.identity import public_key_of
from p2p.limits_core import Buckets, Rate
from p2p.prefixes import is_loopback
from p2p.records import NodeRecord, Refusal

DEFAULT_BITS = 11
"""2,048 evaluations: 1.8 s of one core, once per identity; 1,950 identities per core and hour."""

MAX_BITS = 24
"""Four hours of one core. More is a typing error."""

NONCE_BYTES = 8
MEMORY_BYTES = 1024 * 1024
PASSES = 1

OF_THE_PAID = Rate(per_s=8.0, burst=512.0)
"""Evaluations for each introducer that has paid: two answers at once (256 records each), then 0.7 % of a core."""

OF_ALL_PAID = Rate(per_s=64.0, burst=2048.0)
"""For all of them together: 6 % of a core, and two seconds of one for a newcomer in a large swarm."""

OF_A_STRANGER = Rate(per_s=0.2, burst=8.0)
"""For each introducer that has not paid: everybody is a stranger at first, and speaks for itself."""

OF_STRANGERS = Rate(per_s=32.0, burst=256.0)
"""For all of those together: 3 % of a core. To use it up takes eight fresh connections a second, all the time."""

OF_NOBODY_IN_PARTICULAR = Rate(per_s=8.0, burst=128.0)
"""For records that nobody has introduced: values that our own look-ups in the DHT find, of whoever stored them. They
have no part in the strangers' budget, or whoever fills the DHT with junk would keep newcomers out of the table."""

MAX_REMEMBERED = 40_000
"""Identities that were checked: twice as many as a table of records holds."""

K = TypeVar("K")

_DOMAIN = b"fusion-node/puzzle/1:"
_SALT = b"fusion-1"

_log = structlog.get_logger(__name__)


def bits_of(public_key: bytes, solution: bytes) -> int:
    """What a solution is worth: the zero bits in front of its work. A malformed one is worth nothing.

    Args:
        public_key: 32 bytes.
        solution: NONCE_BYTES.
    """
    if len(solution) != NONCE_BYTES:
        return 0
    work = nacl.pwhash.argon2id.kdf(16, _DOMAIN + public_key, _SALT + solution, opslimit=PASSES, memlimit=MEMORY_BYTES)
    return 128 - int.from_bytes(work, "big").bit_length()


def solve(public_key: bytes, bits: int, *, first: int, should_stop: Callable[[], bool] = lambda: False) -> bytes | None:
    """Searches from the nonce ``first`` on; None when told to stop. Takes 2^bits evaluations on average."""
    nonce = first
    while not should_stop():
        solution = (nonce % 2**64).to_bytes(NONCE_BYTES, "little")
        if bits_of(public_key, solution) >= bits:
            return solution
        nonce += 1
    return None


async def solution_for(peer: PeerId, bits: int, path: Path | None) -> bytes:
    """The solution for an identity: from its file if that is good enough, or else solved in a thread and written there.

    Args:
        bits: 0 needs none, and returns an empty solution.
        path: beside the identity's key file; None remembers nothing.
    """
    if bits <= 0:
        return b""
    public_key = public_key_of(peer)
    kept = await asyncio.to_thread(_read, path)
    if kept is not None and await asyncio.to_thread(bits_of, public_key, kept) >= bits:
        return kept
    stop = threading.Event()
    try:
        solution = await asyncio.to_thread(solve, public_key, bits, first=secrets.randbits(63), should_stop=stop.is_set)
    finally:
        stop.set()  # a thread cannot be cancelled
    assert solution is not None  # noqa: S101  # it was not told to stop
    if path is not None:
        await asyncio.to_thread(_write, path, solution)
    return solution


def default_bits(hosts: Iterable[str], *, is_private: bool) -> int:
    """What to demand, and to solve oneself, when nothing else is said.

    Args:
        hosts: where one listens, or if one does not, by whom one enters the swarm.
        is_private: among members there is nothing to pay, and neither is there on one machine.
    """
    known = list(hosts)
    return 0 if is_private or (known and all(map(is_loopback, known))) else DEFAULT_BITS


def check_bits(bits: int) -> int:
    """Raises ConfigError for a number of bits that nobody can mean."""
    if not 0 <= bits <= MAX_BITS:
        raise ConfigError(
            f"--puzzle-bits {bits} is out of range: 0 (off) to {MAX_BITS}; {DEFAULT_BITS} takes 2 seconds"
        )
    return bits


class PuzzleChecker:
    """Whether the identities behind records have paid; a RecordTable's ``price``. Safe in several threads.

    Args:
        bits: that are demanded; 0 lets everybody through.
        own: the own identity, which need not prove anything to itself.
        is_exempt: who else need not pay, as those on one's own machine, whom nobody else has to heed.
        evaluate: ``bits_of``, or something cheaper in a simulation.
    """

    def __init__(
        self,
        bits: int,
        *,
        own: PeerId | None = None,
        is_exempt: Callable[[str], bool] = lambda peer: False,
        evaluate: Callable[[bytes, bytes], int] = bits_of,
    ) -> None:
        self._is_exempt = is_exempt
        self.bits = bits
        self.num_evaluated = 0
        self._own = own
        self._evaluate = evaluate
        self._lock = threading.Lock()
        self._paid: OrderedDict[str, None] = OrderedDict()
        self._failed: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._of_introducer = Buckets[PeerId](OF_THE_PAID)
        self._of_paid = Buckets[None](OF_ALL_PAID)
        self._of_stranger = Buckets[PeerId](OF_A_STRANGER)
        self._of_strangers = Buckets[None](OF_STRANGERS)
        self._of_nobody = Buckets[None](OF_NOBODY_IN_PARTICULAR)

    def has_paid(self, peer: str) -> bool:
        """Whether this identity has been checked and found paid for, or none has to be."""
        with self._lock:
            return self.bits <= 0 or peer == self._own or peer in self._paid

    def __call__(self, record: NodeRecord, introducer: PeerId | None, now: UnixS) -> Refusal | None:
        """Why a record that is otherwise good is to be refused; see RecordTable.receive for the arguments."""
        with self._lock:
            if self.bits <= 0 or record.peer == self._own or self._is_exempt(record.peer):
                return None
            if record.peer in self._paid:
                self._paid.move_to_end(record.peer)
                return None
            if len(record.puzzle) != NONCE_BYTES or (record.peer, record.puzzle) in self._failed:
                return Refusal.TOO_CHEAP
            if not self._may_evaluate(introducer, now):
                return Refusal.UNCHECKED
            self.num_evaluated += 1
        # Without the lock: another thread's quick question must not wait for this.
        is_paid = self._evaluate(public_key_of(record.peer), record.puzzle) >= self.bits
        with self._lock:
            if is_paid:
                _remember(self._paid, record.peer)
                return None
            _remember(self._failed, (record.peer, record.puzzle))
            return Refusal.TOO_CHEAP

    def check_ahead(self, claims: Iterable[NodeRecord], introducer: PeerId, now: UnixS) -> None:
        """Does the work of calls that are to come, which then take no time. For a thread: the work takes no GIL.

        Args:
            claims: records that need not be verified: a solution is for the key that it names, whoever brings it.
        """
        for record in claims:
            self(record, introducer, now)

    def _may_evaluate(self, introducer: PeerId | None, now: float) -> bool:
        if introducer is None:
            return self._of_nobody.take(None, 1, now=now)
        if introducer not in self._paid:
            return self._of_stranger.take(introducer, 1, now=now) and self._of_strangers.take(None, 1, now=now)
        return self._of_introducer.take(introducer, 1, now=now) and self._of_paid.take(None, 1, now=now)


def _remember(table: OrderedDict[K, None], key: K) -> None:
    table[key] = None
    if len(table) > MAX_REMEMBERED:
        table.popitem(last=False)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(NONCE_BYTES + 1)
    except OSError:
        return None
    return data if len(data) == NONCE_BYTES else None


def _write(path: Path, solution: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(solution)
        temporary.replace(path)
    except OSError as error:
        _log.warning("the puzzle's solution is not kept: the next start solves it again", reason=error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
