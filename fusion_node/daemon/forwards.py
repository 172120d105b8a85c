"""Steps through the devices: the batching core says what runs together, a thread per device computes it.

The event loop decides and never computes; the threads compute and never decide. Steps of all sessions wait in the
batching core; a step may be spread over several forwards, and a forward goes from device to device.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from fusion_node.daemon.admission_core import Session
from fusion_node.daemon.serving_core import ServedStep
from fusion_node.engine.batching_core import Batch, BatchingCore, BatchingStatus, Overload, Priority, Work
from fusion_node.engine.device import prepare_thread, release_cached_memory
from fusion_node.engine.shard_engine import PlannedBatch, ShardEngine
from fusion_node.engine.taps import Tapped, TapTensors
from fusion_node.engine.tensor_codec import RowsNotFinite, StepTensors
from fusion_node.errors import FusionError, ResourceExhausted
from p2p.messages import StageTiming

QUEUE_DEADLINE_S = 20.0
"""A step that has waited so long is not begun any more: the user's side gives up on it after 30 s, and had better go
elsewhere before."""

_MOVES_PER_ROW = 16
"""KV slots that are moved for about the price of a row that is computed."""

_MAX_US = 2**32 - 1

log = structlog.get_logger(__name__)


class Owner(Protocol):
    """Who hands steps in, and gets them back computed."""

    def is_open(self, session: Session) -> bool:
        """Whether that very session is served. Also asked in the threads."""
        ...

    def step_done(
        self, step: ServedStep, payload: memoryview, timing: StageTiming, taps: Sequence[tuple[int, memoryview]]
    ) -> None:
        """All its rows are computed, and by layer what is tapped of them; those of a session come in order."""
        ...

    def steps_lost(self, session: Session, code: str, reason: str) -> None:
        """What was handed in of an open session will never be computed, for a reason of this node's."""
        ...


@dataclass(slots=True, eq=False)
class _Step:
    """A step on its way through the devices."""

    served: ServedStep
    tensors: StepTensors
    queued_us: int
    taps: TapTensors | None = None
    began_us: int | None = None
    compute_us: int = 0
    has_moved: bool = False

    @property
    def session(self) -> Session:
        return self.served.session

    def timing(self, price_s: float) -> StageTiming:
        queue_us = 0 if self.began_us is None else self.began_us - self.queued_us
        return StageTiming(min(queue_us, _MAX_US), min(self.compute_us, _MAX_US), in_us(price_s))


@dataclass(slots=True, eq=False)
class _Flight:
    """One forward on its way through the devices.

    Attributes:
        failures: per piece how many forwards of its session had failed when this one began.
        rows: per piece what the device before has made.
        tapped: per piece what is taken of the layers on the way.
        unfit: why a piece's rows cannot be passed on, by its index.
    """

    batch: Batch
    planned: PlannedBatch
    steps: tuple[_Step, ...]
    failures: tuple[int, ...]
    rows: list[Any] = field(default_factory=list)
    tapped: list[Tapped | None] = field(default_factory=list)
    unfit: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    num_changed: int = 0
    """Devices on which what it changes in the KV was carried out."""


class Forwards:
    """The devices of one node. The batching core knows a session by its object: an id may be opened anew.

    Args:
        running: gets the futures of what runs in threads, and is rid of them when they are done.
        counters: for status replies.
    """

    def __init__(
        self,
        engine: ShardEngine,
        batching: BatchingCore,
        owner: Owner,
        *,
        running: set[asyncio.Future[Any]],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._batching = batching
        self._owner = owner
        self._running = running
        self._counters = counters
        self._clock = clock
        self._devices = [
            ThreadPoolExecutor(1, thread_name_prefix=f"device-{index}", initializer=prepare_thread)
            for index in range(engine.num_devices)
        ]
        self._num_failures: Counter[Session] = Counter()
        """Forwards with rows of a session that failed: what is computed behind one does not count."""
        self._flights: set[_Flight] = set()
        self._is_first_busy = False
        self._is_stopped = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is being computed."""
        return bool(self._flights)

    def status(self) -> BatchingStatus:
        """What waits and what runs now."""
        return self._batching.status(now=self._clock())

    def add(self, step: ServedStep, hidden: Any) -> tuple[str, str] | None:
        """Takes a step with its decoded rows ``[T, D]``. Code and reason if so much waits that it is not taken."""
        session, now = step.session, self._clock()
        num_rows, extra_rows = _size(step)
        tensors = StepTensors(hidden, step.rows.live_rows, step.out, step.encoding)
        overload = self._batching.add(
            Work(
                session=session,
                user=session.user,
                num_rows=num_rows,
                extra_rows=extra_rows,
                group=session.layers,
                priority=Priority(session.plan.priority),
                is_tree=not step.rows.is_chain,
                moves_kv=step.rows.reuses_slots,
                arrived=now,
                deadline=now + QUEUE_DEADLINE_S,
                payload=_Step(step, tensors, _now_us(), self._taps_of(step)),
            ),
            now=now,
        )
        if overload is not None:
            reason = {
                Overload.NODE: "too many rows wait for this node: go elsewhere, or try again later",
                Overload.USER: "too many rows of yours wait for this node: send fewer at once",
            }[overload]
            return overload.value, reason
        # Not at once: what else has come by now takes part in the same forward.
        asyncio.get_running_loop().call_soon(self._pump)
        return None

    def narrow(self, session: Session, derive: Callable[[Sequence[ServedStep]], list[ServedStep]]) -> None:
        """Computes no more than has to be of the steps of a session that have not begun.

        Args:
            derive: what to put in the place of the last ones of these.
        """
        waiting = self._batching.not_begun(session)
        while waiting and waiting[0].payload.has_moved:  # for a forward that failed
            del waiting[0]
        narrowed = derive([work.payload.served for work in waiting])
        for work, served in zip(waiting[len(waiting) - len(narrowed) :], narrowed, strict=True):
            step: _Step = work.payload
            tensors = step.tensors.narrowed(served.rows.live_rows, served.out)
            num_rows, extra_rows = _size(served)
            self._batching.replace(
                work,
                replace(
                    work,
                    num_rows=num_rows,
                    extra_rows=extra_rows,
                    is_tree=not served.rows.is_chain,
                    moves_kv=served.rows.reuses_slots,
                    payload=_Step(served, tensors, step.queued_us, self._taps_of(served)),
                ),
            )

    def _taps_of(self, step: ServedStep) -> TapTensors | None:
        return None if step.tap is None else TapTensors(*step.tap, self._engine.hidden_size, step.encoding)

    def cancel(self, session: Session) -> None:
        """Computes nothing more of a session."""
        self._batching.cancel(session)
        del self._num_failures[session]

    def stop(self) -> None:
        """Begins no forward any more."""
        self._is_stopped = True

    def close(self) -> None:
        """After ``stop``: a thread ends with the forward it is in; a process that exits amid one may crash."""
        if self._timer is not None:
            self._timer.cancel()
        for thread in self._devices:
            thread.shutdown(wait=False, cancel_futures=True)

    def _pump(self) -> None:
        """Starts a forward when the first device is idle, no other waits for the next one, and there is something."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_first_busy or self._is_stopped or len(self._flights) >= len(self._devices):
            return
        now = self._clock()
        self._tell_lost(self._batching.handle_timer(now=now), "overloaded", "a step waited too long for this node")
        batch = self._batching.next_batch(now=now)
        if batch is not None:
            self._start(batch)
            return
        due = self._batching.get_timer()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._pump)

    def _start(self, batch: Batch) -> None:
        work, steps = [], tuple(piece.work.payload for piece in batch.pieces)
        for step, piece in zip(steps, batch.pieces, strict=True):
            rows = step.served.rows
            stop = min(piece.stop, len(rows.live_rows))
            work.append((step.session.key, rows, piece.start, stop, not step.has_moved))
            step.has_moved = True
        try:
            planned = self._engine.plan(steps[0].session.layers, work)
        except FusionError as error:
            log.error("a forward cannot be planned", error=type(error).__name__, exc_info=error)
            self._batching.failed(batch, out_of_memory=False, now=self._clock())
            self._tell_lost([piece.work for piece in batch.pieces], "internal", "an error inside the node")
            return
        failures = tuple(self._num_failures[step.session] for step in steps)
        flight = _Flight(batch, planned, steps, failures)
        self._submit(flight, 0)
        self._flights.add(flight)
        self._is_first_busy = True

    def _submit(self, flight: _Flight, device: int) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._devices[device], self._compute, flight, device)
        self._running.add(future)

        def done(future: asyncio.Future[None]) -> None:
            self._running.discard(future)
            is_over = future.cancelled() or future.exception() is not None or device + 1 == len(self._devices)
            if not is_over:
                self._submit(flight, device + 1)
            if device == 0:
                self._is_first_busy = False
            if is_over:
                self._flights.discard(flight)
                self._land(flight, future)
            self._pump()

        future.add_done_callback(done)

    def _compute(self, flight: _Flight, device: int) -> None:
        """On the thread of a device."""
        began_us = _now_us()
        if device == 0:
            flight.rows = [
                step.tensors.live_rows(piece.start, piece.stop) if self._owner.is_open(step.session) else None
                for step, piece in zip(flight.steps, flight.batch.pieces, strict=True)
            ]
            flight.tapped = [
                None if step.taps is None else step.taps.of(piece.start, piece.stop)
                for step, piece in zip(flight.steps, flight.batch.pieces, strict=True)
            ]
            for step in flight.steps:
                step.began_us = began_us if step.began_us is None else step.began_us
        self._engine.change_kv(flight.planned, device=device)
        flight.num_changed += 1
        flight.rows = self._engine.run(flight.planned, flight.rows, device=device, tapped=flight.tapped)
        if device + 1 == len(self._devices):
            for index, (step, piece) in enumerate(zip(flight.steps, flight.batch.pieces, strict=True)):
                computed = flight.rows[index]
                if computed is not None:
                    try:
                        step.tensors.keep(piece.start, computed)
                    except RowsNotFinite as error:
                        flight.unfit[index] = str(error)
                    tapped = flight.tapped[index]
                    if step.taps is not None and tapped is not None:
                        step.taps.keep(piece.start, tapped)
        compute_us = _now_us() - began_us
        flight.seconds += compute_us / 1e6
        for step in flight.steps:
            step.compute_us += compute_us

    def _land(self, flight: _Flight, future: asyncio.Future[None]) -> None:
        """A forward has come to its end, or has failed on a device."""
        now, batch = self._clock(), flight.batch
        if future.cancelled():
            return
        match future.exception():
            case None:
                self._counters["forwards"] += 1
                self._counters["compute_us"] += int(1e6 * flight.seconds)
                for index, reason in flight.unfit.items():
                    session = flight.steps[index].session
                    if self._num_failures[session] == flight.failures[index]:
                        # Of finite rows. Passed on, they would be held against this node; whose fault it is nobody can
                        # say.
                        self._owner.steps_lost(session, "overflow", f"{reason} in layers {session.layers}")
                done = self._batching.done(batch, seconds=flight.seconds, now=now)
                price_s = self._batching.row_price_s(batch.group)
                for work in done:
                    step: _Step = work.payload
                    taps = [] if step.taps is None else step.taps.payloads()
                    self._owner.step_done(step.served, step.tensors.payload, step.timing(price_s), taps)
            case ResourceExhausted() as error:
                log.warning("a forward did not fit", rows=batch.num_rows, reason=str(error))
                self._counters["forwards_out_of_memory"] += 1
                for thread, stage in zip(self._devices, self._engine.stages, strict=True):
                    thread.submit(release_cached_memory, stage.device)
                self._tell_lost(self._failed(flight, out_of_memory=True), "no-memory", str(error))
            case error:
                # Never the sender's fault: what can be wrong with its rows was checked before.
                log.error("a forward failed", error=type(error).__name__, exc_info=error)
                self._tell_lost(self._failed(flight, out_of_memory=False), "internal", "an error inside the node")

    def _failed(self, flight: _Flight, *, out_of_memory: bool) -> list[Work]:
        """What is lost with a forward that failed; the rest is computed again."""
        for session in {step.session for step in flight.steps}:
            if self._owner.is_open(session):
                self._num_failures[session] += 1
        lost = self._batching.failed(flight.batch, out_of_memory=out_of_memory, now=self._clock())
        if flight.num_changed < len(self._devices):
            # On some device the KV of these sessions is not what their logs say.
            lost += [flight.batch.pieces[index].work for index in flight.planned.changed]
        return lost

    def _tell_lost(self, lost: list[Work], code: str, reason: str) -> None:
        for work in lost:
            self._owner.steps_lost(work.payload.session, code, reason)


def in_us(seconds: float) -> int:
    """As whole microseconds of a StageTiming: 0 is 0, and nothing else is."""
    return 0 if seconds <= 0.0 else min(max(1, round(1e6 * seconds)), _MAX_US)


def _size(step: ServedStep) -> tuple[int, int]:
    """Rows of a work, and what it costs beside them."""
    rows = step.rows
    num_moved = 0 if rows.move is None else len(rows.move.sources)
    # A step without a live row takes its turn as well: what it moves, it moves behind the steps before it.
    return max(1, len(rows.live_rows)), num_moved // _MOVES_PER_ROW


def _now_us() -> int:
    return time.perf_counter_ns() // 1000
