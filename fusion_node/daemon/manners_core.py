"""Whether a node serves now: what its operator said, and what other programs do with the device.

Guarantees: while it does not serve, nothing is announced and no session is taken; running sessions have a grace period
and are then ended, once; the device's memory is released once, when the last of them is gone. A pause of the operator
outlasts every back-off, and a resume of the operator does not override one. A program that uses the device by fits and
starts does not make the node switch at its pace.

Assumes: the shell carries out every event, in order, and calls ``update`` when the timer says so and, while sessions
still run, about once a second.

States: serving; stopping (no new session, those that run have the grace period); idle. Beside it BackOff: free or busy.
Timers, in seconds of the monotonic clock: the end of the grace period.

Source: the thresholds are a judgement, made explicit. A desktop that composes its windows takes 1 to 5 % of a GPU and a
video 5 to 15 %; a game, a renderer or another model take more than half of it for minutes.

Still ugly: the memory rule compares with the least that others ever held, so it says nothing about a program that was
there before the node.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from fusion_node.types import MonotonicS

PAUSE_GRACE_S = 30.0
"""For running sessions when the operator pauses or stops the node, unless they say otherwise: their users are asked to
go elsewhere, which takes a second where there is another node, and a short answer comes to its end where there is not.
"""

BACK_OFF_GRACE_S = 5.0
"""When another program wants the device: a person sits in front of it and sees it stutter."""

MAX_SAMPLE_GAP_S = 5.0
"""A sample counts for the time since the last one, but for no more than this: the machine may have slept."""


class PauseReason(enum.StrEnum):
    """Why a node does not serve."""

    OPERATOR = "paused"
    OTHER_PROGRAM = "backing-off"

    @property
    def in_words(self) -> str:
        """For people, also those whose session it ends."""
        match self:
            case PauseReason.OPERATOR:
                return "the node is paused by its operator"
            case PauseReason.OTHER_PROGRAM:
                return "backing off: another program uses the device"


class Standing(enum.StrEnum):
    """How far a pause has come."""

    SERVING = "serving"
    STOPPING = "stopping"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """What others do with a device, since the last sample.

    Attributes:
        others_percent: of the device's time, 0 to 100.
        others_bytes: of its memory; None when it is not known.
        free_bytes, total_bytes: of its memory.
    """

    others_percent: float
    others_bytes: int | None = None
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When another program is thought to need the device, and when no longer.

    Attributes:
        enter_percent, enter_s: busy after this much of the device's time for that long.
        leave_percent, leave_s: free again after less than this much for that long: games have menus.
        low_memory: busy too when less than this fraction of the memory is free and others took ``taken_memory`` of it
            since the least that they held; free again when they gave half of that back.
    """

    enter_percent: float = 25.0
    enter_s: float = 8.0
    leave_percent: float = 10.0
    leave_s: float = 60.0
    low_memory: float = 0.03
    taken_memory: float = 0.10


class BackOff:
    """Free or busy, with hysteresis in height and in time.

    Time above the upper threshold counts up and time below it down at the same rate, so that neither one quiet sample
    of a game nor one busy sample of a desktop decides.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or Thresholds()
        self.is_busy = False
        self._for_memory = False
        self._evidence_s = 0.0
        """Towards the other state."""
        self._last: MonotonicS | None = None
        self._least_bytes: int | None = None

    def observe(self, usage: DeviceUsage, *, now: MonotonicS) -> bool:
        """Takes one sample; returns whether the device is busy now."""
        elapsed = 0.0 if self._last is None else min(max(now - self._last, 0.0), MAX_SAMPLE_GAP_S)
        self._last = now
        if usage.others_bytes is not None:
            least = usage.others_bytes if self._least_bytes is None else self._least_bytes
            self._least_bytes = min(least, usage.others_bytes)
        if self.is_busy:
            self._observe_busy(usage, elapsed)
        else:
            self._observe_free(usage, elapsed)
        return self.is_busy

    def _observe_free(self, usage: DeviceUsage, elapsed: float) -> None:
        limits = self._thresholds
        for_memory = self._is_memory_wanted(usage)
        if usage.others_percent >= limits.enter_percent or for_memory:
            self._evidence_s += elapsed
        else:
            self._evidence_s = max(0.0, self._evidence_s - elapsed)
        if self._evidence_s >= limits.enter_s:
            self.is_busy, self._for_memory, self._evidence_s = True, for_memory, 0.0

    def _observe_busy(self, usage: DeviceUsage, elapsed: float) -> None:
        limits = self._thresholds
        holds_memory = (
            self._taken(usage) >= limits.taken_memory / 2 if self._for_memory else self._is_memory_wanted(usage)
        )
        if usage.others_percent >= limits.enter_percent or holds_memory:
            self._evidence_s = 0.0
        elif usage.others_percent >= limits.leave_percent:
            self._evidence_s = max(0.0, self._evidence_s - elapsed)
        else:
            self._evidence_s += elapsed
        if self._evidence_s >= limits.leave_s:
            self.is_busy, self._evidence_s = False, 0.0

    def _is_memory_wanted(self, usage: DeviceUsage) -> bool:
        limits = self._thresholds
        is_low = usage.free_bytes < limits.low_memory * usage.total_bytes
        return is_low and self._taken(usage) >= limits.taken_memory

    def _taken(self, usage: DeviceUsage) -> float:
        """What others hold above the least that they held, as a fraction of the memory."""
        if usage.others_bytes is None or self._least_bytes is None or not usage.total_bytes:
            return 0.0
        return (usage.others_bytes - self._least_bytes) / usage.total_bytes


# what the shell has to do


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell the swarm that nothing is served here, and the users of running sessions to take them elsewhere."""


@dataclass(frozen=True, slots=True)
class EndSessions:
    """Hand the running sessions back to their users."""

    reason: PauseReason


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """No session is left: give back what only sessions need."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the swarm that the shard is served again; sessions that are still there may stay."""


MannersEvent = Withdraw | EndSessions | ReleaseMemory | Announce


class Manners:
    """Serving, stopping or idle, and what follows from each change.

    Args:
        pause_grace_s: for running sessions when the operator pauses.
    """

    def __init__(self, *, pause_grace_s: float = PAUSE_GRACE_S) -> None:
        self._pause_grace_s = pause_grace_s
        self._is_paused = False
        self._is_busy = False
        self._deadline: MonotonicS | None = None
        self._events: deque[MannersEvent] = deque()
        self.standing = Standing.SERVING

    @property
    def reason(self) -> PauseReason | None:
        """Why nothing is served; None while the node serves."""
        if self._is_paused:
            return PauseReason.OPERATOR
        return PauseReason.OTHER_PROGRAM if self._is_busy else None

    def pause(self, *, now: MonotonicS, at_once: bool = False) -> None:
        """The operator's word. ``at_once`` leaves running sessions no grace, also when the node is stopping already."""
        self._is_paused = True
        self._change(now, 0.0 if at_once else self._pause_grace_s)

    def resume(self, *, now: MonotonicS) -> None:
        """The operator's word; without effect on a back-off."""
        self._is_paused = False
        self._change(now, BACK_OFF_GRACE_S)

    def set_busy(self, is_busy: bool, *, now: MonotonicS) -> None:
        """What BackOff says."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._change(now, BACK_OFF_GRACE_S)

    def get_timer(self) -> MonotonicS | None:
        """When the grace period ends."""
        return self._deadline

    def update(self, *, now: MonotonicS, num_sessions: int) -> None:
        """To be called after every change, when the timer is due, and while sessions run out."""
        if self.standing is not Standing.STOPPING or self._deadline is None or self.reason is None:
            return
        if num_sessions and now < self._deadline:
            return
        if num_sessions:
            self._events.append(EndSessions(self.reason))
        self._events.append(ReleaseMemory())
        self.standing, self._deadline = Standing.IDLE, None

    def next_event(self) -> MannersEvent | None:
        """What to do next, in order; None when there is nothing."""
        return self._events.popleft() if self._events else None

    def _change(self, now: MonotonicS, grace_s: float) -> None:
        until = MonotonicS(now + grace_s)
        match self.standing:
            case _ if self.reason is None:
                if self.standing is not Standing.SERVING:
                    self.standing, self._deadline = Standing.SERVING, None
                    self._events.append(Announce())
            case Standing.SERVING:
                self.standing, self._deadline = Standing.STOPPING, until
                self._events.append(Withdraw())
            case Standing.STOPPING if self._deadline is not None:
                # Never later: a second reason to stop gives nobody more time.
                self._deadline = min(self._deadline, until)
            case _:
                pass
