"""Puzzle-priced identities: what a solution is worth, and that checking cannot be made a burden."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId, UnixS
from p2p import puzzle
from p2p.identity import Identity, public_key_of
from p2p.puzzle import NONCE_BYTES, PuzzleChecker, bits_of, check_bits, solution_for, solve
from p2p.record_exchange import RecordExchange
from p2p.records import PROTOCOL_VERSION, NodeRecord, RecordTable, Refusal, sign_record

NOW = UnixS(1_000_000.0)
IDENTITIES = [Identity.from_seed(bytes([index, 1]) * 16) for index in range(40)]


def record_of(identity: Identity, solution: bytes = b"", sequence: int = 1) -> NodeRecord:
    return NodeRecord(
        PROTOCOL_VERSION, identity.peer_id, sequence, NOW, NOW + 60, (), (), "cpu", 0, (), 0, "test", puzzle=solution
    )


def cheap(public_key: bytes, solution: bytes) -> int:
    """Instead of Argon2id: worth what its first byte says."""
    return solution[0]


def good(bits: int = 9) -> bytes:
    return bytes([bits]) + bytes(NONCE_BYTES - 1)


def test_known_answer() -> None:
    public_key = bytes(range(32))
    assert [bits_of(public_key, nonce.to_bytes(8, "little")) for nonce in (0, 1, 5)] == [0, 0, 1]
    assert solve(public_key, 6, first=0) == bytes.fromhex("9600000000000000")


def test_solution_is_worth_nothing_for_another_identity() -> None:
    bits = 7
    keys = [public_key_of(identity.peer_id) for identity in IDENTITIES[:12]]
    solution = solve(keys[0], bits, first=0)
    assert solution is not None
    assert bits_of(keys[0], solution) >= bits
    # Each of the others has it by chance once in 128.
    assert sum(bits_of(key, solution) >= bits for key in keys[1:]) <= 2


@pytest.mark.parametrize("solution", [b"", b"1234567", b"123456789", bytes(32)])
def test_solution_of_another_length_is_not_even_looked_at(solution: bytes) -> None:
    assert bits_of(bytes(32), solution) == 0
    checker = PuzzleChecker(1, evaluate=cheap)
    assert checker(record_of(IDENTITIES[0], solution), None, NOW) is Refusal.TOO_CHEAP
    assert checker.num_evaluated == 0


def test_solving_can_be_stopped() -> None:
    calls: list[int] = []
    assert solve(bytes(32), 60, first=0, should_stop=lambda: len(calls) > 3 or calls.append(1) is not None) is None


def test_bits_that_nobody_can_mean() -> None:
    assert check_bits(0) == 0
    for bits in (-1, 25):
        with pytest.raises(ConfigError):
            check_bits(bits)


async def test_solution_is_kept_beside_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, peer = tmp_path / "identity.key.puzzle", IDENTITIES[0].peer_id
    first = await solution_for(peer, 5, path)
    assert bits_of(public_key_of(peer), first) >= 5
    solved: list[int] = []
    monkeypatch.setattr(puzzle, "solve", lambda *_, **__: solved.append(1) or first)
    assert await solution_for(peer, 5, path) == first
    assert not solved
    path.write_bytes(b"damaged")
    assert await solution_for(peer, 5, path) == first
    assert await solution_for(peer, 0, path) == b""
    assert solved == [1]


async def test_solving_that_is_given_up_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def endless(public_key: bytes, bits: int, *, first: int, should_stop) -> None:  # type: ignore[no-untyped-def]
        loop.call_soon_threadsafe(began.set)
        while not should_stop():
            pass
        loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(puzzle, "solve", endless)
    solving = asyncio.create_task(solution_for(IDENTITIES[0].peer_id, 20, None))
    await began.wait()
    solving.cancel()
    await asyncio.wait_for(ended.wait(), 10)
    with pytest.raises(asyncio.CancelledError):
        await solving


def test_table_takes_only_identities_that_have_paid() -> None:
    table = RecordTable(price=PuzzleChecker(9, evaluate=cheap))
    rich, poor = IDENTITIES[0], IDENTITIES[1]
    assert isinstance(table.receive(sign_record(record_of(rich, good()), rich), now=NOW), NodeRecord)
    for solution in (b"", good(8)):
        refusal = table.receive(sign_record(record_of(poor, solution), poor), now=NOW, introducer=poor.peer_id)
        assert refusal is Refusal.TOO_CHEAP
    assert table.refused == {Refusal.TOO_CHEAP: 2}
    assert [record.peer for record in table.live(now=NOW)] == [rich.peer_id]


def test_own_record_needs_no_solution_yet() -> None:
    us = IDENTITIES[0]
    exchange = RecordExchange(RecordTable(price=PuzzleChecker(9, own=us.peer_id, evaluate=cheap)), None)  # type: ignore[arg-type]
    assert isinstance(exchange.set_own(sign_record(record_of(us), us), now=NOW), NodeRecord)


def test_zero_bits_let_everybody_through() -> None:
    checker = PuzzleChecker(0, evaluate=cheap)
    assert checker(record_of(IDENTITIES[0]), None, NOW) is None
    assert checker.has_paid(IDENTITIES[0].peer_id)


@pytest.mark.parametrize(
    ("hosts", "is_private", "expected"),
    [
        (["127.0.0.1", "::1"], False, 0),
        (["127.0.0.1", "192.168.1.5"], False, puzzle.DEFAULT_BITS),
        (["192.168.1.5"], False, puzzle.DEFAULT_BITS),
        ([], False, puzzle.DEFAULT_BITS),
        (["192.168.1.5"], True, 0),
    ],
)
def test_nothing_is_demanded_on_one_machine_or_among_members(hosts: list[str], is_private: bool, expected: int) -> None:
    assert puzzle.default_bits(hosts, is_private=is_private) == expected


def test_peers_of_this_machine_need_not_pay() -> None:
    neighbour, other = IDENTITIES[0], IDENTITIES[1]
    checker = PuzzleChecker(9, is_exempt=lambda peer: peer == neighbour.peer_id, evaluate=cheap)
    assert checker(record_of(neighbour), neighbour.peer_id, NOW) is None
    assert checker(record_of(other), neighbour.peer_id, NOW) is Refusal.TOO_CHEAP


def test_identity_is_checked_once_whatever_it_sends() -> None:
    checker = PuzzleChecker(9, evaluate=cheap)
    rich, poor = IDENTITIES[0], IDENTITIES[1]
    for sequence in range(50):
        assert checker(record_of(rich, good(), sequence), rich.peer_id, NOW) is None
        assert checker(record_of(poor, good(8), sequence), poor.peer_id, NOW) is Refusal.TOO_CHEAP
    assert checker.num_evaluated == 2
    assert checker.has_paid(rich.peer_id)
    assert not checker.has_paid(poor.peer_id)


def flood(checker: PuzzleChecker, introducers: Sequence[PeerId | None], count: int, now: UnixS = NOW) -> None:
    for index in range(count):
        solution = bytes([0, *index.to_bytes(4, "little"), 0, 0, 0])
        checker(record_of(IDENTITIES[-1], solution), introducers[index % len(introducers)], now)


def test_one_stranger_cannot_use_up_what_all_strangers_have() -> None:
    checker = PuzzleChecker(9, evaluate=cheap)
    flood(checker, [IDENTITIES[1].peer_id], 5000)
    assert checker.num_evaluated == puzzle.OF_A_STRANGER.burst
    newcomer = IDENTITIES[2]
    assert checker(record_of(newcomer, good()), newcomer.peer_id, NOW) is None


def test_junk_in_the_dht_leaves_strangers_alone() -> None:
    checker = PuzzleChecker(9, evaluate=cheap)
    flood(checker, [None], 5000)
    assert checker(record_of(IDENTITIES[3], good()), None, NOW) is Refusal.UNCHECKED
    newcomer = IDENTITIES[2]
    assert checker(record_of(newcomer, good()), newcomer.peer_id, NOW) is None


def test_what_was_checked_ahead_is_not_checked_again_and_costs_the_same() -> None:
    checker, stranger = PuzzleChecker(9, evaluate=cheap), PeerId("stranger")
    records = [record_of(identity, good()) for identity in IDENTITIES[:20]]
    checker.check_ahead(records, stranger, NOW)
    assert checker.num_evaluated == puzzle.OF_A_STRANGER.burst
    verdicts = [checker(record, stranger, NOW) for record in records]
    assert verdicts.count(None) == checker.num_evaluated == puzzle.OF_A_STRANGER.burst
    assert set(verdicts) == {None, Refusal.UNCHECKED}


def test_a_check_under_way_in_one_thread_holds_up_no_other() -> None:
    going_on, may_end = threading.Event(), threading.Event()

    def slow(public_key: bytes, solution: bytes) -> int:
        going_on.set()
        assert may_end.wait(10)
        return 9

    checker = PuzzleChecker(9, own=IDENTITIES[1].peer_id, evaluate=slow)
    thread = threading.Thread(target=checker.check_ahead, args=([record_of(IDENTITIES[0], good())], PeerId("a"), NOW))
    thread.start()
    assert going_on.wait(10)
    assert checker.has_paid(IDENTITIES[1].peer_id)
    may_end.set()
    thread.join()
    assert checker.has_paid(IDENTITIES[0].peer_id)


def test_strangers_together_leave_the_paid_alone() -> None:
    checker = PuzzleChecker(9, evaluate=cheap)
    rich = IDENTITIES[0]
    assert checker(record_of(rich, good()), rich.peer_id, NOW) is None
    strangers = [PeerId(f"stranger {index}") for index in range(2000)]
    flood(checker, strangers, 20_000)
    assert checker.num_evaluated <= puzzle.OF_STRANGERS.burst + 1
    assert checker(record_of(IDENTITIES[3], good()), strangers[-1], NOW) is Refusal.UNCHECKED
    assert checker(record_of(IDENTITIES[3], good()), rich.peer_id, NOW) is None


def test_paid_introducer_has_a_bound_too_and_gets_more_with_time() -> None:
    checker = PuzzleChecker(9, evaluate=cheap)
    rich, other = IDENTITIES[0], IDENTITIES[2]
    for identity in (rich, other):
        assert checker(record_of(identity, good()), identity.peer_id, NOW) is None
    flood(checker, [rich.peer_id], 5000)
    assert checker(record_of(IDENTITIES[4], good()), rich.peer_id, NOW) is Refusal.UNCHECKED
    assert checker(record_of(IDENTITIES[4], good()), other.peer_id, NOW) is None
    assert checker(record_of(IDENTITIES[5], good()), rich.peer_id, UnixS(NOW + 1)) is None


def test_newcomer_learns_a_full_answer_at_once() -> None:
    checker = PuzzleChecker(9, evaluate=cheap)
    bootstrap = IDENTITIES[0]
    for identity in IDENTITIES[:30]:
        assert checker(record_of(identity, good()), bootstrap.peer_id, NOW) is None
    assert puzzle.OF_THE_PAID.burst >= 512


def test_records_field_holds_a_solution() -> None:
    record = record_of(IDENTITIES[0], good())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=NodeRecord).puzzle == good()
