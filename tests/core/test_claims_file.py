"""What was measured of nodes, between two processes: it is there again, bounded, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import structlog

from fusion_node.client.claims_file import KEPT_S, MAX_FILE_BYTES, MAX_NODES, load, path_of, save
from fusion_node.types import ModelId, PeerId, UnixS
from p2p.identity import Identity
from scheduler.claims import HALF_LIFE_S, Claim, ClaimBook, StageStep

ALICE, BOB = (Identity.from_seed(seed * 32).peer_id for seed in (b"a", b"b"))
CLAIM = (0.001, 0.002, 0.02)
MODEL = ModelId("ab" * 32)
NOW, UNIX_NOW = 500.0, UnixS(1_800_000_000.0)


def measured(*peers: PeerId, seconds_per_layer: float = 0.003, now: float = NOW) -> ClaimBook:
    book = ClaimBook()
    for peer in peers:
        step = StageStep(peer, 10, 10 * seconds_per_layer, 0.0)
        legs_s = 0.040
        for _ in range(3):
            round_s = 10 * seconds_per_layer + legs_s + 0.004
            book.observe_round([step], 1, round_s=round_s, legs_s=legs_s, now=now)
    return book


def loaded(path: Path, *, now: float = 7.0, unix_now: UnixS = UNIX_NOW) -> ClaimBook:
    book = ClaimBook()
    load(book, path, now=now, unix_now=unix_now)
    return book


def rows_1_s(book: ClaimBook, peer: PeerId, now: float = 7.0) -> float:
    return book.believed(Claim(peer, CLAIM), now).speed.rows_1_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return path_of(tmp_path, MODEL, "f16r32+kv8")


def test_another_process_believes_what_this_one_has_measured_and_forgets_it_as_fast(path: Path) -> None:
    book = measured(ALICE)
    save(book, path, now=NOW, unix_now=UNIX_NOW)
    other = loaded(path)
    belief = other.believed(Claim(ALICE, CLAIM), 7.0)
    assert belief == book.believed(Claim(ALICE, CLAIM), NOW)
    assert belief.is_measured
    assert other.message_excess_s(7.0) == pytest.approx(book.message_excess_s(NOW)) == pytest.approx(0.002)
    later = loaded(path, unix_now=UnixS(UNIX_NOW + HALF_LIFE_S))
    assert rows_1_s(later, ALICE) == pytest.approx(0.002)
    assert later.message_excess_s(7.0) == pytest.approx(0.001)
    assert not other.believed(Claim(BOB, CLAIM), 7.0).is_measured


def test_who_writes_second_keeps_what_the_other_has_measured_later(path: Path) -> None:
    save(measured(ALICE, BOB, seconds_per_layer=0.003), path, now=NOW, unix_now=UNIX_NOW)
    save(measured(ALICE, seconds_per_layer=0.009, now=NOW - 60.0), path, now=NOW, unix_now=UNIX_NOW)
    assert rows_1_s(loaded(path), ALICE) == pytest.approx(0.003)
    save(measured(ALICE, seconds_per_layer=0.009, now=NOW + 1.0), path, now=NOW + 1.0, unix_now=UnixS(UNIX_NOW + 1.0))
    book = loaded(path, unix_now=UnixS(UNIX_NOW + 1.0))
    assert rows_1_s(book, ALICE) == pytest.approx(0.009)
    assert rows_1_s(book, BOB) == pytest.approx(0.003, rel=1e-3)


def test_what_is_old_or_dated_ahead_of_the_clock_is_dropped(path: Path) -> None:
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    for unix_now in (UNIX_NOW + KEPT_S + 1.0, UNIX_NOW - 100.0):
        book = loaded(path, unix_now=UnixS(unix_now))
        assert not book.believed(Claim(ALICE, CLAIM), 7.0).is_measured
        assert book.message_excess_s(7.0) == 0.0


def test_only_so_many_nodes_are_kept_the_newest_ones(path: Path) -> None:
    book = ClaimBook()
    peers = [PeerId(f"12D3Koo{number:04}" + "x" * 41) for number in range(MAX_NODES + 5)]
    for number, peer in enumerate(peers):
        book.observe_step(peer, 10, 1, 0.03, 0.0, 0.0, NOW + number)
    save(book, path, now=NOW + 2000.0, unix_now=UNIX_NOW)
    kept = {each.peer for each in loaded(path).measurements(7.0)}
    assert kept == set(peers[5:])
    assert path.stat().st_size < MAX_FILE_BYTES


def test_files_of_models_that_nobody_uses_any_more_are_removed(path: Path) -> None:
    old = path.with_name("cd.json")
    path.parent.mkdir()
    old.write_bytes(b"{}")
    os.utime(old, (UNIX_NOW - KEPT_S - 1.0, UNIX_NOW - KEPT_S - 1.0))
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b'{"version":2,"nodes":[]}',
        b"{" * 100,
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
def test_file_that_cannot_be_understood_is_set_aside_with_a_warning(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with structlog.testing.capture_logs() as logs:
        assert loaded(path).measurements(7.0) == []
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert not path.exists()
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    assert rows_1_s(loaded(path), ALICE) == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("num_layers", "compute_s", "round_s", "legs_s"),
    [
        (8, 0.02, 50.0, 200.0),  # 256 rows over a line that is known as slow
        (1, 100.0, 130.0, 1.0),
        (1, 70.0, 300.0, 1.0),
        (1, 0.02, 1.0, float("nan")),
        (10, 0.02, 2500.0, 0.01),  # the program was stopped while a token was on its way
    ],
)
def test_whatever_a_round_took_what_is_kept_of_it_can_be_read(
    path: Path, num_layers: int, compute_s: float, round_s: float, legs_s: float
) -> None:
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    book = ClaimBook()
    for _ in range(3):
        for rows in (1, 256):
            step = StageStep(BOB, num_layers, compute_s, 0.0)
            book.observe_round([step], rows, round_s=round_s, legs_s=legs_s, now=NOW + 1.0)
    save(book, path, now=NOW + 1.0, unix_now=UnixS(UNIX_NOW + 1.0))

    with structlog.testing.capture_logs() as logs:
        kept = loaded(path, unix_now=UnixS(UNIX_NOW + 1.0))
    assert logs == []
    assert {each.peer for each in kept.measurements(7.0)} == {ALICE, BOB}


def test_what_could_not_be_read_again_does_not_replace_the_file(path: Path) -> None:
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    with structlog.testing.capture_logs() as logs:
        save(measured(PeerId("no peer id")), path, now=NOW, unix_now=UNIX_NOW)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert rows_1_s(loaded(path), ALICE) == pytest.approx(0.003)
    assert list(path.parent.iterdir()) == [path]


def test_absurd_numbers_in_a_file_are_refused(path: Path) -> None:
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    document = msgspec.json.decode(path.read_bytes())
    for absurd in (-1.0, 1e300, None):
        document["nodes"][0]["samples"][0][0][1] = absurd
        path.write_bytes(msgspec.json.encode(document))
        assert loaded(path).measurements(7.0) == []


def test_folder_that_cannot_be_written_is_told_and_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "claims").write_bytes(b"a file where the folder should be")
    with structlog.testing.capture_logs() as logs:
        save(measured(ALICE), path_of(tmp_path, MODEL, "fp32"), now=NOW, unix_now=UNIX_NOW)
    assert [entry["log_level"] for entry in logs] == ["warning", "warning"]  # it cannot be read either


def test_file_is_for_its_owner_only(path: Path) -> None:
    save(measured(ALICE), path, now=NOW, unix_now=UNIX_NOW)
    assert path.stat().st_mode & 0o777 == 0o600
