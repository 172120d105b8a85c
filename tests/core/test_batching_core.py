"""Which rows run next: in order, none lost, nobody starved, nobody slowed by somebody else's prefill."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusion_node.engine.batching_core import Batch, BatchingCore, BatchLimits, Overload, Priority, Work

FIXED_S, ROW_S = 0.020, 0.001
"""A small device: twenty rows cost as much again as none."""

A, B = "layers 0:10", "layers 10:20"


def seconds_of(num_rows: int) -> float:
    return FIXED_S + ROW_S * num_rows


def core(*, max_rows: int = 512, max_waiting_rows: int = 16_384, groups: Iterable[str] = (A, B)) -> BatchingCore:
    """A core that knows its device."""
    batching = BatchingCore(BatchLimits(max_rows, max_waiting_rows))
    for group in groups:
        for num_rows in (1, 16, 256):
            batching.learn(group, num_rows, seconds_of(num_rows))
    return batching


def work(
    session: str,
    num_rows: int = 1,
    *,
    user: str | None = None,
    group: str = A,
    at: float = 0.0,
    priority: Priority = Priority.INTERACTIVE,
    moves_kv: bool = False,
    deadline: float | None = None,
) -> Work:
    """A step; the user of session ``u1`` is ``u`` unless told."""
    return Work(
        session=session,
        user=session.rstrip("0123456789") if user is None else user,
        num_rows=num_rows,
        group=group,
        priority=priority,
        moves_kv=moves_kv,
        arrived=at,
        deadline=deadline,
    )


def add(batching: BatchingCore, *works: Work) -> None:
    for each in works:
        assert batching.add(each, now=each.arrived) is None


def batch_of(batching: BatchingCore, *, now: float = 0.0) -> Batch:
    batch = batching.next_batch(now=now)
    assert batch is not None
    return batch


def rows_of(batch: Batch, session: str) -> int:
    return sum(piece.stop - piece.start for piece in batch.pieces if piece.work.session == session)


def finish(batching: BatchingCore, batch: Batch, *, now: float = 0.0) -> list[Work]:
    return batching.done(batch, seconds=seconds_of(batch.num_rows), now=now)


def decode_once(batching: BatchingCore, session: str, *, now: float = 0.0) -> float:
    """One step of a session, alone; returns when it is done."""
    add(batching, work(session, at=now))
    batch = batch_of(batching, now=now)
    end = now + seconds_of(1)
    finish(batching, batch, now=end)
    return end


class AnySchedule(RuleBasedStateMachine):
    """Any users, any steps, batches in flight that succeed and fail: what must hold of the rows, holds."""

    def __init__(self) -> None:
        super().__init__()
        self.core = BatchingCore(BatchLimits(max_rows=40, max_waiting_rows=600))
        self.now = 0.0
        self.queued: dict[str, list[Work]] = {}
        """Works of each session that are not done, in order."""
        self.progress: dict[Work, int] = {}
        """Rows of a work that were done."""
        self.flights: list[Batch] = []

    def _forget(self, works: list[Work]) -> None:
        for session in {str(each.session) for each in works}:
            assert [w for w in works if w.session == session] == self.queued.pop(session)

    @rule(
        number=st.integers(0, 5),
        num_rows=st.sampled_from([1, 1, 1, 3, 8, 70, 150]),
        moves_kv=st.booleans(),
        patience=st.sampled_from([None, None, 0.5, 5.0]),
    )
    def arrive(self, number: int, num_rows: int, moves_kv: bool, patience: float | None) -> None:
        each = Work(
            session=f"s{number}",
            user=f"u{number // 2}",
            num_rows=num_rows,
            group=number % 2,
            priority=Priority(number == 5),
            moves_kv=moves_kv,
            arrived=self.now,
            deadline=None if patience is None else self.now + patience,
        )
        waiting = {key: sum(w.num_rows - self.issued(w) for w in works) for key, works in self.queued.items()}
        of_user = sum(rows for key, rows in waiting.items() if int(key[1:]) // 2 == number // 2)
        refused = self.core.add(each, now=self.now)
        if sum(waiting.values()) + num_rows > 600:
            assert refused is Overload.NODE
        elif of_user + num_rows > 300:
            assert refused is Overload.USER
        else:
            assert refused is None
            self.queued.setdefault(f"s{number}", []).append(each)
            self.progress[each] = 0

    def issued(self, each: Work) -> int:
        """Rows done or in flight, as far as they count."""
        return self.counted.get(each, 0)

    @property
    def counted(self) -> dict[Work, int]:
        found = dict(self.progress)
        for batch in self.flights:
            for piece in batch.pieces:
                if piece.start == found.get(piece.work):
                    found[piece.work] = piece.stop
        return found

    @rule()
    def issue(self) -> None:
        if len(self.flights) < 3:
            self._issue()

    def _issue(self) -> Batch | None:
        before = self.counted
        batch = self.core.next_batch(now=self.now)
        if batch is None:
            return None
        assert 0 < batch.num_rows <= self.core.max_rows
        assert {piece.work.group for piece in batch.pieces} == {batch.group}
        seen: set[object] = set()
        for piece in batch.pieces:
            session = str(piece.work.session)
            # In order, without gaps: everything earlier of the session is done, in flight, or in this batch.
            assert piece.start == before[piece.work] < piece.stop <= piece.work.num_rows
            earlier = self.queued[session][: self.queued[session].index(piece.work)]
            assert all(before[each] == each.num_rows for each in earlier)
            if piece.work.moves_kv and piece.start == 0:
                in_flight = {p.work.session for flight in self.flights for p in flight.pieces}
                assert session not in in_flight | seen
            before[piece.work] = piece.stop
            seen.add(session)
        self.flights.append(batch)
        return batch

    @rule(slow=st.sampled_from([0.5, 1.0, 3.0]))
    def succeed(self, slow: float) -> None:
        if self.flights:
            self._finish(seconds_of(self.flights[0].num_rows) * slow)

    def _finish(self, seconds: float) -> None:
        batch = self.flights.pop(0)
        self.now += seconds
        expected = []
        for piece in batch.pieces:
            if piece.work in self.queued.get(str(piece.work.session), []) and self.progress[piece.work] == piece.start:
                earlier = self.queued[str(piece.work.session)][0]
                if earlier is piece.work:
                    self.progress[piece.work] = piece.stop
                    if piece.stop == piece.work.num_rows:
                        expected.append(self.queued[str(piece.work.session)].pop(0))
        assert self.core.done(batch, seconds=seconds, now=self.now) == expected
        self.queued = {key: works for key, works in self.queued.items() if works}

    @rule(which=st.integers(0, 2), out_of_memory=st.booleans())
    def fail(self, which: int, out_of_memory: bool) -> None:
        if which < len(self.flights):
            batch = self.flights.pop(which)
            lost = self.core.failed(batch, out_of_memory=out_of_memory, now=self.now)
            if len(batch.pieces) > 1 and out_of_memory:
                assert lost == []
            self._forget(lost)

    @rule(number=st.integers(0, 5))
    def cancel(self, number: int) -> None:
        assert self.core.cancel(f"s{number}") == self.queued.pop(f"s{number}", [])

    @rule(seconds=st.sampled_from([0.001, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._forget(self.core.handle_timer(now=self.now))
        timer = self.core.get_timer()
        begun = {piece.work for flight in self.flights for piece in flight.pieces}
        assert timer is None or timer > self.now or begun or self.queued

    @rule()
    def drain(self) -> None:
        """Without new work everything ends within a number of forwards that can be computed."""
        while self.flights:
            self._finish(seconds_of(self.flights[0].num_rows))
        rows = sum(each.num_rows for works in self.queued.values() for each in works)
        num_forwards = 0
        while self.queued:
            if self._issue() is None:
                timer = self.core.get_timer()
                assert timer is not None
                assert timer >= self.now
                self.now = timer
                self._forget(self.core.handle_timer(now=self.now))
                if self._issue() is None:
                    assert not self.queued
                    break
            num_forwards += 1
            assert num_forwards <= rows
            self._finish(seconds_of(self.flights[0].num_rows))

    @invariant()
    def adds_up(self) -> None:
        self.core.check_integrity()
        for session, works in self.queued.items():
            assert self.core.num_waiting_rows(session) <= sum(each.num_rows for each in works)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
