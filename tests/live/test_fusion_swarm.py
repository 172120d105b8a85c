"""A real model over a fusion group of real processes: the answer is the whole model's, and outlives a member.

Three nodes hold a third of every layer each, and one more what the second holds.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.engine.reference import ReferenceModel
from fusion_node.errors import NoRoute
from fusion_node.store import StoredModel
from fusion_node.types import PeerId, members_of
from tests.live.swarm_process import MODEL, NodeProcess, Nodes, node_processes, run_cli

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPT = "What is a peer-to-peer network?"
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SLICES = ("0/3", "1/3", "2/3", "1/3")


@pytest.fixture(scope="module")
def nodes(test_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with node_processes(test_home, tmp_path_factory.mktemp("nodes")) as made:
        first = made._start("", (), ("--slice", SLICES[0]))
        made.current = [first.wait_ready()]
        others = [made._start("", first.addresses[:1], ("--slice", each)) for each in SLICES[1:]]
        made.current += [node.wait_ready() for node in others]
        yield made


@pytest.fixture(scope="module")
def reference(builtin_model: StoredModel) -> ReferenceModel:
    torch.set_num_threads(1)  # as the nodes, and because they share two cores with it
    return ReferenceModel(builtin_model.path)


def node_of(nodes: Nodes, peer: PeerId) -> NodeProcess:
    return next(node for node in nodes.current if node.peer == peer)


def test_plan_shows_all_members_with_what_they_hold(nodes: Nodes, test_home: Path) -> None:
    shown = run_cli(
        "plan", MODEL, "--dry-run", "--topology", "fusion", "--no-mdns", "--peer", nodes.addresses[0], home=test_home
    )
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "group of 3, layers 0:30" in text
    assert "slice 2/3" in text
    assert "columns 192:384; heads 3:6, which read KV head 1; channels 512:1024" in text
    assert "of 2 that hold slice 1/3 of 0:30" in text


async def test_a_revoked_member_deletes_and_signs_while_the_answer_goes_on(
    nodes: Nodes, test_home: Path, reference: ReferenceModel
) -> None:
    async with SwarmClient(
        MODEL, peers=nodes.addresses[:1], home=test_home, mdns=False, threads=1, topology="fusion", prefix_cache=False
    ) as client:
        ids = await client.encode(PROMPT)
        expected = await asyncio.to_thread(reference.greedy, ids, NUM_TOKENS, ignore_eos=True)
        answer, revoked = client.generate(PROMPT, GREEDY), PeerId("")
        async for _ in answer:
            if not revoked and answer.stats.completion_tokens >= 4:
                [stage] = answer.stats.stages
                revoked = members_of(stage.peer)[1]
                client.revoke(revoked)
        await client.wait_released(10.0)
    assert answer.stats.token_ids == expected
    assert [(repair.cause, repair.peer) for repair in answer.stats.repairs] == [("revoked", revoked)]
    words = {report.peer: report.release for report in answer.stats.grants}
    assert len(words) == len(SLICES)
    assert {peer: word.why for peer, word in words.items() if word is not None} == {
        peer: "revoked" if peer == revoked else "closed" for peer in words
    }


async def test_answer_of_a_group_is_the_whole_models_and_outlives_a_member_that_is_killed(
    nodes: Nodes, test_home: Path, reference: ReferenceModel
) -> None:
    async with SwarmClient(
        MODEL, peers=nodes.addresses[:1], home=test_home, mdns=False, threads=1, topology="fusion", members=3
    ) as client:
        await outlives(client, nodes, reference)


async def outlives(client: SwarmClient, nodes: Nodes, reference: ReferenceModel) -> None:
    ids = await client.encode(PROMPT)
    expected = await asyncio.to_thread(reference.greedy, ids, NUM_TOKENS, ignore_eos=True)
    before = client.generate(PROMPT, GREEDY)
    await before.text()
    assert before.stats.token_ids == expected
    [stage] = before.stats.stages
    members = members_of(stage.peer)
    assert len(members) == 3

    answer, killed = client.generate(PROMPT, GREEDY), False
    async for _ in answer:
        if not killed and answer.stats.completion_tokens >= 4:
            killed = True
            [stage] = answer.stats.stages
            members = members_of(stage.peer)
            node_of(nodes, members[1]).signal(signal.SIGKILL)
    assert killed
    assert answer.stats.token_ids == expected
    [stage] = answer.stats.stages
    others = members_of(stage.peer)
    assert (others[0], others[2]) == (members[0], members[2])
    assert others[1] not in (members[1], *others[::2])
    assert [(repair.kind, repair.peer) for repair in answer.stats.repairs] == [("patched", members[1])]

    # Then nobody is left for its place.
    node_of(nodes, others[1]).signal(signal.SIGKILL)
    with pytest.raises(NoRoute, match=r"slice 1/3 of layers 0:30 is held by nobody"):
        async with asyncio.timeout(60.0):
            await client.generate(PROMPT, GREEDY).text()
