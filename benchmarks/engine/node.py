"""A node's loop in one thread and in real time: the batching core decides, the engine computes, users send and wait.

What fusion_node.daemon.server does with frames and threads is left out, so that the device is all that is measured.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.engine.rig import Rig, Session, synchronize
from fusion_node.engine.batching_core import Batch, BatchingCore, Priority, Work
from fusion_node.engine.session_log_core import StepRows

OnEnd = Callable[[torch.Tensor], None]
"""Called with the hidden rows of a step."""

WARM_UP_ROWS = (1, 8, 64, 256)


@dataclass(eq=False)
class _Step:
    session: Session
    rows: StepRows
    rows_TD: torch.Tensor
    on_end: OnEnd
    has_moved: bool = False
    outputs: list[torch.Tensor] = field(default_factory=list)


class Node:
    """One device and its users.

    Attributes:
        forwards: rows and seconds of each, in order.
    """

    def __init__(self, rig: Rig) -> None:
        self.core = BatchingCore()
        self.forwards: list[tuple[int, float]] = []
        self._rig = rig
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = itertools.count()

    def warm_up(self) -> None:
        """Teaches the core what forwards cost, as a node does before it announces itself."""
        session = self._rig.open(max(WARM_UP_ROWS))
        for num_rows in (*WARM_UP_ROWS, *WARM_UP_ROWS, *WARM_UP_ROWS):
            step = Session(session.key, num_rows).step(num_rows)
            rows_TD = torch.zeros((num_rows, self._rig.engine.hidden_size))
            before_s = self._rig.forward_s
            self._rig.forward([(session, step, rows_TD)])
            self.core.learn(self._rig.engine.layers, num_rows, self._rig.forward_s - before_s)
        self._rig.close(session)

    def send(self, session: Session, user: str, step: StepRows, rows_TD: torch.Tensor, on_end: OnEnd) -> None:
        """A user's next step of a session."""
        now = time.monotonic()
        work = Work(
            session,
            user,
            len(step.live_rows),
            self._rig.engine.layers,
            Priority.INTERACTIVE,
            is_tree=not step.is_chain,
            moves_kv=step.reuses_slots,
            arrived=now,
            payload=_Step(session, step, rows_TD, on_end),
        )
        refused = self.core.add(work, now=now)
        assert refused is None, refused

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Does something at a time of the monotonic clock."""
        heapq.heappush(self._events, (when, next(self._num_events), action))

    def answer(self, session: Session, user: str, step: StepRows, rows_TD: torch.Tensor) -> torch.Tensor:
        """Sends a step and runs until it has ended: its hidden rows."""
        answers: list[torch.Tensor] = []
        self.send(session, user, step, rows_TD, answers.append)
        self.run(lambda: bool(answers))
        return answers[0]

    def forget(self, session: Session) -> None:
        self.core.cancel(session)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Goes on until then."""
        while not is_over():
            now = time.monotonic()
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            self.core.handle_timer(now=now)
            batch = self.core.next_batch(now=now)
            if batch is not None:
                self._forward(batch)
                continue
            timer = self.core.get_timer()
            times = [t for t in (timer, self._events[0][0] if self._events else None) if t is not None]
            if not times:
                raise RuntimeError("nothing is left that could end the run")
            time.sleep(max(0.0, min(times) - time.monotonic()))

    def _forward(self, batch: Batch) -> None:
        work, rows = [], []
        for piece in batch.pieces:
            step: _Step = piece.work.payload
            work.append((step.session.key, step.rows, piece.start, piece.stop, not step.has_moved))
            rows.append(step.rows_TD[piece.start : piece.stop])
            step.has_moved = True
        planned = self._rig.engine.plan(self._rig.engine.layers, work)
        began = time.perf_counter()
        outputs = self._rig.engine.run(planned, rows)
        synchronize(self._rig.device)
        seconds = time.perf_counter() - began
        self.forwards.append((batch.num_rows, seconds))
        for piece, output_TD in zip(batch.pieces, outputs, strict=True):
            if output_TD is not None:
                piece.work.payload.outputs.append(output_TD)
        for ended in self.core.done(batch, seconds=seconds, now=time.monotonic()):
            step = ended.payload
            step.on_end(step.outputs[0] if len(step.outputs) == 1 else torch.cat(step.outputs))
