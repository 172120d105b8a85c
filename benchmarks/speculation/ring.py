"""A ring of stages and its users in a virtual clock: the production client loop and session logs, over simulated links.

Only time is simulated, and what a stage computes: ``SpeculationCore`` decides what is sent, a ``SessionLog`` per stage
and session applies it. A stage takes everything that waits into one pass (continuous batching) of ``fixed_s`` and
``row_s`` per row; a link delays frames by half a round trip and their time on the wire, in order; cancels travel beside
them and may be lost, doubled or late.

A row is either nothing at all (``digests=False``, for speed alone), or a digest over every row that its stage lets it
see, so that a wrong slot, mask, position or order changes every token that follows.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from fusion_node.client.speculation_core import (
    CancelDead,
    Choose,
    Commit,
    Expand,
    Frame,
    SpeculationCore,
    StageCost,
)
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.types import MonotonicS

MAX_PASS_ROWS = 256
"""Of all sessions together."""


class Drafter(Protocol):
    """Guesses, in no time: the world waits for them."""

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        """Per path beyond the text up to ``position``, tokens with their probabilities and source."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a ring, in seconds.

    Attributes:
        round_trip_s: of every leg, so that one leg takes half of it.
        fixed_s, row_s: of a pass, and of each row in it.
        wire_row_s: of a row on a leg.
        draft_s, draft_path_s: of a forward of the drafter, and of each path in it.
        user_s: from a frame's return until its rows are of use.
        choose_s: of a token from its row, one after the other.
        jitter_s: that a leg may take longer.
    """

    num_stages: int
    round_trip_s: float
    fixed_s: float = 0.008
    row_s: float = 0.0001
    wire_row_s: float = 0.00002
    draft_s: float = 0.003
    user_s: float = 0.001
    jitter_s: float = 0.0
    draft_path_s: float = 0.0
    choose_s: float = 0.0
    lost_cancels: float = 1.0
    doubled_cancels: float = 0.0


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._count), do))

    def run(self, until_s: float = float("inf"), is_done: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until_s and not is_done():
            self.now, _, do = heapq.heappop(self._events)
            do()


class Link:
    """One direction between two machines: frames arrive in order."""

    def __init__(self, clock: Clock, costs: Costs, chance: random.Random) -> None:
        self._clock, self._costs, self._chance = clock, costs, chance
        self._free_at = 0.0
        self._last_arrival = 0.0

    def send(self, num_rows: int, deliver: Callable[[], None]) -> None:
        costs = self._costs
        self._free_at = max(self._clock.now, self._free_at) + num_rows * costs.wire_row_s
        arrival = self._free_at + costs.round_trip_s / 2 + self._chance.random() * costs.jitter_s
        self._last_arrival = max(arrival, self._last_arrival)
        self._clock.at(self._last_arrival, deliver)


POISON = object()
"""In the slot of a row that was not computed."""


@dataclass(slots=True)
class _Work:
    """A frame at a stage, from its arrival until it has been computed.

    Attributes:
        nodes: whose rows have come.
        rows: per such node.
    """

    user: User
    epoch: int
    frame: Frame
    nodes: tuple[int, ...]
    rows: tuple[Any, ...]
    step: StepRows
    costs: tuple[StageCost, ...]
    computed: list[int] = field(default_factory=list)
    """Indices into the step's live rows."""


@dataclass(slots=True)
class _SessionKV:
    log: SessionLog
    committed: set[int] = field(default_factory=set)
    slots: dict[int, Any] = field(default_factory=dict)


class Stage:
    """One node: a queue, one pass at a time."""

    def __init__(self, world: World, index: int) -> None:
        self._world, self._index = world, index
        self._sessions: dict[User, _SessionKV] = {}
        self._queue: list[_Work] = []
        self._is_busy = False
        self._link = Link(world.clock, world.costs, world.chance)
        self._returns: dict[User, Link] = {}
        self.num_passes = 0
        self.num_rows = 0
        self.num_dropped = 0
        self.busy_s = 0.0

    def admit(self, user: User, max_positions: int, prompt: tuple[Any, ...]) -> tuple[Any, ...]:
        """The prompt, which is there at once. Returns its rows."""
        kv = self._sessions[user] = _SessionKV(SessionLog(max_positions))
        self._returns[user] = Link(self._world.clock, self._world.costs, self._world.chance)
        num = len(prompt)
        step = kv.log.apply(0, first_node=1, num_rows=num, parent=0, advance=num)
        assert isinstance(step, StepRows)
        return self._computed(kv, step, prompt, range(num))

    def receive(
        self,
        user: User,
        epoch: int,
        frame: Frame,
        nodes: tuple[int, ...],
        rows: tuple[Any, ...],
        costs: tuple[StageCost, ...],
    ) -> None:
        if epoch != user.epoch:
            return
        kv = self._sessions[user]
        num_nodes, live = len(frame.tokens), b""
        if len(nodes) < num_nodes:
            bits = sum(1 << (node - frame.first_node) for node in nodes)
            live = bits.to_bytes(-(-num_nodes // 8), "little")
        step = kv.log.apply(
            frame.sequence,
            first_node=frame.first_node,
            num_rows=num_nodes,
            parent=frame.parents[0],
            parents=frame.parents,
            advance=frame.advance,
            live=live,
        )
        assert isinstance(step, StepRows), f"stage {self._index} says {step}"
        kv.committed.update(step.committed)
        self._queue.append(_Work(user, epoch, frame, nodes, rows, step, costs))
        self._start()

    def cancel(self, user: User, epoch: int, message: CancelDead) -> None:
        if epoch == user.epoch:
            self._sessions[user].log.cancel(message.root)

    def _start(self) -> None:
        if self._is_busy or not self._queue:
            return
        batch: list[_Work] = []
        num_rows = 0
        while self._queue and num_rows + len(self._queue[0].step.live_rows) <= MAX_PASS_ROWS:
            work = self._queue.pop(0)
            if work.epoch != work.user.epoch:
                continue
            kv = self._sessions[work.user]
            # The log runs ahead of the device: what has died meanwhile is left out.
            work.computed = [
                index for index, node in enumerate(work.step.nodes) if kv.log.is_live(node) or node in kv.committed
            ]
            num_rows += len(work.computed)
            self.num_dropped += len(work.frame.tokens) - len(work.computed)
            batch.append(work)
        costs = self._world.costs
        seconds = costs.fixed_s + num_rows * costs.row_s if num_rows else 0.0
        cost = StageCost(seconds, costs.row_s * len({id(work.user) for work in batch}))
        self.num_passes += 1
        self.num_rows += num_rows
        self.busy_s += seconds
        self._is_busy = True
        self._world.clock.at(self._world.clock.now + seconds, lambda: self._finish(batch, cost))

    def _finish(self, batch: list[_Work], cost: StageCost) -> None:
        self._is_busy = False
        for work in batch:
            if work.epoch != work.user.epoch:
                continue
            rows = self._computed(self._sessions[work.user], work.step, work.rows, work.computed)
            nodes = tuple(work.step.nodes[index] for index in work.computed)
            costs = (*work.costs, cost)
            if self._index + 1 < len(self._world.stages):
                following = self._world.stages[self._index + 1]
                deliver = partial(following.receive, work.user, work.epoch, work.frame, nodes, rows, costs)
                self._link.send(len(rows), deliver)
            else:
                deliver = partial(work.user.receive, work.epoch, work.frame, nodes, rows, costs)
                self._returns[work.user].send(len(rows), deliver)
        self._start()

    def _computed(
        self, kv: _SessionKV, step: StepRows, rows: tuple[Any, ...], computed: Sequence[int]
    ) -> tuple[Any, ...]:
        """Rows of the step's live rows with these indices."""
        if not self._world.digests:
            return (None,) * len(computed)
        slots = kv.slots
        if step.move is not None:
            slots.update(enumerate([slots[source] for source in step.move.sources], step.move.first_slot))
        for slot in range(step.first_slot, step.first_slot + len(step.live_rows)):
            slots[slot] = POISON
        out = []
        for rank in computed:
            own = step.first_slot + rank
            slots[own] = (rows[step.live_rows[rank]], step.positions[rank])
            seen: Iterable[int] = range(own + 1)
            if not step.is_chain:
                mask, first = step.visible[rank], step.num_committed
                seen = itertools.chain(
                    range(first), (first + bit for bit in range(mask.bit_length()) if mask >> bit & 1)
                )
            contents = tuple(slots[slot] for slot in seen)
            assert POISON not in contents, "a row sees one that was not computed"
            out.append(hash((self._index, contents)))
        return tuple(out)


class User:
    """One answer: the production loop, a drafter, and the target's last step."""

    def __init__(
        self,
        world: World,
        core: SpeculationCore,
        drafter: Drafter,
        choose: Callable[[int, Any], int],
        prompt: tuple[int, ...],
        max_positions: int,
    ) -> None:
        self.core = core
        self.prompt, self.max_positions = prompt, max_positions
        self.tokens: list[int] = []
        self._world, self._drafter, self._choose = world, drafter, choose
        self.prompt_row: Any = None
        self.epoch = 0
        self._link = Link(world.clock, world.costs, world.chance)
        self._timer_at: float | None = None
        self.finished_at: float | None = None

    def start(self) -> None:
        self.core.start(now=MonotonicS(self._world.clock.now))
        num_prompt = self.core.num_positions
        self.core.returned(0, [(num_prompt, self.prompt_row)], now=MonotonicS(self._world.clock.now))
        self.pump()

    def receive(
        self, epoch: int, frame: Frame, nodes: tuple[int, ...], rows: tuple[Any, ...], costs: tuple[StageCost, ...]
    ) -> None:
        row_of = dict(zip(nodes, rows, strict=True))
        wanted = [(node, row_of.get(node, POISON)) for node in frame.want]
        clock = self._world.clock
        clock.at(clock.now + self._world.costs.user_s, partial(self.take, epoch, frame.sequence, wanted, costs))

    def take(self, epoch: int, sequence: int, rows: list[tuple[int, Any]], costs: tuple[StageCost, ...]) -> None:
        if self.core.is_over or epoch != self.epoch:
            return
        self.core.returned(sequence, rows, costs=costs, now=MonotonicS(self._world.clock.now))
        self.pump()

    def pump(self) -> None:
        world, core = self._world, self.core
        while (event := core.next_event()) is not None:
            match event:
                case Frame():
                    nodes = tuple(range(event.first_node, event.first_node + len(event.tokens)))
                    rows = tuple(world.embed(token) for token in event.tokens)
                    self._link.send(
                        len(rows), partial(world.stages[0].receive, self, self.epoch, event, nodes, rows, ())
                    )
                case Expand():
                    self._expand(event)
                case Choose(position, row):
                    assert row is not POISON, "the row of a committed token was not computed"
                    if world.costs.choose_s:
                        after = world.clock.now + world.costs.choose_s
                        world.clock.at(after, partial(self._chosen_later, position, row))
                    else:
                        core.chosen(position, self._choose(position, row), now=MonotonicS(world.clock.now))
                case Commit():
                    self.tokens.append(event.token)
                    if event.is_last:
                        self.finished_at = world.clock.now
                case CancelDead():
                    self._cancel(event)
        self._set_timer()

    def _chosen_later(self, position: int, row: Any) -> None:
        if not self.core.is_over:
            self.core.chosen(position, self._choose(position, row), now=MonotonicS(self._world.clock.now))
            self.pump()

    def _expand(self, event: Expand) -> None:
        def answer() -> None:
            if not self.core.is_over:
                found = self._drafter.propose(event.position, event.paths, event.width)
                self.core.drafted(event.number, found, now=MonotonicS(self._world.clock.now))
                self.pump()

        costs = self._world.costs
        took_s = costs.draft_s + costs.draft_path_s * len(event.paths)
        self._world.clock.at(self._world.clock.now + took_s, answer)

    def _cancel(self, event: CancelDead) -> None:
        world, chance = self._world, self._world.chance
        for stage in world.stages:
            copies = (chance.random() >= world.costs.lost_cancels) * (
                1 + (chance.random() < world.costs.doubled_cancels)
            )
            for _ in range(copies):
                after = world.costs.round_trip_s / 2 + chance.random() * world.costs.jitter_s
                world.clock.at(world.clock.now + after, partial(stage.cancel, self, self.epoch, event))

    def _set_timer(self) -> None:
        at = self.core.get_timer()
        if at is None or (self._timer_at is not None and self._timer_at <= at):
            return
        self._timer_at = at

        def fire() -> None:
            if self._timer_at == at:
                self._timer_at = None
                if not self.core.is_over:
                    self.core.handle_timer(now=MonotonicS(self._world.clock.now))
                    self.pump()

        self._world.clock.at(at, fire)


class World:
    """A ring and whoever uses it.

    Args:
        digests: whether rows are computed.
    """

    def __init__(self, costs: Costs, *, seed: int, digests: bool = False) -> None:
        self.costs = costs
        self.digests = digests
        self.clock = Clock()
        self.chance = random.Random(seed)
        self.stages = [Stage(self, index) for index in range(costs.num_stages)]
        self.users: list[User] = []

    def embed(self, token: int) -> Any:
        return hash((17, token)) if self.digests else None

    def add(
        self,
        prompt: Sequence[int],
        *,
        drafter: Drafter,
        choose: Callable[[int, Any], int],
        stop_position: int,
        max_positions: int,
        **options: Any,
    ) -> User:
        """A user whose prompt has just been computed."""
        core = SpeculationCore(
            last_token=prompt[-1],
            num_prompt=len(prompt),
            stop_position=stop_position,
            max_positions=max_positions,
            next_sequence=1,
            **options,
        )
        core.uplink_changed(self.costs.wire_row_s)
        user = User(self, core, drafter, choose, tuple(prompt), max_positions)
        user.prompt_row = self._compute(user, len(prompt))
        self.users.append(user)
        self.clock.at(0.0, user.start)
        return user

    def _compute(self, user: User, num_positions: int) -> Any:
        """Has every stage hold the first positions, and nothing else. Returns the last one's row."""
        rows = tuple(self.embed(token) for token in (*user.prompt, *user.tokens)[:num_positions])
        for stage in self.stages:
            rows = stage.admit(user, user.max_positions, rows)
        return rows[-1]

    def interrupt(self, user: User, num_lost: int, pause_s: float) -> None:
        """Frames under way are lost, and after a pause the stages hold all committed positions but the last ones."""
        if user.core.is_over:
            return
        user.epoch += 1
        user.core.pause()
        self.clock.at(self.clock.now + pause_s, partial(self._resume, user, user.epoch, num_lost))

    def _resume(self, user: User, epoch: int, num_lost: int) -> None:
        if user.core.is_over or epoch != user.epoch:
            return
        num_positions = max(len(user.prompt), user.core.num_positions - num_lost)
        row = self._compute(user, num_positions)
        if user.core.restart(num_positions, next_sequence=1, now=MonotonicS(self.clock.now)):
            after = self.costs.round_trip_s
            self.clock.at(self.clock.now + after, partial(user.take, epoch, 0, [(num_positions, row)], ()))
        user.pump()
