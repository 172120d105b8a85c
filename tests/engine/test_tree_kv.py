"""The KV of a session's committed prefix equals a fresh prefill, whatever tree it comes from and however it was folded.

Slots that are free hold NaN, so that whatever reads one shows it in every later row.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from fusion_node.engine.block_manager_core import BLOCK_SLOTS
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import LogState, SessionLog, StepRows
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.types import LayerRange
from tests.engine.tiny import tiny_model

CPU = torch.device("cpu")
FP32 = numerics_class("fp32")
LAYERS = LayerRange(0, 3)
MAX_POSITIONS = 80
MAX_ERROR = 1e-5
NUM_BLOCKS = 16

Mutation = Callable[[StepRows], StepRows]


@dataclass(frozen=True)
class Waiting:
    """A step that the log has applied and the device has not seen."""

    sequence: int
    first: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    advance: int
    rows: StepRows
    before: LogState
    generation: int


@dataclass
class Session:
    """One session on one stage, and its user's tree."""

    rng: random.Random
    mutate: Mutation = lambda step: step
    tokens: dict[int, int] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    root: int = 0
    decided: int = 0
    """On it, and what hangs on it, the user goes on; the root or below."""
    next_node: int = 1
    generation: int = 0
    num_taken_back: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)

    def __post_init__(self) -> None:
        model = tiny_model("llama", num_hidden_layers=len(LAYERS))
        self.boundary = Boundary.load(model, numerics=FP32, device=CPU)
        stage = Stage.load(model, LAYERS, numerics=FP32, device=CPU)
        budget = NUM_BLOCKS * BLOCK_SLOTS * stage.kv_bytes_per_position
        self.engine = ShardEngine([stage], kv_budget_bytes=budget)
        self.log = SessionLog(MAX_POSITIONS)
        assert self.engine.blocks.open("tree", owner="someone", max_slots=MAX_POSITIONS) == 0
        self.poison(0)

    # the user

    def path(self, node: int) -> list[int]:
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def live(self) -> list[int]:
        return [node for node in self.parents if self.root in (0, *self.path(node)) and node > self.root]

    def grow(self) -> None:
        rng, first, num = self.rng, self.next_node, self.rng.choice((1, 2, 4, 7))
        if self.log.num_slots + num > MAX_POSITIONS:
            return
        self.decided = max(self.decided, self.root)
        options = [self.decided, *[node for node in self.live() if self.decided in self.path(node)][-8:]]
        parents = tuple(rng.choice([*options, *range(first, first + index)]) for index in range(num))
        tokens = tuple(rng.randrange(3, 130) for _ in parents)
        self.parents.update(enumerate(parents, first))
        self.tokens.update(enumerate(tokens, first))
        self.next_node += num
        advance = rng.choice([0, 0, *self.live()]) if len(self.path(self.root)) < 40 else 0
        self.root = advance or self.root
        sequence, before = self.log.next_sequence, self.log.state()
        rows = self.log.apply(sequence, first_node=first, num_rows=num, parent=0, parents=parents, advance=advance)
        assert isinstance(rows, StepRows)
        self.waiting.append(Waiting(sequence, first, parents, tokens, advance, rows, before, self.generation))

    def cancel(self) -> None:
        """The user has decided on a node that is not committed yet; steps that wait are derived anew."""
        steps = [step for step in self.waiting if step.generation == self.generation]
        live = [node for node in self.live() if self.log.is_live(node)]
        if not live or not self.log.cancel(root := self.rng.choice(live)):
            return
        self.decided = root
        kept = {node for node in self.parents if root in self.path(node) or node in self.path(root)}
        self.parents = {node: above for node, above in self.parents.items() if node in kept}
        if not steps:
            return
        self.log.restore(steps[0].before)
        for step in steps:
            self.waiting.remove(step)
            before = self.log.state()
            rows = self.log.apply(
                step.sequence,
                first_node=step.first,
                num_rows=len(step.parents),
                parent=0,
                parents=step.parents,
                advance=step.advance,
                only=frozenset(step.rows.nodes),
            )
            assert isinstance(rows, StepRows)
            self.num_taken_back += len(step.rows.nodes) - len(rows.nodes)
            self.waiting.append(replace(step, rows=rows, before=before))

    def fold(self) -> None:
        """A repair: what the user has committed, which may be more than it has told, is a chain from then on."""
        self.root = self.rng.choice([self.root, *[node for node in self.live() if self.log.is_live(node)]])
        path = self.path(self.root)
        self.log.fold(0, path)
        assert self.log.num_committed == len(path)
        self.tokens = {index: self.tokens[node] for index, node in enumerate(path, start=1)}
        self.parents = {index: index - 1 for index in self.tokens}
        self.root = self.decided = len(path)
        self.next_node = len(path) + 1
        self.generation += 1

    # the stage

    def compute(self) -> None:
        step = self.waiting.popleft()
        rows = self.mutate(step.rows)
        tokens = [step.tokens[index] for index in rows.live_rows]
        planned = self.engine.plan(LAYERS, [("tree", rows, 0, len(rows.live_rows), True)])
        self.engine.change_kv(planned)
        self.poison(rows.first_slot)
        rows_TD = self.boundary.embed(tokens) if tokens else torch.empty(0, self.engine.hidden_size)
        self.engine.run(planned, [rows_TD])

    def poison(self, num_slots: int) -> None:
        """All slots but the first ones of the session."""
        used = set(self.engine.blocks.slots("tree", 0, num_slots))
        free = torch.tensor([slot for slot in range(NUM_BLOCKS * BLOCK_SLOTS) if slot not in used])
        pool = self.engine._pool(0)
        for tensor in pool._tensors():
            tensor[:, free] = torch.nan

    def kv(self, key: str, num_slots: int) -> list[torch.Tensor]:
        slots = torch.tensor(self.engine.blocks.slots(key, 0, num_slots))
        pool = self.engine._pool(0)
        return [tensor for layer in range(len(LAYERS)) for tensor in pool.read(layer, slots, torch.float32)]

    def check(self) -> bool:
        """Computes what waits; whether the KV of the committed prefix is what a prefill of its tokens leaves."""
        while self.waiting:
            self.compute()
        # A move that a fold has left to the next step.
        self.grow_by_root()
        self.compute()
        tokens = [self.tokens[node] for node in self.path(self.root)]
        assert self.log.num_committed == len(tokens)
        ours = self.kv("tree", len(tokens))
        return _equal(ours, prefilled(self, tokens))

    def grow_by_root(self) -> None:
        self.root = self.decided = max(self.decided, self.root)
        node, token = self.next_node, self.rng.randrange(3, 130)
        self.parents[node], self.tokens[node], self.next_node = self.root, token, node + 1
        sequence, before = self.log.next_sequence, self.log.state()
        rows = self.log.apply(sequence, first_node=node, num_rows=1, parent=self.root, advance=node)
        assert isinstance(rows, StepRows), rows
        self.waiting.append(Waiting(sequence, node, (self.root,), (token,), node, rows, before, self.generation))
        self.root = node


def prefilled(session: Session, tokens: Sequence[int]) -> list[torch.Tensor]:
    """The KV of a session that has nothing but these tokens."""
    fresh = Session(random.Random(0))
    step = fresh.log.apply(0, first_node=1, num_rows=len(tokens), parent=0, advance=len(tokens))
    assert isinstance(step, StepRows)
    planned = fresh.engine.plan(LAYERS, [("tree", step, 0, len(tokens), True)])
    fresh.engine.run(planned, [fresh.boundary.embed(list(tokens))])
    return fresh.kv("tree", len(tokens))


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    # NaN compares as unequal.
    return all(bool(((a - b).abs() <= MAX_ERROR).all()) for a, b in zip(ours, theirs, strict=True))


def grown(seed: int, mutate: Mutation = lambda step: step) -> Session:
    """A session of random frames, cancels and folds, of which some steps still wait."""
    rng = random.Random(seed)
    session = Session(rng, mutate)
    for _ in range(rng.randrange(6, 25)):
        match rng.randrange(10):
            case 0 | 9:
                session.cancel()
            case 1:
                session.fold()
            case 2 | 3 if session.waiting:
                session.compute()
            case _:
                session.grow()
    return session


@pytest.mark.parametrize("part", range(4))
def test_committed_kv_equals_a_fresh_prefill(part: int) -> None:
    sessions = [grown(seed) for seed in range(10 * part, 10 * part + 10)]
    for seed, session in enumerate(sessions, 10 * part):
        assert session.check(), f"seed {seed}"
    assert sum(session.generation for session in sessions) > 5
    assert sum(session.num_taken_back for session in sessions) > 0


def _sees_too_little(step: StepRows) -> StepRows:
    """The last row does not see the first live slot that it ought to, but itself."""
    if step.is_chain or not step.visible:
        return step
    mask, own = step.visible[-1], 1 << step.visible[-1].bit_length() - 1
    above = mask ^ own
    return replace(step, visible=(*step.visible[:-1], own | above & (above - 1)))


def _is_elsewhere(step: StepRows) -> StepRows:
    return replace(step, positions=tuple(position + (position > 2) for position in step.positions))


def _does_not_move(step: StepRows) -> StepRows:
    """As if ADVANCE had not been carried out."""
    return replace(step, move=None)


@pytest.mark.parametrize("mutate", [_sees_too_little, _is_elsewhere, _does_not_move])
def test_what_is_wrong_with_a_step_shows_in_the_kv(mutate: Mutation) -> None:
    assert not all(grown(seed, mutate).check() for seed in range(10))
