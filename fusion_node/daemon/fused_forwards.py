"""Steps through a slice of layers, together with the other members of their groups.

It stands where Forwards stands in a node of whole layers. The event loop decides: the exchange core says which units
are ready, and the thread of the device takes them through one exchange, from the contributions of all members to those
that the others get. They leave in one message for each other member, whatever sessions they are of. Only what takes
less than the way to that thread and back is computed where it is decided. Where sums are masked, that thread makes the
masks too.

Above 600 lines: what a batch is from its start to its landing, of which each part reads what the one before has left.
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
from fusion_node.daemon.exchange_core import (
    BAD_PARTIALS,
    MAX_PHASE_ROWS,
    Batch,
    Exchanges,
    Fault,
    Form,
    Unit,
    begun_rows,
    unit_rows,
)
from fusion_node.daemon.forwards import Owner, in_us
from fusion_node.daemon.pace_core import Pace
from fusion_node.daemon.serving_core import ServedStep
from fusion_node.daemon.standstill_core import LOOK_S
from fusion_node.engine.batching_core import BatchingStatus, Overload, Priority
from fusion_node.engine.device import prepare_thread, release_cached_memory
from fusion_node.engine.forward_time_core import ForwardTime
from fusion_node.engine.masked_sums import BeyondRing, MaskedSums, encode_words
from fusion_node.engine.shard_engine import PlannedBatch
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.tensor_codec import RowsNotFinite, StepTensors, decode_partials, encode_partials
from fusion_node.errors import FusionError, ResourceExhausted
from fusion_node.slices import MASKED_BYTES, VALUE_BYTES, contribution_bytes
from fusion_node.types import MonotonicS, PeerId
from fusion_node.wire import MAX_PAYLOAD_BYTES
from p2p.messages import MAX_PARTIALS, Partials, PartialsEntry, StageTiming, Standing

MAX_INLINE_S = 0.001
"""A batch that takes less is computed on the event loop's thread: to hand it to another one and back takes about as
long, and a token passes some hundred. Others wait for it no longer than for a large message."""

LEARN_SHARE = 0.125
"""Weight of a batch in what batches of about its rows take."""

MAX_BACKLOG_BYTES = 16 * 2**20
"""That may wait for another member when something is computed for it. A batch is 16 MiB, or one frame of 32, and a link
for which 64 MiB wait is given up, with the sessions of everybody: however many sessions share it, and however slow it
is, they wait for one another instead."""

HELD_S = 0.05
"""Between two looks at such a backlog."""

_MAX_US = 2**32 - 1

OVERLOADS = {
    Overload.NODE: "too many rows wait for this node: go elsewhere, or try again later",
    Overload.USER: "too many rows of yours wait for this node: send fewer at once",
}

log = structlog.get_logger(__name__)


class GroupOwner(Owner, Protocol):
    """Who hands steps in, gets them back computed, and hears what other members do."""

    def member_failed(
        self, session: Session, code: str, reason: str, culprit: str, standing: Standing | None = None
    ) -> None:
        """Another member has sent what it must not, or nothing: what was handed in will never be computed."""
        ...

    def expire(self) -> None:
        """Time has passed while others are waited for: tells ``stood_still`` if need be, and then ``expire``."""
        ...


@dataclass(slots=True, eq=False)
class _Step:
    """A step on its way through the layers."""

    served: ServedStep
    tensors: StepTensors
    queued_us: int
    num_left: int
    """Units that are not done."""
    masks: MaskedSums | None = None
    """Of the plan under which it came."""
    compute_us: int = 0

    @property
    def session(self) -> Session:
        return self.served.session

    def timing(self, price_s: float) -> StageTiming:
        """All that is no computing of its own is waiting: for the device, and for the other members."""
        queue_us = max(0, _now_us() - self.queued_us - self.compute_us)
        return StageTiming(min(queue_us, _MAX_US), min(self.compute_us, _MAX_US), in_us(price_s))


@dataclass(slots=True, eq=False)
class _Piece:
    """What is known of a unit: live rows ``[start, stop)`` of a step.

    Attributes:
        fused: its rows in the engine, once it has begun.
        seconds, num_rows, num_batches: that the device spent on the batches with it, and their rows.
    """

    step: _Step
    start: int
    stop: int
    fused: Any = None
    seconds: float = 0.0
    num_rows: int = 0
    num_batches: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch on the thread of the device.

    Attributes:
        planned: where in the KV the rows of units go that begin; None if none does.
        own: per unit this member's contribution to itself.
        out: messages to other members, with their payloads.
        lost: why a session cannot go on: through a fault of this member's, or of another one.
        has_changed: what begins has its KV in its place.
        own_s: that the thread itself has computed of its seconds, whatever else the machine does.
    """

    batch: Batch
    planned: PlannedBatch | None
    beginning: tuple[Unit, ...]
    own: list[Any] = field(default_factory=list)
    out: list[tuple[PeerId, Partials, memoryview]] = field(default_factory=list)
    lost: dict[Session, Fault] = field(default_factory=dict)
    has_changed: bool = False
    seconds: float = 0.0
    own_s: float = 0.0


class FusedForwards:
    """The device of one member.

    Args:
        send: hands a message to a link; whoever is gone need not be told.
        running: gets the futures of what runs in threads, and is rid of them when they are done.
        counters: for status replies.
        backlog_bytes: that wait to be sent to a peer, or for its acknowledgement.
        pace: is told how fast it goes.
    """

    def __init__(
        self,
        engine: SliceEngine,
        owner: GroupOwner,
        *,
        send: Callable[[PeerId, Partials, memoryview], None],
        running: set[asyncio.Future[Any]],
        counters: Counter[str],
        clock: Callable[[], float],
        backlog_bytes: Callable[[PeerId], int] = lambda peer: 0,
        pace: Pace | None = None,
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._send = send
        self._running = running
        self._counters = counters
        self._clock = clock
        self._backlog_bytes = backlog_bytes
        self._pace = pace
        own, most = engine.member.index, begun_rows(engine.dims, engine.bounds)
        self._core = Exchanges(
            {exchange: engine.width(exchange, own) for exchange in engine.exchanges},
            max_unit_rows=unit_rows(engine.dims, engine.bounds),
            max_begun_rows=most,
            max_phase_rows=min(MAX_PHASE_ROWS, most),
        )
        self._core.counters = counters
        self._forms = {masked: Form.of(engine.dims, engine.bounds, own, is_masked=masked) for masked in (False, True)}
        self._masks: dict[Session, MaskedSums] = {}
        """Of sessions that were entered and whose sums are masked."""
        self._sent_bytes = {
            masked: [
                sum(contribution_bytes(engine.dims, bounds, each, is_masked=masked) for each in engine.exchanges)
                for bounds in engine.bounds
            ]
            for masked in (False, True)
        }
        """Per member, for one row in one layer."""
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device-0", initializer=prepare_thread)
        self._time = ForwardTime()
        self._batch_s: dict[int, float] = {}
        """What a batch takes, by the number of bits of its rows, and whether it begins (then negative)."""
        self._flight: _Flight | None = None
        self._is_stopped = False
        self._will_pump = False
        self._held: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is being computed, here or by another member for what has begun here."""
        return self._flight is not None or self._core.num_rows > 0

    def status(self) -> BatchingStatus:
        """What waits and what runs now."""
        core, is_running = self._core, self._flight is not None
        per_batch_s = self._time.predict(core.max_rows) / (len(self._engine.layers) * len(self._engine.exchanges))
        return BatchingStatus(
            num_waiting_rows=core.num_rows,
            num_waiting_sessions=core.num_waiting_sessions,
            num_in_flight_batches=int(is_running),
            max_rows=core.max_rows,
            decode_wait_s=(core.num_ready + is_running) * per_batch_s,
            drain_s=self._time.predict(core.num_rows) if core.num_rows else 0.0,
        )

    def standing(self, session: Session) -> Standing | None:
        """How far a session is; None of one of which nothing is computed any more."""
        return self._core.standing(session, now=self._now(), full=self._full())

    def exchanged_bytes_per_row(self, session: Session) -> dict[PeerId, int]:
        """What each other member is sent for one row of a session."""
        places = session.plan.stages[session.stage].members
        return {
            PeerId(place.peer): len(session.layers) * self._sent_bytes[session.plan.masks][index]
            for index, place in enumerate(places)
            if index != session.member
        }

    # sessions

    def enter(self, session: Session) -> None:
        """Other members may contribute to a session from now on, under its present plan."""
        members = [PeerId(place.peer) for place in session.plan.stages[session.stage].members]
        self._core.enter(
            session,
            user=session.user,
            alias=session.alias,
            members=members,
            own=session.member,
            layers=session.layers,
            form=self._forms[session.plan.masks],
        )
        self._masks.pop(session, None)
        if session.plan.masks:
            engine = self._engine
            self._masks[session] = MaskedSums(
                engine.dims, engine.bounds, session.member, keys=session.mask_keys, epoch=session.plan.epoch
            )

    def cancel(self, session: Session) -> None:
        """Computes nothing more of a session."""
        self._core.leave(session)
        self._masks.pop(session, None)

    # what comes

    def add(self, step: ServedStep, hidden: Any) -> tuple[str, str] | None:
        """Takes a step with its decoded rows ``[T, d]``. Code and reason if so much waits that it is not taken."""
        session, rows = step.session, step.rows
        size = self._forms[session.plan.masks].max_unit_rows
        if not self._core.holds(session):
            return None  # it has been left since the step came, and its user was told
        num_rows = len(rows.live_rows)
        starts = range(0, max(num_rows, 1), size)
        tensors = StepTensors(hidden, rows.live_rows, step.out, step.encoding)
        made = _Step(step, tensors, _now_us(), len(starts), masks=self._masks.get(session))
        units = [
            Unit(
                session,
                rows.nodes[start] if num_rows else step.message.first_node,
                min(num_rows - start, size),
                is_alone=start == 0 and (rows.reuses_slots or rows.move is not None),
                is_batch=session.plan.priority == Priority.BATCH,
                payload=_Piece(made, start, min(start + size, num_rows)),
            )
            for start in starts
        ]
        added = self._core.add(units, now=self._now())
        if isinstance(added, Overload):
            return added.value, OVERLOADS[added]
        self._tell(added)
        self._pump_soon()
        return None

    def receive(self, peer: PeerId, message: Partials, payload: memoryview) -> None:
        """Takes contributions of another member."""
        self._counters["partials"] += 1
        self._tell(self._core.receive(peer, message, payload))
        if self._core.num_ready:
            self._pump_soon()

    def stop(self) -> None:
        """Computes nothing any more."""
        self._is_stopped = True

    def close(self) -> None:
        """After ``stop``: the thread ends with the batch that it is in; a process that exits amid one may crash."""
        for timer in (self._timer, self._held):
            if timer is not None:
                timer.cancel()
        self._device.shutdown(wait=False, cancel_futures=True)

    # the device

    def _pump_soon(self) -> None:
        # Not at once: what else has come by now takes part in the same batch.
        if not self._will_pump:
            self._will_pump = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Computes what is ready when the device is idle."""
        self._will_pump = False
        while self._flight is None and not self._is_stopped:
            batch = self._core.next_batch(self._full())
            if batch is None:
                if self._core.num_ready and self._held is None:
                    self._held = asyncio.get_running_loop().call_later(HELD_S, self._pump_held)
                break
            self._start(batch)
        self._set_timer()

    def _full(self) -> set[PeerId]:
        """Members that take nothing more for now."""
        return {peer for peer in self._core.members if self._backlog_bytes(peer) > MAX_BACKLOG_BYTES}

    def _pump_held(self) -> None:
        self._held = None
        self._pump()

    def _set_timer(self) -> None:
        if self._timer is None and not self._is_stopped:
            due = self._core.get_timer()
            if due is not None:
                delay_s = min(max(0.0, due - self._clock()) + 0.001, LOOK_S)
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._owner.expire)

    def expire(self) -> None:
        """Gives up what has waited too long. May be called at any time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell(self._core.handle_timer(now=self._now()))
        self._set_timer()

    def stood_still(self, seconds: float) -> None:
        """In the seconds just past this process did not run: nobody is late for them."""
        self._core.stood_still(seconds, now=self._now())

    def _start(self, batch: Batch) -> None:
        beginning = tuple(unit for unit in batch.units if batch.exchange is None and unit.payload.fused is None)
        planned = None
        if beginning:
            try:
                planned = self._engine.plan(batch.layers, [_work(unit) for unit in beginning])
            except FusionError as error:
                log.error("a batch cannot be planned", error=type(error).__name__, exc_info=error)
                self._lose(batch, "internal", "an error inside the node")
                return
        flight = self._flight = _Flight(batch, planned, beginning)
        if self._pace is not None:
            for unit in beginning:
                waited_s = (_now_us() - unit.payload.step.queued_us) / 1e6
                self._pace.step_began(unit.num_rows, waited_s, self._clock())
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None]
        if self._batch_s.get(_size_of(batch), MAX_INLINE_S) < MAX_INLINE_S:
            future = loop.create_task(self._compute_here(flight))
        else:
            future = loop.run_in_executor(self._device, self._compute, flight)
        self._running.add(future)
        future.add_done_callback(lambda future: self._land(flight, future))

    async def _compute_here(self, flight: _Flight) -> None:
        """On the event loop's thread."""
        self._compute(flight)

    def _compute(self, flight: _Flight) -> None:
        began_us, began_s, batch = _now_us(), time.thread_time(), flight.batch
        if flight.planned is not None:
            self._begin(flight, flight.planned)
        received = self._received(flight)
        going = [
            (index, unit.payload.fused)
            for index, unit in enumerate(batch.units)
            if unit.payload.fused is not None and unit.session not in flight.lost
        ]
        flight.own = [None] * len(batch.units)
        if going:
            sent = self._engine.phase(
                [fused for _, fused in going],
                None if received is None else [received[index] for index, _ in going],
            )
            outgoing = []
            for place, (index, fused) in enumerate(going):
                unit = batch.units[index]
                if fused.is_done:
                    self._keep(flight, unit)
                elif sent is not None and (parts := self._sealed(flight, unit, sent[place])) is not None:
                    flight.own[index] = parts[unit.session.member]
                    outgoing.append((unit, parts))
            self._pack(flight, outgoing)
        flight.seconds = (_now_us() - began_us) / 1e6
        flight.own_s = time.thread_time() - began_s

    def _begin(self, flight: _Flight, planned: PlannedBatch) -> None:
        self._engine.change_kv(planned)
        flight.has_changed = True
        # An entry of the log may leave no row alive: what it changes is changed, and it computes nothing.
        going = [
            (unit.payload, item)
            for unit, item in zip(flight.beginning, planned.items, strict=True)
            if unit.num_rows and self._owner.is_open(unit.session)
        ]
        if going:
            some = replace(planned, items=tuple(item for _, item in going))
            rows = [piece.step.tensors.live_rows(piece.start, piece.stop) for piece, _ in going]
            for (piece, _), fused in zip(going, self._engine.begin(some, rows), strict=True):
                piece.fused = fused

    def _received(self, flight: _Flight) -> list[Any] | None:
        """What has come, as tensors, or as their sum; sessions of which a contribution is no good are lost."""
        if flight.batch.received is None:
            return None
        out: list[Any] = []
        for unit, parts in zip(flight.batch.units, flight.batch.received, strict=True):
            masks = unit.payload.step.masks
            if masks is not None:
                out.append(self._unmasked(flight, unit, masks, parts))
                continue
            tensors = []
            for member, part in enumerate(parts):
                try:
                    is_own = member == unit.session.member
                    tensors.append(part if is_own else decode_partials(part, unit.num_rows))
                except RowsNotFinite as error:
                    culprit = unit.session.plan.stages[unit.session.stage].members[member].peer
                    flight.lost[unit.session] = Fault(unit.session, BAD_PARTIALS, str(error), culprit)
            out.append(tensors)
        return out

    def _unmasked(self, flight: _Flight, unit: Unit, masks: MaskedSums, parts: Sequence[Any]) -> Any:
        """The sum of what has come; without it the session is lost, and nobody knows through whom."""
        exchange = unit.payload.fused.position[1]
        try:
            return masks.total(parts, unit.num_rows, exchange)
        except BeyondRing as error:
            flight.lost[unit.session] = Fault(unit.session, "overflow", f"{_place_of(unit)}: {error}")
            return None

    def _sealed(self, flight: _Flight, unit: Unit, parts: list[Any]) -> list[Any] | None:
        """What goes to each member of a unit's group; None when it cannot be masked, and its session is lost."""
        masks = unit.payload.step.masks
        if masks is None:
            return parts
        layer, exchange = unit.payload.fused.position
        try:
            sealed: list[Any] = masks.contributions(parts, node=unit.node, layer=layer, exchange=exchange)
        except BeyondRing as error:
            flight.lost[unit.session] = Fault(unit.session, "overflow", f"{_place_of(unit)}: {error}")
            return None
        return sealed

    def _keep(self, flight: _Flight, unit: Unit) -> None:
        """The rows of a unit have passed all layers."""
        piece: _Piece = unit.payload
        try:
            piece.step.tensors.keep(piece.start, piece.fused.rows_TD)
        except RowsNotFinite as error:
            # Of finite rows. Passed on, they would be held against this node; whose fault it is nobody can say.
            reason = f"{error} in layers {unit.session.layers}"
            flight.lost[unit.session] = Fault(unit.session, "overflow", reason)
        piece.fused = None

    def _pack(self, flight: _Flight, going: Sequence[tuple[Unit, list[Any]]]) -> None:
        """One message to each other member, of all sessions in whose group it is; more where a frame is too short."""
        of_peer: dict[tuple[PeerId, bool, int], list[tuple[Unit, Any]]] = {}
        for unit, parts in going:
            session: Session = unit.session
            for member, place in enumerate(session.plan.stages[session.stage].members):
                if member != session.member:
                    # Of one width: the same node may be another member in another group.
                    key = PeerId(place.peer), unit.payload.step.masks is not None, parts[member].shape[1]
                    of_peer.setdefault(key, []).append((unit, parts[member]))
        for (peer, is_masked, width), entries in of_peer.items():
            for some in _frames(entries, width * (MASKED_BYTES if is_masked else VALUE_BYTES)):
                self._pack_one(flight, peer, some, is_masked)

    def _pack_one(self, flight: _Flight, peer: PeerId, entries: Sequence[tuple[Unit, Any]], is_masked: bool) -> None:
        try:
            payload = (encode_words if is_masked else encode_partials)([part for _, part in entries])
        except RowsNotFinite as error:
            for unit, part in entries:
                if len(entries) > 1:
                    self._pack_one(flight, peer, [(unit, part)], is_masked)
                else:
                    flight.lost[unit.session] = Fault(unit.session, "overflow", str(error))
            return
        layer, exchange = entries[0][0].payload.fused.position
        named = tuple(PartialsEntry(unit.session.alias, unit.node, unit.num_rows) for unit, _ in entries)
        flight.out.append((peer, Partials(layer, int(exchange), named), payload))

    def _land(self, flight: _Flight, future: asyncio.Future[None]) -> None:
        """A batch was computed, or has failed."""
        self._running.discard(future)
        self._flight = None
        if future.cancelled():
            return
        match future.exception():
            case None:
                size = _size_of(flight.batch)
                before_s = self._batch_s.get(size, flight.own_s)
                self._batch_s[size] = before_s + LEARN_SHARE * (flight.own_s - before_s)
                self._landed(flight)
            case ResourceExhausted() as error:
                log.warning("a batch did not fit", rows=flight.batch.num_rows, reason=str(error))
                self._counters["forwards_out_of_memory"] += 1
                self._device.submit(release_cached_memory, self._engine.stages[0].device)
                # What begins has its KV in its place, or some session's is not what its log says.
                is_sound = flight.planned is None or flight.has_changed
                if not (is_sound and self._core.again(flight.batch)):
                    self._lose(flight.batch, "no-memory", str(error))
            case error:
                # Never a sender's fault: what can be wrong with its rows was checked before.
                log.error("a batch failed", error=type(error).__name__, exc_info=error)
                self._lose(flight.batch, "internal", "an error inside the node")
        self._pump()

    def _landed(self, flight: _Flight) -> None:
        batch = flight.batch
        for peer, message, payload in flight.out:
            self._send(peer, message, payload)
        self._counters["exchanges"] += 1
        self._counters["compute_us"] += int(1e6 * flight.seconds)
        self._tell(flight.lost.values())
        for unit in batch.units:
            piece: _Piece = unit.payload
            piece.step.compute_us += int(1e6 * flight.seconds)
            piece.seconds += flight.seconds
            piece.num_rows += batch.num_rows
            piece.num_batches += 1
        for unit in self._core.passed(batch, flight.own, now=self._now()):
            self._done(unit)

    def _done(self, unit: Unit) -> None:
        piece: _Piece = unit.payload
        step, session = piece.step, piece.step.session
        num_rows = round(piece.num_rows / piece.num_batches)
        if unit.num_rows:
            self._counters["forwards"] += 1
            if session.layers == self._engine.layers:
                self._time.learn(num_rows, piece.seconds)
            if self._pace is not None:
                self._pace.forward_done(len(session.layers), num_rows, piece.seconds, self._clock())
        step.num_left -= 1
        if step.num_left == 0:
            price_s = self._time.row_s * self._core.num_waiting_sessions
            self._owner.step_done(step.served, step.tensors.payload, step.timing(price_s), [])

    def _lose(self, batch: Batch, code: str, reason: str) -> None:
        for session in {unit.session: None for unit in batch.units}:
            self._core.leave(session)
            self._owner.steps_lost(session, code, reason)

    def _tell(self, faults: Any) -> None:
        for fault in list(faults):
            self._core.leave(fault.session)
            if fault.is_kept:
                self._owner.member_failed(fault.session, fault.code, fault.reason, fault.culprit, fault.standing)
            else:
                self._owner.steps_lost(fault.session, fault.code, fault.reason)

    def _now(self) -> MonotonicS:
        return MonotonicS(self._clock())


def _work(unit: Unit) -> tuple[Any, ...]:
    """A unit as the engine plans it: what its step moves is moved with the first of its units."""
    piece: _Piece = unit.payload
    return unit.session.key, piece.step.served.rows, piece.start, piece.stop, piece.start == 0


def _size_of(batch: Batch) -> int:
    """What batches that take about the same have in common."""
    size = batch.num_rows.bit_length()
    return size if batch.received is not None else -size


def _place_of(unit: Unit) -> str:
    """What a unit has sent or waits for, for people."""
    layer, exchange = unit.payload.fused.position
    return f"{exchange.name} in layer {layer}"


def _frames(entries: Sequence[tuple[Unit, Any]], row_bytes: int) -> list[list[tuple[Unit, Any]]]:
    """Cut so that each fits into one message."""
    frames: list[list[tuple[Unit, Any]]] = [[]]
    num_bytes = 0
    for unit, part in entries:
        more = row_bytes * unit.num_rows
        if frames[-1] and (num_bytes + more > MAX_PAYLOAD_BYTES or len(frames[-1]) == MAX_PARTIALS):
            frames.append([])
            num_bytes = 0
        frames[-1].append((unit, part))
        num_bytes += more
    return frames


def _now_us() -> int:
    return time.perf_counter_ns() // 1000
