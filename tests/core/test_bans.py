"""Bans: who is meant, for how long, how they come about by themselves, and the file."""

from __future__ import annotations

import asyncio
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusion_node.errors import ConfigError, PeerClosed, ProtocolVersionMismatch, RemoteProtocolError
from fusion_node.types import PeerId
from p2p import bans
from p2p.bans import BREACHES_OF_A_HOST, BREACHES_OF_A_PEER, FIRST_BAN_S, MAX_BAN_S, Ban, BanList, canonical_target
from p2p.gate import BANNED, PeerGate, matches
from p2p.identity import Identity

PEER = Identity.from_seed(bytes([7]) * 32).peer_id
OTHER = Identity.from_seed(bytes([8]) * 32).peer_id


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def breach_until_banned(banned: BanList, now: float, peer: str | None = PEER, host: str | None = None) -> Ban:
    for _ in range(1000):
        made = banned.breach(peer, host, "breaks the rules", now=now)
        if made:
            return made[0]
    raise AssertionError("never banned")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        (PEER, PEER),
        (" 203.0.113.7 ", "203.0.113.7/32"),
        ("::ffff:203.0.113.7", "203.0.113.7/32"),
        ("203.0.113.7/24", "203.0.113.0/24"),
        ("2001:db8::1", "2001:db8::1/128"),
        ("2001:db8::/48", "2001:db8::/48"),
    ],
)
def test_target_is_read_in_one_form(text: str, target: str) -> None:
    assert canonical_target(text) == target
    assert canonical_target(target) == target


@pytest.mark.parametrize("text", ["", "nobody", PEER[:-1], "1.2.3", "0.0.0.0/0", "10.0.0.0/7", "1.2.3.4/33", "::/0"])
def test_target_that_means_nobody_or_everybody_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        canonical_target(text)


def test_durations() -> None:
    read = [bans.parse_duration(text) for text in ("90", "90s", "10m", "1h", "2d", "1w")]
    assert read == [90, 90, 600, 3600, 172_800, 604_800]
    for text in ("", "0", "-1h", "1y", "h", "1.5h", "9" * 9 + "w"):
        with pytest.raises(ConfigError):
            bans.parse_duration(text)


def test_ban_meets_its_target_and_nobody_else() -> None:
    banned = BanList()
    banned.add(Ban(PEER, 0.0, None), now=0.0)
    banned.add(Ban("203.0.113.0/24", 0.0, 50.0), now=0.0)
    assert banned.of_peer(PEER, now=10.0)
    assert not banned.of_peer(OTHER, now=10.0)
    assert banned.of_host("203.0.113.200", now=10.0)
    assert banned.of_host("::ffff:203.0.113.200", now=10.0)
    assert not banned.of_host("203.0.114.1", now=10.0)
    assert not banned.of_host("2001:db8::1", now=10.0)
    assert not banned.of_host("example.org", now=10.0)
    assert not banned.of_host("203.0.113.200", now=50.0)
    assert [ban.target for ban in banned.current(now=50.0)] == [PEER]
    assert banned.remove(PEER)
    assert not banned.remove(PEER)
    assert len(banned) == 0


def test_breaches_lead_to_bans_that_grow_up_to_an_hour_and_end() -> None:
    banned, now, lengths = BanList(), 0.0, []
    for _ in range(8):
        ban = breach_until_banned(banned, now)
        assert ban.until is not None
        lengths.append(ban.until - now)
        now = ban.until
        assert not banned.of_peer(PEER, now=now)
    assert lengths[0] == FIRST_BAN_S
    assert sorted(lengths) == lengths
    assert lengths[-1] == MAX_BAN_S == max(lengths)


def test_few_breaches_are_forgiven_after_a_while() -> None:
    banned = BanList()
    for index in range(20):
        assert not banned.breach(PEER, None, "x", now=index * (bans.FORGIVEN_AFTER_S + 1))


def test_escalation_is_forgotten_after_a_long_time() -> None:
    banned = BanList()
    for _ in range(4):
        breach_until_banned(banned, 0.0)
    ban = breach_until_banned(banned, bans.TRUSTED_AFTER_S + 1)
    assert ban.until == ban.made_at + FIRST_BAN_S


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_nobody_on_this_machine_is_banned_by_itself(host: str) -> None:
    banned = BanList()
    for _ in range(200):
        assert not banned.breach(PEER, host, "x", now=0.0)


@pytest.mark.parametrize("host", ["172.17.0.1", "192.168.0.9", "100.64.0.1", "fd00::1", "example.org"])
def test_local_address_is_not_banned_for_what_one_behind_it_does(host: str) -> None:
    banned = BanList()
    made = [ban for _ in range(200) for ban in banned.breach(None, host, "x", now=0.0)]
    assert not made
    assert breach_until_banned(banned, 0.0, host=host).target == PEER


def test_host_is_banned_for_what_many_identities_do_from_it() -> None:
    banned = BanList()
    made: list[Ban] = []
    for index in range(BREACHES_OF_A_HOST):
        peer = Identity.from_seed(index.to_bytes(32, "big")).peer_id
        assert not made
        made += banned.breach(peer, "203.1.113.7", "x", now=0.0)
    assert [ban.target for ban in made] == ["203.1.113.7/32"]
    assert not banned.of_host("203.1.113.8", now=0.0)


def test_automatic_ban_never_shortens_an_operators() -> None:
    banned = BanList()
    banned.add(Ban(PEER, 0.0, None, "mine"), now=0.0)
    for _ in range(10):
        banned.breach(PEER, None, "x", now=0.0)
    ban = banned.of_peer(PEER, now=1e9)
    assert ban is not None
    assert ban.reason == "mine"


def test_list_is_bounded_and_automatic_bans_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bans, "MAX_BANS", 50)
    banned = BanList()
    for index in range(30):
        banned.add(Ban(f"10.0.{index}.0/24", 0.0, None), now=0.0)
    for index in range(200):
        banned.add(Ban(f"11.0.{index}.0/24", 0.0, 100.0 + index, is_automatic=True), now=0.0)
    assert len(banned) == 50
    assert sum(not ban.is_automatic for ban in banned.current(now=0.0)) == 30


# The file.


def test_file_holds_the_bans_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "home" / "bans.json"
    bans.change(path, add=[Ban(PEER, 5.0, None, "rude"), Ban("10.0.0.0/8", 5.0, 7.0)], now=5.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {ban.target for ban in bans.load(path)} == {PEER, "10.0.0.0/8"}
    assert bans.change(path, remove=[PEER], now=8.0) == []
    assert json.loads(path.read_text()) == {"version": 1, "bans": []}
    assert {name.name for name in path.parent.iterdir()} <= {"bans.json", "bans.json.lock"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"bans": [{"target": "nobody", "made_at": 0, "until": null}]}', b"\xff" * 100],
)
def test_damaged_file_is_set_aside_and_nobody_is_banned_by_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bans.json"
    path.write_bytes(content)
    gate = PeerGate(path)
    assert gate.bans() == []
    assert not path.exists()
    assert path.with_name("bans.json.unreadable").read_bytes() == content


def test_writers_of_one_home_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bans.json"

    def add(index: int) -> None:
        bans.change(path, add=[Ban(f"10.0.{index}.0/24", 0.0, None)], now=0.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert len(bans.load(path)) == 40


async def test_folder_that_cannot_be_written_is_an_error_and_the_ban_holds(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gate = PeerGate(tmp_path / "file" / "bans.json")
    with pytest.raises(ConfigError, match="cannot write"):
        await gate.change(ban=[Ban(PEER, 0.0, None)])
    assert gate.refuse_peer(PEER, "8.8.8.8") == BANNED


# The gate.


async def test_gate_refuses_whom_its_operator_bans_until_lifted(tmp_path: Path) -> None:
    clock, heard = Clock(), list[Ban]()
    gate = PeerGate(tmp_path / "bans.json", wall_clock=clock)
    gate.on_ban(heard.append)
    assert gate.refuse_peer(PEER, "8.8.8.8") is None
    await gate.change(ban=[Ban(PEER, clock.now, clock.now + 60, "rude"), Ban("9.9.0.0/16", clock.now, None)])
    assert [ban.target for ban in heard] == [PEER, "9.9.0.0/16"]
    assert gate.refuse_peer(PEER, "8.8.8.8") == BANNED
    assert gate.refuse_stream(PEER) == BANNED
    assert gate.refuse_peer(OTHER, "9.9.1.1") == BANNED
    assert gate.refuse_host("9.9.1.1") == BANNED
    assert gate.refuse_host("8.8.8.8") is None
    assert PeerGate(tmp_path / "bans.json", wall_clock=clock).refuse_peer(PEER, "") == BANNED
    assert await gate.change(lift=["9.9.0.0/16", "7.7.7.7/32"]) == 1
    assert gate.refuse_host("9.9.1.1") is None
    clock.now += 60
    assert gate.refuse_peer(PEER, "8.8.8.8") is None
    assert gate.bans() == []
    assert gate.refused[BANNED] == 4


async def test_gate_notices_what_another_process_of_the_home_bans_and_lifts(tmp_path: Path) -> None:
    path, clock, heard = tmp_path / "bans.json", Clock(), list[Ban]()
    gate, other = PeerGate(path, wall_clock=clock), PeerGate(path, wall_clock=clock)
    gate.on_ban(heard.append)
    gate.refresh()
    await other.change(ban=[Ban(PEER, clock.now, None)])
    assert gate.refuse_peer(PEER, "") is None
    gate.refresh()
    gate.refresh()
    assert gate.refuse_peer(PEER, "") == BANNED
    assert [ban.target for ban in heard] == [PEER]
    await other.change(lift=[PEER])
    gate.refresh()
    assert gate.refuse_peer(PEER, "") is None


async def test_gate_bans_for_breaches_and_saves_that(tmp_path: Path) -> None:
    clock, heard = Clock(), list[Ban]()
    gate = PeerGate(tmp_path / "bans.json", wall_clock=clock)
    gate.on_ban(heard.append)
    for _ in range(BREACHES_OF_A_PEER):
        assert gate.refuse_peer(PEER, "8.8.8.8") is None
        gate.report_failure(PEER, "8.8.8.8", RemoteProtocolError(PEER, "sent \x1b[31mnonsense"))
    assert gate.refuse_peer(PEER, "8.8.8.8") == BANNED
    assert [ban.is_automatic for ban in heard] == [True]
    assert "\x1b" not in heard[0].reason
    assert not (tmp_path / "bans.json").exists()
    await gate.save()
    assert [ban.target for ban in bans.load(tmp_path / "bans.json")] == [PEER]


def test_gate_does_not_take_bad_luck_or_age_for_a_breach() -> None:
    gate = PeerGate()
    for failure in (PeerClosed(PEER, "x"), ProtocolVersionMismatch(PEER, "x"), TimeoutError()):
        for _ in range(100):
            gate.report_failure(PEER, "8.8.8.8", failure)
    assert gate.refuse_peer(PEER, "8.8.8.8") is None
    assert gate.refused["breach"] == 0


def test_gate_bans_no_peer_of_this_machine_on_whatever_path_it_errs() -> None:
    gate = PeerGate()
    assert gate.refuse_peer(PEER, "127.0.0.1") is None  # that is where it is
    assert gate.refuse_dial(OTHER, "127.0.0.1") is None  # that is what somebody says
    for peer in (PEER, OTHER):
        for _ in range(BREACHES_OF_A_PEER):
            gate.report(peer, None, "x")
    assert gate.refuse_peer(PEER, "") is None
    assert gate.refuse_peer(OTHER, "") == BANNED


async def test_gate_can_be_asked_from_several_threads() -> None:
    gate = PeerGate()

    def connect() -> None:
        for _ in range(200):
            if gate.refuse_host("10.0.0.1") is None:
                gate.connected("10.0.0.1")
                gate.proven("10.0.0.1")
                gate.disconnected("10.0.0.1")

    await asyncio.gather(*(asyncio.to_thread(connect) for _ in range(8)))
    assert gate.refuse_host("10.0.0.2") is None
    assert sum(gate.refused.values()) == gate.refused["connects-too-often"] > 0


@pytest.mark.parametrize(
    ("target", "peer", "host", "expected"),
    [
        (PEER, PEER, "1.2.3.4", True),
        (PEER, OTHER, "1.2.3.4", False),
        ("1.2.0.0/16", OTHER, "1.2.3.4", True),
        ("1.2.0.0/16", OTHER, "::ffff:1.2.3.4", True),
        ("1.2.0.0/16", OTHER, "unknown", False),
        ("1.2.0.0/16", OTHER, "2001:db8::1", False),
    ],
)
def test_matches(target: str, peer: PeerId, host: str, expected: bool) -> None:
    assert matches(Ban(target, 0.0, None), peer, host) == expected
