"""Serving cores on a wire in memory, with arithmetic in the place of a model: what a row became says what made it.

A row of hidden state is a number. A stage's rows are its KV, by slot; the row that it hands on for a node is a digest
of its layers and of all the KV that the node sees. So a row that was computed from anything but the right history, or
by the wrong stage, is another number, and so is every later one. Slots that are free hold nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from fusion_node.daemon.admission_core import Admission, Session
from fusion_node.daemon.output_log_core import OutputLog, Part
from fusion_node.daemon.serving_core import Connect, Forget, Narrow, Send, SendRows, ServedStep, Serving, Take
from fusion_node.engine.block_manager_core import BlockManager
from fusion_node.types import LayerRange, ModelId, MonotonicS, PeerId
from p2p.identity import Identity
from p2p.messages import (
    AnyMessage,
    CloseSession,
    OpenSession,
    Replayed,
    Resend,
    SessionFailed,
    SessionOpened,
    StageTiming,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage

MODEL = ModelId("ab" * 32)
ROW_SIZE = 4
ROW_BYTES = 16
MAX_MERGED_ROWS = 8
T0 = MonotonicS(1000.0)
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 40)]
KEY = bytes(range(16))


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def embed(position: int) -> int:
    return digest("token", position)


def tap_of(layer: int, row: int) -> int:
    """The row after so many layers, of the node for which a stage hands on ``row``."""
    return digest("tap", layer, row)


def join(parts: Sequence[Part], row_bytes: int) -> tuple[int, ...]:
    assert row_bytes == ROW_BYTES
    return tuple(row for part in parts for row in part.payload[part.start : part.stop])


def expected_row(layer_ranges: Sequence[tuple[int, int]], position: int) -> int:
    """What comes back for a position when nothing ever fails."""
    rows = [embed(p) for p in range(position + 1)]
    for start, stop in layer_ranges:
        rows = [digest(start, stop, rows[: p + 1]) for p in range(position + 1)]
    return rows[position]


@dataclass
class Node:
    """One node: a serving core, and arithmetic instead of a device."""

    peer: PeerId
    layers: LayerRange
    max_bytes: int = 1 << 24
    backlog: int = 0
    backlogs_s: dict[PeerId, float] = field(default_factory=dict)
    num_blocks: int = 64
    sent: list[tuple[PeerId, AnyMessage, tuple[int, ...]]] = field(default_factory=list)
    connecting: list[Connect] = field(default_factory=list)
    forgotten: list[Session] = field(default_factory=list)
    waiting: deque[ServedStep] = field(default_factory=deque)
    kv: dict[Session, dict[int, int]] = field(default_factory=dict)
    plans: dict[bytes, Plan] = field(default_factory=dict)
    now: float = T0
    holds_back: bool = False
    held_back: list[SendRows] = field(default_factory=list)
    """What is still being compressed."""

    def __post_init__(self) -> None:
        self.admission = Admission(self.peer, MODEL, self.layers, "fp32", BlockManager(self.num_blocks, block_slots=4))
        self.outputs = OutputLog(max_bytes=self.max_bytes, join=join)
        self.core = Serving(
            self.admission,
            self.outputs,
            row_size=ROW_SIZE,
            wire_dtype="f32",
            open_plan=self.plans.__getitem__,
            sign_lease=lambda session, lease_s: f"{session.plan.epoch} {lease_s:.0f}".encode(),
            backlog_bytes=lambda peer: self.backlog,
            backlog_s=lambda peer: self.backlogs_s.get(peer, 0.0),
        )

    def receive(self, peer: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> None:
        assert self.core.receive(peer, message, rows, now=MonotonicS(self.now))
        self.carry_out()

    def let_go(self) -> None:
        """What was held back is sent."""
        for command in self.held_back:
            self.core.rows_left(command)
        self.held_back.clear()

    def lose(self, peer: PeerId) -> None:
        self.core.peer_lost(peer, "the link is gone", now=MonotonicS(self.now))
        self.carry_out()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.core.handle_timer(now=MonotonicS(self.now))
        self.carry_out()

    def connected(self, *, is_reachable: bool = True) -> None:
        """The oldest dial ends."""
        dial = self.connecting.pop(0)
        told = self.core.successor_connected if is_reachable else self.core.successor_unreachable
        told(dial.session, dial.epoch, now=MonotonicS(self.now))
        self.carry_out()

    def compute(self) -> None:
        """The oldest step that waits is computed."""
        step = self.waiting.popleft()
        if not self.admission.holds(step.session):
            return
        kv, rows = self.kv.setdefault(step.session, {}), step.rows
        self.admission.blocks.extend(
            step.session.key, rows.first_slot + len(rows.live_rows), first_written=rows.first_slot
        )
        if rows.move is not None:
            # Of a reused prefix nothing is known here.
            moved = [kv.get(slot) for slot in rows.move.sources]
            kv.update((rows.move.first_slot + index, value) for index, value in enumerate(moved) if value is not None)
        for slot in [slot for slot in kv if slot >= rows.first_slot]:
            del kv[slot]
        incoming = self.rows_of.pop(step)
        kv.update((rows.first_slot + index, incoming[row]) for index, row in enumerate(rows.live_rows))
        out = []
        for index, position in enumerate(rows.positions):
            seen = list(range(rows.first_slot + index + 1))
            if not rows.is_chain:
                mask = rows.visible[index]
                others = [rows.num_committed + bit for bit in range(mask.bit_length()) if mask >> bit & 1]
                seen = [*range(rows.num_committed), *others]
            assert len(seen) == position + 1
            out.append(digest(step.session.layers.start, step.session.layers.stop, [kv.get(slot) for slot in seen]))
        result = tuple(out) if step.out is None else tuple(out[index] for index in step.out)
        layers, tapped = ((), ()) if step.tap is None else step.tap
        taps = [(layer, tuple(tap_of(layer, out[index]) for index in tapped)) for layer in layers]
        self.core.step_computed(step, result, StageTiming(1, 2), now=MonotonicS(self.now), taps=taps)
        self.carry_out()

    def carry_out(self) -> None:
        while (command := self.core.next_command()) is not None:
            match command:
                case Take(session, message, payload):
                    step = self.core.take_step(session, message, now=MonotonicS(self.now))
                    if step is not None:
                        self.waiting.append(step)
                        self.rows_of[step] = payload
                case Send(peer, message):
                    self.sent.append((peer, message, ()))
                case SendRows(peer=peer, message=message, payload=payload):
                    assert message.tensor.num_rows == len(payload)
                    self.sent.append((peer, message, payload))
                    self.held_back.append(command)
                    if not self.holds_back:
                        self.let_go()
                case Connect():
                    self.connecting.append(command)
                case Narrow(session):
                    self.narrow(session)
                case Forget(session):
                    self.forgotten.append(session)
                    self.kv.pop(session, None)
        self.admission.check_integrity()
        self.outputs.check_integrity()

    def narrow(self, session: Session) -> None:
        """Steps that wait are derived anew, as far as they are to be."""
        ours = [step for step in self.waiting if step.session is session]
        narrowed = self.core.narrow(session, ours)
        for old, new in zip(ours[len(ours) - len(narrowed) :], narrowed, strict=True):
            self.waiting[self.waiting.index(old)] = new
            self.rows_of[new] = self.rows_of.pop(old)

    @property
    def rows_of(self) -> dict[ServedStep, tuple[int, ...]]:
        return self.__dict__.setdefault("_rows_of", {})

    def told(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """Takes what was sent of that type."""
        found = [message for _, message, _ in self.sent if isinstance(message, kind)]
        self.sent = [each for each in self.sent if not isinstance(each[1], kind)]
        return found


def plan_of(user: PeerId, nodes: Sequence[Node], epoch: int = 0, **changes: object) -> Plan:
    fields: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "user": user,
        "session": KEY,
        "epoch": epoch,
        "model_id": MODEL,
        "numerics": "fp32",
        "max_positions": 100,
        "issued_at": 0.0,
        "expires_at": 60.0,
        "stages": tuple(PlanStage(n.peer, n.layers.start, n.layers.stop, ("host:1",)) for n in nodes),
    }
    return Plan(**(fields | changes))  # type: ignore[arg-type]


def open_(node: Node, plan: Plan, *, resumes: bool = False, prefix: bytes = b"", asked: int = 0) -> None:
    """The user of a plan asks its stage to open it."""
    stage = next(i for i, s in enumerate(plan.stages) if s.peer == node.peer)
    envelope = f"{plan.session.hex()} {plan.epoch} {hash(plan)}".encode()
    node.plans[envelope] = plan
    node.receive(PeerId(plan.user), OpenSession(plan.session, plan.epoch, stage, envelope, prefix, asked, resumes))


def entry(plan: Plan, sequence: int, first_position: int, num_rows: int, /, **changes: object) -> Step:
    """An entry of a plain log, as the user sends it."""
    last = first_position + num_rows
    fields: dict[str, object] = {
        "session": plan.session,
        "epoch": plan.epoch,
        "sequence": sequence,
        "first_node": first_position + 1,
        "parent": first_position,
        "parents": (),
        "advance": last,
        "want": (last,),
        "tensor": TensorMeta("f32", num_rows, ROW_SIZE),
        "timings": (),
    }
    return Step(**(fields | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Lost:
    """In the place of a message: the link to that peer is gone."""

    peer: PeerId


@dataclass
class Order:
    """Entries to bring to the stages ``begin`` to ``end``, as one."""

    sequence: int
    begin: int
    end: int
    is_wanted: bool
    first_position: int
    num_rows: int
    covers: int = 1

    def takes(self, other: Order, max_rows: int) -> bool:
        """Adds another to this one, if that can be."""
        is_next = self.end == other.end and self.sequence + self.covers == other.sequence
        if self.is_wanted or other.is_wanted or not is_next or self.num_rows + other.num_rows > max_rows:
            return False
        self.num_rows += other.num_rows
        self.covers += 1
        return True


def orders_of(
    entries: Sequence[tuple[int, int]], lacks: Sequence[int], results: Container[int], *, max_merged_rows: int
) -> list[Order]:
    """How every entry, a first position and a number of rows, is brought to the stages that lack it.

    Args:
        lacks: per stage, the first entry that it has not applied.
        results: entries whose result has come.
    """
    last = len(lacks) - 1
    orders: list[Order] = []
    for sequence, (first, num_rows) in enumerate(entries):
        stages = [stage for stage in range(last + 1) if lacks[stage] <= sequence]
        begins = [stage for stage in stages if stage - 1 not in stages]
        ends = [stage for stage in stages if stage + 1 not in stages]
        for begin, end in zip(begins, ends, strict=True):
            order = Order(sequence, begin, end, end == last and sequence not in results, first, num_rows)
            before = next((each for each in reversed(orders) if each.begin == begin), None)
            if before is None or not before.takes(order, max_merged_rows):
                orders.append(order)
    return orders


@dataclass
class World:
    """A user and the nodes of its session; every link is a queue, and chance says which of them goes on."""

    rng: random.Random
    ranges: tuple[tuple[int, int], ...] = ((0, 3), (3, 5), (5, 7))
    user: PeerId = PEERS[0]
    num_made: int = 0
    epoch: int = 0
    entries: list[tuple[int, int]] = field(default_factory=list)
    results: dict[int, int] = field(default_factory=dict)
    opened: dict[int, SessionOpened] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    """Per stage, the sequence up to which replays have to be acknowledged."""
    is_repairing: bool = False
    links: dict[tuple[PeerId, PeerId], deque[tuple[object, tuple[int, ...]]]] = field(default_factory=dict)
    failures: list[SessionFailed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_peer: dict[PeerId, Node] = {}
        self.nodes = [self.new_node(each) for each in self.ranges]
        self.open(resumes=False)

    def new_node(self, layers: tuple[int, int]) -> Node:
        self.num_made += 1
        node = Node(PEERS[self.num_made], LayerRange(*layers))
        self.by_peer[node.peer] = node
        return node

    @property
    def num_positions(self) -> int:
        return sum(num_rows for _, num_rows in self.entries)

    def post(self, source: PeerId, target: PeerId, message: object, rows: tuple[int, ...] = ()) -> None:
        self.links.setdefault((source, target), deque()).append((message, rows))

    # the user

    def open(self, *, resumes: bool) -> None:
        self.plan = plan_of(self.user, self.nodes, self.epoch)
        self.opened.clear()
        self.expected.clear()
        self.is_repairing = True
        envelope = f"plan {self.epoch}".encode()
        for stage, node in enumerate(self.nodes):
            node.plans[envelope] = self.plan
            self.post(self.user, node.peer, self.opening(stage, envelope, resumes=resumes))

    def opening(self, stage: int, envelope: bytes, *, resumes: bool) -> OpenSession:
        return OpenSession(KEY, self.epoch, stage, envelope, resumes=resumes)

    def rows(self, first: int, num_rows: int) -> tuple[int, ...]:
        """What the user makes of the tokens at these positions."""
        return tuple(embed(first + i) for i in range(num_rows))

    def send(self, num_rows: int) -> None:
        first = self.num_positions
        rows = self.rows(first, num_rows)
        self.post(self.user, self.nodes[0].peer, entry(self.plan, len(self.entries), first, num_rows), rows)
        self.entries.append((first, num_rows))

    def replace(self, stage: int, *, is_dead: bool) -> None:
        """The user gives a stage up: it is dead, or merely suspected."""
        old = self.nodes[stage]
        if is_dead:
            del self.by_peer[old.peer]
            for (source, target), queue in self.links.items():
                if target == old.peer or (source == old.peer and self.rng.random() < 0.5):
                    queue.clear()
            for other in [*self.by_peer]:
                self.post(old.peer, other, _Lost(old.peer))
        else:
            self.post(self.user, old.peer, CloseSession(KEY, self.epoch))
        self.nodes[stage] = self.new_node(self.ranges[stage])
        self.epoch += 1
        self.open(resumes=True)

    def replay(self) -> None:
        """Every entry is brought to the stages that lack it."""
        for order in self.orders():
            stop = None if order.is_wanted else order.end
            if stop is not None:
                self.expected[stop] = order.sequence + order.covers
            first, num_rows = order.first_position, order.num_rows
            if order.begin == 0:
                rows = self.rows(first, num_rows)
                want = (first + num_rows,) if order.is_wanted else ()
                step = entry(
                    self.plan, order.sequence, first, num_rows, covers=order.covers, stop_stage=stop, want=want
                )
                self.post(self.user, self.nodes[0].peer, step, rows)
                continue
            source = order.begin - 1
            assert self.opened[source].retained_positions >= first + num_rows
            resend = Resend(KEY, self.epoch, order.sequence, order.covers, first, num_rows, order.is_wanted, stop)
            self.post(self.user, self.nodes[source].peer, resend)

    def orders(self) -> list[Order]:
        lacks = [self.opened[stage].next_sequence for stage in range(len(self.nodes))]
        return orders_of(self.entries, lacks, self.results, max_merged_rows=MAX_MERGED_ROWS)

    def told(self, source: PeerId, message: object, rows: tuple[int, ...]) -> None:
        match message:
            case SessionOpened() if message.epoch == self.epoch:
                self.opened[message.stage] = message
                if len(self.opened) == len(self.nodes):
                    self.replay()
            case StepResult():
                self.got(message, rows)
            case Replayed() if (
                message.epoch == self.epoch and self.expected.get(message.stage) == message.next_sequence
            ):
                first, num_rows = self.entries[message.next_sequence - 1]
                assert message.num_positions == first + num_rows
                del self.expected[message.stage]
            case SessionFailed():
                assert message.is_kept, message
                self.failures.append(message)
        self.is_repairing = len(self.opened) < len(self.nodes) or bool(self.expected) or self.lacks_results()

    def got(self, message: StepResult, rows: tuple[int, ...]) -> None:
        (first, num_rows) = self.entries[message.sequence]
        assert message.nodes == (first + num_rows,)
        before = self.results.setdefault(message.sequence, rows[0])
        assert before == rows[0]

    def lacks_results(self) -> bool:
        return len(self.results) < len(self.entries)

    # what chance does

    def step(self) -> bool:
        """One thing happens somewhere; False when nothing can."""
        links = [key for key, queue in self.links.items() if queue]
        busy = [] if links and self.is_slow() else [node for node in self.by_peer.values() if node.waiting]
        dialling = [node for node in self.by_peer.values() if node.connecting]
        options: list[object] = [*links, *busy, *dialling]
        if not options:
            return False
        index = self.rng.randrange(len(options))
        if index < len(links):
            self.deliver(links[index])
        elif index < len(links) + len(busy):
            busy[index - len(links)].compute()
        else:
            node = dialling[index - len(links) - len(busy)]
            node.connected(is_reachable=node.connecting[0].peer in self.by_peer)
        for node in list(self.by_peer.values()):
            for target, message, rows in node.sent:
                if target == self.user or target in self.by_peer:
                    self.post(node.peer, target, message, rows)
            node.sent.clear()
        return True

    def is_slow(self) -> bool:
        """Whether nobody computes while something is under way."""
        return False

    def deliver(self, link: tuple[PeerId, PeerId]) -> None:
        source, target = link
        message, rows = self.links[link].popleft()
        if target == self.user:
            self.told(source, message, rows)
        elif target in self.by_peer:
            node = self.by_peer[target]
            if isinstance(message, _Lost):
                node.lose(message.peer)
            else:
                node.receive(source, message, rows)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Until nothing more happens."""
        while self.step():
            pass
