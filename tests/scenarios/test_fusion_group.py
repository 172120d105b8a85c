"""Groups of real servers in one process: what they compute together, and what they do when one of them errs or dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from msgspec import structs

from fusion_node.daemon.fused_forwards import MAX_BACKLOG_BYTES
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_stage import FusedStep
from fusion_node.engine.tensor_codec import encode_rows
from fusion_node.errors import ResourceExhausted
from fusion_node.slices import Exchange, ModelSlice
from fusion_node.types import LayerRange, PeerId
from p2p.messages import (
    Cancel,
    Partials,
    PartialsEntry,
    Replayed,
    Resend,
    SessionFailed,
    SessionOpened,
    StageTiming,
    TensorMeta,
    alias_of,
)
from p2p.records import PlanMember, PlanStage
from tests.scenarios.group_user import GroupUser, group, member, stage_of
from tests.scenarios.swarm import MemorySwarm, Node, step, until

ALL = LayerRange(0, 7)
PROMPT = [5, 17, 99, 3, 42, 8]

Layout = tuple[tuple[LayerRange, tuple[int, ...]], ...]
"""Layer ranges with the weights of their members; a stage of one weight is a node of whole layers."""

LAYOUTS: dict[str, Layout] = {
    "two": ((ALL, (1, 1)),),
    "three, uneven": ((ALL, (3, 1, 2)),),
    "four": ((ALL, (1, 1, 1, 1)),),
    "node, then group": ((LayerRange(0, 3), (1,)), (LayerRange(3, 7), (1, 1))),
    "group, then node": ((LayerRange(0, 3), (1, 1)), (LayerRange(3, 7), (1,))),
    "groups of two and three": ((LayerRange(0, 4), (1, 1)), (LayerRange(4, 7), (2, 1, 1))),
}


async def stages_of(swarm: MemorySwarm, layout: Layout) -> list[list[Node]]:
    return [
        [await swarm.node(layers)] if len(weights) == 1 else await group(swarm, layers, weights)
        for layers, weights in layout
    ]


def near(rows_TD: torch.Tensor, whole_TD: torch.Tensor) -> bool:
    return bool((rows_TD - whole_TD).norm() <= 1e-5 * whole_TD.norm())


async def plain_and_tree(user: GroupUser) -> list[torch.Tensor]:
    """A prompt, some tokens, a tree of which a branch is kept, and more tokens."""
    out = [await user.step(user.embed(PROMPT)), await user.step(user.embed([7]))]
    # Two branches of the root: 8 - 10 - 11 and 9.
    first = user.last_node + 1
    out.append(
        await user.step(user.embed([1, 2, 3, 4]), parent=0, parents=(first - 1, first - 1, first, first + 2), advance=0)
    )
    # Keeps the first branch, which does not lie in order, and hangs a chain on its middle.
    out.append(await user.step(user.embed([9, 11]), parent=first + 2, advance=first + 2))
    second = first + 4
    out.append(await user.step(user.embed([6]), parent=second + 1, advance=second + 2))
    out.append(await user.step(user.embed([30])))
    return out


@pytest.mark.parametrize("name", LAYOUTS)
async def test_prompt_tokens_and_trees_come_out_as_of_the_whole_layers(swarm: MemorySwarm, name: str) -> None:
    whole = GroupUser.of(swarm, [[await swarm.node(ALL)]])
    user = GroupUser.of(swarm, await stages_of(swarm, LAYOUTS[name]))
    await whole.open()
    await user.open()
    expected = await plain_and_tree(whole)
    for ours, theirs in zip(await plain_and_tree(user), expected, strict=True):
        assert near(ours, theirs)
    user.close()
    await until(lambda: not any(node.num_sessions for nodes in user.stages for node in nodes))
    for node in (node for nodes in user.stages for node in nodes):
        node.admission.check_integrity()
        assert not node.server.is_busy


async def test_long_prompts_of_several_sessions_pass_in_units_beside_one_another(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1, 1))
    ids = [(7 * i) % 131 for i in range(300)]
    whole = GroupUser.of(swarm, [[await swarm.node(ALL)]])
    await whole.open()
    expected = await whole.step(whole.embed(ids)), await whole.step(whole.embed([4]))
    users = [GroupUser.of(swarm, [nodes]) for _ in range(3)]
    for user in users:
        await user.open()
    sent = [[user.send(user.embed(ids)), user.send(user.embed([4]))] for user in users]  # neither waits for the other
    for user, sequences in zip(users, sent, strict=True):
        for sequence, rows in zip(sequences, expected, strict=True):
            assert near(await user.result(sequence), rows)
    for node in nodes:
        assert node.server.counters["steps"] == 6
        assert 7 * 4 < node.server.counters["exchanges"] <= 3 * 3 * 29  # alone, each unit would take 29
        assert node.server.counters["partials"] <= 2 * 3 * 3 * 28


async def test_a_member_computes_nothing_for_another_one_whose_link_is_full(
    swarm: MemorySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    user = GroupUser.of(swarm, [nodes])
    await user.open()
    expected = await user.step(user.embed(PROMPT)), await user.step(user.embed([7]))
    pool, num_before = nodes[0].pool, nodes[0].server.counters["exchanges"]
    looked = asyncio.Event()

    def full(peer: PeerId) -> int:
        if peer == nodes[1].peer:
            looked.set()
            return MAX_BACKLOG_BYTES + 1
        return 0

    again = GroupUser.of(swarm, [nodes])
    await again.open()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "backlog_bytes", full)
        sequences = [again.send(again.embed(PROMPT)), again.send(again.embed([7]))]
        for _ in range(3):
            looked.clear()
            await looked.wait()
        assert nodes[0].server.counters["exchanges"] == num_before
    for sequence, rows in zip(sequences, expected, strict=True):
        assert near(await again.result(sequence), rows)


async def test_rows_that_are_reused_or_skipped_are_so_in_all_members(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    whole, user = GroupUser.of(swarm, [[await swarm.node(ALL)]]), GroupUser.of(swarm, [nodes])
    for each in (whole, user):
        await each.open()
    expected, out = [], []
    for each, rows in ((whole, expected), (user, out)):
        rows.append(await each.step(each.embed([*range(20)])))
        first = each.last_node + 1
        # Of three nodes one comes without a row, and one hangs on that.
        rows.append(
            await each.step(
                each.embed([50]),
                parent=0,
                parents=(first - 1, first - 1, first + 1),
                num_nodes=3,
                live=b"\x01",
                advance=first,
                want=(first,),
            )
        )
        each.last_node += 2
        rows.append(await each.step(each.embed([51]), parent=first))
        # An entry without any row, which still has its place in the log.
        last = each.last_node
        each.send(torch.empty(0, 48), first_node=last + 1, parent=last, num_nodes=1, live=b"\0", advance=0, want=())
        each.last_node = last + 1
        rows.append(await each.step(each.embed([52]), parent=last))
    for ours, theirs in zip(out, expected, strict=True):
        assert near(ours, theirs)
    # A second session begins like the first.
    again = GroupUser(swarm, user.raw, [nodes], user.planned(swarm, user.raw, [nodes]))
    await again.open(prefix=user.plan.session, prefix_positions=16)
    assert {opened.reused_positions for opened in again.opened.values()} == {16}
    again.last_node = 16
    assert near(await again.step(again.embed([*range(16, 20)])), out[0][16:])


@pytest.mark.parametrize("num_positions", [6, 300])
async def test_a_member_that_dies_is_named_and_a_new_group_goes_on_with_the_same_rows(
    swarm: MemorySwarm, num_positions: int
) -> None:
    nodes = await group(swarm, ALL, (1, 1, 1))
    whole, user = GroupUser.of(swarm, [[await swarm.node(ALL)]]), GroupUser.of(swarm, [nodes])
    ids = [(5 * i) % 131 for i in range(num_positions)]
    for each in (whole, user):
        await each.open()
        await each.step(each.embed(ids))
    expected = await whole.step(whole.embed([9])), await whole.step(whole.embed([10]))
    user.send(user.embed([9]))
    await nodes[1].pool.aclose()
    failures = [await user.failure() for _ in range(2)]
    assert {peer for peer, _ in failures} == {nodes[0].peer, nodes[2].peer}
    assert {(f.code, f.culprit, f.is_kept) for _, f in failures} == {("peer-lost", nodes[1].peer, True)}
    await until(lambda: not nodes[0].server.is_busy and not nodes[2].server.is_busy)
    # The others begin anew as well: what was under way between them is lost.
    user.close()
    user.stages = [[nodes[0], await member(swarm, ALL, ModelSlice(1, (1, 1, 1))), nodes[2]]]
    user.replan()
    user.results.clear()
    await user.open()
    assert {opened.next_sequence for opened in user.opened.values()} == {0}
    user.sequence = user.last_node = 0
    user.send(user.embed(ids), want=())
    for token, rows in zip((9, 10), expected, strict=True):
        assert near(await user.step(user.embed([token])), rows)


async def test_a_group_whose_next_stage_dies_hands_its_columns_on_again(swarm: MemorySwarm) -> None:
    front, back = LayerRange(0, 4), LayerRange(4, 7)
    nodes, last = await group(swarm, front, (2, 1, 1)), await group(swarm, back, (1, 1))
    whole = GroupUser.of(swarm, [[await swarm.node(ALL)]])
    user = GroupUser.of(swarm, [nodes, last])
    for each in (whole, user):
        await each.open()
        await each.step(each.embed(PROMPT))
    await last[1].pool.aclose()
    failures = [await user.failure() for _ in range(3)]
    # The first of them shares no column with it.
    assert {peer for peer, _ in failures} == {nodes[1].peer, nodes[2].peer, last[0].peer}
    assert {failed.culprit for _, failed in failures} == {last[1].peer}
    user.stages = [nodes, [await swarm.node(back)]]
    user.replan()
    await user.open(resumes=True)
    assert [user.opened[node.peer].next_sequence for node in nodes] == [1, 1, 1]
    assert [user.opened[node.peer].retained_positions for node in nodes] == [len(PROMPT)] * 3
    for node in nodes:
        user.raw.pool.send(
            node.peer, Resend(user.plan.session, user.plan.epoch, 0, 1, 0, len(PROMPT), False, stop_stage=1)
        )
    user.sequence, user.last_node = 1, len(PROMPT)
    assert near(await user.step(user.embed([3])), await whole.step(whole.embed([3])))
    assert [type(message) for _, message in user.others] == [Replayed]
    assert sum(node.server.counters["rows"] for node in nodes) == 3 * (len(PROMPT) + 1)  # nothing was computed twice


async def test_what_a_stranger_says_of_a_session_changes_nothing(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    user, stranger = GroupUser.of(swarm, [nodes]), swarm.stranger()
    await user.open()
    expected = await user.step(user.embed(PROMPT))
    await stranger.pool.connect(nodes[0].peer, [nodes[0].address])
    entry = PartialsEntry(alias_of(user.plan.session, 0), user.last_node + 1, 1)
    for layer in (0, 6):
        stranger.pool.send(nodes[0].peer, Partials(layer, 0, (entry,)), bytes(4 * 33))
    await until(lambda: nodes[0].server.counters["partials_of_strangers"] == 2)
    again = GroupUser.of(swarm, [nodes])
    await again.open()
    assert near(await again.step(again.embed(PROMPT)), expected)
    assert len(await user.step(user.embed([1]))) == 1


BAD_CONTRIBUTIONS = {
    "not finite": (0, Exchange.QKV, 1, b"\x00\x00\xc0\x7f"),
    "finite and too large": (0, Exchange.QKV, 1, b"\x00\x00\x7f\x7f"),
    "another width": (0, Exchange.QKV, 2, bytes(4)),
    "another layer": (7, Exchange.QKV, 1, bytes(4)),
    "an exchange ahead": (0, Exchange.GATE_UP, 1, bytes(4)),
}


@pytest.mark.parametrize("what", BAD_CONTRIBUTIONS)
async def test_a_member_that_sends_what_cannot_be_is_named(swarm: MemorySwarm, what: str) -> None:
    node = await member(swarm, ALL, ModelSlice(0, (1, 1)))
    user, evil = GroupUser.of(swarm, [[node]]), swarm.stranger()
    stage = stage_of([node])
    address = await evil.pool.listen(f"{evil.host}:0")
    user.plan = user.planned(
        swarm,
        user.raw,
        [[node]],
        stages=(structs.replace(stage, members=(*stage.members, PlanMember(evil.peer, (address,)))),),
    )
    await user.open()
    user.send(user.embed([5]))
    layer, exchange, num_rows, value = BAD_CONTRIBUTIONS[what]
    assert isinstance(node.engine, SliceEngine)
    width = node.engine.width(exchange, 0) + (what == "another width")
    entry = PartialsEntry(alias_of(user.plan.session, 0), 1, num_rows)
    await evil.get(Partials)
    evil.pool.send(node.peer, Partials(layer, exchange, (entry,)), value * width * num_rows)
    peer, failed = await user.failure()
    code, culprit = ("overflow", "") if what == "finite and too large" else ("bad-partials", evil.peer)
    assert (peer, failed.code, failed.culprit, failed.is_kept) == (node.peer, code, culprit, True)
    await until(lambda: not node.server.is_busy)
    user.close()
    await until(lambda: node.num_sessions == 0)
    node.admission.check_integrity()


async def test_of_parts_of_one_step_that_differ_nobody_can_know_whose_is_right(swarm: MemorySwarm) -> None:
    """Two peers in the place of a group send the node behind them parts that do not belong together."""
    node, user = await swarm.node(LayerRange(3, 7)), swarm.stranger()
    front = [swarm.stranger(), swarm.stranger()]
    members = tuple(PlanMember(each.peer, (f"{each.host}:1",)) for each in front)
    group_stage = PlanStage(front[0].peer, 0, 3, (), members=members, weights=(1, 1))
    plan = swarm.plan(user.peer, [node], stages=(group_stage, stage_of([node])))
    await user.open(plan, [node], stage=1)
    await user.get(SessionOpened)
    tensor, payload = encode_rows(torch.zeros(1, 24), "f32")
    for each, advance in zip(front, (1, 0), strict=True):
        await each.pool.connect(node.peer, [node.address])
        each.pool.send(node.peer, step(plan, tensor, advance=advance, timings=(StageTiming(1, 1),)), payload)
        await until(lambda: node.admission.sessions[0].num_joining_rows == 1 or bool(user.frames))
    failed = await user.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.culprit, failed.is_kept) == ("bad-parts", "", True)
    assert set(failed.suspects) == {each.peer for each in front}


async def test_a_part_that_is_not_finite_is_the_fault_of_who_sent_it(swarm: MemorySwarm) -> None:
    node, user = await swarm.node(LayerRange(3, 7)), swarm.stranger()
    front = [swarm.stranger(), swarm.stranger()]
    members = tuple(PlanMember(each.peer, (f"{each.host}:1",)) for each in front)
    group_stage = PlanStage(front[0].peer, 0, 3, (), members=members, weights=(1, 1))
    plan = swarm.plan(user.peer, [node], stages=(group_stage, stage_of([node])))
    await user.open(plan, [node], stage=1)
    await user.get(SessionOpened)
    for each, value in zip(front, (b"\x00\x00\xc0\x7f", bytes(4)), strict=True):
        await each.pool.connect(node.peer, [node.address])
        message = step(plan, TensorMeta("f32", 1, 24), timings=(StageTiming(1, 1),))
        each.pool.send(node.peer, message, value * 24)
    failed = await user.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.culprit, failed.is_kept) == ("bad-rows", front[0].peer, True)


async def test_plans_that_do_not_fit_a_slice_are_refused_with_the_reason(swarm: MemorySwarm) -> None:
    nodes, whole = await group(swarm, ALL, (1, 1)), await swarm.node(ALL)
    stage = stage_of(nodes)
    alone = PlanStage(nodes[0].peer, 0, 7, (nodes[0].address,))
    of_wholes = structs.replace(
        stage, peer=whole.peer, members=(PlanMember(whole.peer, (whole.address,)), stage.members[1])
    )
    for asked, changes, code, words in (
        ([nodes[0]], {"stages": (alone,)}, "slice-not-held", "slice 0/2 is held here, not whole layers"),
        ([whole], {"stages": (of_wholes,)}, "slice-not-held", "whole layers are held here, not slice 0/2"),
        (nodes, {"stages": (structs.replace(stage, weights=(2, 1)),)}, "slice-not-held", "not slice 0/2:1"),
        (nodes, {"wire": "i8b32"}, "bad-plan", "plain encoding"),
    ):
        user = GroupUser.of(swarm, [asked])
        user.plan = user.planned(swarm, user.raw, [nodes], **changes)
        await user.ask()
        peer, refused = await user.refusal()
        assert peer in {node.peer for node in asked}
        assert (refused.code, words in refused.reason) == (code, True), refused
    user = GroupUser.of(swarm, [nodes])
    for asked_for, code in (({"taps": (1,)}, "bad-taps"), ({"swap": True}, "bad-plan")):
        await user.ask(**asked_for)
        assert {(await user.refusal())[1].code for _ in nodes} == {code}


async def test_a_member_that_cannot_be_reached_is_named(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    await nodes[1].pool.aclose()
    user = GroupUser.of(swarm, [nodes])
    user.stages = [nodes[:1]]
    await user.ask()
    peer, refused = await user.refusal()
    assert (peer, refused.code, refused.culprit) == (nodes[0].peer, "member-unreachable", nodes[1].peer)
    assert nodes[0].num_sessions == 0


async def test_cancels_change_nothing_in_a_group(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    user = GroupUser.of(swarm, [nodes])
    await user.open()
    await user.step(user.embed(PROMPT))
    first = user.last_node + 1
    tree = {"parent": 0, "parents": (first - 1, first - 1, first), "advance": 0}
    for node in nodes[:1]:
        user.raw.pool.send(node.peer, Cancel(user.plan.session, 0, first))
    assert len(await user.step(user.embed([1, 2, 3]), **tree)) == 3
    assert nodes[0].server.counters["cancels_unheeded"] == 1


async def test_late_member_is_named_and_the_rows_are_given_up(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    user = GroupUser.of(swarm, [nodes])
    await user.open()
    user.stages = [nodes[:1]]  # the other one never gets the step
    user.send(user.embed([5]))
    await until(lambda: nodes[0].server.counters["exchanges"] == 1)
    nodes[0].run_for(21)
    peer, failed = await user.failure()
    assert (peer, failed.code, failed.culprit) == (nodes[0].peer, "late-partials", nodes[1].peer)
    assert not nodes[0].server.is_busy


async def test_who_was_stopped_itself_blames_nobody_for_that_time(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    user = GroupUser.of(swarm, [nodes])
    await user.open()
    whole = GroupUser.of(swarm, [[await swarm.node(ALL)]])
    await whole.open()
    user.stages = [nodes[:1]]  # the other one gets the step later
    user.send(user.embed([5]))
    await until(lambda: nodes[0].server.counters["exchanges"] == 1)
    nodes[0].run_for(10)
    nodes[0].clock.now += 60.0
    nodes[0].server.expire()
    nodes[0].run_for(5)
    assert nodes[0].server.is_busy
    user.stages, user.sequence, user.last_node = [nodes], 0, 0
    assert near(await user.step(user.embed([5])), await whole.step(whole.embed([5])))


async def test_a_batch_that_does_not_fit_is_computed_in_smaller_ones(swarm: MemorySwarm) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    users = [GroupUser.of(swarm, [nodes]) for _ in range(2)]
    for user in users:
        await user.open()
    for user in users:
        await user.step(user.embed(PROMPT))
    engine, phase = nodes[1].engine, nodes[1].engine.phase  # type: ignore[union-attr]
    wide: list[int] = []

    def phase_of_one(steps: Sequence[FusedStep], received: object) -> object:
        wide.append(len(steps))
        if len(steps) > 1:
            raise ResourceExhausted("no memory left for two")
        return phase(steps, received)  # type: ignore[arg-type]

    engine.phase = phase_of_one  # type: ignore[method-assign, assignment, union-attr]
    for _ in range(100):  # until the two come together
        sent = [user.send(user.embed([7])) for user in users]
        first, second = [await user.result(sequence) for user, sequence in zip(users, sent, strict=True)]
        assert near(first, second)
        if 2 in wide:
            break
    assert max(wide) == 2
    assert nodes[1].server.counters["forwards_out_of_memory"] == wide.count(2)


@pytest.mark.parametrize(("error", "code"), [(ResourceExhausted("none left"), "no-memory"), (ValueError(), "internal")])
async def test_a_batch_that_cannot_be_computed_ends_its_sessions_through_no_fault_of_others(
    swarm: MemorySwarm, error: Exception, code: str
) -> None:
    nodes = await group(swarm, ALL, (1, 1))
    user, later = GroupUser.of(swarm, [nodes]), GroupUser.of(swarm, [nodes])
    await user.open()
    expected = await user.step(user.embed(PROMPT))
    phase = nodes[1].engine.phase  # type: ignore[union-attr]

    def failing(steps: object, received: object) -> object:
        raise error

    nodes[1].engine.phase = failing  # type: ignore[method-assign, assignment, union-attr]
    user.send(user.embed([3]))
    peer, failed = await user.failure()
    assert (peer, failed.code, failed.culprit, failed.is_kept) == (nodes[1].peer, code, "", False)
    nodes[1].engine.phase = phase  # type: ignore[method-assign, union-attr]
    await later.open()
    assert near(await later.step(later.embed(PROMPT)), expected)
    user.close()
    await until(lambda: not any(node.num_sessions > 1 or node.server.is_busy for node in nodes))
