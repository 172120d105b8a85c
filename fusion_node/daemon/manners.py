"""The shell around the manners core: carries out what it decides, and watches the device for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from fusion_node.daemon.device_usage import DeviceWatch, WatchFailed
from fusion_node.daemon.manners_core import (
    PAUSE_GRACE_S,
    Announce,
    BackOff,
    EndSessions,
    Manners,
    PauseReason,
    ReleaseMemory,
    Standing,
    Withdraw,
)
from fusion_node.types import MonotonicS

SAMPLE_S = 2.0
"""Between two samples of the device; NVML averages over up to a second itself."""

TICK_S = 0.5
"""Between two looks at the sessions that still run when the node stops serving."""

log = structlog.get_logger(__name__)


class Host(Protocol):
    """The node that serves or does not. All but ``publish`` return at once."""

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds that the device has computed for sessions since the start."""
        ...

    def refuse(self, reason: str | None) -> None:
        """Refuses new sessions for that reason; None takes them again."""
        ...

    def hand_over(self, reason: PauseReason, grace_s: float) -> None:
        """Asks the users of running sessions to take them elsewhere within that time; they are served until then."""
        ...

    def stay(self) -> None:
        """Sessions that are still there need not go any more."""
        ...

    def end_sessions(self, reason: PauseReason) -> None:
        """Hands every session back to its user."""
        ...

    def release_memory(self) -> bool:
        """Gives back what only sessions need; False while something still computes on it, and then asked again."""
        ...

    async def publish(self) -> None:
        """Tells the swarm whether anything is served here now. Raises nothing for a swarm that does not listen."""
        ...


class MannersShell:
    """Pause, resume and back off. Made before there is anything to pause: a node can be paused while it loads.

    Args:
        pause_grace_s: for running sessions when the operator pauses.
    """

    def __init__(self, *, pause_grace_s: float = PAUSE_GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = Manners(pause_grace_s=pause_grace_s)
        self._back_off = BackOff()
        self._clock = clock
        self._host: Host | None = None
        self._changed = asyncio.Event()
        self._to_publish = asyncio.Event()
        self._is_release_due = False

    @property
    def ends_in_s(self) -> float | None:
        """How long running sessions may still go on; None when they need not end."""
        timer = self.core.get_timer()
        return None if timer is None else max(0.0, timer - self._clock())

    def pause(self, *, at_once: bool) -> None:
        """Sessions are refused when this returns, and ended too if ``at_once``."""
        self.core.pause(now=self._now(), at_once=at_once)
        self._apply()

    def resume(self) -> None:
        """Sessions are taken again when this returns, unless another program uses the device."""
        self.core.resume(now=self._now())
        self._apply()

    def attach(self, host: Host) -> None:
        """Takes the node on; it is told at once if it is not to serve."""
        self._host = host
        self._step()

    async def run(self, watch: DeviceWatch | None, *, sample_s: float = SAMPLE_S) -> None:
        """Publishes what changes, ends grace periods, and backs off for what the watch sees, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish())
            if watch is not None:
                tasks.create_task(self._watch(watch, sample_s))
            while True:
                self._changed.clear()
                self._step()
                try:
                    is_waiting = self.core.standing is Standing.STOPPING or self._is_release_due
                    async with asyncio.timeout(TICK_S if is_waiting else None):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _apply(self) -> None:
        self._step()
        self._changed.set()

    def _step(self) -> None:
        host = self._host
        if host is None:
            return
        self.core.update(now=self._now(), num_sessions=host.num_sessions)
        host.refuse(None if self.core.reason is None else self.core.reason.in_words)
        while (event := self.core.next_event()) is not None:
            match event:
                case Withdraw():
                    log.info("no longer serving", reason=self.core.reason, sessions=host.num_sessions)
                    if self.core.reason is not None and self.ends_in_s:
                        host.hand_over(self.core.reason, self.ends_in_s)
                    self._to_publish.set()
                case Announce():
                    log.info("serving again")
                    host.stay()
                    self._to_publish.set()
                case EndSessions():
                    host.end_sessions(event.reason)
                case ReleaseMemory():
                    self._is_release_due = True
        if self._is_release_due:
            self._is_release_due = self.core.standing is Standing.IDLE and not host.release_memory()

    async def _publish(self) -> None:
        # Apart from the rest: a swarm that is slow to listen must not keep sessions from ending.
        while True:
            await self._to_publish.wait()
            self._to_publish.clear()
            if self._host is not None:
                await self._host.publish()

    async def _watch(self, watch: DeviceWatch, sample_s: float) -> None:
        while True:
            await asyncio.sleep(sample_s)
            now, busy_s = self._now(), 0.0 if self._host is None else self._host.busy_s
            try:
                usage = await asyncio.to_thread(watch.sample, now=now, own_busy_s=busy_s)
            except WatchFailed as error:
                log.warning("not backing off for other programs any more", reason=str(error))
                self.core.set_busy(False, now=self._now())
                self._apply()
                return
            before = self.core.reason
            self.core.set_busy(self._back_off.observe(usage, now=now), now=now)
            if self.core.reason is not before:
                self._apply()

    def _now(self) -> MonotonicS:
        return MonotonicS(self._clock())
