"""Dialling one peer at all its addresses: those of better paths first, and none of them waited for in vain.

As RFC 8305 (Happy Eyeballs) §5: the next attempt starts after ATTEMPT_DELAY_S, or at once when one fails. The first
that proves the identity wins, and the others are given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from fusion_node.errors import FusionError, PeerUnreachable, ProtocolVersionMismatch, RemoteProtocolError
from fusion_node.types import PeerId
from p2p.identity import short
from p2p.paths import best_first
from p2p.seam import Link, Network, PathKind

ATTEMPT_DELAY_S = 0.25
"""RFC 8305 §8."""


class DialFailed(PeerUnreachable):
    """No address of the peer led to it.

    Attributes:
        failures: why, per address.
        is_refused: every direct address, of those to dial first if there are such, is known to have no listener, and no
            other address led anywhere.
    """

    def __init__(self, peer: PeerId, failures: dict[str, FusionError], *, is_refused: bool) -> None:
        why = "; ".join(str(failure) for failure in failures.values()) or "no address of it is known"
        super().__init__(peer, f"peer {short(peer)} cannot be reached: {why}", is_refused=is_refused)
        self.failures = failures

    def most_telling(self) -> FusionError:
        """What the caller had better hear of: a wrong version or identity at one address, else this."""
        for kind in (ProtocolVersionMismatch, RemoteProtocolError):
            for failure in self.failures.values():
                if isinstance(failure, kind):
                    return failure
        return self


async def dial_any(
    network: Network, peer: PeerId, addresses: Sequence[str], *, timeout_s: float, first: Sequence[str] = ()
) -> tuple[Link, str]:
    """A link with ``peer``, and the address that led to it.

    Args:
        first: those of the addresses that are dialled before the others, also before those of better paths.

    Raises:
        DialFailed: none did within ``timeout_s``.
    """
    failures: dict[str, FusionError] = {}
    waiting = deque(dict.fromkeys([*best_first(network, first), *best_first(network, addresses)]))
    running: dict[asyncio.Task[Link], str] = {}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        while (waiting or running) and (left_s := deadline - loop.time()) > 0:
            if waiting:
                address = waiting.popleft()
                running[loop.create_task(network.dial(address, expect=peer, timeout_s=left_s))] = address
            # An address that swallows everything must leave time for those behind it.
            delay_s = min(ATTEMPT_DELAY_S, left_s / (len(waiting) + 1)) if waiting else left_s
            done, _ = await asyncio.wait(running, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
            for dial in done:
                failure = dial.exception()
                if failure is None:
                    return dial.result(), running.pop(dial)
                if not isinstance(failure, FusionError):
                    raise failure
                failures[running.pop(dial)] = failure
    finally:
        _give_up(running)
    for address in running.values():
        failures[address] = PeerUnreachable(peer, f"{address} did not answer within {timeout_s:g} s")
    telling = {address: failure for address, failure in failures.items() if not first or address in first}
    raise DialFailed(peer, failures, is_refused=_is_refused(network, telling))


def _is_refused(network: Network, failures: dict[str, FusionError]) -> bool:
    direct = [failure for address, failure in failures.items() if network.path_of(address).rank == PathKind.DIRECT.rank]
    # Somebody else at the address is as telling as nobody.
    return bool(direct) and all(
        failure.is_refused if isinstance(failure, PeerUnreachable) else isinstance(failure, RemoteProtocolError)
        for failure in direct
    )


def _give_up(running: Iterable[asyncio.Task[Link]]) -> None:
    """Cancels dials. One that has just succeeded leaves a link, which is cut."""
    for dial in running:
        dial.cancel()
        dial.add_done_callback(_cut)


def _cut(dial: asyncio.Task[Link]) -> None:
    if not dial.cancelled() and dial.exception() is None:
        dial.result().abort()
