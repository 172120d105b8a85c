import os
from pathlib import Path

import pytest

from fusion_node.errors import ConfigError
from p2p.allow_list import MAX_FILE_BYTES, NOT_ALLOWED, AllowList, read
from p2p.bans import Ban
from p2p.gate import BANNED, PeerGate
from p2p.identity import Identity

ANNA, BERT, CLEO = (Identity.from_seed(bytes([number]) * 32).peer_id for number in range(3))


def write(path: Path, *lines: str) -> Path:
    """Replaces the file, as editors do."""
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    temporary.replace(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "allowed", "# friends", "", f"{ANNA}  # Anna's laptop", f"  {BERT}")


def test_who_is_on_the_list_is_let_in_and_nobody_else(path: Path) -> None:
    allowed = AllowList(path)
    assert allowed.peers == {ANNA, BERT}
    assert allowed.refuse(ANNA) is None
    assert allowed.refuse(CLEO) == NOT_ALLOWED


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "names nobody"),
        (b"# nobody yet\n\n", "names nobody"),
        (f"{ANNA}\n\n{BERT[:-1]}\n".encode(), "line 3 of the allow-list .* is no peer id"),
        (f"{ANNA} {BERT}\n".encode(), "line 1 of the allow-list .* is no peer id"),
        (b"\xff\xfe", "not a text file in UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger than 1 MiB"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "allowed").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        AllowList(tmp_path / "allowed")


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the allow-list .*: No such file"):
        AllowList(tmp_path / "allowed")


def test_a_changed_list_is_in_force_after_the_next_look(path: Path) -> None:
    allowed, changes = AllowList(path), list[frozenset[str]]()
    allowed.on_change(lambda: changes.append(allowed.peers))
    allowed.refresh()
    assert changes == []
    write(path, ANNA, CLEO)
    allowed.refresh()
    assert changes == [{ANNA, CLEO}]
    assert allowed.refuse(BERT) == NOT_ALLOWED
    assert allowed.refuse(CLEO) is None


def test_a_list_written_in_place_within_one_tick_of_the_clock_is_noticed_by_its_size(path: Path) -> None:
    allowed, before = AllowList(path), path.stat()
    path.write_text(f"{ANNA}\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    allowed.refresh()
    assert allowed.peers == {ANNA}


@pytest.mark.parametrize("content", [[], ["nonsense"], None])
def test_a_list_that_breaks_later_changes_nothing_until_it_is_mended(path: Path, content: list[str] | None) -> None:
    allowed, changes = AllowList(path), list[int]()
    allowed.on_change(lambda: changes.append(1))
    if content is None:
        path.unlink()
    else:
        write(path, *content)
    allowed.refresh()
    allowed.refresh()
    assert allowed.peers == {ANNA, BERT}
    assert changes == []
    write(path, CLEO)
    allowed.refresh()
    assert allowed.peers == {CLEO}
    assert changes == [1]


def test_only_comments_that_change_do_not_count_as_a_change(path: Path) -> None:
    allowed, changes = AllowList(path), list[int]()
    allowed.on_change(lambda: changes.append(1))
    write(path, "# sorted", BERT, ANNA)
    allowed.refresh()
    assert read(path) == allowed.peers
    assert changes == []


def test_a_gate_refuses_links_dials_and_requests_of_strangers(path: Path) -> None:
    gate = PeerGate(allow_list=AllowList(path))
    assert gate.refuse_peer(ANNA, "192.0.2.7") is None
    assert gate.refuse_stream(ANNA) is None
    assert gate.refuse_peer(CLEO, "192.0.2.7") == NOT_ALLOWED
    assert gate.refuse_stream(CLEO) == NOT_ALLOWED
    assert gate.refused == {NOT_ALLOWED: 2}


async def test_a_gate_tells_when_others_are_refused_than_before(path: Path) -> None:
    gate, changes = PeerGate(allow_list=AllowList(path)), list[str]()
    gate.on_change(lambda: changes.append(gate.reason_against(BERT) or "allowed"))
    gate.refresh()
    assert changes == []
    write(path, ANNA)
    gate.refresh()
    assert changes == [NOT_ALLOWED]
    await gate.change(ban=[Ban(BERT, 0.0, None)])
    assert changes == [NOT_ALLOWED, BANNED]
    assert gate.refused == {}
