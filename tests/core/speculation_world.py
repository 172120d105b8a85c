"""The world of answer_world with a user who speculates: its nodes compute trees, and it has a drafter.

A row says the path that made it, as there: the digest of a layer goes on from that of the nearest row that it sees. The
text is therefore that of ``answer_world.undisturbed``, whatever is drafted, sent in vain, cancelled or lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusion_node.client.answer_core import AnswerCore, StepDone, TreeRowsWanted, TreeStepDone
from fusion_node.client.session_core import Prefix
from fusion_node.client.speculation_core import CancelDead, Choose, Commit, Expand, Frame, SpeculationCore, StageCost
from fusion_node.daemon.admission_core import Session
from fusion_node.daemon.serving_core import Narrow, ServedStep
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.messages import AnyMessage, Cancel, StageTiming, StepResult
from scheduler.speculation import Mode, ModePolicy
from tests.core import answer_world
from tests.core.answer_world import EMBED_S, NAN, ROW, USER, Rows, User, World, embed, next_token

CHOOSE_S = 0.002
DRAFT_S = 0.004


class Drafter(Protocol):
    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]: ...


@dataclass
class Guesser:
    """Right about the next token in some share of the cases, sure of itself or not, and silent now and then."""

    text: Sequence[int]
    share: float
    chance: random.Random

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        return [self._candidates(position, path, width) for path in paths]

    def _candidates(self, position: int, path: tuple[int, ...], width: int) -> list[tuple[int, float, str]]:
        chance, at = self.chance, position + len(path)
        if chance.random() < 0.05:
            return []
        tokens = chance.sample(range(1000, 2000), min(width, chance.randint(1, 4)))
        if at < len(self.text) and tuple(self.text[position:at]) == path and chance.random() < self.share:
            tokens.insert(0, self.text[at])
        return [(token, chance.choice((1.0, 0.9, 0.5, 0.2, 0.01)), "guess") for token in tokens]


class Layers:
    """What some layers have of one session, by slot."""

    def __init__(self, layers: LayerRange) -> None:
        self.state: dict[int, dict[int, int]] = {layer: {} for layer in range(layers.start, layers.stop)}

    def forward(self, step: ServedStep, rows: Rows) -> Rows:
        todo = step.rows
        if todo.move is not None:
            for kv in self.state.values():
                moved = [kv[slot] for slot in todo.move.sources]
                kv.update(enumerate(moved, todo.move.first_slot))
        taken = tuple(rows[row] for row in todo.live_rows)
        for layer, kv in self.state.items():
            for slot in [slot for slot in kv if slot >= todo.first_slot]:
                del kv[slot]
            out = []
            for index, row in enumerate(taken):
                slot = todo.first_slot + index
                above, num_seen = slot - 1, slot + 1
                if not todo.is_chain:
                    mask = todo.visible[index]
                    others = [todo.num_committed + bit for bit in range(mask.bit_length()) if mask >> bit & 1]
                    assert others[-1] == slot
                    above = others[-2] if len(others) > 1 else todo.num_committed - 1
                    num_seen = todo.num_committed + len(others)
                assert num_seen == todo.positions[index] + 1, "positions were skipped"
                kv[slot] = NAN if row == NAN else hash((layer, kv[above] if above >= 0 else 0, row))  # type: ignore[assignment]
                out.append(kv[slot])
            taken = tuple(out)
        return taken

    def shared(self, num_positions: int) -> Layers:
        copy = Layers(LayerRange(min(self.state), max(self.state) + 1))
        copy.state = {
            layer: {slot: row for slot, row in kv.items() if slot < num_positions} for layer, kv in self.state.items()
        }
        return copy


@dataclass(eq=False)
class Node(answer_world.Node):
    """A node that computes trees. A forward takes ``fixed_s`` beside its rows."""

    fixed_s: float = 0.0
    trees: dict[Session, Layers] = field(default_factory=dict)
    trees_by_key: dict[bytes, Layers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        next_command = self.serving.next_command

        def without_narrow() -> Any:
            command = next_command()
            while isinstance(command, Narrow):
                self._narrow(command.session)
                command = next_command()
            return command

        self.serving.next_command = without_narrow  # type: ignore[method-assign]

    def _narrow(self, session: Session) -> None:
        ours = [step for step, _ in self.queue[self.is_busy :] if step.session is session]
        narrowed = self.serving.narrow(session, ours)
        new = dict(zip(ours[len(ours) - len(narrowed) :], narrowed, strict=True))
        self.queue = [(new.get(step, step), rows) for step, rows in self.queue]

    def _compute(self) -> None:
        self.is_busy = False
        if not self.queue:
            return
        step, rows = self.queue.pop(0)
        session, todo = step.session, step.rows
        layers = self.trees.get(session)
        if layers is None:
            first = todo.first_slot
            shared = self.trees_by_key.get(self.prefixes.get(session.key, b"")) if first else None
            layers = shared.shared(first) if shared is not None else Layers(session.layers)
            self.trees[session] = self.trees_by_key[session.key] = layers
        self.serving.admission.blocks.extend(
            session.key, todo.first_slot + len(todo.live_rows), first_written=todo.first_slot
        )
        out = layers.forward(step, rows)
        if self.spoils:
            out = (NAN,) * len(out)
        if step.out is not None:
            out = tuple(out[row] for row in step.out)
        timing = StageTiming(1, round(1e6 * (self.fixed_s + self.row_s * len(rows))), round(1e6 * self.row_s))
        self.serving.step_computed(step, out, timing, now=self.world.now)


class SpeculativeWorld(World):
    """Cancels get lost and come twice, by chance."""

    lost_cancels: float = 0.0
    doubled_cancels: float = 0.0

    def node(self, start: int, stop: int, **changes: Any) -> Node:
        peer = answer_world._IDS[len(self.nodes)]
        node = Node(peer, LayerRange(start, stop), self, **changes)
        self.nodes[peer] = node
        return node

    num_cancels_lost: int = 0
    num_cancels_doubled: int = 0

    def _carry(self, sender: PeerId, receiver: PeerId, message: AnyMessage, rows: Rows = ()) -> bool:
        if isinstance(message, Cancel):
            if self.rng.random() < self.lost_cancels:
                self.num_cancels_lost += 1
                return True
            if self.rng.random() < self.doubled_cancels:
                self.num_cancels_doubled += 1
                super()._carry(sender, receiver, message)
        return super()._carry(sender, receiver, message, rows)

    def speculate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        drafter: Drafter,
        *,
        modes: Sequence[Mode] = (Mode.TREE,),
        prefix: Prefix | None = None,
        spare: int = 400,
    ) -> SpeculativeUser:
        user = self.user = SpeculativeUser(self, prompt, num_tokens, prefix, drafter, modes, spare)
        user.start()
        return user


class SpeculativeUser(User):
    """The shell of one answer that speculates."""

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        world: World,
        prompt: Sequence[int],
        num_tokens: int,
        prefix: Prefix | None,
        drafter: Drafter,
        modes: Sequence[Mode],
        spare: int,
    ) -> None:
        super().__init__(world, prompt, num_tokens, prefix)
        self.drafter = drafter
        self.spare = spare
        self.rows: Rows = ()
        self.choose_s = CHOOSE_S
        self.num_frames_of: dict[int, int] = {}
        self.speculation = SpeculationCore(
            last_token=prompt[-1],
            num_prompt=len(prompt),
            stop_position=len(prompt) + num_tokens,
            stop_tokens=frozenset(),
            max_positions=len(prompt) + num_tokens + spare,
            next_sequence=0,
            policy=ModePolicy(modes),
            wants_taps=bool(self.taps),
        )
        self.core = AnswerCore(
            num_prompt=len(prompt),
            row_size=4,
            wire_dtype=ROW,
            make_plan=self._plan,
            new_session=lambda: bytes(world.rng.randrange(256) for _ in range(16)),
            open_lease=world.open_lease,
            speculation=self.speculation,
            taps=self.taps,
        )
        self._speculation_timer: object = None

    @property
    def num_reserved(self) -> int:
        return self.num_prompt + self.num_tokens + self.spare

    def start(self) -> None:
        self.speculation.start(now=self.world.now)
        super().start()

    def receive(self, peer: PeerId, message: AnyMessage, rows: Rows) -> None:
        self.rows = rows if isinstance(message, StepResult) else ()
        super().receive(peer, message, rows)

    def pump(self) -> None:
        self.speculate()
        super().pump()
        self.speculate()
        super().pump()

    def _follow(self, event: object) -> None:
        world = self.world
        match event:
            case TreeRowsWanted():
                rows = embed(event.frame.tokens)
                world.after(EMBED_S, lambda: self._send_rows(event, rows))  # type: ignore[arg-type]
            case TreeStepDone():
                self._returned(event.sequence, [(n, self.rows[i]) for n, i in event.rows], event.timings)
            case StepDone():
                rows_of = [(event.num_computed, self.rows[-1])] if event.has_row else []
                if rows_of:
                    self._returned(event.sequence, rows_of, event.timings)
            case _:
                super()._follow(event)
        self.speculate()

    def _returned(self, sequence: int, rows: list[tuple[int, Any]], timings: Sequence[StageTiming]) -> None:
        sender = self.core.places[-1].peer
        costs = [StageCost(t.compute_us / 1e6, t.price_us / 1e6) for t in timings]
        tagged = [(node, (row, sender)) for node, row in rows]
        self.speculation.returned(sequence, tagged, costs=costs, now=self.world.now)

    def speculate(self) -> None:
        """Follows the speculation until it has nothing more to say."""
        world, core = self.world, self.speculation
        while not self.is_done and (event := core.next_event()) is not None:
            match event:
                case Frame():
                    self.num_frames_of[self.core.epoch] = self.num_frames_of.get(self.core.epoch, 0) + 1
                    self.core.append_tree(event, now=world.now)
                case CancelDead():
                    self.core.cancel(event.root, now=world.now)
                case Expand():
                    found = self.drafter.propose(event.position, event.paths, event.width)
                    world.after(DRAFT_S, lambda n=event.number, f=found: self._drafted(n, f))  # type: ignore[misc]
                case Choose(position, row):
                    world.after(self.choose_s, lambda p=position, r=row: self._chosen(p, r))  # type: ignore[misc]
                case Commit(token, position):
                    assert position == len(self.ids)
                    self.ids.append(token)
                    self.on_token(len(self.tokens))
                    if event.is_last:
                        self.core.close(retain=True, now=world.now)
                        self.is_done = True
        timer = self._speculation_timer = object()
        due = None if self.is_done else core.get_timer()
        if due is not None:

            def ring() -> None:
                if self._speculation_timer is timer:
                    core.handle_timer(now=world.now)
                    self.pump()

            world.after(max(0.0, due - world.now), ring)

    def _drafted(self, number: int, found: list[list[tuple[int, float, str]]]) -> None:
        if not self.is_done:
            self.speculation.drafted(number, found, now=self.world.now)
            self.pump()

    def _chosen(self, position: int, tagged: tuple[Any, PeerId]) -> None:
        row, sender = tagged
        if self.is_done:
            return
        if row == NAN:
            self.core.tree_row_unfit(position, sender, "not a number", now=self.world.now)
        else:
            self.speculation.chosen(position, next_token(row, position), now=MonotonicS(self.world.now))
        self.pump()


__all__ = ["USER", "Guesser", "Node", "SpeculativeUser", "SpeculativeWorld"]
