"""What `generate` and `chat` show of an answer, and tell of it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from fusion_node.cli import speculation_view
from fusion_node.cli.main import app
from fusion_node.cli.talk import converse, describe, summary
from fusion_node.client.generation import Generation, GenerationStats, RepairReport, StageReport
from fusion_node.client.grants_core import GrantReport
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import ConfigError, NoRoute
from fusion_node.grants import Grant, Release, ReleaseReason
from fusion_node.types import LayerRange, PeerId, group_id
from p2p.identity import Identity

STATS = GenerationStats(
    completion_tokens=3,
    time_to_first_token_s=0.5,
    decode_s=1.0,
    stages=(StageReport(PeerId("12D3KooWabcdefgh"), LayerRange(0, 4), "cpu", 0.01, 7, 0.07, 0.0),),
    repairs=(RepairReport("patched", 0, PeerId("12D3KooWstuvwxyz"), "silent", 1.25, 40, 5760),),
)


def test_statistics_name_each_repair_on_a_line_of_its_own() -> None:
    first, second = summary(STATS).split("\n")
    assert first == "3 tokens, 2.0 tokens/s, first token after 0.50 s, over …abcdefgh [0:4]"
    assert second == ("patched: stage 1 …stuvwxyz (silent), stood still for 1.25 s, 40 positions computed again")


def test_machines_are_told_all_of_a_repair() -> None:
    (repair,) = json.loads(json.dumps(describe(STATS)))["repairs"]
    assert repair == {
        "kind": "patched",
        "stage": 0,
        "peer": "12D3KooWstuvwxyz",
        "cause": "silent",
        "stall_s": 1.25,
        "replayed_positions": 40,
        "replayed_bytes": 5760,
    }
    assert STATS.replayed_positions == 40


def granted(number: int, release: bool) -> GrantReport:
    node = Identity.from_seed(bytes([number + 1]) * 32).peer_id
    grant = Grant(3, bytes([number]) * 16, "u" * 52, node, "ab" * 8, "ab" * 32, 0, 4, number, (1, 1), 0.0, 60.0)
    word = Release(
        3, grant.grant, node, grant.user, grant.session, ReleaseReason.REVOKED, 0, 4, number, (1, 1), 40, 30.0
    )
    return GrantReport(grant, True, True, word if release else None)


def test_statistics_tell_who_has_released_its_slice_and_who_has_not() -> None:
    stats = GenerationStats(completion_tokens=3, grants=(granted(0, True), granted(1, False)))
    silent = stats.grants[1].peer
    assert summary(stats).endswith(f"\n1 of 2 slices released by their holders; not by …{silent[-8:]} (slice 1/2)")
    first, second = describe(stats)["grants"]
    assert (first["slice"], first["layers"], first["is_revoked"]) == ("0/2", "0:4", True)
    assert (first["released"], first["released_positions"]) == ("revoked", 40)
    assert (second["peer"], second["released"]) == (silent, None)
    assert json.loads(json.dumps(describe(stats)))["grants"][0] == first


HOSTILE = ("clear\x1b", "[2J, title \x1b]0;", "mine\x07\n", "csi \x9b31m")
SHOWN = "clear?[2J, title ?]0;mine?\ncsi ?31m\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class HostileSwarm:
    """Its nodes have made the model write what commands a terminal."""

    def __init__(self, *_: Any, error: NoRoute | None = None, **__: Any) -> None:
        self.error = error
        self.asked: list[list[dict[str, Any]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def generate(self, prompt: str, params: SamplingParams, *, raw: bool = False) -> Generation:
        return Generation(self._pieces(), GenerationStats(prompt_tokens=3, seed=1))

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Generation:
        self.asked.append(list(messages))
        return self.generate("", params)

    async def wait_released(self) -> None:
        pass

    async def _pieces(self) -> AsyncGenerator[str, None]:
        if self.error is not None:
            raise self.error
        for piece in HOSTILE:
            yield piece


@pytest.mark.parametrize(("out", "shown"), [(Terminal(), SHOWN), (io.StringIO(), "".join(HOSTILE) + "\n")])
def test_generate_shows_no_control_characters_on_a_terminal_and_passes_them_on_elsewhere(
    out: io.StringIO, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fusion_node.client.swarm", cast(Any, SimpleNamespace(SwarmClient=HostileSwarm)))
    monkeypatch.setattr(sys, "stdout", out)
    app(["generate", "m", "?"], standalone_mode=False)
    assert out.getvalue() == shown


def test_json_has_the_text_as_it_is_also_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setitem(sys.modules, "fusion_node.client.swarm", cast(Any, SimpleNamespace(SwarmClient=HostileSwarm)))
    monkeypatch.setattr(sys, "stdout", out)
    app(["generate", "m", "?", "--json"], standalone_mode=False)
    assert "\x1b" not in out.getvalue()  # JSON escapes it
    assert json.loads(out.getvalue())["text"] == "".join(HOSTILE)


async def test_chat_shows_no_control_characters_on_a_terminal_but_remembers_what_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, swarm = Terminal(), HostileSwarm()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    await converse(cast(SwarmClient, swarm), SamplingParams(), None)
    assert out.getvalue() == 2 * SHOWN
    assert swarm.asked[1][1] == {"role": "assistant", "content": "".join(HOSTILE)}


class Revoking(HostileSwarm):
    """Remembers whom it was told to leave out."""

    def __init__(self, group: PeerId) -> None:
        super().__init__()
        self.group = group
        self.revoked: frozenset[PeerId] = frozenset()

    def generate(self, prompt: str, params: SamplingParams, *, raw: bool = False) -> Generation:
        stage = StageReport(self.group, LayerRange(0, 4), "cpu", 0.01, 7, 0.07, 0.0)
        return Generation(self._pieces(), GenerationStats(stages=(stage,)))

    def revoke(self, peer: PeerId) -> None:
        if len(peer) != 52:
            raise ConfigError(f"{peer!r} is not a peer id")
        self.revoked |= {peer}

    def allow_again(self, peer: PeerId) -> None:
        self.revoked -= {peer}


async def test_chat_revokes_members_by_a_part_of_their_id_and_allows_them_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (granted(number, False).peer for number in (0, 1))
    swarm = Revoking(group_id([first, second]))
    lines = ["one", f"/revoke {second[-8:]}", "/revoke", "/revoke 12D3KooW", f"/revoke {first}", f"/allow {first[-6:]}"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "/allow somebody", ""])))
    await converse(cast(SwarmClient, swarm), SamplingParams(), None)
    assert swarm.revoked == {second}
    assert len(swarm.asked) == 1, "commands are no questions"
    assert capsys.readouterr().err.splitlines() == [
        f"…{second[-8:]} is revoked",
        "error: /revoke needs a peer id, or 6 characters of its end",
        "error: /revoke needs a peer id, or 6 characters of its end",
        f"…{first[-8:]} is revoked",
        f"…{first[-8:]} may serve again",
        f"error: /allow needs one of those that are revoked: …{second[-8:]}",
    ]


async def test_error_in_a_chat_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    await converse(cast(SwarmClient, HostileSwarm(error=NoRoute("it said \x1b[2J"))), SamplingParams(), None)
    assert capsys.readouterr().err == "\nerror: it said ?[2J\n"


def test_answer_is_shown_whole_where_its_picture_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GuessedSwarm(HostileSwarm):
        def generate(self, prompt: str, params: SamplingParams, *, raw: bool = False) -> Generation:
            stats = GenerationStats(prompt_tokens=3, seed=1, speculation=cast(Any, "a report"))
            return Generation(self._pieces(), stats)

    def full(*_: Any) -> None:
        raise ConfigError("the disk is full")

    out = Terminal()
    monkeypatch.setitem(sys.modules, "fusion_node.client.swarm", cast(Any, SimpleNamespace(SwarmClient=GuessedSwarm)))
    monkeypatch.setattr(speculation_view, "check_plot", lambda path: None)
    monkeypatch.setattr(speculation_view, "write_plot", full)
    monkeypatch.setattr(sys, "stdout", out)
    options = ["--speculate", "auto", "--speculation-plot", str(tmp_path / "guesses.png")]
    with pytest.raises(ConfigError, match="full"):
        app(["generate", "m", "?", *options], standalone_mode=False)
    with pytest.raises(ConfigError, match="full"):
        app(["generate", "m", "?", *options, "--json"], standalone_mode=False)
    shown, told = out.getvalue()[: len(SHOWN)], out.getvalue()[len(SHOWN) :]
    assert shown == SHOWN
    assert json.loads(told)["text"] == "".join(HOSTILE)
