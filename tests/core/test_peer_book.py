"""Known peers: who gets in, who stays, what is tried first, and what a damaged file does."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from random import Random

import pytest

from fusion_node.types import PeerId, UnixS
from p2p.identity import Identity
from p2p.peer_book import (
    FORGET_AFTER_S,
    FORGET_FAILURES,
    KEPT_PEERS,
    MAX_PEERS,
    SURE_FOR_S,
    KnownPeer,
    PeerBook,
    load,
    path_of,
    save,
)

NOW = UnixS(1_800_000_000.0)
PEERS = [Identity.from_seed(number.to_bytes(32, "big")).peer_id for number in range(40)]


def later(seconds: float) -> UnixS:
    return UnixS(NOW + seconds)


def address(number: int, host: str | None = None) -> str:
    return f"/ip4/{host or f'{20 + number}.7.1.2'}/tcp/4600/p2p/{PEERS[number]}"


def book_of(*numbers: int) -> PeerBook:
    book = PeerBook()
    for number in numbers:
        book.met(PEERS[number], [address(number)], now=NOW)
    return book


def peers(entries: list[KnownPeer]) -> set[str]:
    return {entry.peer for entry in entries}


def test_book_is_found_again_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path = path_of(tmp_path / "home", "public")
    book = book_of(0, 1)
    book.met(PEERS[0], [address(0), address(0, "2.2.2.2")], now=later(5))
    save(book, path, now=NOW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    found = load(path, now=later(60))
    assert found.get(PEERS[0]) == KnownPeer(PEERS[0], (address(0), address(0, "2.2.2.2")), NOW + 5, 2, 0)
    assert peers(found.entries()) == {PEERS[0], PEERS[1]}
    assert not found.is_changed
    assert path_of(tmp_path, "0123456789abcdef") != path_of(tmp_path, "public")


def test_loopback_is_never_kept() -> None:
    book = PeerBook()
    book.met(PEERS[0], [address(0, "127.0.0.1")], now=NOW)
    assert book.num_peers == 0
    book.met(PEERS[0], [address(0, "127.0.0.1"), address(0), f"/ip6/::1/tcp/1/p2p/{PEERS[0]}"], now=NOW)
    assert [entry.addresses for entry in book.entries()] == [(address(0),)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"[]",
        b'{"version": 2, "peers": []}',
        b'{"version": 1, "peers": [{"peer": "x"}]}',
        b'{"version": 1, "peers": [' + b" " * 3_000_000 + b"]}",
    ],
)
def test_damaged_file_is_set_aside_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(tmp_path, "public")
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        book = load(path, now=NOW)
    assert book.num_peers == 0
    assert str(path) in caplog.text
    assert path.with_name("peers-public.json.unreadable").read_bytes() == content
    book.met(PEERS[0], [address(0)], now=NOW)
    save(book, path, now=NOW)
    assert load(path, now=NOW).num_peers == 1


def test_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    path = path_of(tmp_path / "file", "public")
    with caplog.at_level(logging.WARNING):
        save(book_of(0), path, now=NOW)
        assert load(path, now=NOW).num_peers == 0
    assert str(path) in caplog.text


def test_two_processes_that_write_add_up(tmp_path: Path) -> None:
    path = path_of(tmp_path, "public")
    ours, theirs = book_of(0, 2), book_of(1)
    theirs.met(PEERS[2], [address(2, "9.9.9.9")], now=later(50))
    save(ours, path, now=NOW)
    save(theirs, path, now=NOW)
    save(ours, path, now=NOW)
    found = load(path, now=NOW)
    assert peers(found.entries()) == {PEERS[0], PEERS[1], PEERS[2]}
    newest = found.get(PEERS[2])
    assert newest is not None
    assert newest.addresses == (address(2, "9.9.9.9"),)


def test_copy_for_the_writer_knows_what_was_dropped(tmp_path: Path) -> None:
    path = path_of(tmp_path, "public")
    everybody = range(KEPT_PEERS + 1)
    save(book_of(*everybody), path, now=NOW)
    book = load(path, now=later(2 * SURE_FOR_S))
    for _ in range(FORGET_FAILURES):
        book.failed(PEERS[0], now=later(2 * SURE_FOR_S))
    save(book.copy(), path, now=later(2 * SURE_FOR_S))
    assert peers(load(path, now=later(2 * SURE_FOR_S)).entries()) == {PEERS[number] for number in everybody[1:]}


def test_peer_that_fails_is_dropped_only_when_it_has_been_away_long() -> None:
    book = book_of(*range(KEPT_PEERS + 1))
    for _ in range(3 * FORGET_FAILURES):
        book.failed(PEERS[0], now=later(SURE_FOR_S / 2))
    assert book.get(PEERS[0]) is not None
    book.failed(PEERS[0], now=later(SURE_FOR_S + 1))
    assert book.get(PEERS[0]) is None
    book.failed(PEERS[0], now=NOW)
    assert book.num_peers == KEPT_PEERS


def test_last_peers_are_kept_however_often_they_fail(tmp_path: Path) -> None:
    """A book that has failed altogether tells of a line that was down, and is all that there is."""
    book = book_of(*range(KEPT_PEERS + 5))
    for _ in range(2 * FORGET_FAILURES):
        for peer in PEERS[: KEPT_PEERS + 5]:
            book.failed(peer, now=later(2 * SURE_FOR_S))
    assert book.num_peers == KEPT_PEERS
    save(book, path_of(tmp_path, "public"), now=later(2 * SURE_FOR_S))
    found = load(path_of(tmp_path, "public"), now=later(2 * SURE_FOR_S))
    assert peers(found.entries()) == peers(book.entries())
    found.expire(now=later(FORGET_AFTER_S + 1))
    assert found.num_peers == 0


def test_peer_that_was_not_met_for_weeks_is_forgotten_and_so_is_one_dated_ahead() -> None:
    book = book_of(0)
    book.met(PEERS[1], [address(1)], now=later(FORGET_AFTER_S))
    book.expire(now=later(FORGET_AFTER_S + 1))
    assert peers(book.entries()) == {PEERS[1]}
    book.expire(now=NOW)
    assert book.num_peers == 0


def test_full_book_forgets_who_fails_first_and_then_the_oldest() -> None:
    many = [f"{number:052d}" for number in range(MAX_PEERS)]
    book = PeerBook(KnownPeer(peer, (f"/ip4/1.2.3.4/tcp/1/p2p/{peer}",), NOW + n) for n, peer in enumerate(many))
    book.failed(PeerId(many[7]), now=NOW)
    book.met(PEERS[0], [address(0)], now=later(MAX_PEERS))
    book.met(PEERS[1], [address(1)], now=later(MAX_PEERS))
    assert book.num_peers == MAX_PEERS
    assert set(many) - peers(book.entries()) == {many[7], many[0]}


def test_several_networks_are_tried_before_one_network_twice() -> None:
    book = PeerBook()
    for number in range(20):
        book.met(PEERS[number], [address(number, f"52.1.{number}.9")], now=NOW)
    for number in (30, 31, 32):
        book.met(PEERS[number], [address(number)], now=NOW)
    for seed in range(5):
        chosen = book.choose(4, Random(seed))
        assert {PEERS[30], PEERS[31], PEERS[32]} < peers(chosen)
        assert len({entry.neighbourhood for entry in chosen}) == 4


def test_who_fails_is_tried_last_and_who_is_excluded_never() -> None:
    book = book_of(0, 1, 2)
    book.failed(PEERS[0], now=NOW)
    assert [entry.peer for entry in book.choose(3, Random(0))][-1] == PEERS[0]
    assert peers(book.choose(9, Random(0), without=[PEERS[1]])) == {PEERS[0], PEERS[2]}


def test_file_can_be_read_by_people(tmp_path: Path) -> None:
    path = path_of(tmp_path, "public")
    save(book_of(0), path, now=NOW)
    assert json.loads(path.read_text())["peers"][0]["addresses"] == [address(0)]
