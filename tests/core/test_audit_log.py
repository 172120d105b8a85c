"""The audit log: what is recorded of the frames of a connection, and what is not."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion_node.audit_records import MAX_LINE_BYTES, decode_line, digest_of, name_of
from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from p2p import audit_log
from p2p.audit_log import AuditLog
from p2p.compression import LARGE_BYTES
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.messages import (
    MAX_PAYLOAD_BYTES,
    ZSTD,
    AnyMessage,
    BandwidthProbe,
    CloseSession,
    OpenSession,
    Partials,
    PartialsEntry,
    Resend,
    StatusRequest,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    alias_of,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanMember, PlanStage, sign_plan
from p2p.tensor_wire import compress

SESSION = bytes(range(16))
ROWS = np.arange(12, dtype="<f4").tobytes()
US, THEM = Identity.generate(), Identity.generate()


def a_plan(*, epoch: int = 0) -> bytes:
    members = (PlanMember(US.peer_id, ()), PlanMember(THEM.peer_id, ()))
    stages = (PlanStage(US.peer_id, 0, 3, ("h:1",), (), members, (2, 1)), PlanStage(THEM.peer_id, 3, 5, ("h:2",)))
    now = time.time()
    plan = Plan(PROTOCOL_VERSION, US.peer_id, SESSION, epoch, "ab" * 32, "fp32", 64, now, now + 60, stages)
    return sign_plan(plan, US)


def a_step(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "session": SESSION,
        "epoch": 0,
        "sequence": 3,
        "first_node": 7,
        "parent": 6,
        "parents": (),
        "advance": 9,
        "want": (9,),
        "tensor": TensorMeta("f32", 3, 4),
        "timings": (),
    }
    return Step(**(fields | changes))


class Recording:
    """A log, and what it has written."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.log = AuditLog(path, US.peer_id, **options)

    def lines(self) -> list[dict[str, Any]]:
        data = self.path.read_bytes().splitlines()
        for line in data:
            decode_line(line)
        return [json.loads(line) for line in data]

    def of(self, message: AnyMessage, payload: bytes = b"") -> dict[str, Any]:
        """The line about a frame that is sent."""
        self.log.sent(THEM.peer_id, message, payload)
        return self.lines()[-1]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "log", clock=iter(range(1000)).__next__, now=lambda: 5.0, software="test 1")


def test_a_step_is_recorded_with_a_keyed_digest_and_no_value(recording: Recording) -> None:
    line = recording.of(a_step(), ROWS)
    assert line == {
        "is": "step", "n": 1, "ms": 1000, "to": 1, "session": 1, "sequence": 3, "first": 7, "nodes": 3, "wanted": 1,
        "rows": 3, "width": 4, "dtype": "f32", "bytes": 48, "digest": digest_of(ROWS, SESSION),
    }  # fmt: skip
    assert recording.lines()[:3] == [
        {"is": "log", "version": 1, "peer": US.peer_id, "software": "test 1", "started_at": 5.0},
        {"is": "peer", "number": 1, "peer": THEM.peer_id},
        {"is": "session", "number": 1, "name": name_of(SESSION)},
    ]
    written = recording.path.read_bytes()
    assert SESSION.hex().encode() not in written
    assert digest_of(ROWS, b"").encode() not in written


def test_a_file_is_readable_by_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        recording = Recording(tmp_path / "log")
        recording.of(CloseSession(SESSION, 0))
        recording.log.close()
        recording.log.close()
        recording.log.sent(THEM.peer_id, CloseSession(SESSION, 0), b"")  # too late
    assert stat.S_IMODE(recording.path.stat().st_mode) == 0o600
    assert [line["is"] for line in recording.lines()] == ["log", "peer", "session", "said", "end"] * 2


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        AuditLog(tmp_path / "nowhere" / "log", US.peer_id)


def test_trees_skipped_rows_and_replays_are_told_apart(recording: Recording) -> None:
    tree = recording.of(a_step(parents=(6, 6, 7), advance=0), ROWS)
    assert (tree["is_tree"], "live" in tree) == (True, False)
    skipping = recording.of(a_step(num_nodes=5, live=b"\x15", advance=11), ROWS)
    assert (skipping["nodes"], skipping["rows"], skipping["live"]) == (5, 3, "15")
    assert "is_tree" not in skipping
    replay = recording.of(a_step(covers=2, stop_stage=1, want=()), ROWS)
    assert (replay["covers"], replay["stop"], "wanted" in replay) == (2, 1, False)


def test_compressed_rows_have_the_digest_of_the_rows(recording: Recording) -> None:
    rows = np.zeros(1000, dtype="<f4").tobytes()
    stored = compress(rows, "f32", level=1)
    line = recording.of(a_step(tensor=TensorMeta("f32", 10, 100, ZSTD)), stored)
    assert (line["bytes"], line["digest"]) == (4000, digest_of(rows, SESSION))


def test_what_cannot_be_decompressed_has_no_digest(recording: Recording) -> None:
    line = recording.of(a_step(tensor=TensorMeta("f32", 10, 100, ZSTD)), b"nonsense")
    assert "digest" not in line


def test_results_taps_and_orders(recording: Recording) -> None:
    tensor = TensorMeta("f32", 3, 4)
    result = recording.of(StepResult(SESSION, 1, 3, (7, 8, 9), tensor, ()), ROWS)
    assert (result["is"], result["epoch"], result["sequence"], result["rows"]) == ("result", 1, 3, 3)
    taps = recording.of(StepTaps(SESSION, 1, 3, 2, (7, 8, 9), tensor), ROWS)
    assert (taps["is"], taps["layer"], taps["digest"]) == ("taps", 2, digest_of(ROWS, SESSION))
    order = recording.of(Resend(SESSION, 1, 3, 1, 6, 3, True, None))
    assert (order["is"], order["sequence"], order["first"], order["rows"]) == ("resend", 3, 6, 3)


def test_a_plan_is_recorded_as_who_serves_what(recording: Recording) -> None:
    plan = a_plan(epoch=2)
    line = recording.of(OpenSession(SESSION, 2, 1, plan, resumes=True, member=1))
    assert (line["is"], line["epoch"], line["stage"], line["member"], line["resumes"]) == ("open", 2, 1, 1, True)
    assert line["plan"] == {
        "user": US.peer_id,
        "model_id": "ab" * 32,
        "numerics": "fp32",
        "stages": [
            {"start": 0, "stop": 3, "peers": [US.peer_id, THEM.peer_id], "weights": [2, 1]},
            {"start": 3, "stop": 5, "peers": [THEM.peer_id]},
        ],
    }
    assert line["digest"] == digest_of(plan, SESSION)
    assert "plan" not in recording.of(OpenSession(SESSION, 3, 0, b"no plan"))


def test_no_more_sessions_and_peers_are_remembered_than_the_last_ones(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "MAX_SESSIONS", 2)
    monkeypatch.setattr(audit_log, "MAX_PEERS", 2)
    ids = [bytes([number]) * 16 for number in range(3)]
    peers = [Identity.generate().peer_id for _ in ids]
    for session, peer in [*zip(ids, peers, strict=True), (ids[2], peers[2]), (ids[0], peers[0])]:
        recording.log.sent(peer, a_step(session=session), ROWS)
    lines = recording.lines()
    introduced = [(line["number"], line["name"]) for line in lines if line["is"] == "session"]
    assert introduced == [(n, name_of(session)) for n, session in enumerate([*ids, ids[0]], start=1)]
    assert [(line["number"], line["peer"]) for line in lines if line["is"] == "peer"] == [
        *enumerate([*peers, peers[0]], start=1)
    ]
    assert [(line["session"], line["to"]) for line in lines if line["is"] == "step"] == [
        (n, n) for n in (1, 2, 3, 3, 4)
    ]


def test_the_longest_plan_fits_into_a_line(recording: Recording) -> None:
    peers = [PeerId(f"12D3KooW{number:044d}") for number in range(16)]
    stages = tuple(
        PlanStage(peers[0], n, n + 1, (), (), tuple(PlanMember(peer, ()) for peer in peers), (1000,) * 16)
        for n in range(40)
    )
    plan = Plan(PROTOCOL_VERSION, US.peer_id, SESSION, 0, "ab" * 32, "fp32", 64, 1.0, 2.0, stages)
    signed = sign_plan(plan, US)
    assert 36 * 1024 < len(signed) < 48 * 1024
    recording.of(OpenSession(SESSION, 0, 0, signed))
    assert max(map(len, recording.path.read_bytes().splitlines())) < MAX_LINE_BYTES


def test_partials_have_a_line_for_each_entry_in_the_session_that_its_alias_stands_for(recording: Recording) -> None:
    other = bytes(16)
    for session in (SESSION, other):
        recording.of(OpenSession(session, 4, 0, a_plan()))
    entries = (
        PartialsEntry(alias_of(SESSION, 4), 7, 2),
        PartialsEntry(alias_of(other, 4), 1, 1),
        PartialsEntry(5, 9, 1),
    )
    payload = np.arange(16, dtype="<f4").tobytes()
    recording.of(Partials(3, 4, entries), payload)
    first, second, third = recording.lines()[-3:]
    assert (first["layer"], first["exchange"], first["node"], first["rows"]) == (3, "down", 7, 2)
    assert (first["width"], first["bytes"], first["session"], first["epoch"]) == (4, 32, 1, 4)
    assert first["digest"] == digest_of(payload[:32], SESSION)
    assert (second["session"], second["digest"]) == (2, digest_of(payload[32:48], other))
    assert (third["alias"], "session" in third) == ("00000005", False)


def test_a_probe_that_holds_anything_is_recorded_as_such(recording: Recording) -> None:
    assert "zeros" not in recording.of(BandwidthProbe(1, 0, 2), bytes(100))
    assert recording.of(BandwidthProbe(1, 1, 2), bytes(99) + b"x")["zeros"] is False


def test_what_concerns_no_session_is_not_recorded(recording: Recording) -> None:
    recording.log.received(THEM.peer_id, StatusRequest(1), memoryview(b""))
    assert [line["is"] for line in recording.lines()] == ["log", "peer"]


def test_a_full_log_says_so_and_takes_no_more(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "log", max_bytes=600)
    for _ in range(10):
        recording.log.sent(THEM.peer_id, CloseSession(SESSION, 0), b"")
    recording.log.close()
    kinds = [line["is"] for line in recording.lines()]
    assert (kinds[-1], kinds.count("full"), "end" in kinds) == ("full", 1, False)
    assert recording.path.stat().st_size < 700


def test_large_tensors_are_hashed_elsewhere_and_keep_their_numbers(recording: Recording) -> None:
    rows = bytes(MAX_PAYLOAD_BYTES)
    assert len(rows) > LARGE_BYTES
    tensor = TensorMeta("f32", 8, MAX_PAYLOAD_BYTES // 32)
    recording.log.sent(THEM.peer_id, a_step(tensor=tensor), rows)
    recording.log.sent(THEM.peer_id, CloseSession(SESSION, 0), b"")
    recording.log.close()
    lines = {line["n"]: line for line in recording.lines() if "n" in line}
    assert [lines[n]["is"] for n in sorted(lines)] == ["step", "said", "end"]
    assert lines[1]["digest"] == digest_of(rows, SESSION)


@dataclass
class End:
    pool: LinkPool
    recording: Recording
    got: asyncio.Queue[AnyMessage]


@asynccontextmanager
async def two_ends(folder: Path) -> AsyncIterator[tuple[End, End]]:
    """Two pools with a connection, each with a log."""
    world, ends = MemoryWorld(), []
    for name, identity in (("us", US), ("them", THEM)):
        recording = Recording(folder / name)
        got: asyncio.Queue[AnyMessage] = asyncio.Queue()
        pool = LinkPool(
            MemoryNetwork(world, identity, name),
            identity.peer_id,
            on_frame=lambda peer, message, payload, got=got: got.put_nowait(message),  # type: ignore[misc]
            on_closed=lambda peer, error: None,
            recorder=recording.log,
        )
        ends.append(End(pool, recording, got))
    ours, theirs = ends
    address = await theirs.pool.listen("them:0")
    await ours.pool.connect(THEM.peer_id, [address])
    try:
        yield ours, theirs
    finally:
        for end in ends:
            await end.pool.aclose()
            end.recording.log.close()


async def test_a_connection_records_all_frames_on_both_sides(tmp_path: Path) -> None:
    async with two_ends(tmp_path) as (ours, theirs):
        ours.pool.send(THEM.peer_id, a_step(), ROWS)
        ours.pool.send(THEM.peer_id, CloseSession(SESSION, 0))
        for _ in range(2):
            await theirs.got.get()
    sent = [line for line in ours.recording.lines() if "n" in line]
    received = [line for line in theirs.recording.lines() if "n" in line]
    assert [line["is"] for line in sent] == [line["is"] for line in received] == ["step", "said", "gone", "end"]
    assert (sent[0]["to"], received[0]["from"]) == (1, 1)
    same = {"digest", "sequence", "first", "rows", "width"}
    assert {key: sent[0][key] for key in same} == {key: received[0][key] for key in same}
