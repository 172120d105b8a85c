"""Where the orders of a session are, by the stages' own word, and who has had one for too long.

A stage says how many entries have come to it and how many it has computed. An order passes one stage after another, so
the first number on its way that is too low tells who owes it: the stage that has it and does not compute it, the two
between which it is, or the last stage, whose answer is missing.

Guarantees: a verdict rests on two reports with the whole patience between them, of which the later one was asked for
when it was over, so that no delay of this program or of a message makes one. There is none while the order that is
owed first moves on, nor while its rows are on a line, by the word of who has sent them, for MAX_BACKLOG_S at most. A
stage that lies about its numbers can put it off by its patience once for each order and number, and there are a few
orders under way. Upstream goes first: who waits for somebody else owes nothing. Who never reports is found as well
(``Questions``), though it is heard whenever it is asked.

Assumes: stages are numbered in the order of the plan, and compute what they are given in the order of the log.

States of an order: owed by one of the above. Timers: the patience, and then a question to everybody, in seconds of the
monotonic clock. Source: docs/protocol-data-plane.md, "Repair". Still ugly: rows of a reused prefix belong to no entry,
so that nobody can tell where they are; scheduler.repair_core.Watch finds, later, that nothing moves.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fusion_node.types import MonotonicS
from scheduler.repair_core import BACKLOG_MARGIN, MAX_BACKLOG_S, MAX_CLAIMED_WAIT_S, Cause, Order, Verdict

_NEVER = MonotonicS(float("-inf"))


class _Owes(enum.Enum):
    ROWS = "rows"
    """They have not come to the stage: it, or who is before it, owes them."""
    WORK = "work"
    """The stage has them."""
    ANSWER = "answer"
    """It has computed them, as the last one."""


@dataclass(slots=True)
class _Debt:
    """Of one place, for the order that it has had for longest.

    Attributes:
        end: of the order: the sequence of the entry behind it.
        arrives_at: when rows that are on a line come, by the word of who has sent them.
        witnesses: stages whose word it rests on.
        is_asked: its time is over, and everybody was asked.
    """

    end: int
    num_rows: int
    since: MonotonicS
    arrives_at: MonotonicS
    witnesses: tuple[int, ...]
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class _Report:
    """As of SessionProgress; ``asked_at`` is when the question was sent."""

    next_sequence: int = 0
    num_done: int = 0
    wait_s: float = 0.0
    backlog_s: float = 0.0
    asked_at: MonotonicS = _NEVER


class Progress:
    """The orders of one epoch.

    Args:
        patience_s: for an order of so many rows, at one place.
        backlog_s: how long what was sent to the first stage takes to get there.
    """

    def __init__(
        self, num_stages: int, patience_s: Callable[[int], float], backlog_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._patience_s = patience_s
        self._backlog_s = backlog_s
        self._reports = [_Report()] * num_stages
        self._debts: dict[tuple[int, _Owes], _Debt] = {}

    def reported(
        self,
        stage: int,
        next_sequence: int,
        num_done: int,
        wait_s: float,
        *,
        asked_at: MonotonicS,
        backlog_s: float = 0.0,
    ) -> None:
        """A stage has answered a question. What it had does not get less."""
        before = self._reports[stage]
        come, done = max(before.next_sequence, next_sequence), max(before.num_done, num_done)
        self._reports[stage] = _Report(come, done, min(wait_s, MAX_CLAIMED_WAIT_S), backlog_s, asked_at)
        for key, debt in self._debts.items():
            if stage in debt.witnesses and asked_at < self._over_at(key):
                debt.is_asked = False  # this answers an older question, or there is more time by it

    def under_way(self, orders: Sequence[Order], *, now: MonotonicS) -> None:
        """The orders that were sent, and are not over."""
        first: dict[tuple[int, _Owes], Order] = {}
        for order in orders:
            place = self._place_of(order)
            if place is not None and (place not in first or order.sequence < first[place].sequence):
                first[place] = order
        debts = {}
        for (stage, owes), order in first.items():
            end, known = order.sequence + order.covers, self._debts.get((stage, owes))
            if known is None or known.end != end:
                both = owes is _Owes.ROWS and stage > 0
                arrives_at = self._arrives_at(stage - 1) if both else _NEVER
                known = _Debt(end, order.num_positions, now, arrives_at, (stage - 1, stage) if both else (stage,))
            debts[stage, owes] = known
        self._debts = debts

    def get_timer(self) -> MonotonicS | None:
        """When ``handle_timer`` is due."""
        return min((self._over_at(key) for key, debt in self._debts.items() if not debt.is_asked), default=None)

    def handle_timer(self, *, now: MonotonicS) -> bool:
        """Whether everybody is to be asked."""
        over = [debt for key, debt in self._debts.items() if not debt.is_asked and self._over_at(key) <= now]
        for debt in over:
            debt.is_asked = True
        return bool(over)

    def verdict(self) -> Verdict | None:
        """Who has had an order for too long; of a PAIR, nobody has spoken against the other."""
        for key in sorted(self._debts, key=lambda key: key[0]):
            debt, over_at = self._debts[key], self._over_at(key)
            if debt.is_asked and all(self._reports[stage].asked_at >= over_at for stage in debt.witnesses):
                stage, owes = key
                if owes is _Owes.ROWS and stage > 0:
                    return Verdict(stage, Cause.PAIR, stage - 1)
                return Verdict(stage, Cause.STUCK)
        return None

    # inside

    def _over_at(self, key: tuple[int, _Owes]) -> MonotonicS:
        (stage, owes), debt = key, self._debts[key]
        seconds = self._patience_s(debt.num_rows)
        if owes is _Owes.WORK:
            seconds += self._reports[stage].wait_s
        elif owes is _Owes.ROWS and stage == 0:
            seconds += self._backlog_s()
        over_at = debt.since + seconds
        return MonotonicS(max(over_at, min(debt.arrives_at, over_at + MAX_BACKLOG_S)))

    def _arrives_at(self, sender: int) -> MonotonicS:
        """When what a stage had sent by its last report is there. What it says later is of what it has sent later."""
        report = self._reports[sender]
        return MonotonicS(report.asked_at + BACKLOG_MARGIN * report.backlog_s) if report.backlog_s > 0 else _NEVER

    def _place_of(self, order: Order) -> tuple[int, _Owes] | None:
        """Who owes it; None when that cannot be told, or it waits for another order."""
        end = order.sequence + order.covers
        if order.covers == 0:
            return None
        if order.source is not None and self._reports[order.source].num_done < end:
            # It hands on what it has computed only. What it lacks another order brings.
            return (order.source, _Owes.WORK) if self._reports[order.source].next_sequence >= end else None
        for stage in range(order.first, order.last + 1):
            if self._reports[stage].next_sequence < end:
                return stage, _Owes.ROWS
            if self._reports[stage].num_done < end:
                return stage, _Owes.WORK
        return order.last, _Owes.ANSWER


@dataclass(slots=True)
class _Asked:
    """One stage.

    Attributes:
        at: when the questions were sent that it has not answered.
        since: when the first of them was, or it has reported or come back since.
        strikes: halves of the patience that have passed since then.
    """

    at: deque[MonotonicS] = field(default_factory=deque)
    since: MonotonicS = _NEVER
    strikes: int = 0


class Questions:
    """What the stages were asked. To be heard is not enough: a question is answered by a report.

    Guarantees: who is mute has two questions, and was given its patience in two halves, each of which ended when this
    program ran: a pause of ours is one half at most, and in the other what has come is read.

    Args:
        patience_s: of a stage; what its questions have to wait for included.
    """

    def __init__(self, num_stages: int, patience_s: Callable[[int], float]) -> None:
        self._patience_s = patience_s
        self._stages = [_Asked() for _ in range(num_stages)]

    def asked(self, stage: int, *, now: MonotonicS) -> None:
        """A question was sent."""
        asked = self._stages[stage]
        if not asked.at:
            asked.since, asked.strikes = now, 0
        asked.at.append(now)

    def reported(self, stage: int, *, now: MonotonicS) -> MonotonicS | None:
        """A stage has answered its oldest question: when that was sent; None when it was not asked."""
        self.excused(stage, now=now)
        asked = self._stages[stage]
        return asked.at.popleft() if asked.at else None

    def excused(self, stage: int, *, now: MonotonicS) -> None:
        """It was not there until now."""
        asked = self._stages[stage]
        asked.since, asked.strikes = now, 0

    def get_timer(self) -> MonotonicS | None:
        """When ``handle_timer`` is due."""
        due = [self._due(stage) for stage, asked in enumerate(self._stages) if len(asked.at) > 1 and asked.strikes < 2]
        return min(due, default=None)

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early."""
        for stage, asked in enumerate(self._stages):
            if len(asked.at) > 1 and asked.strikes < 2 and self._due(stage) <= now:
                asked.since, asked.strikes = now, asked.strikes + 1

    def late(self) -> list[int]:
        """Stages that have not reported for half of their patience, or all of it."""
        return [stage for stage, asked in enumerate(self._stages) if asked.strikes]

    def mute(self) -> list[int]:
        """Stages that have not reported for all of their patience."""
        return [stage for stage, asked in enumerate(self._stages) if asked.strikes > 1]

    def _due(self, stage: int) -> MonotonicS:
        return MonotonicS(self._stages[stage].since + self._patience_s(stage) / 2)
