"""Decides from the records of all parties who was sent which part of which state, and whether nothing is missing.

Guarantees, if the parties' records are true: every entry of a session's log that counts as *closed* went the whole way
that its plan says, each stage's exchanges included, with equal digests at both ends of every frame, and all columns of
its result came to the user. Every tensor that anybody recorded is one that the plan lets its receiver have, or is a
finding; so no node was sent a column of a hidden state that is not its own, and the largest fraction of a state that it
was sent is the one reported. What a node holds of a state for another reason counts as well: a member of a group that
is sent a tensor which it should not have been sent is taken to know its own slice beside it.

Assumes: nothing of what one party says alone. Two parties that agree on it can leave out a frame between them that
neither the plan nor anybody else knows of. That is what no audit of records can find (docs/audit.md).

An entry that is not closed is *excused* if nothing shows that it should be: its result did not come to the user whole,
no later entry of its epoch was answered, and the user opened a later epoch (it was *given up*, to be replayed), or the
session ended: the user closed it or was killed, or a stage said that it failed (it was *abandoned*). All other entries
are *open*, each for a reason that is named.

States: none; one call judges everything. Timers: none.

Source: docs/protocol-data-plane.md; docs/audit.md says what each finding means.

Ugly: what a node was sent of the states of a layer counts together over a session: a node that was given two different
slices of it by two plans, which no plan of one group does, is said to have the sum at once.

Above 600 lines: what is found of one session is one state, in which every kind of frame has its part.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fusion_node.audit_records import (
    MASKED,
    PLAIN,
    OpenLine,
    OrderLine,
    PartialsLine,
    ResultLine,
    SaidLine,
    StepLine,
    TapsLine,
)
from fusion_node.errors import ConfigError
from fusion_node.slices import Dims, Exchange
from verification.audit_entries_core import Entry, EntryJudge, Order
from verification.audit_file import Run
from verification.audit_frames_core import (
    Columns,
    Frame,
    Record,
    SessionFrames,
    Statement,
    collect,
    lost_in_the_middle,
    short,
    told,
)
from verification.audit_grants_core import GrantJudge, Statements
from verification.audit_plan_core import EXCHANGE_NAMES, RoutePlan, Stage
from verification.audit_report import (
    CHECK_OF,
    Band,
    Check,
    CheckName,
    Finding,
    How,
    Kind,
    NodeShare,
    Place,
    Report,
    SessionView,
    Status,
    StepView,
)

MAX_FINDINGS = 20
"""Of one kind that are told one by one; the others are counted."""


def models_in(runs: Iterable[Run]) -> set[str]:
    """Ids of the models whose sizes ``audit`` has to be told."""
    opens = (event for run in runs for event in run.events if isinstance(event, OpenLine))
    return {event.plan.model_id for event in opens if event.plan is not None}


def audit(
    runs: Sequence[Run], dims_of: Mapping[str, Dims], *, only: str = "", statements: Statements | None = None
) -> Report:
    """Judges the records of all parties.

    Args:
        dims_of: sizes of the models, by model id; all of ``models_in``.
        only: beginning of the name of the one session to judge; empty: all whose users have handed in a log.
        statements: checks grants and releases; None: they are not judged.

    Raises:
        ConfigError: there is no session to be judged.
    """
    runs = sorted(runs, key=lambda run: (run.peer, run.started_at))
    findings = _Findings(runs)
    found = collect(runs)
    parties, unended = {run.peer for run in runs}, {run.peer for run in runs if not run.is_ended}
    for run in runs:
        if run.missing or run.is_full:
            why = "became full" if run.is_full else f"lacks record {run.missing[0]}"
            findings.add(Kind.LOG_GAP, "", f"the log of {short(run.peer)} {why}", ())
    for record in found.odd_probes:
        peer = short(runs[record[0]].peer)
        findings.add(Kind.PROBE, "", f"a measurement of bandwidth at {peer} carried something", (record,))
    views, skipped = [], []
    for name in sorted(found.sessions):
        session, users = found.sessions[name], found.sessions[name].users()
        if not name.startswith(only):
            continue
        if users and not users & parties:
            skipped.append(name)
        else:
            judge = None if statements is None else GrantJudge(statements, name)
            view = _Session(session, dims_of, parties, unended, findings, judge).judge()
            if view is not None:
                views.append(view)
    if not only:
        for frame in found.nameless:
            what = f"contributions from {short(frame.sender)} to {short(frame.receiver)} in a session that is not known"
            findings.add(Kind.NO_PLAN, "", what, frame.records)
    if not views and not findings.counts:
        raise ConfigError("these logs hold no session whose user is among them: add the log of the user's side")
    checks = tuple(
        Check(name, not number, number)
        for name in CheckName
        if statements is not None or name is not CheckName.GRANTS
        for number in (sum(count for kind, count in findings.counts.items() if CHECK_OF[kind] is name),)
    )
    return Report(
        passed=all(check.passed for check in checks),
        checks=checks,
        sessions=tuple(views),
        findings=tuple(findings.told),
        counts={str(kind): count for kind, count in findings.counts.items()},
        skipped=tuple(skipped),
        unended=tuple(sorted({run.source for run in runs if not run.is_ended})),
        num_records=sum(len(run.events) for run in runs),
    )


class _Findings:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.told: list[Finding] = []
        self.counts: Counter[Kind] = Counter()
        self._runs = runs

    def add(self, kind: Kind, session: str, what: str, records: Iterable[Record]) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= MAX_FINDINGS:
            named = tuple(f"{self._runs[run].source}:{number}" for run, number in itertools.islice(records, 4))
            self.told.append(Finding(kind, session, what, named))


class _Session:
    """Judges one session."""

    def __init__(
        self,
        session: SessionFrames,
        dims_of: Mapping[str, Dims],
        parties: set[str],
        unended: set[str],
        findings: _Findings,
        grants: GrantJudge | None = None,
    ) -> None:
        self._session = session
        self._grants = grants
        self._parties = parties
        self._findings = findings
        self._plans = self._read_plans(dims_of)
        self._orders: dict[Order, set[str]] = {}
        self._entries: dict[tuple[object, ...], Entry] = {}
        self._results: list[tuple[Frame, ResultLine]] = []
        self._partials: list[tuple[Frame, PartialsLine, Stage]] = []
        self._columns: dict[tuple[str, int], Columns] = {}
        self._foreign: dict[tuple[str, int, int, str, int], Columns] = {}
        self._totals: Counter[tuple[str, str]] = Counter()
        self._contributed: dict[str, set[tuple[Exchange, str, int]]] = {}
        self._made: set[tuple[int, str, int]] = set()
        self._ends = bool(session.users() & unended)
        self._has_trees = False

    def judge(self) -> SessionView | None:
        """None where nobody has said what the session is."""
        for frame in self._session.frames.values():
            self._check_ends(frame)
            self._sort(frame)
            if self._grants is not None:
                self._grants.note(frame)
        for conversation in self._session.conversations.values():
            for frame in lost_in_the_middle(conversation):
                if frame.receiver in self._parties and isinstance(frame.what, StepLine | ResultLine | OpenLine):
                    self._add(
                        Kind.NEVER_RECEIVED, f"{told(frame)} is not in the receiver's log, and later ones are", frame
                    )
        if not self._plans:
            return None
        self._place_results()
        self._place_partials()
        by_epoch: dict[int, list[Entry]] = {}
        for entry in self._entries.values():
            by_epoch.setdefault(entry.step.epoch, []).append(entry)
        for epoch, entries in sorted(by_epoch.items()):
            self._judge_epoch(self._plans[epoch], sorted(entries, key=lambda each: (each.end, each.step.first)))
        self._check_sequences(by_epoch)
        self._check_shares()
        if self._grants is not None:
            for kind, text, records in self._grants.problems(plan for _, plan in sorted(self._plans.items())):
                self._findings.add(kind, self._session.name, text, records)
        return self._view()

    # plans and logs

    def _read_plans(self, dims_of: Mapping[str, Dims]) -> dict[int, RoutePlan]:
        plans = {}
        for epoch, by_digest in sorted(self._session.plans.items()):
            frames = [frame for _, carried in by_digest.values() for frame in carried]
            if len(by_digest) > 1:
                self._add(Kind.PLAN_DIFFERS, f"there are {len(by_digest)} plans of epoch {epoch}", *frames)
            # What the user has sent counts; where there are several, the one that went to most.
            seen = max(by_digest.values(), key=lambda each: len(each[1]))[0]
            if seen is None or any(frame.sender != seen.user for frame in frames):
                self._add(
                    Kind.PLAN_DIFFERS, f"the plan of epoch {epoch} cannot be read, or is not its sender's", *frames
                )
            if seen is None:
                continue
            try:
                plans[epoch] = RoutePlan(epoch, seen, dims_of[seen.model_id])
            except ConfigError as error:
                self._add(Kind.PLAN_DIFFERS, f"the plan of epoch {epoch} is none: {error}", *frames)
        return plans

    def _check_ends(self, frame: Frame) -> None:
        """What one frame's records say of one another."""
        if isinstance(frame.what, SaidLine):
            return
        if frame.differs or getattr(frame.what, "digest", "-") == "":
            self._add(Kind.DIGEST, f"{told(frame)} has not the same digest at both ends", frame)
        if frame.repeats:
            self._add(Kind.DUPLICATE, f"{told(frame)} is there twice", frame)
        if frame.sent is None and frame.sender in self._parties:
            self._add(Kind.NEVER_SENT, f"{told(frame)} is not in the sender's log", frame)

    # frames

    def _sort(self, frame: Frame) -> None:
        """Puts a frame where it belongs, or tells why it belongs nowhere."""
        what = frame.what
        if isinstance(what, OpenLine | Statement):
            return
        if isinstance(what, SaidLine):
            users = self._session.users()
            self._ends |= what.what == "close" and frame.sender in users
            self._ends |= what.what == "failed" and frame.receiver in users
            return
        plan = self._plans.get(what.epoch)
        if plan is None:
            self._add(Kind.NO_PLAN, f"{told(frame)} is of an epoch that nobody opened", frame)
            return
        if isinstance(what, OrderLine):
            if frame.sender == plan.user:
                key = (what.epoch, what.sequence, what.covers, what.first + 1, what.rows, what.stop)
                self._orders.setdefault(key, set()).add(frame.receiver)
            return
        for peer in (frame.sender, frame.receiver):
            if peer not in self._parties:
                self._add_once(Kind.NO_LOG, f"there is no log of {short(peer)}, which had part in it", frame)
        if any(peer != plan.user and not plan.serves(peer) for peer in (frame.sender, frame.receiver)):
            self._add(Kind.STRANGER, f"{told(frame)}: one of them is in no plan of it", frame)
            self._note_foreign(plan, frame)
            return
        match what:
            case StepLine():
                self._sort_step(plan, frame, what)
            case ResultLine():
                self._sort_result(plan, frame, what)
            case TapsLine():
                self._sort_taps(plan, frame, what)
            case PartialsLine():
                self._sort_partials(plan, frame, what)

    def _sort_step(self, plan: RoutePlan, frame: Frame, what: StepLine) -> None:
        way = plan.way_of_step(frame.sender, frame.receiver, what.width)
        if way is None:
            self._add(Kind.PATH, f"{told(frame)}: the plan has no such way", frame)
            self._note_foreign(plan, frame)
            return
        self._has_trees = self._has_trees or what.is_tree
        self._totals[frame.receiver, "states"] += 1
        self._totals[frame.receiver, "state_bytes"] += what.bytes
        if what.stop is not None and what.stop >= len(plan.stages):
            self._add(Kind.PATH, f"{told(frame)}: it is to stop at a stage that there is not", frame)
            return
        key = (what.epoch, what.sequence, what.first, what.nodes, what.covers, what.stop)
        entry = self._entries.setdefault(key, Entry(what))
        if what.width != len(way.columns):
            self._add_width(frame, what.width, len(way.columns), "columns")
            self._note_foreign(plan, frame)
            return
        parts = entry.parts.setdefault(way.boundary, {})
        if (frame.sender, frame.receiver) in parts:
            self._add(Kind.DUPLICATE, f"{told(frame)}: there is another one, with other rows", frame)
            return
        parts[frame.sender, frame.receiver] = frame
        layer = plan.stages[way.boundary].start
        self._columns.setdefault((frame.receiver, layer), Columns()).add(way.columns)
        entry.fractions[frame.receiver] = entry.fractions.get(frame.receiver, 0) + len(way.columns)

    def _sort_result(self, plan: RoutePlan, frame: Frame, what: ResultLine) -> None:
        last = plan.stages[-1]
        if frame.receiver != plan.user or frame.sender not in last.peers:
            self._add(Kind.PATH, f"{told(frame)}: results go from the last stage to the user", frame)
            self._note_foreign(plan, frame)
        elif what.width != len(last.columns_of(frame.sender)):
            self._add_width(frame, what.width, len(last.columns_of(frame.sender)), "columns")
        else:
            self._results.append((frame, what))

    def _sort_taps(self, plan: RoutePlan, frame: Frame, what: TapsLine) -> None:
        stage = plan.stage_of(frame.sender)
        if frame.receiver != plan.user or stage is None or stage.is_group or not stage.start < what.layer <= stage.stop:
            self._add(Kind.PATH, f"{told(frame)}: taps go from a stage that is one node to the user", frame)
            self._note_foreign(plan, frame)

    def _sort_partials(self, plan: RoutePlan, frame: Frame, what: PartialsLine) -> None:
        stage, exchange = plan.stage_of(frame.sender, frame.receiver), EXCHANGE_NAMES.get(what.exchange)
        if (
            stage is None
            or frame.sender == frame.receiver
            or not stage.is_group
            or not stage.start <= what.layer < stage.stop
            or exchange not in plan.exchanges
        ):
            self._add(Kind.PATH, f"{told(frame)}: they have no such thing to exchange", frame)
            self._note_foreign(plan, frame)
            return
        width = plan.width_of(stage, exchange, frame.receiver)
        if what.width != width:
            self._add_width(frame, what.width, width, "values")
            self._note_foreign(plan, frame)
            return
        form = MASKED if plan.seen.masks else PLAIN
        if what.dtype != form:
            text = f"{told(frame)}: its values are {what.dtype or 'nothing'} where the plan says {form}"
            self._add(Kind.OVERSENT, text, frame)
            self._note_foreign(plan, frame)
            return
        self._totals[frame.receiver, "partials"] += 1
        self._totals[frame.receiver, "partials_bytes"] += what.bytes
        inputs = plan.inputs_of(stage, exchange, frame.sender)
        # Of masked ones it has the sum alone: equations in what all others have together.
        equations, unknowns = width, inputs
        if plan.seen.masks:
            equations = plan.equations_of(stage, exchange, frame.receiver)
            unknowns = plan.inputs_of_others(stage, exchange, frame.receiver)
        if equations >= unknowns:
            self._contributed.setdefault(frame.receiver, set()).add((exchange, frame.sender, inputs))
        self._partials.append((frame, what, stage))

    def _note_foreign(self, plan: RoutePlan, frame: Frame) -> None:
        """A node has been sent something that is not its own: which columns, only the content would show.

        The worst that it can be is taken for true: columns of a state that the sender holds and the receiver does not,
        beside those that the receiver has of the same state.
        """
        what, receiver = frame.what, frame.receiver
        if receiver == plan.user or isinstance(what, OpenLine | OrderLine | SaidLine | Statement):
            return
        layer = getattr(what, "layer", None)
        stage = plan.stage_of(frame.sender)
        if layer is None:
            layer = plan.stages[0].start if stage is None else stage.start
        own = plan.own_columns(receiver, layer)
        has = range(plan.dims.hidden) if stage is None else stage.columns_of(frame.sender)
        known = Columns()
        known.add(own)
        of = ("node", what.node) if isinstance(what, PartialsLine) else ("step", what.sequence)
        where = (receiver, what.epoch, layer, *of)
        found = self._foreign.setdefault(where, known)
        found.frames.append(frame)
        # Of a linear's output, or of columns that another one holds: as many as the tensor has room for.
        found.add(range(has.start, min(has.stop, has.start + what.width)))
        self._totals[receiver, "states"] += 1
        self._totals[receiver, "state_bytes"] += what.bytes

    # entries

    def _place_results(self) -> None:
        entries = {(e.step.epoch, e.step.sequence): e for e in self._entries.values() if not e.is_replay}
        for frame, what in self._results:
            entry = entries.get((what.epoch, what.sequence))
            if entry is None:
                self._add(Kind.EXTRA, f"{told(frame)} answers no step", frame)
            elif frame.sender in entry.results:
                self._add(Kind.DUPLICATE, f"{told(frame)}: there is another one, with other rows", frame)
            else:
                entry.results[frame.sender] = frame

    def _place_partials(self) -> None:
        """Finds for each contribution the step that its node belongs to."""
        starts: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
        for entry in self._entries.values():
            for boundary in entry.parts:
                starts.setdefault((entry.step.epoch, boundary), []).append((entry.step.first, entry))
        for listed in starts.values():
            listed.sort(key=lambda each: each[0])
        firsts = {key: [first for first, _ in listed] for key, listed in starts.items()}
        for frame, what, stage in self._partials:
            key = (what.epoch, stage.index)
            at = bisect_right(firsts.get(key, []), what.node) - 1
            if at < 0 or what.node >= (entry := starts[key][at][1]).step.first + entry.step.nodes:
                self._add(Kind.EXTRA, f"{told(frame)} belongs to no step", frame)
                continue
            exchange = EXCHANGE_NAMES[what.exchange]
            entry.units.setdefault((what.layer, exchange, frame.sender, frame.receiver), []).append(frame)

    def _judge_epoch(self, plan: RoutePlan, entries: Sequence[Entry]) -> None:
        """Whether the entries of one epoch, in the order in which they were to be answered, are closed."""
        # What was sent to the user may have been lost with the node that sent it.
        came = [e for e in entries if any(frame.received is not None for frame in e.results.values())]
        answered = max((entry.end for entry in came), default=-1)
        is_last = plan.epoch == max(self._plans)
        judge = EntryJudge(plan, self._orders, self._parties, has_trees=self._has_trees)
        for entry in entries:
            problems = list(judge.problems(entry))
            if not problems:
                entry.status = Status.CLOSED
                self._note_made(plan, entry)
                continue
            is_answered = len(entry.results) == len(plan.stages[-1].peers) and all(
                frame.sent is not None and frame.received is not None for frame in entry.results.values()
            )
            if is_answered or entry.end < answered or (is_last and not self._ends):
                entry.status = Status.OPEN
                for kind, text, records in problems:
                    self._findings.add(kind, self._session.name, text, records)
            else:
                entry.status = Status.ABANDONED if is_last else Status.GIVEN_UP

    def _note_made(self, plan: RoutePlan, entry: Entry) -> None:
        """Who has computed which states of a closed entry."""
        last = len(plan.stages) - 1 if entry.step.stop is None else entry.step.stop
        for stage in plan.stages[min(entry.parts) : last + 1]:
            for peer in stage.peers:
                self._made |= {(plan.epoch, peer, layer) for layer in range(stage.start + 1, stage.stop + 1)}

    # the whole session

    def _check_sequences(self, by_epoch: Mapping[int, Sequence[Entry]]) -> None:
        """Whether the entries that users send are counted without a gap."""
        folded = {
            frame.what.epoch
            for frame in self._session.frames.values()
            if isinstance(frame.what, OpenLine) and frame.what.folds
        }
        next_one = 0
        for epoch, entries in sorted(by_epoch.items()):
            numbers = sorted({entry.step.sequence for entry in entries if not entry.is_replay})
            if not numbers:
                continue
            if epoch in folded:
                next_one = numbers[0]
            before = [min(next_one, numbers[0]) - 1, *numbers]
            gaps = [(a + 1, b) for a, b in itertools.pairwise(before) if b > a + 1]
            if gaps:
                num_missing = sum(stop - start for start, stop in gaps)
                text = f"{num_missing} steps of epoch {epoch}, of which {gaps[0][0]} is the first, are in no log"
                self._add(Kind.SKIPPED, text)
            next_one = max(next_one, numbers[-1] + 1)

    def _check_shares(self) -> None:
        for (peer, layer), columns in sorted(self._columns.items()):
            hidden = self._hidden
            own = max((len(plan.own_columns(peer, layer)) for plan in self._plans.values()), default=0)
            sent = len(columns)
            if sent == hidden:
                self._add(Kind.WHOLE, f"{short(peer)} was sent whole states after layer {layer}, as its plan says")
            elif sent > own:
                text = f"{short(peer)} was sent {sent} columns of states after layer {layer}, and {own} are its own"
                self._add(Kind.NOT_OWN, text)
        for (peer, _, layer, *_), columns in sorted(self._foreign.items()):
            kind = Kind.WHOLE if len(columns) == self._hidden else Kind.NOT_OWN
            text = f"{short(peer)} may know {len(columns)} of {self._hidden} columns of a state at layer {layer}"
            self._add(kind, text, *columns.frames)

    @property
    def _hidden(self) -> int:
        return next(iter(self._plans.values())).dims.hidden

    def _view(self) -> SessionView:
        plan = self._plans[max(self._plans)]
        entries = sorted(
            self._entries.values(), key=lambda each: (each.step.epoch, each.step.sequence, not each.is_replay)
        )
        ordinary = Counter(entry.status for entry in entries if not entry.is_replay)
        peers = dict.fromkeys(peer for each in self._plans.values() for stage in each.stages for peer in stage.peers)
        strangers = dict.fromkeys(peer for peer, *_ in self._foreign if peer not in peers)
        return SessionView(
            session=self._session.name,
            user=plan.user,
            model_id=plan.seen.model_id,
            numerics=plan.seen.numerics,
            hidden=self._hidden,
            num_layers=plan.num_layers,
            epochs=tuple(sorted(self._plans)),
            nodes=tuple(map(self._share_of, (*peers, *strangers))),
            num_closed=ordinary[Status.CLOSED],
            num_steps=ordinary[Status.CLOSED] + ordinary[Status.OPEN],
            num_given_up=ordinary[Status.GIVEN_UP],
            num_abandoned=ordinary[Status.ABANDONED],
            num_replays=sum(entry.is_replay for entry in entries),
            bands=tuple(self._bands()),
            steps=tuple(self._step_view(entry) for entry in entries),
        )

    def _share_of(self, peer: str) -> NodeShare:
        places = tuple(_places(peer, self._plans.values()))
        sent = {layer: len(columns) for (who, layer), columns in self._columns.items() if who == peer}
        for (who, _, layer, *_), columns in self._foreign.items():
            if who == peer:
                sent[layer] = max(sent.get(layer, 0), len(columns))
        after_layer = max(sent, key=lambda layer: (sent[layer], -layer), default=None)
        own = max((place.stop_column - place.first_column for place in places), default=0)
        known: Counter[Exchange] = Counter()
        for exchange, _, inputs in self._contributed.get(peer, ()):
            known[exchange] += inputs
        return NodeShare(
            peer=peer,
            places=places,
            own_fraction=own / self._hidden,
            largest_fraction=0.0 if after_layer is None else sent[after_layer] / self._hidden,
            after_layer=after_layer,
            num_states=self._totals[peer, "states"],
            state_bytes=self._totals[peer, "state_bytes"],
            num_partials=self._totals[peer, "partials"],
            partials_bytes=self._totals[peer, "partials_bytes"],
            invertible_fraction=max((self._invertible(peer, each, known[each]) for each in known), default=0.0),
            has_log=peer in self._parties,
            is_member=any(stage.is_group and peer in stage.peers for p in self._plans.values() for stage in p.stages),
            released="" if self._grants is None else self._grants.released.get(peer, ""),
        )

    def _invertible(self, peer: str, exchange: Exchange, from_others: int) -> float:
        """What part of the input of a linear a member can work out, or has."""
        plan, stage = next(
            (plan, stage) for plan in self._plans.values() if (stage := plan.stage_of(peer)) and stage.is_group
        )
        whole = sum(plan.inputs_of(stage, exchange, each) for each in stage.peers)
        return min(1.0, (from_others + plan.inputs_of(stage, exchange, peer)) / whole)

    def _bands(self) -> Iterable[Band]:
        sent: set[tuple[int, int, str, str]] = set()
        for entry in self._entries.values():
            for boundary, parts in entry.parts.items():
                sent |= {(entry.step.epoch, boundary, *way) for way in parts}
        for epoch, plan in self._plans.items():
            for way in (way for ways in plan.ways_into[:-1] for way in ways):
                if (epoch, way.boundary, way.sender, way.receiver) in sent:
                    layer = plan.stages[way.boundary].start
                    yield Band(epoch, way.receiver, layer, way.columns.start, way.columns.stop, How.SENT)
        for epoch, peer, layer in sorted(self._made):
            own = self._plans[epoch].own_columns(peer, layer)
            stage = self._plans[epoch].stage_of(peer)
            if stage is not None:
                own = stage.columns_of(peer)
            yield Band(epoch, peer, layer, own.start, own.stop, How.MADE)
        for (peer, epoch, layer, *_), columns in sorted(self._foreign.items()):
            own = self._plans[epoch].own_columns(peer, layer)
            for start, stop in columns.without(own):
                yield Band(epoch, peer, layer, start, stop, How.FOREIGN)

    def _step_view(self, entry: Entry) -> StepView:
        fractions = {peer: columns / self._hidden for peer, columns in entry.fractions.items()}
        nodes = range(entry.step.first, entry.step.first + entry.step.nodes)
        for (peer, epoch, _, of, number), columns in self._foreign.items():
            is_of_this = number in nodes if of == "node" else number == entry.step.sequence
            if epoch == entry.step.epoch and is_of_this:
                fractions[peer] = max(fractions.get(peer, 0.0), len(columns) / self._hidden)
        rows = next((frame.what.rows for parts in entry.parts.values() for frame in parts.values()
                     if isinstance(frame.what, StepLine)), entry.step.rows)  # fmt: skip
        return StepView(entry.step.epoch, entry.step.sequence, rows, entry.status, entry.is_replay, fractions)

    # findings

    def _add(self, kind: Kind, what: str, *frames: Frame) -> None:
        records = (record for frame in frames for record in frame.records)
        self._findings.add(kind, self._session.name, what, records)

    def _add_once(self, kind: Kind, what: str, frame: Frame) -> None:
        if not any(found.kind is kind and found.what == what for found in self._findings.told):
            self._add(kind, what, frame)

    def _add_width(self, frame: Frame, width: int, wanted: int, of_what: str) -> None:
        kind = Kind.OVERSENT if width > wanted else Kind.SHAPE
        self._add(kind, f"{told(frame)}: {width} {of_what} where it gets {wanted}", frame)


def _places(peer: str, plans: Iterable[RoutePlan]) -> Iterable[Place]:
    for plan in plans:
        for stage in plan.stages:
            if peer in stage.peers:
                own = stage.columns_of(peer)
                member = stage.peers.index(peer)
                yield Place(plan.epoch, stage.start, stage.stop, member, len(stage.peers), own.start, own.stop)
