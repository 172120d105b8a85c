"""Answers over groups whose sums are masked: the tokens are those without masks, whatever guesses or fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fusion_node.engine.architectures import load_config
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_layer import fusion_dims
from fusion_node.errors import ConfigError, NoRoute
from fusion_node.mask_keys import mask_keys
from fusion_node.slices import MASK_KEY_BYTES, MASKED_BYTES, Exchange, masked_width
from fusion_node.types import LayerRange, PeerId
from p2p.identity import Identity
from p2p.messages import AnyMessage, Partials
from tests.engine.tiny import TinyModel
from tests.scenarios.group_user import GroupUser, group
from tests.scenarios.swarm import MemorySwarm, memory_swarm
from tests.scenarios.test_audit import judged
from tests.scenarios.test_fusion import GREEDY, SEEDED, Fusion, answer, boundary, by_pipeline, fusion, home, ids, model
from tests.scenarios.test_fusion import peers as peers_of

__all__ = ["boundary", "fusion", "home", "model"]
"""Fixtures: the same model and store."""

LAYERS = LayerRange(0, 4)


@pytest.mark.parametrize("weights", [("0/3", "1/3", "2/3"), ("0/3:1:2", "1/3:1:2", "2/3:1:2"),
                                     ("0/4", "1/4", "2/4", "3/4"), ("0/5", "1/5", "2/5", "3/5", "4/5")])  # fmt: skip
async def test_masked_group_answers_as_a_pipeline_does_token_for_token(
    fusion: Fusion, weights: tuple[str, ...]
) -> None:
    greedy, seeded = await by_pipeline(fusion, GREEDY, SEEDED)
    nodes = await fusion.group("0:4", *weights)
    client = await fusion.client(masked_sums=True)
    for params, expected in ((GREEDY, greedy), (SEEDED, seeded)):
        stats = await answer(client, params)
        assert stats.token_ids == expected
        assert peers_of(stats) == [ids(nodes)]
        assert not stats.repairs


async def test_masked_sums_of_two_groups_with_trees_change_no_token(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, SEEDED)
    first = await fusion.group("0:1", "0/3", "1/3", "2/3")
    second = await fusion.group("1:4", "0/3:1:1", "1/3:1:1", "2/3:1:1")
    stats = await answer(await fusion.client(speculation="tree", masked_sums=True), SEEDED)
    assert stats.token_ids == expected
    assert peers_of(stats) == [ids(first), ids(second)]
    assert stats.speculation is not None
    assert stats.speculation.rows_per_token > 1.0


@pytest.mark.parametrize("speculation", ["off", "tree"])
async def test_masked_member_that_is_killed_is_replaced_and_the_answer_is_the_same(
    fusion: Fusion, speculation: str
) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", "1/3", ms=5.0)
    client = await fusion.client(speculation=speculation, masked_sums=True)
    killing: list[asyncio.Task[None]] = []

    def kill(count: int) -> None:
        if count == 5:
            killing.append(asyncio.ensure_future(nodes[1].kill()))

    stats = await answer(client, on_piece=kill)
    await asyncio.gather(*killing)
    assert stats.token_ids == expected
    assert peers_of(stats) == [ids([nodes[0], spare, nodes[2]])]
    assert [repair.kind for repair in stats.repairs] == ["patched"]


async def test_several_masked_and_plain_answers_at_once_are_the_same(fusion: Fusion) -> None:
    """Their contributions travel in the same messages where they are of one form."""
    greedy, seeded = await by_pipeline(fusion, GREEDY, SEEDED)
    await fusion.group("0:4", "0/3", "1/3", "2/3")
    clients = [await fusion.client(masked_sums=masked) for masked in (True, True, False)]
    both = [(GREEDY, greedy), (SEEDED, seeded)]
    told = await asyncio.gather(*(answer(client, params) for client in clients for params, _ in both))
    assert [stats.token_ids for stats in told] == [tokens for _ in clients for _, tokens in both]


async def test_masked_sums_do_without_groups_of_two_and_say_so(fusion: Fusion) -> None:
    await fusion.group("0:4", "0/2", "1/2")
    client = await fusion.client(masked_sums=True)
    with pytest.raises(NoRoute, match=r"group of 3 or more, as masked sums need it.*slices for groups of 2"):
        await answer(client)


@pytest.mark.parametrize(
    ("topology", "members", "complaint"),
    [
        ("fusion", 2, "masked sums need --members 3 or more"),
        ("pipeline", None, "add --topology fusion"),
        ("hybrid", None, "add --topology fusion"),
    ],
)
async def test_masked_sums_where_there_is_nobody_to_hide_behind_are_refused(
    fusion: Fusion, topology: str, members: int | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await fusion.client(topology, members=members, masked_sums=True)


async def test_audit_of_a_masked_answer_knows_its_words_and_what_can_be_solved(
    model: TinyModel, boundary: Boundary, home: Path, tmp_path: Path
) -> None:
    for masked in (True, False):
        folder = tmp_path / str(masked)
        folder.mkdir()
        async with memory_swarm(model, boundary) as swarm:
            swarm.audit_folder = folder
            fusion = Fusion(swarm, home)
            await fusion.group("0:4", "0/3", "1/3", "2/3")
            await answer(await fusion.client(masked_sums=masked))
        report = judged(folder, fusion_dims(load_config(fusion.stored)))
        assert all(check.passed for check in report.checks), report.findings
        logs = b"".join(path.read_bytes() for path in folder.iterdir())
        assert (b'"dtype":"u64"' in logs) == masked
        assert (b'"masks":true' in logs) == masked


# the wire


def keys_of(user: GroupUser, num_members: int) -> list[bytes]:
    plan = user.plan
    return [
        mask_keys(
            bytes(32),
            session=plan.session,
            epoch=plan.epoch,
            opening=0,
            stage=0,
            num_members=num_members,
            member=member,
        )
        for member in range(num_members)
    ]


@pytest.mark.parametrize(
    ("weights", "num_bytes", "reason"),
    [
        ((1, 1), 0, "in groups of 3 or more"),
        ((1, 1, 1), 0, "not one key"),
        ((1, 1, 1), 3 * MASK_KEY_BYTES, "not one key"),
    ],
)
async def test_node_refuses_masks_without_enough_members_or_keys(
    swarm: MemorySwarm, weights: tuple[int, ...], num_bytes: int, reason: str
) -> None:
    user = GroupUser.of(swarm, [await group(swarm, LAYERS, weights)], masks=True)
    await user.ask(mask_keys=bytes(num_bytes))
    for _ in weights:
        _, refused = await user.refusal()
        assert refused.code == "bad-plan"
        assert reason in refused.reason


async def test_node_refuses_keys_where_the_plan_has_no_masks(swarm: MemorySwarm) -> None:
    user = GroupUser.of(swarm, [await group(swarm, LAYERS, (1, 1, 1))])
    await user.ask(mask_keys=bytes(2 * MASK_KEY_BYTES))
    _, refused = await user.refusal()
    assert "not one key" in refused.reason


async def test_contributions_whose_masks_do_not_cancel_fail_the_session_and_change_no_row(swarm: MemorySwarm) -> None:
    """Of members whose user has given them other keys: as of one that makes up what it sends."""
    user = GroupUser.of(swarm, [await group(swarm, LAYERS, (1, 1, 1))], masks=True)
    await user.open(keys=[bytes([place]) * 2 * MASK_KEY_BYTES for place in range(3)])
    user.send(user.embed([5, 6]))
    _, failed = await user.failure()
    assert failed.code == "overflow"
    assert failed.is_kept
    assert not failed.culprit
    assert "QKV in layer 0: contributions do not add up" in failed.reason
    assert not user.results


async def test_rows_of_a_masked_group_are_those_of_a_plain_one(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, LAYERS, (2, 1, 1))
    masked, plain = GroupUser.of(swarm, [nodes], masks=True), GroupUser.of(swarm, [nodes])
    await masked.open(keys=keys_of(masked, 3))
    await plain.open()
    for num_rows in (300, 1, 1):
        rows_TD = masked.embed([token % 50 + 4 for token in range(num_rows)])
        one_TD, other_TD = await masked.step(rows_TD), await plain.step(rows_TD)
        assert (one_TD - other_TD).norm() <= 1e-5 * other_TD.norm()


class Overheard:
    """Stands where an audit log does, and keeps contributions that one peer sends."""

    def __init__(self) -> None:
        self.sent_to: dict[PeerId, list[tuple[Partials, bytes]]] = {}

    def sent(self, peer: PeerId, message: AnyMessage, payload: bytes | memoryview) -> None:
        if isinstance(message, Partials):
            self.sent_to.setdefault(peer, []).append((message, bytes(payload)))

    def received(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        pass

    def gone(self, peer: PeerId) -> None:
        pass


async def test_what_a_member_is_sent_is_uniform_to_it_and_the_same_of_a_plain_plan_is_not(swarm: MemorySwarm) -> None:
    """The frames of real nodes, of a prompt whose contributions are anything but uniform."""
    found = {}
    ears: dict[PeerId, Overheard] = {}

    def recorder(host: str, identity: Identity) -> Overheard:
        return ears.setdefault(identity.peer_id, Overheard())

    swarm.recorder = recorder  # type: ignore[method-assign,assignment]
    for masked in (True, False):
        nodes = await group(swarm, LAYERS, (1, 1, 1))
        user = GroupUser.of(swarm, [nodes], masks=masked)
        await user.open(keys=keys_of(user, 3) if masked else ())
        await user.step(user.embed([token % 50 + 4 for token in range(64)]))
        found[masked] = ears[nodes[1].peer].sent_to[nodes[0].peer]
    assert len(found[True]) == len(found[False]) == 4 * len(LAYERS)
    engine = nodes[0].engine
    assert isinstance(engine, SliceEngine)
    for message, payload in found[True]:
        width = masked_width(engine.dims, engine.bounds[0], Exchange(message.exchange))
        assert len(payload) == message.num_rows * width * MASKED_BYTES
    assert chi_square(b"".join(payload for _, payload in found[True])) < 400.0
    assert chi_square(b"".join(payload for _, payload in found[False])) > 4_000.0


def chi_square(data: bytes) -> float:
    """255 on average where bytes are uniform, with a standard deviation of 23."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    return float(((counts - len(data) / 256) ** 2 / (len(data) / 256)).sum())
