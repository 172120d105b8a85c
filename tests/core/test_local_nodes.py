"""Nodes of one user on one machine find each other by a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from p2p.local_nodes import registered, running

ADDRESS = "/ip4/127.0.0.1/tcp/4600/p2p/12D3KooW"


def test_a_node_is_found_while_it_runs_and_not_after(tmp_path: Path) -> None:
    assert running(tmp_path / "run") == ()
    with (
        registered(tmp_path / "run", "a", lambda: [ADDRESS]),
        registered(tmp_path / "run", "b", lambda: [ADDRESS + "b"]),
    ):
        assert running(tmp_path / "run") == (ADDRESS, ADDRESS + "b")
    assert running(tmp_path / "run") == ()


def test_addresses_that_change_are_written_anew(tmp_path: Path) -> None:
    addresses = [ADDRESS]
    with registered(tmp_path, "a", lambda: addresses) as rewrite:
        written = (tmp_path / "a.json").stat().st_mtime_ns
        rewrite()
        assert (tmp_path / "a.json").stat().st_mtime_ns == written, "nothing has changed"
        addresses = ["/ip4/192.168.1.7/tcp/4600/p2p/12D3KooW"]
        rewrite()
        assert running(tmp_path) == tuple(addresses)
    assert running(tmp_path) == ()


def test_the_file_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / "a.json").write_text(json.dumps({"pid": process.pid, "addresses": [ADDRESS]}))
    assert running(tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"pid": "x"}')
    (tmp_path / "c.json").write_bytes(b"\xff" * 100)
    assert running(tmp_path) == ()


def test_a_folder_that_cannot_be_written_does_not_keep_a_node_from_running(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with registered(tmp_path / "run", "a", lambda: [ADDRESS]):
        pass


def test_nodes_of_one_swarm_are_not_told_to_another(tmp_path: Path) -> None:
    with (
        registered(tmp_path, "a", lambda: ["/public"]),
        registered(tmp_path, "b", lambda: ["/private"], swarm="0123456789abcdef"),
    ):
        assert running(tmp_path) == ("/public",)
        assert running(tmp_path, "0123456789abcdef") == ("/private",)
        assert running(tmp_path, "another") == ()
