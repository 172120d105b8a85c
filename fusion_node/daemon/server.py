"""The shell around admission and engine: frames in, steps through the device, frames out.

The event loop decides and never computes; one thread per device computes and never decides. The thread takes steps in
the order in which they came, so every session's log stays in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import structlog

from fusion_node.daemon.admission_core import MAX_QUEUED_ROWS, Admission, RefusalCode, Refused, Session
from fusion_node.engine.device import prepare_thread
from fusion_node.engine.kv_cache import SessionKV
from fusion_node.engine.session_log_core import Duplicate, StepFault, StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.tensor_codec import RowsNotFinite, decode_rows, encode_rows
from fusion_node.errors import FusionError, PeerError, RemoteProtocolError, ResourceExhausted
from fusion_node.types import MonotonicS, PeerId, UnixS
from p2p.identity import short
from p2p.links import LinkPool
from p2p.messages import (
    PEER_LOST,
    AnyMessage,
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
    TensorMeta,
)
from p2p.records import Plan, Refusal, open_plan

CONNECT_SUCCESSOR_S = 8.0
"""For dialling the next stage while a session opens; the user's side waits longer than this."""

_MAX_US = 2**32 - 1

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _OnDevice:
    """What a session has on the device."""

    session: Session
    stage: Stage
    kv: SessionKV


@dataclass(frozen=True, slots=True)
class _Computed:
    tensor: TensorMeta
    payload: memoryview
    returned: tuple[int, ...]
    began_us: int
    compute_us: int


@dataclass(frozen=True, slots=True)
class _Unfit:
    """The rows of a step cannot be computed with, or not passed on."""

    code: str
    reason: str
    is_senders: bool


_Outcome = _Computed | _Unfit | None
"""Of one step on the device; None when its session ended before its turn came."""


class NodeServer:
    """Serves sessions of one stage.

    Args:
        own_record: gives the node's present signed record, for StatusRequest.
        clock, unix_clock: monotonic and Unix seconds.
    """

    def __init__(
        self,
        stage: Stage,
        admission: Admission,
        *,
        own_record: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._stage = stage
        self._admission = admission
        self._own_record = own_record
        self._clock = clock
        self._unix_clock = unix_clock
        self._on_device: dict[bytes, _OnDevice] = {}
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=prepare_thread)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Future[_Outcome]] = set()
        self._started_at = clock()
        self._pool: LinkPool | None = None
        self.counters: Counter[str] = Counter()

    def attach(self, pool: LinkPool) -> None:
        """Where to send; the pool and the server need each other, so this comes second."""
        self._pool = pool

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
                session = self._admission.close(message.session, epoch=message.epoch, source=peer)
                if session is not None:
                    self._forget(session)
                    self._send(peer, SessionClosed(session=message.session, epoch=message.epoch))
            case StatusRequest():
                self._send(peer, StatusReply(message.request, record=self._own_record(), counters=self._counters()))
            case _:
                self.counters["unexpected_frames"] += 1
                raise RemoteProtocolError(peer, f"{short(peer)} sent {type(message).__name__} to a node")

    def on_closed(self, peer: PeerId, error: FusionError) -> None:
        """A peer is gone: what cannot go on without it ends, and its user is told who is missing."""
        for session in self._admission.touching(peer):
            self._end(session, PEER_LOST, str(error), culprit=peer)

    # sessions

    def expire(self) -> None:
        """Ends the sessions whose lease ran out. Called now and then by whoever runs the server."""
        for session in self._admission.handle_timer(now=self._now()):
            log.info("session expired", session=session.key.hex()[:8], user=short(session.user))
            self._tell_user(session, "lease-expired", "nothing was heard of the session", "")
            self._forget(session)

    async def drain(self, *, timeout_s: float) -> None:
        """Takes no more sessions, finishes what is running, and hands the rest back to its users."""
        self._admission.draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        for session in self._admission.sessions:
            self._end(session, "draining", "the node is shutting down", culprit="")
        # The thread ends with the step it is in: a process that exits in the middle of one may crash.
        self._device.shutdown(wait=False, cancel_futures=True)

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
        stage = self._stage.part(session.layers)
        try:
            kv = stage.new_kv(plan.max_positions)
        except ResourceExhausted as error:
            log.warning("no room for a session that was admitted", reason=str(error))
            self._give_back(session, message, Refused(RefusalCode.NO_MEMORY, "the device has no memory left"))
            return
        self._on_device[session.key] = _OnDevice(session, stage, kv)
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
        self._send(session.user, SessionOpened(message.session, message.epoch, message.stage, lease_s))

    async def _connect_successor(self, session: Session, plan: Plan, message: OpenSession) -> None:
        place = plan.stages[session.stage + 1]
        pool = self._require_pool()
        try:
            await pool.connect(session.next, place.data_addresses, timeout_s=CONNECT_SUCCESSOR_S)
        except FusionError as error:
            log.info("next stage unreachable", peer=short(session.next), reason=str(error))
            # Not why: whoever writes the plan chooses the addresses, and would have us explore our network for them.
            reason = f"the next stage {short(session.next)} cannot be reached from here"
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
            del self._on_device[session.key]

    def _is_open(self, session: Session) -> bool:
        """Whether this very session is served: its id may have been opened anew since."""
        on_device = self._on_device.get(session.key)
        return on_device is not None and on_device.session is session

    # steps

    def _take_step(self, peer: PeerId, message: Step, payload: memoryview) -> None:
        session = self._admission.get(message.session, epoch=message.epoch, source=peer)
        on_device = self._on_device.get(message.session)
        if session is None or on_device is None:
            # Steps in flight when a session ends are no fault, and a stranger learns nothing from silence.
            self.counters["steps_without_session"] += 1
            return
        stage = on_device.stage
        if message.tensor.row_size != stage.hidden_size or message.tensor.dtype != stage.numerics.wire_dtype:
            self._end(
                session, "bad-shape", f"rows must be {stage.numerics.wire_dtype} of {stage.hidden_size}", culprit=peer
            )
            return
        if len(message.timings) != session.stage:
            # Every stage adds one. A list that is full already would make the next stage refuse ours as malformed, and
            # close a link on which other users depend.
            self._end(session, "bad-timings", "a step has one timing per stage behind it", culprit=peer)
            return
        if session.num_queued_rows + message.tensor.num_rows > MAX_QUEUED_ROWS:
            self._end(session, "flooded", f"more than {MAX_QUEUED_ROWS} rows wait for the device", culprit=peer)
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
                self._admission.renew(session, now=self._now())
                session.num_queued_rows += message.tensor.num_rows
                self._submit(session, on_device, message, rows, payload)

    def _submit(
        self, session: Session, on_device: _OnDevice, message: Step, rows: StepRows, payload: memoryview
    ) -> None:
        queued_us = _now_us()
        last = session.is_last

        def compute() -> _Outcome:
            began_us = _now_us()
            returned: tuple[int, ...] = ()
            if not self._is_open(session):
                return None
            try:
                hidden = decode_rows(message.tensor, payload)
            except RowsNotFinite as error:
                return _Unfit("bad-rows", str(error), is_senders=True)
            is_whole = len(rows.live_rows) == message.tensor.num_rows
            live = hidden if is_whole else hidden[list(rows.live_rows)]
            (out,) = on_device.stage.forward([StepInput(on_device.kv, rows, live)])
            if last:
                row_of = {node: row for row, node in enumerate(rows.nodes)}
                returned = tuple(node for node in message.want if node in row_of)
                out = out[[row_of[node] for node in returned]]
            elif not is_whole:
                # Dead rows keep their place, so that every stage reads the same table of nodes.
                padded = out.new_zeros((message.tensor.num_rows, out.shape[1]))
                padded[list(rows.live_rows)] = out
                out = padded
            try:
                tensor, encoded = encode_rows(out, on_device.stage.numerics.wire_dtype)
            except RowsNotFinite as error:
                # Of finite rows. Passed on, they would be held against this node; whose fault it is nobody can say.
                return _Unfit("overflow", f"{error} in layers {session.layers}", is_senders=False)
            return _Computed(tensor, encoded, returned, began_us, _now_us() - began_us)

        future = asyncio.get_running_loop().run_in_executor(self._device, compute)
        self._running.add(future)

        def done(future: asyncio.Future[_Outcome]) -> None:
            self._running.discard(future)
            session.num_queued_rows -= message.tensor.num_rows
            self._finish(session, message, rows, future, queued_us)

        future.add_done_callback(done)

    def _finish(
        self, session: Session, message: Step, rows: StepRows, future: asyncio.Future[_Outcome], queued_us: int
    ) -> None:
        if future.cancelled() or not self._is_open(session):
            return
        match future.exception():
            case None:
                computed = future.result()
            case FusionError() as error:
                self._end(session, "no-memory", str(error), culprit="")
                return
            case error:
                # Never the sender's fault: what can be wrong with its rows was checked before.
                log.error("step failed", error=type(error).__name__, exc_info=error)
                self._end(session, "internal", "an error inside the node", culprit="")
                return
        if computed is None:
            return
        if isinstance(computed, _Unfit):
            culprit = session.previous if computed.is_senders else ""
            self._end(session, computed.code, computed.reason, culprit=culprit)
            return
        # Also now: a step of many rows on a slow device takes longer than a lease lasts.
        self._admission.renew(session, now=self._now())
        self.counters["steps"] += 1
        self.counters["rows"] += len(rows.live_rows)
        self.counters["compute_us"] += computed.compute_us
        timing = StageTiming(min(computed.began_us - queued_us, _MAX_US), min(computed.compute_us, _MAX_US))
        timings = (*message.timings, timing)
        forward: AnyMessage
        if session.is_last:
            forward = StepResult(
                session.key, message.epoch, message.sequence, computed.returned, computed.tensor, timings
            )
        else:
            forward = msgspec.structs.replace(message, tensor=computed.tensor, timings=timings)
        try:
            self._require_pool().send(session.next, forward, computed.payload)
        except PeerError as error:
            self._end(session, PEER_LOST, str(error), culprit=session.next)
        except FusionError as error:
            log.error("rows cannot be sent", error=type(error).__name__)
            self._end(session, "internal", "an error inside the node", culprit="")

    # small things

    def _counters(self) -> dict[str, float]:
        return {
            "uptime_s": round(self._clock() - self._started_at, 3),
            "open_sessions": float(len(self._admission.sessions)),
            "kv_positions": float(self._admission.max_positions),
            "kv_free_positions": float(self._admission.free_positions),
            "sessions_failed": 0.0,
            **{name: float(value) for name, value in self.counters.items()},
            **{f"refused.{name}": float(value) for name, value in self._admission.refused.items()},
            **{f"link.{name}": float(value) for name, value in self._require_pool().counters.items()},
        }

    def _send(self, peer: PeerId, message: AnyMessage) -> None:
        try:
            self._require_pool().send(peer, message)
        except PeerError:
            # Whoever is gone cannot be told; on_closed has been or will be called.
            log.debug("message not sent", peer=short(peer), message=type(message).__name__)

    def _require_pool(self) -> LinkPool:
        if self._pool is None:
            raise RuntimeError("NodeServer.attach was not called")
        return self._pool

    def _now(self) -> MonotonicS:
        return MonotonicS(self._clock())


def _now_us() -> int:
    return time.perf_counter_ns() // 1000
