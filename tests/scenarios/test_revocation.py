"""A user revokes a node in the midst of an answer: it goes on with others, and says the same, or names what is missing.

Servers, links and engine are real, as in test_fusion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from fusion_node.client.generation import GenerationStats
from fusion_node.client.grants_core import GrantReport
from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import ConfigError, NoRoute
from fusion_node.grants import Grant, Release
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, PeerId, UnixS
from p2p.grants import open_grant, open_release, sign_grant
from p2p.identity import Identity
from p2p.messages import CloseSession, OpenSession, RenewGrant, RevokeGrant, SessionReleased, StatusReply, StatusRequest
from p2p.records import Refusal, sign_plan
from tests.scenarios.group_user import GroupUser, group
from tests.scenarios.swarm import MemorySwarm, Node, until
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


# grants and releases, as nodes and users exchange them


def of(stats: GenerationStats, peer: PeerId) -> GrantReport:
    [found] = [report for report in stats.grants if report.peer == peer]
    return found


async def test_members_release_what_they_held_when_an_answer_is_over(fusion: Fusion) -> None:
    nodes = await fusion.group("0:4", "0/3:1:2", "1/3:1:2", "2/3:1:2")
    client = await fusion.client(prefix_cache=False)
    stats = await answer(client)
    await client.wait_released(20.0)
    assert [report.peer for report in stats.grants] == [node.peer for node in nodes]
    for index, (node, report) in enumerate(zip(nodes, stats.grants, strict=True)):
        assert report.grant.node == node.peer
        assert (report.layers, report.slice) == (LayerRange(0, 4), ModelSlice(index, (3, 1, 2)))
        assert report.release is not None
        assert report.release.why == "closed"
        assert report.release.num_positions == len(PROMPT) + stats.completion_tokens - 1
    assert [node.server.counters["grants_released"] for node in nodes] == [1, 1, 1]


async def test_what_is_kept_for_the_next_question_is_released_when_the_client_leaves(fusion: Fusion) -> None:
    await fusion.group("0:4", "0/2", "1/2")
    client = await fusion.client()
    stats = await answer(client)
    await client.wait_released(0.0)
    assert [(report.is_ended, report.release) for report in stats.grants] == [(False, None)] * 2
    await client.aclose()
    assert [report.release is not None for report in stats.grants] == [True, True]


async def test_a_revoked_member_releases_at_once_and_the_others_go_on_under_other_grants(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", "1/3", ms=5.0)
    client = await fusion.client(prefix_cache=False)
    stats = await answer(client, on_piece=at(5, lambda: client.revoke(nodes[1].peer)))
    assert stats.token_ids == expected
    await client.wait_released(20.0)
    revoked = of(stats, nodes[1].peer)
    assert revoked.is_revoked
    assert revoked.release is not None
    assert revoked.release.why == "revoked"
    assert revoked.release.num_positions >= len(PROMPT)
    others = [of(stats, node.peer) for node in (nodes[0], nodes[2], spare)]
    assert [report.release.why for report in others if report.release] == ["closed"] * 3
    assert client.grants.counters.total() == 0


async def test_a_member_that_is_killed_has_released_nothing(fusion: Fusion) -> None:
    nodes = await fusion.group("0:4", "0/2", "1/2")
    await fusion.node("0:4", "1/2", ms=5.0)
    client = await fusion.client(prefix_cache=False)
    killing: list[asyncio.Task[None]] = []
    stats = await answer(client, on_piece=at(3, lambda: killing.append(asyncio.ensure_future(nodes[1].kill()))))
    await asyncio.gather(*killing)
    await client.wait_released(20.0)
    assert of(stats, nodes[1].peer).release is None
    assert of(stats, nodes[0].peer).release is not None


async def test_of_a_member_that_refuses_no_release_is_waited_for(fusion: Fusion) -> None:
    nodes = await fusion.group("0:4", "0/2", "1/2")
    spare = await fusion.node("0:4", "1/2", ms=5.0)
    client = await fusion.client(prefix_cache=False)
    nodes[1].admission.paused = "it is somebody else's turn"
    stats = await answer(client)
    await client.wait_released(20.0)
    assert peers(stats) == [ids([nodes[0], spare])]
    assert {report.peer for report in stats.grants} == {nodes[0].peer, spare.peer}
    assert all(report.release is not None for report in stats.grants)


LAYERS = LayerRange(0, 4)


async def two(swarm: MemorySwarm) -> tuple[list[Node], GroupUser]:
    nodes = await group(swarm, LAYERS, (1, 1))
    return nodes, GroupUser.of(swarm, [nodes])


async def refusal(user: GroupUser, grant: bytes) -> tuple[str, str]:
    """What the first member says to a grant."""
    await user.ask(grant=grant)
    peer, refused = await user.refusal()
    assert peer in {node.peer for node in user.stages[0]}
    return refused.code, refused.reason


async def test_a_slice_is_not_held_without_a_grant(swarm: MemorySwarm) -> None:
    nodes, user = await two(swarm)
    assert await refusal(user, b"") == ("not-granted", "a slice is held under its user's grant, and none came")
    assert [node.num_sessions for node in nodes] == [0, 0]
    assert [node.admission.blocks.num_open for node in nodes] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"user": "stranger"}, "the grant is wrong-key"),
        ({"issued_at": -700.0, "expires_at": -1.0}, "the grant is expired: compare the clocks"),
        ({"issued_at": 40.0, "expires_at": 80.0}, "the grant is future-dated: compare the clocks"),
        ({"expires_at": 3601.0}, "the grant is lifetime-too-long"),
        ({"session": "0123456789abcdef"}, "it is for another session"),
        ({"model_id": "cd" * 32}, "it is for another model"),
        ({"stop": 3}, "it is for layers 0:3, and not for 0:4"),
        ({"member": 1}, "it is for slice 1/2, and not for 0/2"),
        ({"weights": (1, 1, 1)}, "it is for slice 0/3, and not for 0/2"),
        ({"node": "stranger"}, "it is for another node"),
    ],
)
async def test_a_grant_that_does_not_cover_what_is_asked_opens_nothing(
    swarm: MemorySwarm, changes: dict[str, object], problem: str
) -> None:
    nodes, user = await two(swarm)
    fields = dict(changes)
    for name in ("issued_at", "expires_at"):
        if name in fields:
            fields[name] = time.time() + float(str(fields[name]))
    for name in ("user", "node"):
        if name in fields:
            fields[name] = Identity.generate().peer_id
    await user.raw.pool.connect(nodes[0].peer, [nodes[0].address])
    opening = OpenSession(
        user.plan.session,
        0,
        0,
        sign_plan(user.plan, user.raw.identity),
        grant=user.granted(0, nodes[0], **fields),
    )
    user.raw.pool.send(nodes[0].peer, opening)
    _, refused = await user.refusal()
    assert refused.code == "not-granted"
    assert problem in refused.reason
    assert nodes[0].admission.blocks.num_open == 0


async def test_nothing_is_held_after_the_end_of_a_grant_unless_it_is_renewed(swarm: MemorySwarm) -> None:
    nodes, user = await two(swarm)
    now = time.time()
    grants = [user.granted(0, node, issued_at=now, expires_at=now + 60.0) for node in nodes]
    signed = sign_plan(user.plan, user.raw.identity)
    for index, node in enumerate(nodes):
        await user.raw.pool.connect(node.peer, [node.address])
        opening = OpenSession(user.plan.session, 0, 0, signed, member=index, grant=grants[index])
        user.raw.pool.send(node.peer, opening)
    await until(lambda: user.pump() or len(user.opened) == 2)
    assert all(opened.lease_s <= 60.0 for opened in user.opened.values()), "no more is promised than was granted"
    first = open_grant(grants[0], now=UnixS(now))
    assert isinstance(first, Grant)
    renewed = msgspec.structs.replace(first, expires_at=now + 500.0)
    longer = msgspec.structs.replace(first, expires_at=now + 500.0, stop=99)
    for grant in (renewed, longer):
        message = RenewGrant(user.plan.session, 0, sign_grant(grant, user.raw.identity))
        user.raw.pool.send(nodes[0].peer, message)
    await until(lambda: nodes[0].server.counters["grants_unfit"] == 1)
    for node in nodes:
        node.clock.ahead_s += 61.0
        node.server.expire()
    await until(lambda: user.pump() or bool(user.failed))
    await until(lambda: user.pump() or any(isinstance(message, SessionReleased) for _, message in user.others))
    [(peer, failed)] = user.failed
    assert (peer, failed.code) == (nodes[1].peer, "grant-expired")
    assert [node.num_sessions for node in nodes] == [1, 0]
    [(source, message)] = user.others
    assert source == nodes[1].peer
    assert isinstance(message, SessionReleased)
    release = open_release(message.release, now=UnixS(time.time()))
    second = open_grant(grants[1], now=UnixS(now))
    assert isinstance(release, Release)
    assert isinstance(second, Grant)
    assert release.is_of(second)
    assert release.why == "expired"


async def test_a_grant_that_has_ended_opens_nothing_again_and_another_user_cannot_revoke_it(swarm: MemorySwarm) -> None:
    nodes, user = await two(swarm)
    grant = user.granted(0, nodes[0])
    await user.raw.pool.connect(nodes[0].peer, [nodes[0].address])
    opening = OpenSession(user.plan.session, 0, 0, sign_plan(user.plan, user.raw.identity), grant=grant)
    user.raw.pool.send(nodes[0].peer, opening)
    await until(lambda: nodes[0].num_sessions == 1)
    opened = open_grant(grant, now=UnixS(time.time()))
    assert isinstance(opened, Grant)
    revoke = RevokeGrant(user.plan.session, 0, opened.grant)
    stranger = swarm.stranger()
    await stranger.pool.connect(nodes[0].peer, [nodes[0].address])
    stranger.pool.send(nodes[0].peer, revoke)
    stranger.pool.send(nodes[0].peer, StatusRequest(1))
    assert isinstance(await stranger.get(StatusReply), StatusReply)
    assert nodes[0].num_sessions == 1
    user.raw.pool.send(nodes[0].peer, revoke)
    await until(lambda: nodes[0].num_sessions == 0)
    assert nodes[0].admission.blocks.num_open == 0
    user.raw.pool.send(nodes[0].peer, opening)
    _, refused = await user.refusal()
    assert (refused.code, refused.reason) == ("not-granted", "the grant has ended here already")


async def test_what_is_kept_of_a_session_ends_with_its_grant_and_can_be_revoked(swarm: MemorySwarm) -> None:
    nodes, user = await two(swarm)
    now, signed = time.time(), sign_plan(user.plan, user.raw.identity)
    grants = [user.granted(0, node, issued_at=now, expires_at=now + 60.0) for node in nodes]
    for index, node in enumerate(nodes):
        await user.raw.pool.connect(node.peer, [node.address])
        opening = OpenSession(user.plan.session, 0, 0, signed, member=index, grant=grants[index])
        user.raw.pool.send(node.peer, opening)
    await until(lambda: user.pump() or len(user.opened) == 2)
    await user.step(user.embed(list(range(5, 45))))
    for node in nodes:
        user.raw.pool.send(node.peer, CloseSession(user.plan.session, 0, retain=True))
    await until(lambda: [node.admission.blocks.num_retained for node in nodes] == [1, 1])
    assert [node.server.counters["grants_released"] for node in nodes] == [0, 0], "it is held still"
    first = open_grant(grants[0], now=UnixS(now))
    assert isinstance(first, Grant)
    user.raw.pool.send(nodes[0].peer, RevokeGrant(user.plan.session, 0, first.grant))
    await until(lambda: nodes[0].admission.blocks.num_retained == 0)
    nodes[1].admission.check_integrity()
    nodes[1].clock.ahead_s += 61.0
    nodes[1].server.expire()
    assert nodes[1].admission.blocks.num_retained == 0

    def words() -> dict[PeerId, Release | Refusal]:
        user.pump()
        found = {peer: message for peer, message in user.others if isinstance(message, SessionReleased)}
        return {peer: open_release(each.release, now=UnixS(time.time())) for peer, each in found.items()}

    await until(lambda: len(words()) == 2)
    told = {peer: (word.why, word.num_positions) for peer, word in words().items() if isinstance(word, Release)}
    assert told == {nodes[0].peer: ("revoked", 40), nodes[1].peer: ("expired", 40)}
