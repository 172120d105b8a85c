"""Answers over fusion groups, with a log at every party: nobody gets more than its slice, also when one dies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from fusion_node.engine.architectures import load_config
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.sliced_layer import fusion_dims
from fusion_node.grants import Grant
from fusion_node.store import ModelStore
from p2p.records import SignedEnvelope
from tests.engine.tiny import TinyModel
from tests.scenarios.swarm import MemorySwarm, memory_swarm
from tests.scenarios.test_audit import judged
from tests.scenarios.test_fusion import Fusion, answer, boundary, home, model
from verification.audit_report import Report

__all__ = ["boundary", "home", "model"]
"""Fixtures: the same model and store."""


class Recorded(Fusion):
    """Nodes and users that keep logs."""

    def __init__(self, swarm: MemorySwarm, home: Path, folder: Path) -> None:
        super().__init__(swarm, home)
        self.folder = folder
        swarm.audit_folder = folder

    def judged(self) -> Report:
        """When all processes have ended."""
        return judged(self.folder, fusion_dims(load_config(self.stored)))


Play: TypeAlias = Callable[[Callable[[Recorded], Awaitable[None]]], Awaitable[Report]]


@pytest.fixture
def played(model: TinyModel, boundary: Boundary, home: Path, tmp_path: Path) -> Play:
    """Plays something, ends all processes, and judges the logs."""

    async def play(work: Callable[[Recorded], Awaitable[None]]) -> Report:
        async with memory_swarm(model, boundary) as swarm:
            recorded = Recorded(swarm, home, tmp_path)
            await work(recorded)
        return recorded.judged()

    return play


def contents(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.glob("*.log")}


@pytest.mark.parametrize("speculation", ["off", "tree"])
async def test_a_member_that_is_killed_is_replaced_and_every_step_closes(played: Play, speculation: str) -> None:
    expected: list[str] = []

    async def work(fusion: Recorded) -> None:
        first = await fusion.group("0:1", "0/2", "1/2")
        second = await fusion.group("1:4", "0/3", "1/3", "2/3")
        spare = await fusion.node("1:4", "1/3", ms=5.0)
        expected.extend(node.peer for node in (*first, *second, spare))
        client = await fusion.client(speculation=speculation)
        killing: list[asyncio.Task[None]] = []

        def kill(count: int) -> None:
            if count == 5:
                killing.append(asyncio.ensure_future(second[1].kill()))

        stats = await answer(client, on_piece=kill)
        await asyncio.gather(*killing)
        assert [repair.kind for repair in stats.repairs] == ["patched"]

    report = await played(work)
    assert report.passed, report.findings
    (session,) = report.sessions
    assert session.epochs == (0, 1)
    assert session.num_closed == session.num_steps > 5
    assert session.num_replays > 0
    sent = {node.peer: node.largest_fraction for node in session.nodes}
    assert [sent[peer] for peer in expected] == [0.5, 0.5, *[pytest.approx(1 / 3)] * 4]


def node_of(grant: str) -> str:
    envelope = msgspec.msgpack.decode(bytes.fromhex(grant), type=SignedEnvelope)
    return msgspec.msgpack.decode(envelope.body, type=Grant).node


async def test_a_revoked_member_releases_and_a_grant_that_is_not_the_users_is_found(
    played: Play, home: Path, tmp_path: Path
) -> None:
    """One answer, whose logs are then changed at both ends, as parties would that agree on a lie."""
    who: dict[str, str] = {}

    async def work(fusion: Recorded) -> None:
        nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
        spare = await fusion.node("0:4", "1/3", ms=5.0)
        client = await fusion.client(prefix_cache=False)

        def revoke(count: int) -> None:
            if count == 5:
                client.revoke(nodes[1].peer)

        stats = await answer(client, on_piece=revoke)
        assert [repair.cause for repair in stats.repairs] == ["revoked"]
        who.update(first=nodes[0].peer, revoked=nodes[1].peer, last=nodes[2].peer, spare=spare.peer)

    report = await played(work)
    assert report.passed, report.findings
    (session,) = report.sessions
    assert {node.peer: node.released for node in session.nodes} == {
        who["first"]: "closed",
        who["revoked"]: "revoked",
        who["last"]: "closed",
        who["spare"]: "closed",
    }
    dims = fusion_dims(load_config(ModelStore(home).find("tiny")))
    logs = contents(tmp_path)
    grants = sorted({found for text in logs.values() for found in re.findall(r'"grant":"([0-9a-f]{100,})"', text)})
    releases = sorted({found for text in logs.values() for found in re.findall(r'"release":"([0-9a-f]+)"', text)})
    assert len(grants) == 6, "of three members in the first epoch, and of three in the second"
    assert len(releases) >= 4

    def found(bend: Callable[[str], str]) -> set[str]:
        for path, text in logs.items():
            path.write_text("\n".join(map(bend, text.splitlines())) + "\n")
        return set(judged(tmp_path, dims).counts)

    assert found(lambda line: line) == set()
    for grant in grants:
        assert found(lambda line, g=grant: line.replace(f',"grant":"{g}"', "")) >= {"not-granted"}
        forged = f"{grant[:-2]}{int(grant[-2:], 16) ^ 1:02x}"
        assert found(lambda line, g=grant, f=forged: line.replace(g, f)) >= {"not-granted"}
    owner = {grant: node_of(grant) for grant in grants}
    for grant, other in zip(grants, grants[1:] + grants[:1], strict=True):
        # One of another epoch lets the same node hold the same, but is not what its release speaks of.
        expected = "not-granted" if owner[grant] != owner[other] else "bad-release"
        assert expected in found(lambda line, g=grant, o=other: line.replace(g, o))
    for release in releases:
        forged = f"{release[:-2]}{int(release[-2:], 16) ^ 1:02x}"
        assert found(lambda line, r=release, f=forged: line.replace(r, f)) == {"bad-release"}

    def late(line: str) -> str:
        """As if the answer had gone on for long after its grants had been signed, and they had never been renewed."""
        pattern = r'("is":"(?:step|partials)","n":\d+,"ms":)(\d+)'
        return re.sub(pattern, lambda m: f"{m[1]}{int(m[2]) + 2_000_000}", line)

    assert found(late) >= {"not-granted"}
