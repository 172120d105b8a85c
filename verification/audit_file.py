"""Reads audit logs as they come from their parties: bounded, checked line by line, numbers replaced by names.

A file holds one or more runs of one process. What a run lacks (its end, a number in between) is noted and left to
verification.audit_core to judge; what is no log at all is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from fusion_node.audit_records import (
    MAX_LINE_BYTES,
    VERSION,
    AnyEvent,
    EndLine,
    FullLine,
    LogLine,
    PeerLine,
    SessionLine,
    decode_line,
)

MAX_EVENTS = 10_000_000
"""Of one file: more than one run may write (p2p.audit_log), and 4 GB of memory."""


class NoAuditLog(ValueError):
    """A file is no audit log, or one of another version. The message says where."""


@dataclass(slots=True)
class Run:
    """What one process says that it has sent and was sent, from its start to its end.

    Attributes:
        source: where it was read, for people.
        peers, sessions: what the numbers in the events stand for.
        events: by their numbers.
        is_ended: it says itself that nothing is missing at its end. A process that was killed, or still runs, does not.
        is_full: it was longer than it may be, and ends before its process did.
        missing: numbers of events that are not there, the first few of them.
    """

    source: str
    peer: str
    software: str = ""
    started_at: float = 0.0
    peers: dict[int, str] = field(default_factory=dict)
    sessions: dict[int, str] = field(default_factory=dict)
    events: list[AnyEvent] = field(default_factory=list)
    is_ended: bool = False
    is_full: bool = False
    missing: tuple[int, ...] = ()


def read_runs(source: str, lines: Iterable[bytes]) -> list[Run]:
    """The runs of one file, given line by line with their ends.

    A last line that was cut off, as by a full disk, is left out.

    Raises:
        NoAuditLog: a line is none of a log, or of one that this program can read.
    """
    runs: list[Run] = []
    num_events = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        if len(line) > MAX_LINE_BYTES:
            raise NoAuditLog(f"{source}, line {number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            decoded = decode_line(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NoAuditLog(f"{source}, line {number}: no line of an audit log") from error
        if isinstance(decoded, LogLine):
            if decoded.version != VERSION:
                raise NoAuditLog(f"{source}, line {number}: a log of version {decoded.version}, which is not {VERSION}")
            runs.append(Run(source, decoded.peer, decoded.software, decoded.started_at))
            continue
        if not runs:
            raise NoAuditLog(f"{source} does not begin like an audit log")
        run = runs[-1]
        if isinstance(decoded, PeerLine):
            run.peers[decoded.number] = decoded.peer
        elif isinstance(decoded, SessionLine):
            run.sessions[decoded.number] = decoded.name
        else:
            _check_numbers(run, decoded, source, number)
            run.events.append(decoded)
            num_events += 1
            if num_events > MAX_EVENTS:
                raise NoAuditLog(f"{source} has more than {MAX_EVENTS} records")
    if not runs:
        raise NoAuditLog(f"{source} is empty")
    for run in runs:
        _close(run)
    return runs


def _check_numbers(run: Run, event: AnyEvent, source: str, number: int) -> None:
    for peer in (event.to, event.from_):
        if peer and peer not in run.peers:
            raise NoAuditLog(f"{source}, line {number}: a peer that was not introduced")
    if event.session and event.session not in run.sessions:
        raise NoAuditLog(f"{source}, line {number}: a session that was not introduced")


def _close(run: Run) -> None:
    """Puts the events in order: large tensors are recorded a little after their turn."""
    run.events.sort(key=lambda event: event.n)
    run.is_full = any(isinstance(event, FullLine) for event in run.events)
    run.is_ended = any(isinstance(event, EndLine) for event in run.events)
    missing, expected = list[int](), 1
    for event in run.events:
        if event.n > expected and len(missing) < 8:
            missing.append(expected)
        expected = event.n + 1
    run.missing = tuple(missing)
