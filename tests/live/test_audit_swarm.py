"""Real processes with audit logs: two fusion groups, cut in different ways, each lose a member by SIGKILL in the midst
of an answer. The answer is the whole model's, and the audit of all logs closes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
import torch

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.engine.reference import ReferenceModel
from fusion_node.store import StoredModel
from fusion_node.types import members_of
from tests.live.swarm_process import MODEL, STOP_S, NodeProcess, node_processes, run_cli

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPT = "What is a peer-to-peer network?"
NUM_TOKENS = 12
SHARDS = (
    ("0/2", "0:15"), ("1/2", "0:15"), ("1/2", "0:15"),
    ("0/2:1", "15:30"), ("1/2:1", "15:30"), ("0/2:1", "15:30"),
)  # fmt: skip
"""Slice and layers; of those that are there twice, one is a spare."""

KILLS = ((3, 0, 1), (7, 1, 0))
"""After so many tokens, of which stage, which member: the rows come again from the user, and from the group before."""


async def test_audit_of_two_groups_that_each_lose_a_member_closes(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    logs = [tmp_path / f"node-{number}.log" for number in range(len(SHARDS))]
    with node_processes(test_home, tmp_path) as nodes:
        for (slice_, layers), log in zip(SHARDS, logs, strict=True):
            addresses = nodes.all[0].wait_ready().addresses[:1] if nodes.all else ()
            nodes._start(layers, addresses, ("--slice", slice_, "--audit-log", str(log)))
        for node in nodes.all:
            node.wait_ready()
        by_peer: dict[str, NodeProcess] = {node.peer: node for node in nodes.all}
        async with SwarmClient(
            MODEL,
            peers=nodes.all[0].addresses[:1],
            home=test_home,
            mdns=False,
            threads=1,
            topology="hybrid",
            prefix_cache=False,
            audit=tmp_path / "user.log",
        ) as client:
            answer = client.generate(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
            killed: list[str] = []
            async for _ in answer:
                if len(killed) == len(KILLS):
                    continue
                after, stage, member = KILLS[len(killed)]
                if answer.stats.completion_tokens >= after:
                    killed.append(members_of(answer.stats.stages[stage].peer)[member])
                    by_peer[killed[-1]].signal(signal.SIGKILL)
            assert [(repair.kind, repair.peer) for repair in answer.stats.repairs] == [("patched", k) for k in killed]
            assert len(killed) == len(KILLS)
            ids = await client.encode(PROMPT)
        for peer, node in by_peer.items():
            if peer not in killed:
                node.signal(signal.SIGTERM)
                assert node.wait(STOP_S) == 0
    torch.set_num_threads(1)
    reference = ReferenceModel(builtin_model.path)
    assert answer.stats.token_ids == await asyncio.to_thread(reference.greedy, ids, NUM_TOKENS, ignore_eos=True)

    files = [str(path) for path in (*logs, tmp_path / "user.log")]
    audited = run_cli("audit", *files, "--json", "--html", str(tmp_path / "page.html"), home=test_home)
    assert audited.returncode == 0, audited.stdout[:2000] + audited.stderr[-2000:]
    report = json.loads(audited.stdout)
    peers = [node.peer for node in nodes.all]
    assert report["unended"] == sorted(f"node-{peers.index(peer)}.log" for peer in killed)
    (session,) = report["sessions"]
    assert session["epochs"] == [0, 1, 2]
    # The prompt, and all tokens but the last.
    assert session["num_closed"] == session["num_steps"] >= NUM_TOKENS
    fraction = {node["peer"]: node["largest_fraction"] for node in session["nodes"]}
    assert [fraction[peer] for peer in peers] == pytest.approx([0.5] * 3 + [2 / 3, 1 / 3, 2 / 3])
    assert "audit passed" in (tmp_path / "page.html").read_text(encoding="utf-8")
