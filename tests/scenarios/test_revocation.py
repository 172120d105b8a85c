"""A user revokes a node in the midst of an answer: it goes on with others, and says the same, or names what is missing.

Servers, links and engine are real, as in test_fusion.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import ConfigError, NoRoute
from fusion_node.types import PeerId
from tests.scenarios.swarm import until
from tests.scenarios.test_fusion import (
    GREEDY,
    PROMPT,
    Fusion,
    Member,
    answer,
    boundary,
    by_pipeline,
    fusion,
    home,
    ids,
    model,
    peers,
)

__all__ = ["boundary", "fusion", "home", "model"]
"""Fixtures: the same model and store."""


def at(count: int, work: Callable[[], None]) -> Callable[[int], None]:
    """Does something after so many pieces of an answer."""
    return lambda now: work() if now == count else None


def num_sessions(nodes: list[Member]) -> list[int]:
    return [len(node.admission.sessions) for node in nodes]


@pytest.mark.parametrize(("place", "speculation"), [(0, "off"), (2, "off"), (1, "tree")])
async def test_a_member_that_is_revoked_is_replaced_and_the_answer_is_the_same(
    fusion: Fusion, place: int, speculation: str
) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", f"{place}/3", ms=5.0)
    client = await fusion.client(speculation=speculation)
    stats = await answer(client, on_piece=at(5, lambda: client.revoke(nodes[place].peer)))
    assert stats.token_ids == expected
    assert peers(stats) == [ids([*nodes[:place], spare, *nodes[place + 1 :]])]
    assert [(repair.kind, repair.cause, repair.peer) for repair in stats.repairs] == [
        ("patched", "revoked", nodes[place].peer)
    ]
    assert nodes[place].admission.blocks.num_retained == 0
    assert num_sessions([nodes[place]]) == [0]
    again = await answer(client)
    assert again.token_ids == expected
    assert nodes[place].peer not in peers(again)[0], "it is left alone"
    assert not again.repairs


async def test_a_stage_of_a_pipeline_is_revoked_as_well(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    first, second = fusion.nodes
    spare = await fusion.node("1:4", ms=5.0)
    client = await fusion.client("pipeline")
    stats = await answer(client, on_piece=at(5, lambda: client.revoke(second.peer)))
    assert stats.token_ids == expected
    assert peers(stats) == [first.peer, spare.peer]
    assert [(repair.cause, repair.peer) for repair in stats.repairs] == [("revoked", second.peer)]
    assert num_sessions([second]) == [0]


async def test_without_a_spare_the_error_names_the_peer_and_the_slice_and_it_can_be_allowed_again(
    fusion: Fusion,
) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    client = await fusion.client()
    with pytest.raises(NoRoute) as told:
        await answer(client, on_piece=at(4, lambda: client.revoke(nodes[1].peer)))
    assert f"you have revoked node …{nodes[1].peer[-8:]}" in str(told.value)
    assert "slice 1/3 of layers 0:4 is held by nobody whom your rules allow" in str(told.value)
    await until(lambda: num_sessions(nodes) == [0, 0, 0])
    assert client.revoked == {nodes[1].peer}
    client.allow_again(nodes[1].peer)
    assert client.revoked == frozenset()
    assert (await answer(client)).token_ids == expected


async def test_what_a_revoked_member_has_kept_of_earlier_answers_is_dropped(fusion: Fusion) -> None:
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    await fusion.node("0:4", "1/3", ms=5.0)
    client = await fusion.client()
    await answer(client)
    await until(lambda: nodes[1].admission.blocks.num_retained == 1)
    client.revoke(nodes[1].peer)
    client.revoke(nodes[1].peer)
    await until(lambda: [node.admission.blocks.num_retained for node in nodes] == [0, 0, 0])
    longer = await answer(client, prompt=PROMPT + " So it was.")
    assert longer.cached_tokens == 0


async def test_a_peer_is_revoked_by_its_id_alone(fusion: Fusion) -> None:
    client: SwarmClient = await fusion.client("pipeline")
    with pytest.raises(ConfigError, match="'nobody' is not a peer id"):
        client.revoke(PeerId("nobody"))
