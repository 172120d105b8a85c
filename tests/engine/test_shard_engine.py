"""Layers, KV pool, block manager and batching core together: many sessions in any order equal the whole model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from fusion_node.engine.batching_core import BatchingCore, BatchLimits, Work
from fusion_node.engine.block_manager_core import BLOCK_SLOTS
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.shard_engine import MAX_PARTS, ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.errors import InvalidLayers, ResourceExhausted
from fusion_node.types import LayerRange
from tests.engine.tiny import TinyModel, tiny_model

CPU = torch.device("cpu")
FP32 = numerics_class("fp32")
WHOLE = LayerRange(0, 7)


@dataclass
class Chat:
    """A session as its user sees it: a tree of tokens, and what came back for each."""

    key: int
    log: SessionLog
    ids: dict[int, int] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    root: int = 0
    sequence: int = 0

    def path(self, node: int) -> list[int]:
        ids: list[int] = []
        while node:
            ids.append(self.ids[node])
            node = self.parents[node]
        return ids[::-1]

    def live(self) -> list[int]:
        """Nodes that a step may hang on."""
        nodes = []
        for node in self.ids:
            above = node
            while above > self.root:
                above = self.parents[above]
            if above == self.root:
                nodes.append(node)
        return nodes


@dataclass
class Rows:
    """A step that waits in the batching core."""

    chat: Chat
    step: StepRows
    rows_TD: torch.Tensor
    has_moved: bool = False
    outputs: list[torch.Tensor] = field(default_factory=list)


class Server:
    """What a node does with steps, without network, threads and clock."""

    def __init__(self, model: TinyModel, *, num_blocks: int, max_rows: int, cuts: tuple[int, ...] = (0, 7)) -> None:
        self.model = model
        self.boundary = Boundary.load(model, numerics=FP32, device=CPU)
        stages = [Stage.load(model, LayerRange(a, b), numerics=FP32, device=CPU) for a, b in itertools.pairwise(cuts)]
        per_block = BLOCK_SLOTS * sum(stage.kv_bytes_per_position for stage in stages)
        self.engine = ShardEngine(stages, kv_budget_bytes=num_blocks * per_block)
        self.batching = BatchingCore(BatchLimits(max_rows=max_rows))
        self.now = 0.0
        self._keys = iter(range(10**9))

    def open(self, max_positions: int) -> Chat | None:
        key = next(self._keys)
        opened = self.engine.blocks.open(key, owner="someone", max_slots=max_positions)
        return Chat(key, SessionLog(max_positions)) if isinstance(opened, int) else None

    def close(self, chat: Chat) -> None:
        self.batching.cancel(chat.key)
        self.engine.blocks.close(chat.key)

    def send(self, chat: Chat, ids: list[int], parents: list[int], advance: int) -> None:
        first = max(chat.ids, default=0) + 1
        for offset, (token, parent) in enumerate(zip(ids, parents, strict=True)):
            chat.ids[first + offset], chat.parents[first + offset] = token, parent
        step = chat.log.apply(
            chat.sequence,
            first_node=first,
            num_rows=len(ids),
            parent=parents[0],
            parents=tuple(parents),
            advance=advance,
        )
        assert isinstance(step, StepRows)
        chat.sequence += 1
        chat.root = max(chat.root, advance)
        rows = Rows(chat, step, self.boundary.embed(ids)[list(step.live_rows)])
        refused = self.batching.add(
            Work(
                session=chat.key,
                user=str(chat.key % 3),
                num_rows=max(1, len(step.live_rows)),
                group=WHOLE,
                moves_kv=step.reuses_slots,
                arrived=self.now,
                payload=rows,
            ),
            now=self.now,
        )
        assert refused is None

    def run(self) -> Iterator[tuple[Chat, int, np.ndarray]]:
        """One forward. Gives the logits of every row of the steps that it finished."""
        while (batch := self.batching.next_batch(now=self.now)) is None:
            due = self.batching.get_timer()
            assert due is not None
            self.now = max(self.now, due)
        work = []
        for piece in batch.pieces:
            waiting: Rows = piece.work.payload
            stop = min(piece.stop, len(waiting.step.live_rows))
            work.append((waiting.chat.key, waiting.step, piece.start, stop, not waiting.has_moved))
            waiting.has_moved = True
        planned = self.engine.plan(WHOLE, work)
        self.engine.blocks.check_integrity()
        rows: list[torch.Tensor | None] = [p.work.payload.rows_TD[p.start : p.stop] for p in batch.pieces]
        for device in range(self.engine.num_devices):
            self.engine.change_kv(planned, device=device)
            rows = self.engine.run(planned, rows, device=device)
        for piece, out in zip(batch.pieces, rows, strict=True):
            assert out is not None
            piece.work.payload.outputs.append(out)
        self.now += 0.01
        for done in self.batching.done(batch, seconds=0.01, now=self.now):
            finished: Rows = done.payload
            logits = self.boundary.logits(torch.cat(finished.outputs))
            for node, row in zip(finished.step.nodes, logits, strict=True):
                yield finished.chat, node, row

    def waits(self) -> bool:
        return self.batching.status(now=self.now).num_waiting_rows > 0

    def reference(self, ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.model.whole(input_ids=torch.tensor([ids])).logits[0, -1].numpy()  # type: ignore[operator]


def close_to(ours: np.ndarray, reference: np.ndarray) -> None:
    assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()


def chain(first: int, count: int) -> list[int]:
    return [first - 1 + index for index in range(count)]


@pytest.mark.parametrize(
    ("model_type", "seed", "cuts"),
    [("llama", 0, (0, 7)), ("llama", 1, (0, 3, 7)), ("mistral", 2, (0, 7)), ("mistral", 3, (0, 1, 5, 7))],
)
def test_any_schedule_of_many_sessions_equals_the_whole_model(
    model_type: str, seed: int, cuts: tuple[int, ...]
) -> None:
    """Prefill, decode, trees and commits of sessions that come and go, split over small forwards, in a tight pool."""
    rng = random.Random(seed)
    server = Server(tiny_model(model_type), num_blocks=14, max_rows=rng.choice((5, 9, 16)), cuts=cuts)
    chats: list[Chat] = []
    checked = 0
    for _ in range(30):
        if len(chats) < 5 and (opened := server.open(rng.randint(20, 80))) is not None:
            chats.append(opened)
        if len(chats) > 2 and rng.random() < 0.1:
            server.close(chats.pop(rng.randrange(len(chats))))
        for chat in rng.sample(chats, rng.randint(1, len(chats))):
            first, room = max(chat.ids, default=0) + 1, chat.log.max_positions - chat.log.num_slots
            if room == 0:
                continue
            kind = rng.random()
            ids = [rng.randint(3, 130) for _ in range(min(room, rng.randint(1, 20) if kind < 0.3 else 6))]
            hooks = [n for n in chat.live() if n >= chat.root] or [0]
            if kind < 0.5 or not chat.ids:
                parents = [rng.choice(hooks[-2:]), *chain(first + 1, len(ids) - 1)]
                advance = first + len(ids) - 1 if rng.random() < 0.5 else 0
            else:
                parents = [rng.choice([*hooks, *range(first, first + i)]) for i in range(len(ids))]
                advance = rng.choice([*hooks, 0, first + rng.randrange(len(ids))])
            server.send(chat, ids, parents, advance)
        for _ in range(rng.randint(0, 4)):
            if not server.waits():
                break
            for chat, node, logits in server.run():
                if rng.random() < 0.5:
                    close_to(logits, server.reference(chat.path(node)))
                    checked += 1
    while server.waits():
        for chat, node, logits in server.run():
            close_to(logits, server.reference(chat.path(node)))
            checked += 1
    assert checked > 100


def test_parts_of_the_layers_share_the_pool_with_the_whole() -> None:
    server = Server(tiny_model("qwen3"), num_blocks=8, max_rows=64, cuts=(0, 4, 7))
    engine, ids = server.engine, [5, 6, 7, 8]
    rows_TD = server.boundary.embed(ids)
    for key, ranges in enumerate(((WHOLE,), (LayerRange(0, 2), LayerRange(2, 6), LayerRange(6, 7)))):
        hidden: list[torch.Tensor | None] = [rows_TD]
        for number, layers in enumerate(ranges):
            table = (key, number)
            assert engine.blocks.open(table, owner="someone", max_slots=8) == 0
            step = SessionLog(8).apply(0, first_node=1, num_rows=4, parent=0)
            assert isinstance(step, StepRows)
            planned = engine.plan(layers, [(table, step, 0, 4, True)])
            for device in range(engine.num_devices):
                hidden = engine.run(planned, hidden, device=device)
        assert hidden[0] is not None
        close_to(server.boundary.logits(hidden[0])[-1], server.reference(ids))


def test_ranges_that_strangers_choose_are_kept_up_to_a_number() -> None:
    server = Server(tiny_model("llama", num_hidden_layers=10), num_blocks=8, max_rows=64, cuts=(0, 10))
    assert server.open(16) is not None
    step = SessionLog(16).apply(0, first_node=1, num_rows=1, parent=0, parents=(), advance=1)
    assert isinstance(step, StepRows)
    ranges = [LayerRange(a, b) for a in range(10) for b in range(a + 1, 11)]
    for layers in [*ranges, ranges[-1]]:
        batch = server.engine.plan(layers, [(0, step, 0, 1, False)])
        assert server.engine.run(batch, [torch.zeros(1, server.engine.hidden_size)])[0] is not None
    assert len(ranges) > MAX_PARTS
    assert server.engine.num_parts == MAX_PARTS


def test_fork_shares_what_it_has_and_leaves_its_source_alone() -> None:
    server = Server(tiny_model("llama"), num_blocks=12, max_rows=64)
    ours = server.open(60)
    assert ours is not None
    server.send(ours, list(range(10, 31)), chain(1, 21), 21)
    assert len(list(server.run())) == 21
    theirs = Chat(99, SessionLog(60), dict(ours.ids), dict(ours.parents), ours.root, 0)
    assert server.engine.blocks.fork(ours.key, 99, num_slots=21, max_slots=60) == 21
    theirs.log = ours.log.__class__(60)
    theirs.log.num_committed, theirs.log._root, theirs.log._last_node = 21, 21, 21
    server.send(ours, [40], [21], 22)
    server.send(theirs, [50, 51], [21, 22], 23)
    for _ in range(2):
        server.send(ours, [41], [max(ours.ids)], max(ours.ids) + 1)
        server.send(theirs, [52], [max(theirs.ids)], max(theirs.ids) + 1)
    results = []
    while server.waits():
        results += [(chat, node, logits) for chat, node, logits in server.run()]
    assert len(results) == 7
    for chat, node, logits in results:
        close_to(logits, server.reference(chat.path(node)))


def test_budget_below_one_block_is_refused_with_what_to_do() -> None:
    stage = Stage.load(tiny_model("llama"), LayerRange(0, 7), numerics=FP32, device=CPU)
    with pytest.raises(ResourceExhausted, match="--kv-memory"):
        ShardEngine([stage], kv_budget_bytes=100)


def test_stages_that_do_not_follow_each_other_are_refused() -> None:
    first, last = (
        Stage.load(tiny_model("llama"), LayerRange(a, b), numerics=FP32, device=CPU) for a, b in ((0, 2), (3, 7))
    )
    with pytest.raises(InvalidLayers, match="do not follow"):
        ShardEngine([first, last], kv_budget_bytes=1 << 20)
