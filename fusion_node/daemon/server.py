"""The shell around admission, batching and engine: frames in, steps through the device, frames out.

The event loop decides and never computes; one thread per device computes and never decides. Steps of all sessions wait
in the batching core, which says what runs together in the next forward; a step may be spread over several.

Above 600 lines: sessions, steps and forwards hold on to one another; all that is decided about them is in the cores.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import structlog

from fusion_node.daemon.admission_core import MAX_QUEUED_ROWS, Admission, RefusalCode, Refused, Session
from fusion_node.daemon.in_order import InOrder
from fusion_node.engine.batching_core import Batch, BatchingCore, BatchingStatus, Overload, Priority, Work
from fusion_node.engine.device import prepare_thread, release_cached_memory
from fusion_node.engine.session_log_core import Duplicate, StepFault, StepRows
from fusion_node.engine.shard_engine import PlannedBatch, ShardEngine
from fusion_node.engine.tensor_codec import RowsNotFinite, StepTensors, decode_rows
from fusion_node.errors import FusionError, PeerError, RemoteProtocolError, ResourceExhausted
from fusion_node.types import MonotonicS, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.bandwidth import BandwidthMeter
from p2p.compression import Compressor, Packed
from p2p.identity import short
from p2p.links import LinkPool
from p2p.messages import (
    PEER_LOST,
    AnyMessage,
    BandwidthProbe,
    BandwidthReport,
    CloseSession,
    OpenSession,
    SessionClosed,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    StageTiming,
    StatusReply,
    StatusRequest,
    Step,
    StepResult,
)
from p2p.records import Plan, Refusal, dialled_at, open_plan

CONNECT_SUCCESSOR_S = 8.0
"""For dialling the next stage while a session opens; the user's side waits longer than this."""

QUEUE_DEADLINE_S = 20.0
"""A step that has waited so long is not begun any more: the user's side gives up on it after 30 s, and had better go
elsewhere before."""

_MOVES_PER_ROW = 16
"""KV slots that are moved for about the price of a row that is computed."""

_MAX_US = 2**32 - 1

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _OnDevice:
    """A session that is served. The batching core knows it by this object: an id may be opened anew."""

    session: Session
    arriving: InOrder
    leaving: InOrder
    num_failures: int = 0
    """Forwards with rows of it that failed: what is computed behind one does not count."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step on its way through the devices."""

    on_device: _OnDevice
    message: Step
    rows: StepRows
    tensors: StepTensors
    returned: tuple[int, ...]
    """Nodes whose rows go back to the user, if that is who comes next."""
    queued_us: int
    began_us: int | None = None
    compute_us: int = 0
    has_moved: bool = False


@dataclass(slots=True, eq=False)
class _Flight:
    """One forward on its way through the devices.

    Attributes:
        failures: per piece how many forwards of its session had failed when this one began.
        rows: per piece what the device before has made.
        unfit: why a piece's rows cannot be passed on, by its index.
    """

    batch: Batch
    planned: PlannedBatch
    steps: tuple[_Step, ...]
    failures: tuple[int, ...]
    rows: list[Any] = field(default_factory=list)
    unfit: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    num_changed: int = 0
    """Devices on which what it changes in the KV was carried out."""


class NodeServer:
    """Serves sessions of one shard.

    Args:
        own_record: gives the node's present signed record, for StatusRequest.
        batching: decides the forwards; a new one if not given.
        clock, unix_clock: monotonic and Unix seconds.
    """

    def __init__(
        self,
        engine: ShardEngine,
        admission: Admission,
        *,
        own_record: Callable[[], bytes],
        batching: BatchingCore | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._batching = batching or BatchingCore()
        self._own_record = own_record
        self._clock = clock
        self._unix_clock = unix_clock
        self._on_device: dict[bytes, _OnDevice] = {}
        self._devices = [
            ThreadPoolExecutor(1, thread_name_prefix=f"device-{index}", initializer=prepare_thread)
            for index in range(engine.num_devices)
        ]
        self._codec = ThreadPoolExecutor(2, thread_name_prefix="codec")
        """Compresses large tensors, and decompresses and checks those that come."""
        self._is_first_busy = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Future[Any]] = set()
        self._flights: set[_Flight] = set()
        self._started_at = clock()
        self._pool: LinkPool | None = None
        self.bandwidth: BandwidthMeter | None = None
        self._compressor: Compressor | None = None
        self.counters: Counter[str] = Counter()

    def attach(self, pool: LinkPool, *, compressor: Compressor | None = None) -> None:
        """Where to send; the pool and the server need each other, so this comes second.

        Args:
            compressor: decides which rows are compressed; one that goes by the pool's links if not given.
        """
        self._pool = pool
        self._compressor = compressor or Compressor(
            rate_Bps=pool.delivery_rate_Bps, features=pool.features, limit_Bps=pool.max_upload_Bps
        )
        self.bandwidth = BandwidthMeter(pool, is_busy=lambda: bool(self._flights), clock=self._clock)

    # what the link pool tells

    def on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        """Takes a frame.

        Raises:
            RemoteProtocolError: a node has no business with it; the link is to be closed.
        """
        match message:
            case Step():
                self._take_step(peer, message, payload)
            case OpenSession():
                self._open(peer, message)
            case CloseSession():
                session = self._admission.close(
                    message.session, epoch=message.epoch, source=peer, now=self._now(), retain=message.retain
                )
                if session is not None:
                    self._forget(session)
                    self._send(peer, SessionClosed(session=message.session, epoch=message.epoch))
            case StatusRequest():
                self._send(peer, StatusReply(message.request, record=self._own_record(), counters=self._counters()))
            case BandwidthProbe() | BandwidthReport() if self.bandwidth is not None:
                self.bandwidth.receive(peer, message, len(payload))
            case _:
                self.counters["unexpected_frames"] += 1
                raise RemoteProtocolError(peer, f"{short(peer)} sent {type(message).__name__} to a node")

    def on_closed(self, peer: PeerId, error: FusionError) -> None:
        """A peer is gone: what cannot go on without it ends, and its user is told who is missing."""
        for session in self._admission.touching(peer):
            self._end(session, PEER_LOST, str(error), culprit=peer)
        if self.bandwidth is not None:
            self.bandwidth.forget(peer)
        if self._compressor is not None:
            self._compressor.forget(peer)

    # sessions

    def expire(self) -> None:
        """Ends the sessions whose lease ran out. Called now and then by whoever runs the server."""
        for session in self._admission.handle_timer(now=self._now()):
            log.info("session expired", session=session.key.hex()[:8], user=short(session.user))
            self._tell_user(session, "lease-expired", "nothing was heard of the session", "")
            self._forget(session)

    def status(self) -> BatchingStatus:
        """What waits and what runs now."""
        return self._batching.status(now=self._now())

    def end_all(self, code: str, reason: str) -> None:
        """Ends every session; its user is told why."""
        for session in self._admission.sessions:
            self._end(session, code, reason, culprit="")

    def release_kv(self) -> bool:
        """Gives the memory of the KV back when no session is open and nothing runs; says whether it did."""
        return not self._running and self._engine.release_kv()

    async def drain(self, *, timeout_s: float) -> None:
        """Takes no more sessions, finishes what is running, and hands the rest back to its users."""
        self._admission.draining = True
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    await asyncio.wait(self._running)
                    await asyncio.sleep(0)  # a forward goes on to its next device in a callback
        except TimeoutError:
            log.warning("a forward is still running", seconds=timeout_s)
        self.end_all("draining", "the node is shutting down")
        if self._timer is not None:
            self._timer.cancel()
        # A thread ends with the forward it is in: a process that exits in the middle of one may crash.
        for threads in (*self._devices, self._codec):
            threads.shutdown(wait=False, cancel_futures=True)

    def _open(self, peer: PeerId, message: OpenSession) -> None:
        """Admits a session in the call that read the message, so that a close that follows finds it."""
        plan = open_plan(message.plan, now=UnixS(self._unix_clock()))
        if isinstance(plan, Refusal):
            self._admission.refused[f"plan-{plan.value}"] += 1
            hint = ": compare the clocks of both machines" if plan in (Refusal.EXPIRED, Refusal.FUTURE_DATED) else ""
            self._refuse(peer, message, Refused(RefusalCode.BAD_PLAN, f"the plan is {plan.value}{hint}"))
            return
        session = self._admission.open(message, plan, source=peer, now=self._now())
        if isinstance(session, Refused):
            self._refuse(peer, message, session)
            return
        self._on_device[session.key] = _OnDevice(session, self._in_order(), self._in_order())
        if session.is_last:
            self._confirm(session, message)
        else:
            task = asyncio.get_running_loop().create_task(self._connect_successor(session, plan, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _confirm(self, session: Session, message: OpenSession) -> None:
        self.counters["sessions"] += 1
        log.info("session opened", session=session.key.hex()[:8], user=short(session.user), layers=str(session.layers))
        lease_s = session.lease_until - self._now()
        reused = session.reused_positions
        self._send(session.user, SessionOpened(message.session, message.epoch, message.stage, lease_s, reused))

    async def _connect_successor(self, session: Session, plan: Plan, message: OpenSession) -> None:
        place = plan.stages[session.stage + 1]
        pool = self._require_pool()
        try:
            await pool.connect(session.next, dialled_at(place), timeout_s=CONNECT_SUCCESSOR_S)
        except FusionError as error:
            log.info("next stage unreachable", peer=short(session.next), reason=str(error))
            # Not why: whoever writes the plan chooses the addresses, and would have us explore our network for them.
            reason = f"the next stage {short(session.next)} cannot be reached from here"
            if not dialled_at(place):
                reason = f"the next stage {short(session.next)} can be dialled by nobody, and no relay leads to it"
            self._give_back(session, message, Refused(RefusalCode.SUCCESSOR_UNREACHABLE, reason))
            return
        if self._is_open(session):  # not closed while we were dialling
            self._confirm(session, message)

    def _give_back(self, session: Session, message: OpenSession, refused: Refused) -> None:
        """Refuses a session that was admitted, unless its user has closed it meanwhile."""
        if self._admission.holds(session):
            self._admission.drop(session)
            self._forget(session)
            self._admission.refused[refused.code] += 1
            self._refuse(session.user, message, refused)

    def _refuse(self, peer: PeerId, message: OpenSession, refused: Refused) -> None:
        self.counters["sessions_refused"] += 1
        log.info("session refused", user=short(peer), code=refused.code.value)
        self._send(
            peer, SessionRefused(message.session, message.epoch, message.stage, refused.code.value, refused.reason)
        )

    def _end(self, session: Session, code: str, reason: str, *, culprit: str) -> None:
        self.counters["sessions_failed"] += 1
        log.info("session ended", session=session.key.hex()[:8], code=code, culprit=short(culprit) if culprit else "")
        self._tell_user(session, code, reason, culprit)
        self._admission.drop(session)
        self._forget(session)

    def _tell_user(self, session: Session, code: str, reason: str, culprit: str) -> None:
        message = SessionFailed(session.key, session.plan.epoch, session.stage, code, reason[:500], culprit)
        self._send(session.user, message)

    def _forget(self, session: Session) -> None:
        if self._is_open(session):
            on_device = self._on_device.pop(session.key)
            on_device.arriving.clear()
            on_device.leaving.clear()
            self._batching.cancel(on_device)

    def _is_open(self, session: Session) -> bool:
        """Whether this very session is served: its id may have been opened anew since."""
        on_device = self._on_device.get(session.key)
        return on_device is not None and on_device.session is session

    # steps

    def _take_step(self, peer: PeerId, message: Step, payload: memoryview) -> None:
        session = self._admission.get(message.session, epoch=message.epoch, source=peer)
        on_device = self._on_device.get(message.session)
        if session is None or on_device is None or on_device.session is not session:
            # Steps in flight when a session ends are no fault, and a stranger learns nothing from silence.
            self.counters["steps_without_session"] += 1
            return
        dtype, size = self._encoding(session), self._engine.hidden_size
        if message.tensor.row_size != size or message.tensor.dtype != dtype:
            self._end(session, "bad-shape", f"rows must be {dtype} of {size}", culprit=peer)
            return
        if len(message.timings) != session.stage:
            # Every stage adds one. A list that is full already would make the next stage refuse ours as malformed, and
            # close a link on which other users depend.
            self._end(session, "bad-timings", "a step has one timing per stage behind it", culprit=peer)
            return
        if message.sequence < session.log.next_sequence:
            self.counters["steps_duplicate"] += 1  # before its rows cost anything
            return
        if session.num_queued_rows + message.tensor.num_rows > MAX_QUEUED_ROWS:
            self._end(session, "flooded", f"more than {MAX_QUEUED_ROWS} rows wait for the device", culprit=peer)
            return
        session.num_queued_rows += message.tensor.num_rows
        on_device.arriving.submit(
            partial(decode_rows, message.tensor, payload, as_dtype=self._engine.wire_dtype),
            partial(self._apply_step, peer, on_device, message),
            is_large=self._require_compressor().is_large(message.tensor),
        )

    def _apply_step(self, peer: PeerId, on_device: _OnDevice, message: Step, decoded: Callable[[], Any]) -> None:
        """The rows of a step can be had, and the steps before it were applied."""
        session = on_device.session
        session.num_queued_rows -= message.tensor.num_rows  # until the log says that they are to be computed
        if not self._is_open(session):
            return
        try:
            hidden = decoded()
        except (RowsNotFinite, WireError) as error:
            # Before the step has any part in a forward: others' rows have the bits that they would have without it.
            self._end(session, "bad-rows", str(error), culprit=peer)
            return
        if session.log.declines_prefix(message.parent, message.parents) and not self._admission.start_empty(session):
            self._end(session, "no-memory", "KV does not fit without the prefix that was reused", culprit="")
            return
        rows = session.log.apply(
            message.sequence,
            first_node=message.first_node,
            num_rows=message.tensor.num_rows,
            parent=message.parent,
            parents=message.parents,
            advance=message.advance,
        )
        match rows:
            case Duplicate():
                self.counters["steps_duplicate"] += 1
            case StepFault():
                self._end(session, rows.value, f"the step does not follow the log: {rows.value}", culprit=peer)
            case StepRows():
                if message.sequence == 0:
                    self.counters["positions_reused"] += session.reused_positions
                self._admission.renew(session, now=self._now())
                self._queue(on_device, message, rows, hidden)

    def _queue(self, on_device: _OnDevice, message: Step, rows: StepRows, hidden: Any) -> None:
        session, now = on_device.session, self._now()
        row_of = {node: row for row, node in enumerate(rows.nodes)} if session.is_last else {}
        returned = tuple(node for node in message.want if node in row_of)
        out = [row_of[node] for node in returned] if session.is_last else None
        num_moved = 0 if rows.move is None else len(rows.move.sources)
        tensors = StepTensors(hidden, rows.live_rows, out, self._encoding(session))
        step = _Step(on_device, message, rows, tensors, returned, _now_us())
        overload = self._batching.add(
            Work(
                session=on_device,
                user=session.user,
                # A step without a live row takes its turn as well: what it moves, it moves behind the steps before it.
                num_rows=max(1, len(rows.live_rows)),
                extra_rows=message.tensor.num_rows - len(rows.live_rows) + num_moved // _MOVES_PER_ROW,
                group=session.layers,
                priority=Priority(session.plan.priority),
                is_tree=not rows.is_chain,
                moves_kv=rows.reuses_slots,
                arrived=now,
                deadline=now + QUEUE_DEADLINE_S,
                payload=step,
            ),
            now=now,
        )
        if overload is not None:
            reason = {
                Overload.NODE: "too many rows wait for this node: go elsewhere, or try again later",
                Overload.USER: "too many rows of yours wait for this node: send fewer at once",
            }[overload]
            self._end(session, overload.value, reason, culprit="")
            return
        session.num_queued_rows += message.tensor.num_rows
        # Not at once: what else has come by now takes part in the same forward.
        asyncio.get_running_loop().call_soon(self._pump)

    # forwards

    def _pump(self) -> None:
        """Starts a forward when the first device is idle, no other waits for the next one, and there is something."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_first_busy or self._is_closed or len(self._flights) >= len(self._devices):
            return
        now = self._now()
        self._end_lost(self._batching.handle_timer(now=now), "overloaded", "a step waited too long for this node")
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
            stop = min(piece.stop, len(step.rows.live_rows))
            work.append((step.on_device.session.key, step.rows, piece.start, stop, not step.has_moved))
            step.has_moved = True
        try:
            planned = self._engine.plan(steps[0].on_device.session.layers, work)
        except FusionError as error:
            log.error("a forward cannot be planned", error=type(error).__name__, exc_info=error)
            self._batching.failed(batch, out_of_memory=False, now=self._now())
            self._end_lost([piece.work for piece in batch.pieces], "internal", "an error inside the node")
            return
        failures = tuple(step.on_device.num_failures for step in steps)
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
                step.tensors.live_rows(piece.start, piece.stop) if self._is_open(step.on_device.session) else None
                for step, piece in zip(flight.steps, flight.batch.pieces, strict=True)
            ]
            for step in flight.steps:
                step.began_us = began_us if step.began_us is None else step.began_us
        self._engine.change_kv(flight.planned, device=device)
        flight.num_changed += 1
        flight.rows = self._engine.run(flight.planned, flight.rows, device=device)
        if device + 1 == len(self._devices):
            for index, (step, piece) in enumerate(zip(flight.steps, flight.batch.pieces, strict=True)):
                computed = flight.rows[index]
                if computed is not None:
                    try:
                        step.tensors.keep(piece.start, computed)
                    except RowsNotFinite as error:
                        flight.unfit[index] = str(error)
        compute_us = _now_us() - began_us
        flight.seconds += compute_us / 1e6
        for step in flight.steps:
            step.compute_us += compute_us

    def _land(self, flight: _Flight, future: asyncio.Future[None]) -> None:
        """A forward has come to its end, or has failed on a device."""
        now, batch = self._now(), flight.batch
        if future.cancelled():
            return
        match future.exception():
            case None:
                self.counters["forwards"] += 1
                self.counters["compute_us"] += int(1e6 * flight.seconds)
                for index, reason in flight.unfit.items():
                    on_device = flight.steps[index].on_device
                    if self._is_open(on_device.session) and on_device.num_failures == flight.failures[index]:
                        # Of finite rows. Passed on, they would be held against this node; whose fault it is nobody can
                        # say.
                        layers = on_device.session.layers
                        self._end(on_device.session, "overflow", f"{reason} in layers {layers}", culprit="")
                for work in self._batching.done(batch, seconds=flight.seconds, now=now):
                    self._finish(work.payload)
            case ResourceExhausted() as error:
                log.warning("a forward did not fit", rows=batch.num_rows, reason=str(error))
                self.counters["forwards_out_of_memory"] += 1
                for thread, stage in zip(self._devices, self._engine.stages, strict=True):
                    thread.submit(release_cached_memory, stage.device)
                self._end_lost(self._failed(flight, out_of_memory=True), "no-memory", str(error))
            case error:
                # Never the sender's fault: what can be wrong with its rows was checked before.
                log.error("a forward failed", error=type(error).__name__, exc_info=error)
                self._end_lost(self._failed(flight, out_of_memory=False), "internal", "an error inside the node")

    def _failed(self, flight: _Flight, *, out_of_memory: bool) -> list[Work]:
        """What is lost with a forward that failed; the rest is computed again."""
        for on_device in {step.on_device for step in flight.steps}:
            on_device.num_failures += 1
        lost = self._batching.failed(flight.batch, out_of_memory=out_of_memory, now=self._now())
        if flight.num_changed < len(self._devices):
            # On some device the KV of these sessions is not what their logs say.
            lost += [flight.batch.pieces[index].work for index in flight.planned.changed]
        return lost

    def _end_lost(self, lost: list[Work], code: str, reason: str) -> None:
        for work in lost:
            session = work.payload.on_device.session
            if self._is_open(session):
                self._end(session, code, reason, culprit="")

    def _finish(self, step: _Step) -> None:
        """All rows of a step are computed: on to the next stage, or back to the user."""
        session, message = step.on_device.session, step.message
        session.num_queued_rows -= message.tensor.num_rows
        if not self._is_open(session):
            return
        session.num_computed = step.rows.num_final
        # Also now: a step of many rows on a slow device takes longer than a lease lasts.
        self._admission.renew(session, now=self._now())
        self.counters["steps"] += 1
        self.counters["rows"] += len(step.rows.live_rows)
        queue_us = 0 if step.began_us is None else step.began_us - step.queued_us
        timings = (*message.timings, StageTiming(min(queue_us, _MAX_US), min(step.compute_us, _MAX_US)))
        tensor, payload = step.tensors.meta, step.tensors.payload
        packing = self._require_compressor().choose(session.next, tensor, payload)
        step.on_device.leaving.submit(
            (lambda: None) if packing is None else packing.run,
            partial(self._send_on, step, timings),
            is_large=packing is not None and packing.is_large,
        )

    def _send_on(self, step: _Step, timings: tuple[StageTiming, ...], packed: Callable[[], Packed | None]) -> None:
        """What a step has come to can be sent, and what is before it was."""
        session, message = step.on_device.session, step.message
        if not self._is_open(session):
            return
        tensor, payload = step.tensors.meta, step.tensors.payload
        smaller = packed()
        if smaller is not None:
            self._require_compressor().note(smaller)
            tensor, payload = smaller.tensor, memoryview(smaller.payload)
        forward: AnyMessage
        if session.is_last:
            forward = StepResult(session.key, message.epoch, message.sequence, step.returned, tensor, timings)
        else:
            forward = msgspec.structs.replace(message, tensor=tensor, timings=timings)
        try:
            self._require_pool().send(session.next, forward, payload)
        except PeerError as error:
            self._end(session, PEER_LOST, str(error), culprit=session.next)
        except FusionError as error:
            log.error("rows cannot be sent", error=type(error).__name__)
            self._end(session, "internal", "an error inside the node", culprit="")

    # small things

    def _in_order(self) -> InOrder:
        def watch(future: asyncio.Future[Any]) -> None:
            self._running.add(future)
            future.add_done_callback(self._running.discard)

        return InOrder(self._codec, watch=watch)

    def _encoding(self, session: Session) -> str:
        """Of the rows that come and go in a session."""
        return session.plan.wire or self._engine.wire_dtype

    def _counters(self) -> dict[str, float]:
        load = self.status()
        return {
            "waiting_rows": float(load.num_waiting_rows),
            "max_forward_rows": float(load.max_rows),
            "decode_wait_s": round(load.decode_wait_s, 6),
            "uptime_s": round(self._clock() - self._started_at, 3),
            "open_sessions": float(len(self._admission.sessions)),
            "kv_positions": float(self._admission.max_positions),
            "kv_free_positions": float(self._admission.free_positions),
            "sessions_failed": 0.0,
            **{name: float(value) for name, value in self.counters.items()},
            **{f"refused.{name}": float(value) for name, value in self._admission.refused.items()},
            **{f"link.{name}": float(value) for name, value in self._require_pool().counters.items()},
            **self._require_compressor().report(),
        }

    def _send(self, peer: PeerId, message: AnyMessage) -> None:
        try:
            self._require_pool().send(peer, message)
        except PeerError:
            # Whoever is gone cannot be told; on_closed has been or will be called.
            log.debug("message not sent", peer=short(peer), message=type(message).__name__)

    def _require_compressor(self) -> Compressor:
        if self._compressor is None:
            raise RuntimeError("NodeServer.attach was not called")
        return self._compressor

    def _require_pool(self) -> LinkPool:
        if self._pool is None:
            raise RuntimeError("NodeServer.attach was not called")
        return self._pool

    def _now(self) -> MonotonicS:
        return MonotonicS(self._clock())


def _now_us() -> int:
    return time.perf_counter_ns() // 1000
