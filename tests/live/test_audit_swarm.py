"""Real processes with audit logs: a fusion group loses a member by SIGKILL, and the audit of all logs still closes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.store import StoredModel
from fusion_node.types import members_of
from tests.live.swarm_process import MODEL, STOP_S, node_processes, run_cli

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

SLICES = ("0/2", "1/2", "1/2")
"""The last one is a spare."""


async def test_audit_of_a_group_whose_member_is_killed_closes(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    logs = [tmp_path / f"node-{number}.log" for number in range(len(SLICES))]
    with node_processes(test_home, tmp_path) as nodes:
        for slice_, log in zip(SLICES, logs, strict=True):
            addresses = nodes.all[0].wait_ready().addresses[:1] if nodes.all else ()
            nodes._start("", addresses, ("--slice", slice_, "--audit-log", str(log)))
        for node in nodes.all:
            node.wait_ready()
        async with SwarmClient(
            MODEL,
            peers=nodes.all[0].addresses[:1],
            home=test_home,
            mdns=False,
            topology="fusion",
            prefix_cache=False,
            audit=tmp_path / "user.log",
        ) as client:
            answer = client.generate("What is a peer-to-peer network?", SamplingParams(max_tokens=12, ignore_eos=True))
            killed = ""
            async for _ in answer:
                if not killed and answer.stats.completion_tokens >= 4:
                    killed = members_of(answer.stats.stages[0].peer)[1]
                    next(node for node in nodes.all if node.peer == killed).signal(signal.SIGKILL)
            assert [repair.peer for repair in answer.stats.repairs] == [killed]
        for node in nodes.all:
            if node.peer != killed:
                node.signal(signal.SIGTERM)
                assert node.wait(STOP_S) == 0
        killed_at = next(number for number, node in enumerate(nodes.all) if node.peer == killed)
    files = [str(path) for path in (*logs, tmp_path / "user.log")]
    audited = run_cli("audit", *files, "--json", "--html", str(tmp_path / "page.html"), home=test_home)
    assert audited.returncode == 0, audited.stdout[:2000] + audited.stderr[-2000:]
    report = json.loads(audited.stdout)
    assert report["unended"] == [f"node-{killed_at}.log"]
    (session,) = report["sessions"]
    assert session["epochs"] == [0, 1]
    # The prompt, and all tokens but the last.
    assert session["num_closed"] == session["num_steps"] >= 12
    assert [node["largest_fraction"] for node in session["nodes"]] == [0.5, 0.5, 0.5]
    assert "audit passed" in (tmp_path / "page.html").read_text(encoding="utf-8")
