"""Whether one entry of a session's log went all the way that its plan says, with nothing missing and nothing extra.

Guarantees: an entry without problems has, at both ends and with equal digests: the parts of its rows on every way from
where it began to where it had to end; for every stage on the way that is a group, one contribution for each of those
rows, from each member to each other, in every exchange of every layer; and the rows of its result from every member of
the last stage. Where it does not begin with the user, the user has ordered it to begin there.

Assumes: frames that were put where they belong, by verification.audit_core.

States: none. Timers: none.

Source: docs/protocol-data-plane.md, "The session log", "Replaying" and "Groups".

Ugly: into how many pieces the contributions for a step are cut depends on the largest of them; so the pieces that most
have are taken for the right ones, as long as they are those of the step's rows. In a session with token trees, a stage
may have computed fewer rows than came: nobody wants what is dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fusion_node.audit_records import PartialsLine, ResultLine, StepLine
from fusion_node.slices import Exchange
from verification.audit_frames_core import Frame, Record, short
from verification.audit_plan_core import RoutePlan, Stage
from verification.audit_report import Kind, Status

Problem: TypeAlias = tuple[Kind, str, list[Record]]
"""What is wrong, in words, and the records that show it."""

Order: TypeAlias = tuple[int, int, int, int, int, int | None]
"""Of a user to hand on rows again: the epoch, sequence, covers, first node and number of nodes of the step that it asks
for, and the stage where that is to stop."""


@dataclass(slots=True)
class Entry:
    """One entry of the log under one plan: all frames of it.

    Attributes:
        step: one of its frames.
        parts: its steps by boundary, then by sender and receiver.
        results: by sender.
        units: of contributions, by layer, exchange, sender and receiver.
    """

    step: StepLine
    parts: dict[int, dict[tuple[str, str], Frame]] = field(default_factory=dict)
    results: dict[str, Frame] = field(default_factory=dict)
    units: dict[tuple[int, Exchange, str, str], list[Frame]] = field(default_factory=dict)
    fractions: dict[str, int] = field(default_factory=dict)
    status: Status = Status.OPEN

    @property
    def is_replay(self) -> bool:
        return self.step.stop is not None

    @property
    def end(self) -> int:
        """Of the entries that it stands for, the one behind the last."""
        return self.step.sequence + self.step.covers


class EntryJudge:
    """Judges the entries of one epoch.

    Args:
        orders: that the user has sent, and to whom.
        parties: who has handed in a log.
        has_trees: whether the session has token trees.
    """

    def __init__(
        self, plan: RoutePlan, orders: Mapping[Order, set[str]], parties: set[str], *, has_trees: bool
    ) -> None:
        self._plan = plan
        self._orders = orders
        self._parties = parties
        self._has_trees = has_trees

    def problems(self, entry: Entry) -> Iterable[Problem]:
        """Why an entry is not closed."""
        plan = self._plan
        name = f"step {entry.step.sequence} of epoch {plan.epoch}"
        first = min(entry.parts, default=0)
        last = len(plan.stages) - 1 if entry.step.stop is None else entry.step.stop
        if not entry.parts:
            yield Kind.MISSING, f"{name}: none of its rows were sent as they should be", []
            return
        if first > 0:
            step = entry.step
            key = (plan.epoch, step.sequence, step.covers, step.first, step.nodes, step.stop)
            unasked = [peer for peer in plan.stages[first - 1].peers if peer not in self._orders.get(key, ())]
            if unasked:
                text = f"{name}: no rows from the user, nor an order to {short(unasked[0])} to hand them on"
                yield Kind.MISSING, text, []
        if max(entry.parts) > last:
            yield Kind.EXTRA, f"{name} was handed on behind the stage that it was to stop at", []
        num_rows: int | None = None
        for boundary in range(first, last + 1):
            parts = entry.parts.get(boundary, {})
            for way in plan.ways_into[boundary]:
                yield from self._ends(parts.get((way.sender, way.receiver)), name, "rows", way.sender, way.receiver)
            forms = {_form_of(frame) for frame in parts.values()}
            if len(forms) > 1:
                frames = [record for frame in parts.values() for record in frame.records]
                yield Kind.SHAPE, f"{name}: its parts on the way to stage {boundary + 1} have different rows", frames
            if not forms:
                return
            rows, live = max(forms)
            if num_rows is not None and (rows > num_rows or (rows < num_rows and not self._has_trees)):
                yield Kind.SHAPE, f"{name}: {num_rows} rows became {rows} in stage {boundary}", []
            num_rows = rows
            stage = plan.stages[boundary]
            if stage.is_group:
                nodes = _live_nodes(entry.step.first, entry.step.nodes, live)
                num_rows = yield from self._exchange_problems(stage, entry, nodes, name)
        if entry.step.stop is None:
            yield from self._result_problems(entry, name)

    def _exchange_problems(
        self, stage: Stage, entry: Entry, nodes: Sequence[int], name: str
    ) -> Generator[Problem, None, int]:
        """Whether all members have contributed to one another, for all rows, in all exchanges of all layers.

        Returns:
            The number of rows that the stage has computed.
        """
        plan = self._plan
        ways = [(a, b) for a in stage.peers for b in stage.peers if a != b]
        wanted = [
            (layer, exchange, a, b)
            for layer in range(stage.start, stage.stop)
            for exchange in plan.exchanges
            for a, b in ways
        ]
        found = {key: _units_of(entry.units.get(key, ())) for key in wanted}
        # What most say is how the rows were cut: that is not told in advance.
        cut, _ = Counter(found.values()).most_common(1)[0]
        if not _is_cut_of(nodes, cut, allow_fewer=self._has_trees):
            yield Kind.MISSING, f"{name}: the contributions in stage {stage.index + 1} are not of its rows", []
        for key in wanted:
            layer, exchange, sender, receiver = key
            frames = entry.units.get(key, ())
            what = f"contributions to {exchange.name.lower()} of layer {layer}"
            if found[key] != cut:
                records = [record for frame in frames for record in frame.records]
                who = f"from {short(sender)} to {short(receiver)}"
                kind = Kind.MISSING if len(found[key]) <= len(cut) else Kind.EXTRA
                yield kind, f"{name}: {what} {who} are not those of the others", records
            for frame in frames:
                yield from self._ends(frame, name, what, sender, receiver)
        return sum(rows for _, rows in cut)

    def _result_problems(self, entry: Entry, name: str) -> Iterable[Problem]:
        for peer in self._plan.stages[-1].peers:
            yield from self._ends(entry.results.get(peer), name, "the result", peer, self._plan.user)
        rows = {frame.what.rows for frame in entry.results.values() if isinstance(frame.what, ResultLine)}
        wanted = entry.step.wanted
        if len(rows) > 1 or any(count > wanted or (count < wanted and not self._has_trees) for count in rows):
            yield Kind.SHAPE, f"{name}: {wanted} rows were asked for, and {max(rows)} came", []

    def _ends(self, frame: Frame | None, name: str, what: str, sender: str, receiver: str) -> Iterable[Problem]:
        """What is wrong with one frame that must be there, at both ends."""
        who = f"{what} from {short(sender)} to {short(receiver)}"
        if frame is None:
            yield Kind.MISSING, f"{name}: {who} are in no log", []
        elif frame.received is None and receiver in self._parties:
            yield Kind.NEVER_RECEIVED, f"{name}: {who} are not in the receiver's log", frame.records
        elif frame.differs or (frame.sent is None and sender in self._parties):
            yield Kind.DIGEST, f"{name}: {who} are not the same at both ends", frame.records


def _form_of(frame: Frame) -> tuple[int, str]:
    what = frame.what
    return (what.rows, what.live) if isinstance(what, StepLine) else (0, "")


def _units_of(frames: Iterable[Frame]) -> tuple[tuple[int, int], ...]:
    """The first node and the number of rows of each contribution, in order."""
    lines = (frame.what for frame in frames)
    return tuple(sorted((line.node, line.rows) for line in lines if isinstance(line, PartialsLine)))


def _live_nodes(first: int, count: int, live: str) -> list[int]:
    """The nodes of a step whose rows came."""
    if not live:
        return list(range(first, first + count))
    bits = int.from_bytes(bytes.fromhex(live), "little")
    return [first + index for index in range(count) if bits >> index & 1]


def _is_cut_of(nodes: Sequence[int], units: Sequence[tuple[int, int]], *, allow_fewer: bool) -> bool:
    """Whether units, by first node and number of rows, are these nodes one after another."""
    if allow_fewer:
        return sum(rows for _, rows in units) <= len(nodes) and {node for node, _ in units} <= set(nodes)
    at = 0
    for node, rows in units:
        if at >= len(nodes) or nodes[at] != node or not rows:
            return False
        at += rows
    return at == len(nodes)
