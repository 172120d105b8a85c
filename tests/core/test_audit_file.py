"""Reading audit logs that come from others: whole, cut off, with gaps, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_node.audit_records import (
    MAX_LINE_BYTES,
    AnyLine,
    EndLine,
    FullLine,
    LogLine,
    PeerLine,
    SaidLine,
    SessionLine,
    encode_line,
)
from p2p.audit_log import AuditLog
from p2p.identity import Identity
from p2p.messages import CloseSession
from verification.audit_file import NoAuditLog, Run, read_runs

HEAD = LogLine(1, "peerA", "test", 5.0)
KNOWN = (HEAD, PeerLine(1, "peerB"), SessionLine(1, "00" * 8))


def said(n: int, *, to: int = 1, session: int = 1) -> SaidLine:
    return SaidLine(n, 0, to=to, session=session, what="close")


def read(*lines: AnyLine | bytes) -> list[Run]:
    return read_runs("log", [line if isinstance(line, bytes) else encode_line(line) + b"\n" for line in lines])


def test_what_a_process_writes_is_read(tmp_path: Path) -> None:
    us, them = Identity.generate().peer_id, Identity.generate().peer_id
    for _ in range(2):
        log = AuditLog(tmp_path / "log", us, software="test")
        log.sent(them, CloseSession(bytes(16), 3), b"")
        log.gone(them)
        log.close()
    with (tmp_path / "log").open("rb") as file:
        first, second = read_runs("log", file)
    assert (first.peer, first.software, first.is_ended, first.missing) == (us, "test", True, ())
    assert [event.n for event in second.events] == [1, 2, 3]
    event = first.events[0]
    assert (first.peers[event.to], event.epoch) == (them, 3)
    assert len(first.sessions[event.session]) == 16


def test_lines_that_come_after_their_turn_are_put_in_order_and_gaps_are_told() -> None:
    (run,) = read(*KNOWN, said(2), said(1), said(5), EndLine(6, 0))
    assert [event.n for event in run.events] == [1, 2, 5, 6]
    assert (run.missing, run.is_ended, run.is_full) == ((3,), True, False)


def test_a_log_without_its_end_and_a_full_one_are_told() -> None:
    (run,) = read(*KNOWN, said(1), FullLine(2, 0))
    assert (run.is_ended, run.is_full) == (False, True)


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    (run,) = read(*KNOWN, said(1), encode_line(said(2))[:-3])
    assert [event.n for event in run.events] == [1]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "is empty"),
        ([said(1)], "does not begin"),
        ([b"{}\n"], "no line"),
        ([b'{"is":"log"\n'], "no line"),
        ([b"\xff\n"], "no line"),
        ([b'{"is":"what"}\n'], "no line"),
        ([encode_line(HEAD)[:-1] + b',"more":1}\n'], "no line"),
        ([LogLine(2, "peerA", "", 5.0)], "version 2"),
        ([LogLine(1, "peer\x1b[31m", "", 5.0)], "no line"),
        ([HEAD, said(1, session=0)], "peer that was not introduced"),
        ([HEAD, PeerLine(1, "peerB"), said(1)], "session that was not introduced"),
        ([*KNOWN, SaidLine(1, 0, to=1, session=1, what="\x1b[2J")], "no line"),
        ([b"[" * 3000 + b"\n"], "no line"),
        ([b" " * MAX_LINE_BYTES + b"\n"], "longer"),
    ],
)
def test_what_is_no_log_is_refused_with_the_line(lines: list[AnyLine | bytes], why: str) -> None:
    with pytest.raises(NoAuditLog, match=why):
        read(*lines)
