"""The whole built-in model over groups of two, three and four processes: eight answers of 128 tokens, all audited.

Minutes each, so not in CI, where tests/live/test_fusion_swarm.py and test_audit_swarm.py try one group.
"""

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
from tests.live.swarm_process import MODEL, STOP_S, node_processes, run_cli

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPTS = (
    "What is a peer-to-peer network?",
    "Write three sentences about a lighthouse in winter.",
    "How do I boil an egg?",
    "Explain why the sky is blue to a child of six.",
    "List four rivers of Europe and the seas that they flow into.",
    "def fibonacci(n):",
    "Translate into French: The library is closed on Mondays.",
    "A train leaves at nine and travels for two hours and a half. When does it arrive?",
)
NUM_TOKENS = 128
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(builtin_model: StoredModel) -> dict[tuple[int, ...], list[int]]:
    """Filled as prompts are asked."""
    return {}


@pytest.mark.parametrize("num_members", [2, 3, 4])
async def test_eight_answers_are_the_whole_models_and_every_step_of_them_closes(
    num_members: int,
    builtin_model: StoredModel,
    test_home: Path,
    tmp_path: Path,
    expected: dict[tuple[int, ...], list[int]],
) -> None:
    logs = [tmp_path / f"node-{number}.log" for number in range(num_members)]
    with node_processes(test_home, tmp_path) as nodes:
        for number, log in enumerate(logs):
            addresses = nodes.all[0].wait_ready().addresses[:1] if nodes.all else ()
            options = ("--slice", f"{number}/{num_members}", "--audit-log", str(log))
            nodes._start("", addresses, options)
        for node in nodes.all:
            node.wait_ready()
        async with SwarmClient(
            MODEL,
            peers=nodes.all[0].addresses[:1],
            home=test_home,
            mdns=False,
            threads=1,
            topology="fusion",
            members=num_members,
            prefix_cache=False,
            audit=tmp_path / "user.log",
        ) as client:
            answers = [client.generate(prompt, GREEDY) for prompt in PROMPTS]
            await asyncio.gather(*(answer.text() for answer in answers))
            prompts = [tuple(await client.encode(prompt)) for prompt in PROMPTS]
        for node in nodes.all:
            node.signal(signal.SIGTERM)
        assert [node.wait(STOP_S) for node in nodes.all] == [0] * num_members

    torch.set_num_threads(2)
    reference = ReferenceModel(builtin_model.path)
    for ids, answer in zip(prompts, answers, strict=True):
        if ids not in expected:
            expected[ids] = reference.greedy(list(ids), NUM_TOKENS, ignore_eos=True)
        assert answer.stats.token_ids == expected[ids]

    files = [str(path) for path in (*logs, tmp_path / "user.log")]
    audited = run_cli("audit", *files, "--json", home=test_home, timeout_s=900.0)
    assert audited.returncode == 0, audited.stdout[:2000] + audited.stderr[-2000:]
    sessions = json.loads(audited.stdout)["sessions"]
    assert len(sessions) == len(PROMPTS)
    assert sum(session["num_steps"] for session in sessions) >= len(PROMPTS) * NUM_TOKENS
    for session in sessions:
        assert session["num_layers"] == builtin_model.num_layers
        assert session["num_closed"] == session["num_steps"]
        own = [node["own_fraction"] for node in session["nodes"]]
        assert [node["largest_fraction"] for node in session["nodes"]] == own
        assert sum(own) == pytest.approx(1.0)
        print(f"{num_members} members: {session['num_closed']} of {session['num_steps']} steps closed, own {own}")
