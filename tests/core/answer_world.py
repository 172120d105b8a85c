"""One user, some nodes and an event heap: the real cores of both sides, over a toy model that shows any mistake.

A row is a number. Each layer makes of it a digest over all rows that it was given so far in the session, so a row that
is missing, repeated, out of order or changed on any stage changes every token that follows.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusion_node.client.answer_core import (
    AnswerCore,
    Failed,
    Opened,
    PeerFailed,
    Place,
    Repaired,
    RouteKind,
    RowsWanted,
    SessionBegan,
    SessionEnded,
    StepDone,
    WantsAlternates,
    WantsConnection,
    WantsRoute,
)
from fusion_node.client.session_core import Prefix
from fusion_node.daemon.admission_core import Admission, Session
from fusion_node.daemon.output_log_core import OutputLog, Part
from fusion_node.daemon.serving_core import Connect, Forget, Send, SendRows, ServedStep, Serving, Take
from fusion_node.engine.block_manager_core import BlockManager
from fusion_node.errors import FusionError, NoRoute, PeerClosed, PeerUnreachable
from fusion_node.types import LayerRange, ModelId, MonotonicS, PeerId
from p2p.identity import Identity
from p2p.messages import AnyMessage, OpenSession, StageTiming, StepResult, TensorMeta
from p2p.records import PROTOCOL_VERSION, Lease, Plan, PlanStage, Refusal

MODEL = ModelId("ab" * 32)
ROW = "f32"
NAN = "NaN"
NUM_LAYERS = 6
ROUTE_S = 0.05
EMBED_S = 0.001
_IDS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(24)]
USER = Identity.from_seed(b"u" * 32).peer_id

Rows = tuple[Any, ...]


class Sending(Protocol):
    """Returns False when there is no link."""

    def __call__(self, sender: PeerId, receiver: PeerId, message: AnyMessage, rows: Rows = (), /) -> bool: ...


def join(parts: Sequence[Part], row_bytes: int) -> Rows:
    return tuple(row for part in parts for row in part.payload[part.start : part.stop])


def embed(tokens: Sequence[int]) -> Rows:
    return tuple(hash((17, token)) for token in tokens)


def next_token(row: Any, position: int) -> int:
    return int(hash((row, position)) % 1000)


class Layers:
    """What some layers have of one session."""

    def __init__(self, layers: LayerRange) -> None:
        self.state: dict[int, list[int]] = {layer: [] for layer in range(layers.start, layers.stop)}

    def forward(self, first_position: int, rows: Rows) -> Rows:
        for layer, seen in self.state.items():
            del seen[first_position:]
            assert len(seen) == first_position, "positions were skipped"
            out = []
            for row in rows:
                seen.append(hash((layer, seen[-1] if seen else 0, row)))
                out.append(seen[-1])
            rows = tuple(out)
        return rows

    def shared(self, num_positions: int) -> Layers:
        copy = Layers(LayerRange(min(self.state), max(self.state) + 1))
        copy.state = {layer: seen[:num_positions] for layer, seen in self.state.items()}
        return copy


def undisturbed(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that one machine would choose."""
    layers, tokens, rows, first = Layers(LayerRange(0, NUM_LAYERS)), [], embed(prompt), 0
    for _ in range(num_tokens):
        row = layers.forward(first, rows)[-1]
        first += len(rows)
        tokens.append(next_token(row, first))
        rows = embed(tokens[-1:])
    return tokens


@dataclass(eq=False)
class Node:
    """A node as its shell runs it: one forward at a time."""

    peer: PeerId
    layers: LayerRange
    world: World
    row_s: float = 0.002
    retained_bytes: int = 1 << 30
    is_up: bool = True
    is_frozen: bool = False
    spoils: bool = False
    """What it computes is no number any more."""
    inbox: list[Callable[[], None]] = field(default_factory=list)
    states: dict[Session, Layers] = field(default_factory=dict)
    by_key: dict[bytes, Layers] = field(default_factory=dict)
    prefixes: dict[bytes, bytes] = field(default_factory=dict)
    queue: list[tuple[ServedStep, Rows]] = field(default_factory=list)
    is_busy: bool = False
    serving: Serving = field(init=False)

    def __post_init__(self) -> None:
        blocks = BlockManager(64)
        admission = Admission(self.peer, MODEL, self.layers, "fp32", blocks)
        self.serving = Serving(
            admission,
            OutputLog(max_bytes=self.retained_bytes, join=join),
            row_size=4,
            wire_dtype=ROW,
            open_plan=self.world.open_plan,
            sign_lease=self._lease,
        )

    def _lease(self, session: Session, lease_s: float) -> bytes:
        self.world.leases.append(
            Lease(
                PROTOCOL_VERSION,
                self.peer,
                session.user,
                session.key,
                session.plan.epoch,
                session.layers.start,
                session.layers.stop,
                session.plan.max_positions,
                0.0,
                lease_s,
            )
        )
        return str(len(self.world.leases) - 1).encode()

    def do(self, work: Callable[[], None]) -> None:
        """Now; or when it runs again, if it is frozen; or never, if it was killed."""
        if self.is_frozen:
            self.inbox.append(work)
        elif self.is_up:
            work()
            self.pump()

    def receive(self, source: PeerId, message: AnyMessage, rows: Rows) -> None:
        if isinstance(message, OpenSession):
            self.prefixes[message.session] = message.prefix
        assert self.serving.receive(source, message, rows, now=self.world.now)

    def pump(self) -> None:
        while (command := self.serving.next_command()) is not None:
            match command:
                case Send(peer, message):
                    self.world.send(self.peer, peer, message)
                case SendRows(session=session, peer=peer, message=message, payload=payload):
                    self.serving.rows_left(command)
                    if not self.world.send(self.peer, peer, message, payload):  # type: ignore[arg-type]
                        self.serving.send_failed(session, peer, "gone", now=self.world.now)
                case Connect(session=session, epoch=epoch):
                    self._connect(session, epoch, command.peer)
                case Take(session, message, payload):
                    rows: Rows = payload  # type: ignore[assignment]
                    if NAN in rows:
                        self.serving.rows_unfit(session, message, "not a number", now=self.world.now)
                    elif (step := self.serving.take_step(session, message, now=self.world.now)) is not None:
                        self.queue.append((step, rows))
                case Forget(session):
                    if self.states.get(session) is not None:
                        del self.states[session]
                    self.queue = [item for item in self.queue if item[0].session is not session]
        if self.queue and not self.is_busy:
            self.is_busy = True
            seconds = self.row_s * len(self.queue[0][1])
            self.world.after(seconds, lambda: self.do(self._compute))

    def _connect(self, session: Session, epoch: int, peer: PeerId) -> None:
        works = self.world.link(self.peer, peer)
        delay = 0.01 if works or not self.world.nodes[peer].is_frozen else 3.0
        told = self.serving.successor_connected if works else self.serving.successor_unreachable
        self.world.after(delay, lambda: self.do(lambda: told(session, epoch, now=self.world.now)))

    def _compute(self) -> None:
        self.is_busy = False
        if not self.queue:
            return
        step, rows = self.queue.pop(0)
        session, first = step.session, step.message.first_node - 1
        layers = self.states.get(session)
        if layers is None:
            shared = self.by_key.get(self.prefixes.get(session.key, b"")) if first else None
            layers = shared.shared(first) if shared is not None else Layers(session.layers)
            self.states[session] = layers
            self.by_key[session.key] = layers
        self.serving.admission.blocks.extend(session.key, first + len(rows), first_written=first)
        out = layers.forward(first, rows)
        if self.spoils:
            out = (NAN,) * len(out)
        if step.out is not None:
            out = tuple(out[row] for row in step.out)
        self.serving.step_computed(step, out, StageTiming(1, 1), now=self.world.now)


class World:
    """Time, links, nodes and one user with an answer.

    Attributes:
        send: what everybody sends by; a test that has somebody lie or keep silent puts its own in front.
    """

    def __init__(self, seed: int) -> None:
        self.send: Sending = self._carry
        self.rng = random.Random(seed)
        self.now = MonotonicS(1000.0)
        self.nodes: dict[PeerId, Node] = {}
        self.plans: list[Plan] = []
        self.leases: list[Lease] = []
        self.broken_links: set[frozenset[PeerId]] = set()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._last_arrival: dict[tuple[PeerId, PeerId], float] = {}
        self._latency: dict[frozenset[PeerId], float] = {}
        self._life: dict[PeerId, int] = {}

    def node(self, start: int, stop: int, **changes: Any) -> Node:
        peer = _IDS[len(self.nodes)]
        self.nodes[peer] = Node(peer, LayerRange(start, stop), self, **changes)
        return self.nodes[peer]

    def open_plan(self, envelope: bytes) -> Plan | Refusal:
        return self.plans[int(envelope)]

    def open_lease(self, envelope: bytes) -> Lease | Refusal:
        return self.leases[int(envelope)] if envelope else Refusal.MALFORMED

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), work))

    def latency(self, one: PeerId, other: PeerId) -> float:
        return self._latency.setdefault(frozenset((one, other)), self.rng.uniform(0.001, 0.02))

    def link(self, one: PeerId, other: PeerId) -> bool:
        """Whether the two can reach each other."""
        ends = [self.nodes[peer] for peer in (one, other) if peer != USER]
        return frozenset((one, other)) not in self.broken_links and all(n.is_up and not n.is_frozen for n in ends)

    def _carry(self, sender: PeerId, receiver: PeerId, message: AnyMessage, rows: Rows = ()) -> bool:
        """Messages of two peers come in order. False when there is no link."""
        ends = [self.nodes[peer] for peer in (sender, receiver) if peer != USER]
        if frozenset((sender, receiver)) in self.broken_links or not all(node.is_up for node in ends):
            return False
        key = (sender, receiver)
        arrival = max(self.now + self.latency(*key), self._last_arrival.get(key, 0.0))
        self._last_arrival[key] = arrival
        life = (self._life.get(sender, 0), self._life.get(receiver, 0))

        def deliver() -> None:
            if life != (self._life.get(sender, 0), self._life.get(receiver, 0)):
                return
            if receiver == USER:
                self.user.receive(sender, message, rows)
            else:
                node = self.nodes[receiver]
                node.do(lambda: node.receive(sender, message, rows))

        self.after(arrival - self.now, deliver)
        return True

    # what goes wrong

    def kill(self, node: Node) -> None:
        """Everybody linked to it learns of it from the operating system."""
        node.is_up = node.is_frozen = False
        self._life[node.peer] = self._life.get(node.peer, 0) + 1
        self._lost(node.peer, [*self.nodes, USER])

    def restart(self, node: Node) -> None:
        fresh = type(node)(node.peer, node.layers, self, node.row_s, node.retained_bytes)
        self.nodes[node.peer] = fresh

    def freeze(self, node: Node) -> None:
        node.is_frozen = True

    def thaw(self, node: Node) -> None:
        node.is_frozen = False
        inbox, node.inbox = node.inbox, []
        for work in inbox:
            node.do(work)

    def cut(self, one: PeerId, other: PeerId, *, for_good: bool) -> None:
        """A link is reset; both ends notice."""
        if for_good:
            self.broken_links.add(frozenset((one, other)))
        self._lost(one, [other])
        self._lost(other, [one])

    def _lost(self, gone: PeerId, told: Sequence[PeerId]) -> None:
        for peer in told:
            if peer == USER:
                self.after(self.latency(gone, peer), lambda: self.user.lost(gone, PeerClosed(gone, "gone")))
            elif peer != gone and self.nodes[peer].is_up:
                node = self.nodes[peer]
                self.after(
                    self.latency(gone, peer),
                    lambda node=node: node.do(  # type: ignore[misc]
                        lambda: node.serving.peer_lost(gone, "gone", now=self.now)
                    ),
                )

    def run(self, until_s: float = 300.0, stop: Callable[[], bool] = lambda: False) -> None:
        end = self.now + until_s
        while self._heap and self._heap[0][0] <= end and not stop():
            at, _, work = heapq.heappop(self._heap)
            self.now = MonotonicS(max(self.now, at))
            work()

    # an answer

    def answer(self, prompt: Sequence[int], num_tokens: int, *, prefix: Prefix | None = None) -> User:
        self.user = User(self, prompt, num_tokens, prefix)
        self.user.start()
        return self.user


class User:
    """The shell of one answer."""

    def __init__(self, world: World, prompt: Sequence[int], num_tokens: int, prefix: Prefix | None) -> None:
        self.world = world
        self.ids = list(prompt)
        self.num_prompt = len(prompt)
        self.num_tokens = num_tokens
        self.prefix = prefix
        self.error: FusionError | None = None
        self.is_done = False
        self.events: list[object] = []
        self.row: Any = None
        self.expected_prefill_s: float | None = None
        """What the cost model has to say."""
        self.choose_s = EMBED_S
        """What choosing a token takes."""
        self.on_token: Callable[[int], None] = lambda count: None
        self.on_event: Callable[[object], None] = lambda event: None
        self.sees: Callable[[Place], bool] = lambda place: True
        """Whom its router knows."""
        self.allows: Callable[[Sequence[Place]], bool] = lambda places: True
        """What routes its rules allow."""
        self.core = AnswerCore(
            num_prompt=len(prompt),
            row_size=4,
            wire_dtype=ROW,
            make_plan=self._plan,
            new_session=lambda: bytes(world.rng.randrange(256) for _ in range(16)),
            open_lease=world.open_lease,
            is_allowed=lambda places: self.allows(places),
        )
        self._timer: object = None
        self._sessions: set[bytes] = set()

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.num_prompt :]

    @property
    def num_reserved(self) -> int:
        return self.num_prompt + self.num_tokens

    @property
    def repairs(self) -> list[Repaired]:
        return [event for event in self.events if isinstance(event, Repaired)]

    @property
    def num_sessions(self) -> int:
        return sum(isinstance(event, SessionBegan) for event in self.events)

    @property
    def avoided(self) -> list[str]:
        return [event.error.peer for event in self.events if isinstance(event, PeerFailed)]

    def start(self) -> None:
        self.core.start(now=self.world.now)
        self.pump()

    def _plan(self, session: bytes, epoch: int, stages: tuple[PlanStage, ...]) -> tuple[Plan, bytes]:
        plan = Plan(
            version=PROTOCOL_VERSION,
            user=USER,
            session=session,
            epoch=epoch,
            model_id=MODEL,
            numerics="fp32",
            max_positions=self.num_reserved,
            issued_at=0.0,
            expires_at=1.0,
            stages=stages,
        )
        self.world.plans.append(plan)
        return plan, str(len(self.world.plans) - 1).encode()

    def receive(self, peer: PeerId, message: AnyMessage, rows: Rows) -> None:
        if getattr(message, "session", None) not in self._sessions:
            return
        self.row = rows[-1] if isinstance(message, StepResult) and rows else None
        self.core.receive(message, source=peer, now=self.world.now)
        self.pump()

    def lost(self, peer: PeerId, error: PeerClosed) -> None:
        self.core.link_closed(peer, error, now=self.world.now)
        self.pump()

    def pump(self) -> None:
        world = self.world
        while True:
            while (event := self.core.next_event()) is not None:
                self.events.append(event)
                self._follow(event)
                self.on_event(event)
            messages = self.core.messages_to_send()
            for peer, message in messages:
                if not world.send(USER, peer, message):
                    self.core.link_closed(peer, PeerClosed(peer, "gone"), now=world.now)
            if not messages:
                break
        timer = self._timer = object()
        due = self.core.get_timer()
        if due is not None:

            def ring() -> None:
                if self._timer is timer:
                    self.core.handle_timer(now=world.now)
                    self.pump()

            world.after(max(0.0, due - world.now), ring)

    def _follow(self, event: object) -> None:
        world = self.world
        match event:
            case WantsRoute():
                world.after(ROUTE_S, lambda: self._route(event))
            case WantsConnection(place):
                self._connect(place)
            case WantsAlternates(avoid_peers, avoid_pairs):
                found = []
                for index in range(len(self.core.places)):
                    wants = WantsRoute(0, RouteKind.PATCH, (index,), avoid_peers, avoid_pairs, False, "")
                    patched = self._patched(wants, only_up=True)
                    kept = len(self.core.places) - 1
                    found.append(() if patched is None else patched[index : len(patched) - kept + index])
                self.core.alternates(tuple(found), now=world.now)
            case SessionBegan(session):
                self._sessions.add(session)
            case SessionEnded(session):
                self._sessions.discard(session)
            case RowsWanted():
                first, count = event.first_position, event.num_positions
                rows = embed(self.ids[first : first + count])
                assert len(rows) == count, "rows of positions that have no token"
                world.after(EMBED_S, lambda: self._send_rows(event, rows))
            case StepDone() if event.has_row:
                row, num_computed = self.row, event.num_computed
                world.after(self.choose_s, lambda: self._choose(row, num_computed))
            case Failed(error):
                self.error, self.is_done = error, True
            case Opened() | Repaired() | PeerFailed() | StepDone():
                pass

    def _send_rows(self, wanted: RowsWanted, rows: Rows) -> None:
        sent = self.core.rows_ready(wanted, TensorMeta(ROW, len(rows), 4), now=self.world.now)
        if sent is not None and not self.world.send(USER, *sent, rows):
            self.core.link_closed(sent[0], PeerClosed(sent[0], "gone"), now=self.world.now)
        self.pump()

    def _choose(self, row: Any, num_computed: int) -> None:
        if self.is_done:
            return
        assert num_computed == len(self.ids), "a row came out twice, or for another position"
        if row == NAN:
            self.core.result_unfit("not a number", now=self.world.now)
        else:
            self.ids.append(next_token(row, num_computed))
            self.on_token(len(self.tokens))
            if len(self.tokens) == self.num_tokens:
                self.core.close(retain=True, now=self.world.now)
                self.is_done = True
            else:
                self.core.append(now=self.world.now)
        self.pump()

    # routes

    def _route(self, wants: WantsRoute) -> None:
        world = self.world
        found = self._patched(wants) if wants.kind is RouteKind.PATCH else self._whole(wants)
        if found is None:
            self.core.no_route(wants.number, NoRoute("nobody is there"), now=world.now)
        else:
            is_first = self.num_sessions == 0
            self.core.routed(
                wants.number,
                found,
                now=world.now,
                prefix=self.prefix if is_first else None,
                expected_prefill_s=self.expected_prefill_s,
            )
        self.pump()

    def _places(self) -> list[Place]:
        nodes = self.world.nodes.values()
        places = [
            Place(PlanStage(n.peer, n.layers.start, n.layers.stop, ("there",)), 2 * self.world.latency(USER, n.peer))
            for n in nodes
        ]
        return [place for place in places if self.sees(place)]

    def _whole(self, wants: WantsRoute) -> tuple[Place, ...] | None:
        places = self._places()
        good = [place for place in places if place.peer not in wants.avoid_peers]
        layers = LayerRange(0, NUM_LAYERS)
        return (
            _cover(good, layers, None, wants.avoid_pairs)
            or _cover(places, layers, None, wants.avoid_pairs)
            or _cover(places, layers, None, frozenset())
        )

    def _patched(self, wants: WantsRoute, *, only_up: bool = False) -> tuple[Place, ...] | None:
        route = self.core.places
        not_again = {place.peer for place in route} | wants.avoid_peers
        usable = [place for place in self._places() if place.peer not in not_again]
        if only_up:
            usable = [place for place in usable if self.world.link(USER, place.peer)]
        found: list[Place] = []
        for is_lost, group in itertools.groupby(range(len(route)), key=lambda index: index in wants.lost):
            run = list(group)
            if not is_lost:
                found += [route[index] for index in run]
                continue
            gap = LayerRange(route[run[0]].layers.start, route[run[-1]].layers.stop)
            before = route[run[0] - 1].peer if run[0] else None
            part = _cover([p for p in usable if p not in found], gap, before, wants.avoid_pairs)
            if part is None:
                return None
            found += part
        return tuple(found)

    def _connect(self, place: Place) -> None:
        world, peer = self.world, place.peer

        def answer() -> None:
            if world.link(USER, peer):
                self.core.connected(peer, now=world.now)
            else:
                self.core.unreachable(peer, PeerUnreachable(peer, "not there"), now=world.now)
            self.pump()

        world.after(3.0 if world.nodes[peer].is_frozen else 2 * world.latency(USER, peer), answer)


def _cover(
    places: Sequence[Place], layers: LayerRange, before: PeerId | None, avoid_pairs: frozenset[tuple[PeerId, PeerId]]
) -> tuple[Place, ...] | None:
    """The first chain of places over the layers, which are clipped to them."""
    for place in places:
        start, stop = layers.start, min(place.layers.stop, layers.stop)
        if not place.layers.start <= start < stop:
            continue
        if before is not None and (min(before, place.peer), max(before, place.peer)) in avoid_pairs:
            continue
        stage = dataclasses.replace(place, stage=_clipped(place.stage, start, stop))
        if stop == layers.stop:
            return (stage,)
        others = [other for other in places if other.peer != place.peer]
        rest = _cover(others, LayerRange(stop, layers.stop), place.peer, avoid_pairs)
        if rest is not None:
            return (stage, *rest)
    return None


def _clipped(stage: PlanStage, start: int, stop: int) -> PlanStage:
    return PlanStage(stage.peer, start, stop, stage.data_addresses, stage.libp2p_addresses)
