"""The shell around the serving core: frames in, rows through codec and devices, frames out.

What a session may do is decided in serving_core, what is computed together in the batching core (forwards.py), which
rows are compressed in the compressor's. This file carries out what they say.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import structlog

from fusion_node.daemon.admission_core import Admission, Session
from fusion_node.daemon.forwards import Forwards, in_us
from fusion_node.daemon.fused_forwards import FusedForwards
from fusion_node.daemon.grants_core import release_of
from fusion_node.daemon.in_order import InOrder
from fusion_node.daemon.output_log_core import OutputLog
from fusion_node.daemon.pace_core import Pace
from fusion_node.daemon.parts_core import Joined
from fusion_node.daemon.serving_core import (
    Connect,
    EnterGroup,
    Forget,
    LeaveGroup,
    Narrow,
    Send,
    SendRows,
    ServedStep,
    Serving,
    Take,
)
from fusion_node.daemon.standstill_core import Standstill
from fusion_node.engine.batching_core import BatchingCore, BatchingStatus
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.tensor_codec import RowsNotFinite, decode_rows, join_columns
from fusion_node.errors import FusionError, PeerError, RemoteProtocolError
from fusion_node.grants import Grant, Release
from fusion_node.types import MonotonicS, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.bandwidth import BandwidthMeter
from p2p.compression import Compressor, Packed
from p2p.grants import open_grant
from p2p.identity import short
from p2p.links import LinkPool
from p2p.messages import (
    DRAINING,
    AnyMessage,
    BandwidthProbe,
    BandwidthReport,
    Partials,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    StageTiming,
    Standing,
    StatusReply,
    StatusRequest,
    Step,
    row_bytes,
)
from p2p.records import Lease, Refusal, open_plan

CONNECT_SUCCESSOR_S = 8.0
"""For dialling the next stage while a session opens; the user's side waits longer than this."""

DEFAULT_RETAIN_BYTES = 256 * 2**20
"""Of rows that were handed on, where nothing else is said."""

log = structlog.get_logger(__name__)


class _PartUnfit(Exception):
    """What one of several peers has sent of an entry cannot be computed with."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class NodeServer:
    """Serves sessions of one shard, of whole layers or of a slice of them.

    Args:
        own_record: gives the node's present signed record, for StatusRequest.
        sign_lease: signs what the node promises a user; without it, leases are told and not signed.
        sign_release: signs that nothing is held under a grant any more; without it, nothing is said of that.
        batching: decides the forwards through whole layers; a new one if not given.
        pace: is told how fast a slice of layers is.
        retain_bytes: of rows that were handed on, to be handed on again in a repair.
        clock, unix_clock: monotonic and Unix seconds.
    """

    def __init__(
        self,
        engine: ShardEngine | SliceEngine,
        admission: Admission,
        *,
        own_record: Callable[[], bytes],
        sign_lease: Callable[[Lease], bytes] | None = None,
        sign_release: Callable[[Release], bytes] | None = None,
        batching: BatchingCore | None = None,
        pace: Pace | None = None,
        retain_bytes: int = DEFAULT_RETAIN_BYTES,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._own_record = own_record
        self._clock = clock
        self._started_at = clock()
        self._standstill = Standstill(now=self._now())
        self.outputs = OutputLog(max_bytes=retain_bytes)

        def signed(session: Session, lease_s: float) -> bytes:
            if sign_lease is None:
                return b""
            return sign_lease(session.lease(admission.peer, issued_at=unix_clock(), lease_s=lease_s))

        def opened(envelope: bytes) -> tuple[Grant, float] | Refusal:
            now = UnixS(unix_clock())
            grant = open_grant(envelope, now=now)
            return grant if isinstance(grant, Refusal) else (grant, grant.expires_at - now)

        self._serving = Serving(
            admission,
            self.outputs,
            row_size=engine.hidden_size,
            wire_dtype=engine.wire_dtype,
            open_plan=lambda signed_plan: open_plan(signed_plan, now=UnixS(unix_clock())),
            sign_lease=signed,
            open_grant=opened,
            sign_release=None
            if sign_release is None
            else lambda over: sign_release(release_of(over, issued_at=unix_clock())),
            wait_s=lambda: self.status().decode_wait_s,
            backlog_bytes=lambda peer: self._require_pool().backlog_bytes(peer),
            backlog_s=lambda peer: self._require_pool().backlog_s(peer),
            standing=self._standing,
        )
        self.counters: Counter[str] = self._serving.counters
        self._running: set[asyncio.Future[Any]] = set()
        self._forwards: Forwards | FusedForwards
        if isinstance(engine, SliceEngine):
            self._forwards = FusedForwards(
                engine,
                self,
                send=self._send_partials,
                running=self._running,
                counters=self.counters,
                clock=clock,
                backlog_bytes=lambda peer: self._require_pool().backlog_bytes(peer),
                pace=pace,
            )
        else:
            self._forwards = Forwards(
                engine, batching or BatchingCore(), self, running=self._running, counters=self.counters, clock=clock
            )
        self._codec = ThreadPoolExecutor(2, thread_name_prefix="codec")
        """Compresses large tensors, and decompresses and checks those that come."""
        self._in_order: dict[Session, tuple[InOrder, InOrder]] = {}
        """What arrives and what leaves."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        """Set, and replaced by another, when a session is over."""
        self._pool: LinkPool | None = None
        self.bandwidth: BandwidthMeter | None = None
        self._compressor: Compressor | None = None

    def attach(
        self, pool: LinkPool, *, compressor: Compressor | None = None, bandwidth: BandwidthMeter | None = None
    ) -> None:
        """Where to send; the pool and the server need each other, so this comes second.

        Args:
            compressor: decides which rows are compressed; one that goes by the pool's links if not given.
            bandwidth: of the pool's links; a new one if not given.
        """
        self._pool = pool
        self._compressor = compressor or Compressor(
            rate_Bps=pool.delivery_rate_Bps, features=pool.features, limit_Bps=pool.max_upload_Bps
        )
        self.bandwidth = bandwidth or BandwidthMeter(pool, is_busy=lambda: self.is_busy, clock=self._clock)

    # what the link pool tells

    def on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        """Takes a frame.

        Raises:
            RemoteProtocolError: a node has no business with it; the link is to be closed.
        """
        self._look()
        if self._serving.receive(peer, message, payload, now=self._now()):
            self._carry_out()
            return
        match message:
            case StatusRequest():
                self._send(peer, StatusReply(message.request, record=self._own_record(), counters=self._counters()))
            case Partials() if isinstance(self._forwards, FusedForwards):
                self._forwards.receive(peer, message, payload)
            case BandwidthProbe() | BandwidthReport() if self.bandwidth is not None:
                self.bandwidth.receive(peer, message, len(payload))
            case _:
                self.counters["unexpected_frames"] += 1
                raise RemoteProtocolError(peer, f"{short(peer)} sent {type(message).__name__} to a node")

    def on_closed(self, peer: PeerId, error: FusionError) -> None:
        """A peer is gone: what cannot go on without it waits for another plan, and its user is told who is missing."""
        self._serving.peer_lost(peer, str(error), now=self._now())
        self._carry_out()
        if self.bandwidth is not None:
            self.bandwidth.forget(peer)
        if self._compressor is not None:
            self._compressor.forget(peer)

    # what the rest of the node asks

    def expire(self) -> None:
        """Ends the sessions whose time is over. Called every LOOK_S by whoever runs the server.

        When nobody has called for longer, nor anything has come, this process stood still, and nobody is late for that.
        """
        self._look()
        self._serving.handle_timer(now=self._now())
        self._carry_out()
        if isinstance(self._forwards, FusedForwards):
            self._forwards.expire()

    @property
    def is_busy(self) -> bool:
        """Whether anything is being computed."""
        return self._forwards.is_busy

    def status(self) -> BatchingStatus:
        """What waits and what runs now."""
        return self._forwards.status()

    def end_all(self, code: str, reason: str) -> None:
        """Ends every session; its user is told why."""
        self._serving.end_all(code, reason)
        self._carry_out()

    def release_kv(self) -> bool:
        """Gives the memory of the KV back when no session is open and nothing runs; says whether it did."""
        return not self._running and self._engine.release_kv()

    async def drain_sessions(
        self,
        sessions: Iterable[Session] | None = None,
        *,
        grace_s: float,
        reason: str,
        code: str = DRAINING,
    ) -> None:
        """Hands sessions over: their users are asked to go elsewhere, and are served until they have, or for so long.

        Returns when they are gone; they are told of it before the first wait. New ones are opened meanwhile, unless the
        admission says otherwise.

        Args:
            sessions: these only; all that are open now if not given.
            reason, code: what those are told that do not go in time.
        """
        leaving = list(self._admission.sessions if sessions is None else sessions)
        until = self._now() + grace_s
        self.hand_over(leaving, grace_s=grace_s, reason=reason, code=code)
        while any(map(self._admission.holds, leaving)):
            try:
                # Once more when it is over: the timer of the last does not wait for whoever calls `expire`.
                async with asyncio.timeout(max(0.0, until - self._now()) + 0.001):
                    await self._gone.wait()
            except TimeoutError:
                self.expire()
                # Also of those that were told meanwhile that they may stay: whoever drains them cannot wait for that.
                for session in filter(self._admission.holds, leaving):
                    self._serving.end(session, code, reason)
                self._carry_out()

    def hand_over(
        self,
        sessions: Iterable[Session] | None = None,
        *,
        grace_s: float,
        reason: str,
        code: str = DRAINING,
        may_stay: bool = False,
    ) -> None:
        """What ``drain_sessions`` begins with. The sessions end after ``grace_s`` if somebody calls ``expire``.

        Args:
            may_stay: unless somebody calls ``stay`` before.
        """
        self._serving.drain(
            now=self._now(), grace_s=grace_s, reason=reason, code=code, sessions=sessions, may_stay=may_stay
        )
        self._carry_out()

    def stay(self) -> None:
        """The sessions that were to be handed over may stay; not those of ``drain_sessions``."""
        self._serving.stay()

    async def drain(
        self,
        *,
        timeout_s: float,
        grace_s: float = 0.0,
        hurry: asyncio.Event | None = None,
        reason: str = "the node is shutting down",
    ) -> None:
        """Takes no more sessions, hands over those that are open, finishes what is running, and ends the rest.

        Args:
            timeout_s: for what is running after that.
            grace_s: for users to take their sessions elsewhere.
            hurry: ends that when it is set.
            reason: what users are told.
        """
        self._admission.draining, self._admission.draining_reason = True, reason
        if grace_s > 0 and self._admission.sessions:
            draining = asyncio.ensure_future(self.drain_sessions(grace_s=grace_s, reason=reason))
            hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
            try:
                await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
                if draining.done():
                    draining.result()
            finally:
                draining.cancel()
                hurried.cancel()
                await asyncio.gather(draining, hurried, return_exceptions=True)
        self._forwards.stop()
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    await asyncio.wait(self._running)
                    await asyncio.sleep(0)  # a forward goes on to its next device in a callback
        except TimeoutError:
            log.warning("a forward is still running", seconds=timeout_s)
        self.end_all(DRAINING, reason)
        self._serving.end_kept()
        self._carry_out()
        self._forwards.close()
        self._codec.shutdown(wait=False, cancel_futures=True)
        if self._retry is not None:
            self._retry.cancel()

    # what the core says

    def _carry_out(self) -> None:
        while (command := self._serving.next_command()) is not None:
            match command:
                case Take():
                    self._take(command)
                case SendRows():
                    self._send_rows(command)
                case Send():
                    self._tell(command.peer, command.message)
                case Connect():
                    task = asyncio.get_running_loop().create_task(self._connect_successor(command))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Forget():
                    self._forget(command.session)
                case Narrow() if isinstance(self._forwards, Forwards):
                    self._forwards.narrow(command.session, partial(self._serving.narrow, command.session))
                case EnterGroup() if isinstance(self._forwards, FusedForwards):
                    self._forwards.enter(command.session)
                case LeaveGroup():
                    self._forwards.cancel(command.session)
        due = self._serving.retry_at
        if due is not None and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.expire()

    async def _connect_successor(self, command: Connect) -> None:
        session, epoch = command.session, command.epoch
        try:
            await self._require_pool().connect(command.peer, command.addresses, timeout_s=CONNECT_SUCCESSOR_S)
        except FusionError as error:
            log.info("next stage unreachable", peer=short(command.peer), reason=str(error))
            self._serving.successor_unreachable(session, epoch, now=self._now(), peer=command.peer)
        else:
            self._serving.successor_connected(session, epoch, now=self._now(), peer=command.peer)
        self._carry_out()

    def _forget(self, session: Session) -> None:
        for order in self._in_order.pop(session, ()):
            order.clear()
        self._forwards.cancel(session)
        self._gone.set()
        self._gone = asyncio.Event()

    # steps

    def _take(self, command: Take) -> None:
        message = command.message
        arriving, _ = self._orders_of(command.session)
        decode: Callable[[], Any] = partial(
            decode_rows, message.tensor, command.payload, as_dtype=self._engine.wire_dtype
        )
        if isinstance(command.payload, Joined):
            decode = partial(_decode_joined, command.payload, as_dtype=self._engine.wire_dtype)
        arriving.submit(
            decode,
            partial(self._rows_are_there, command.session, message),
            is_large=self._require_compressor().is_large(message.tensor),
        )

    def _rows_are_there(self, session: Session, message: Step, decoded: Callable[[], Any]) -> None:
        try:
            hidden = decoded()
        except (RowsNotFinite, WireError) as error:
            # Before the step has any part in a forward: others' rows have the bits that they would have without it.
            self._serving.rows_unfit(session, message, str(error), now=self._now())
        except _PartUnfit as error:
            self._serving.rows_unfit(session, message, str(error), now=self._now(), peer=error.peer)
        else:
            step = self._serving.take_step(session, message, now=self._now())
            overload = None if step is None else self._forwards.add(step, hidden)
            if overload is not None:
                self._serving.end(session, *overload)
        self._carry_out()

    def is_open(self, session: Session) -> bool:
        """For the forwards: what is computed of a session that is over, nobody wants."""
        return self._admission.holds(session)

    def step_done(
        self, step: ServedStep, payload: memoryview, timing: StageTiming, taps: Sequence[tuple[int, memoryview]]
    ) -> None:
        """For the forwards: all rows of a step are computed."""
        timing = self._priced(step, timing)
        self._serving.step_computed(step, payload, timing, now=self._now(), taps=taps)
        self._carry_out()

    def _priced(self, step: ServedStep, timing: StageTiming) -> StageTiming:
        """With the price of a row on the way out, where that is the bottleneck."""
        pool, session = self._require_pool(), step.session
        sent: Counter[PeerId] = Counter()
        for target in session.parts.targets:
            sent[target.peer] += row_bytes(step.encoding, len(target.columns)) or 0
        if isinstance(self._forwards, FusedForwards):
            sent.update(self._forwards.exchanged_bytes_per_row(session))
        times = [num_bytes / rate for peer, num_bytes in sent.items() if (rate := pool.delivery_rate_Bps(peer))]
        if pool.max_upload_Bps:
            times.append(sent.total() / pool.max_upload_Bps)
        wire_us = in_us(max(times, default=0.0))
        return timing if wire_us <= timing.price_us else StageTiming(timing.queue_us, timing.compute_us, wire_us)

    def member_failed(
        self, session: Session, code: str, reason: str, culprit: str, standing: Standing | None = None
    ) -> None:
        """For the forwards: another member has sent what it must not, or nothing for long."""
        self._serving.member_at_fault(session, code, reason, culprit=culprit, now=self._now(), standing=standing)
        self._carry_out()

    def _standing(self, session: Session) -> Standing | None:
        return self._forwards.standing(session) if isinstance(self._forwards, FusedForwards) else None

    def _send_partials(self, peer: PeerId, message: Partials, payload: memoryview) -> None:
        try:
            self._require_pool().send(peer, message, payload)
        except PeerError:
            # Its sessions are kept for that when on_closed is called.
            log.debug("contributions not sent", peer=short(peer))

    def steps_lost(self, session: Session, code: str, reason: str) -> None:
        """For the forwards: the KV of a session is not what its log says any more."""
        self._serving.end(session, code, reason)
        self._carry_out()

    def _send_rows(self, command: SendRows) -> None:
        packing = self._require_compressor().choose(command.peer, command.message.tensor, memoryview(command.payload))
        _, leaving = self._orders_of(command.session)
        leaving.submit(
            (lambda: None) if packing is None else packing.run,
            partial(self._send_packed, command),
            is_large=packing is not None and packing.is_large,
        )

    def _send_packed(self, command: SendRows, packed: Callable[[], Packed | None]) -> None:
        """What is before it in its session was sent, and its rows are as small as they will be."""
        session, message, payload = command.session, command.message, command.payload
        if not self._admission.holds(session):
            return
        smaller = packed()
        if smaller is not None:
            self._require_compressor().note(smaller)
            message = msgspec.structs.replace(message, tensor=smaller.tensor)
            payload = smaller.payload
        try:
            self._require_pool().send(command.peer, message, memoryview(payload))
            self._serving.rows_left(command)
        except PeerError as error:
            self._serving.rows_left(command)
            self._serving.send_failed(session, command.peer, str(error), now=self._now())
            self._carry_out()
        except FusionError as error:
            log.error("rows cannot be sent", error=type(error).__name__)
            self._serving.end(session, "internal", "an error inside the node")
            self._carry_out()

    # small things

    def _orders_of(self, session: Session) -> tuple[InOrder, InOrder]:
        orders = self._in_order.get(session)
        if orders is None:
            orders = self._in_order[session] = (self._new_order(), self._new_order())
        return orders

    def _new_order(self) -> InOrder:
        def watch(future: asyncio.Future[Any]) -> None:
            self._running.add(future)
            future.add_done_callback(self._running.discard)

        return InOrder(self._codec, watch=watch)

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
            "retained_bytes": float(self.outputs.num_bytes),
            "retention_dropped": float(self.outputs.num_dropped),
            "sessions_failed": 0.0,
            **{name: float(value) for name, value in self.counters.items()},
            **{f"refused.{name}": float(value) for name, value in self._admission.refused.items()},
            **{f"link.{name}": float(value) for name, value in self._require_pool().counters.items()},
            **self._require_compressor().report(),
        }

    def _tell(self, peer: PeerId, message: AnyMessage) -> None:
        match message:
            case SessionOpened():
                log.info("session opened", session=message.session.hex()[:8], user=short(peer), epoch=message.epoch)
            case SessionRefused():
                log.info("session refused", user=short(peer), code=message.code)
            case SessionFailed():
                culprit = short(message.culprit) if message.culprit else ""
                what = "session kept" if message.is_kept else "session ended"
                log.info(what, session=message.session.hex()[:8], code=message.code, culprit=culprit)
        self._send(peer, message)

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

    def _look(self) -> None:
        seconds = self._standstill.look(now=self._now())
        if seconds:
            self._serving.stood_still(seconds, now=self._now())
            if isinstance(self._forwards, FusedForwards):
                self._forwards.stood_still(seconds)

    def _now(self) -> MonotonicS:
        return MonotonicS(self._clock())


def _decode_joined(joined: Joined, as_dtype: str) -> Any:
    rows = []
    for part in joined.parts:
        try:
            rows.append(decode_rows(part.tensor, part.payload, as_dtype=as_dtype))
        except (RowsNotFinite, WireError) as error:
            raise _PartUnfit(part.peer, str(error)) from error
    return join_columns(rows)
