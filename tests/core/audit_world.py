"""Records as honest parties would make them: answers that are played on paper, frame by frame, at both ends."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fusion_node.audit_records import (
    MASKED,
    PLAIN,
    VERSION,
    AnyEvent,
    AnyLine,
    EndLine,
    GoneLine,
    LogLine,
    OpenLine,
    OrderLine,
    PartialsLine,
    PeerLine,
    PlanSeen,
    ResultLine,
    SaidLine,
    SessionLine,
    StageSeen,
    StepLine,
    Tensor,
    encode_line,
    name_of,
)
from fusion_node.grants import Grant
from fusion_node.slices import Dims, Exchange, exchange_width, exchanges, masked_width, overlap, split
from p2p.grants import sign_grant
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION
from verification.audit_file import Run

MODEL = "ab" * 32
USER = "user"
DENSE = Dims(hidden=96, heads=6, kv_heads=3, head_dim=8, channels=96)
EXPERTS = Dims(hidden=96, heads=6, kv_heads=3, head_dim=8, channels=96, num_experts=4, experts_per_row=2)


def group(start: int, stop: int, peers: str, weights: Sequence[int] = ()) -> StageSeen:
    """A stage of the peers that are named with one letter each; one of them serves it alone."""
    if len(peers) == 1:
        return StageSeen(start, stop, (peers,))
    return StageSeen(start, stop, tuple(peers), tuple(weights) or (1,) * len(peers))


@functools.cache
def identity_of(name: str) -> Identity:
    """Who signs for a peer of that name."""
    return Identity.from_seed(hashlib.blake2b(name.encode(), digest_size=32).digest())


@dataclass
class World:
    """One session of one user, and the logs of all who have part in it."""

    stages: tuple[StageSeen, ...]
    dims: Dims = DENSE
    unit_rows: int = 256
    session: bytes = bytes(16)
    masks: bool = False
    runs: dict[str, Run] = field(default_factory=dict, repr=False)
    epoch: int = 0
    next_node: int = 1
    next_sequence: int = 0

    def __post_init__(self) -> None:
        self.open()

    # what happens

    def open(self, stages: Sequence[StageSeen] | None = None, **how: bool) -> None:
        """The user sends the plan of the present epoch to all that it names."""
        self.stages = tuple(stages or self.stages)
        plan = PlanSeen(USER, MODEL, "fp32", self.stages, masks=self.masks)
        digest = hashlib.blake2b(repr((plan, self.epoch)).encode(), digest_size=16).hexdigest()
        for index, stage in enumerate(self.stages):
            for member, peer in enumerate(stage.peers):
                line = OpenLine(0, 0, stage=index, member=member, digest=digest, plan=plan, **how)
                self.carry(USER, peer, line)
                self.carry(peer, USER, SaidLine(0, 0, what="opened"))

    def repair(self, stages: Sequence[StageSeen], **how: bool) -> None:
        """A new plan is adopted."""
        self.epoch += 1
        self.open(stages, resumes=True, **how)

    def steps(self, *row_counts: int) -> None:
        """Steps that go all the way, each of so many rows of which the last is wanted."""
        for rows in row_counts:
            self.step(rows)

    def step(self, rows: int, *, returns: bool = True, stop_behind: int | None = None) -> None:
        """One entry. It gets lost behind a stage, if told so, or on the way back."""
        sequence, first = self.next_sequence, self.next_node
        self.next_sequence, self.next_node = sequence + 1, first + rows
        last = len(self.stages) - 1 if stop_behind is None else stop_behind
        self.pass_through(sequence, first, rows, last=last, wanted=1)
        if returns and stop_behind is None:
            self.answer(sequence)

    def pass_through(
        self, sequence: int, first: int, rows: int, *, last: int, begin: int = 0, wanted: int = 0, covers: int = 1,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        """Steps and exchanges of the stages from ``begin`` to ``last``."""
        for index in range(begin, last + 1):
            for sender, has in self.holders(index - 1):
                for receiver, takes in self.holders(index):
                    width = len(overlap(has, takes))
                    if width:
                        line = StepLine(
                            0, 0, rows=rows, width=width, sequence=sequence, first=first, nodes=rows, wanted=wanted,
                            covers=covers, stop=stop,
                        )  # fmt: skip
                        self.carry(sender, receiver, line)
            self.exchange(self.stages[index], first, rows)

    def exchange(self, stage: StageSeen, first: int, rows: int) -> None:
        """All contributions within a group; none within one node."""
        if len(stage.peers) == 1:
            return
        bounds = dict(zip(stage.peers, split(self.dims, stage.weights), strict=True))
        for layer in range(stage.start, stage.stop):
            for exchange in exchanges(self.dims):
                for sender in stage.peers:
                    for receiver in stage.peers:
                        if sender != receiver:
                            widths = masked_width if self.masks else exchange_width
                            width = widths(self.dims, bounds[receiver], exchange)
                            self.contribute(sender, receiver, layer, exchange, first, rows, width)

    def contribute(
        self, sender: str, receiver: str, layer: int, exchange: Exchange, first: int, rows: int, width: int
    ) -> None:
        for start in range(0, rows, self.unit_rows):
            unit = min(self.unit_rows, rows - start)
            line = PartialsLine(
                0, 0, rows=unit, width=width, layer=layer, exchange=exchange.name.lower(), node=first + start
            )
            self.carry(sender, receiver, line)

    def answer(self, sequence: int, rows: int = 1) -> None:
        for peer, columns in self.holders(len(self.stages) - 1):
            self.carry(peer, USER, ResultLine(0, 0, rows=rows, width=len(columns), sequence=sequence))

    def replay(self, stage: int, sequence: int, covers: int, rows: int) -> None:
        """The stage before hands on its first rows once more, as ordered, for one that has none."""
        for peer, _ in self.holders(stage - 1):
            line = OrderLine(0, 0, sequence=sequence, covers=covers, first=0, rows=rows, stop=stage)
            self.carry(USER, peer, line)
        self.pass_through(sequence, 1, rows, begin=stage, last=stage, covers=covers, stop=stage)
        for peer, _ in self.holders(stage):
            self.carry(peer, USER, SaidLine(0, 0, what="replayed"))

    def close(self) -> World:
        """The user ends the session, and all their processes."""
        for peer in dict.fromkeys(peer for stage in self.stages for peer in stage.peers):
            self.carry(USER, peer, SaidLine(0, 0, what="close"))
            self.carry(peer, USER, SaidLine(0, 0, what="closed"))
        for run in self.runs.values():
            if not run.is_ended:
                self._write(run, EndLine(0, 0))
                run.is_ended = True
        return self

    def kill(self, peer: str) -> None:
        """A process ends without a word: the others lose their connections with it."""
        for other, run in self.runs.items():
            if other != peer:
                self._write(run, GoneLine(0, 0, to=self._number(run, peer)))

    # how it is recorded

    def holders(self, stage: int) -> list[tuple[str, range]]:
        """Who has which columns behind so many stages less one; -1: the user."""
        if stage < 0:
            return [(USER, range(self.dims.hidden))]
        seen = self.stages[stage]
        if len(seen.peers) == 1:
            return [(seen.peers[0], range(self.dims.hidden))]
        return [(p, b.columns) for p, b in zip(seen.peers, split(self.dims, seen.weights), strict=True)]

    def carry(self, sender: str, receiver: str, line: AnyEvent, *, sent: bool = True, received: bool = True) -> None:
        """One frame, recorded at both ends."""
        changes: dict[str, Any] = {"session": 1, "epoch": self.epoch}
        if isinstance(line, Tensor):
            content = repr((sender, receiver, line)).encode()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            is_masked = self.masks and isinstance(line, PartialsLine)
            num_bytes = (8 if is_masked else 4) * line.rows * line.width
            changes |= {"dtype": MASKED if is_masked else PLAIN, "bytes": num_bytes, "digest": digest}
        line = msgspec.structs.replace(line, **changes)
        if sent:
            run = self.run(sender)
            self._write(run, msgspec.structs.replace(line, to=self._number(run, receiver)))
        if received:
            run = self.run(receiver)
            self._write(run, msgspec.structs.replace(line, from_=self._number(run, sender)))

    def _granted(self, event: AnyEvent) -> AnyEvent:
        """With a grant, where a member of a group is opened."""
        if not isinstance(event, OpenLine) or event.plan is None:
            return event
        user, stage = identity_of(event.plan.user), event.plan.stages[event.stage]
        stages = tuple(
            msgspec.structs.replace(each, peers=tuple(identity_of(peer).peer_id for peer in each.peers))
            for each in event.plan.stages
        )
        plan = msgspec.structs.replace(event.plan, user=user.peer_id, stages=stages)
        if len(stage.peers) == 1:
            return msgspec.structs.replace(event, plan=plan)
        node = stages[event.stage].peers[event.member]
        key = hashlib.blake2b(f"{event.epoch} {node}".encode(), digest_size=16).digest()
        grant = Grant(
            PROTOCOL_VERSION, key, user.peer_id, node, name_of(self.session), MODEL, stage.start, stage.stop,
            event.member, stage.weights, 0.0, 1800.0,
        )  # fmt: skip
        return msgspec.structs.replace(event, plan=plan, grant=sign_grant(grant, user).hex())

    def run(self, peer: str) -> Run:
        if peer not in self.runs:
            self.runs[peer] = Run(f"{peer}.log", peer, sessions={1: name_of(self.session)})
        return self.runs[peer]

    def _number(self, run: Run, peer: str) -> int:
        for number, known in run.peers.items():
            if known == peer:
                return number
        run.peers[len(run.peers) + 1] = peer
        return len(run.peers)

    def _write(self, run: Run, line: AnyEvent) -> None:
        run.events.append(msgspec.structs.replace(line, n=len(run.events) + 1))

    def write(self, folder: Path) -> list[Path]:
        """The logs as files, each named after its party; with ids of peers that sign, and the grants of members."""
        paths = []
        for peer, run in self.runs.items():
            head: list[AnyLine] = [LogLine(VERSION, identity_of(run.peer).peer_id, "test", 5.0)]
            head += [PeerLine(number, identity_of(name).peer_id) for number, name in run.peers.items()]
            head += [SessionLine(number, name) for number, name in run.sessions.items()]
            events = [
                msgspec.structs.replace(self._granted(event), n=number) for number, event in enumerate(run.events, 1)
            ]
            paths.append(folder / f"{peer}.log")
            paths[-1].write_bytes(b"".join(encode_line(line) + b"\n" for line in (*head, *events)))
        return paths

    def logs(self, without: Iterable[str] = ()) -> list[Run]:
        return [run for peer, run in self.runs.items() if peer not in without]
