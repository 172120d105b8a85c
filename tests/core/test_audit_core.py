"""What the auditor decides from the records of all parties: what is right passes, and every change of it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_node.audit_records import (
    AnyEvent,
    OpenLine,
    OrderLine,
    PartialsLine,
    PlanSeen,
    ProbeLine,
    ResultLine,
    SaidLine,
    StageSeen,
    StepLine,
    TapsLine,
    Tensor,
)
from fusion_node.errors import ConfigError
from fusion_node.slices import Exchange, exchange_width, split
from tests.core.audit_world import DENSE, EXPERTS, MODEL, USER, World, group
from verification.audit_core import audit, models_in
from verification.audit_file import Run
from verification.audit_report import How, Kind, NodeShare, Report, Status

DIMS = {MODEL: DENSE}


def judged(world: World, *, without: str = "") -> Report:
    return audit(world.logs(without), {MODEL: world.dims})


def kinds(report: Report) -> set[str]:
    return set(report.counts)


def share_of(report: Report, peer: str) -> NodeShare:
    return next(node for session in report.sessions for node in session.nodes if node.peer == peer)


def trio() -> World:
    """Three members share two layers by 2:1:1, for a prompt and four tokens."""
    world = World((group(0, 2, "abc", (2, 1, 1)),))
    world.steps(5, 1, 1, 1, 1)
    return world


def hybrid() -> World:
    """Three members, then two that cut the columns elsewhere, then one node; a prompt of more than one unit."""
    world = World((group(0, 2, "abc", (2, 1, 1)), group(2, 4, "de", (1, 2)), group(4, 5, "f")), unit_rows=4)
    world.steps(9, 1, 1)
    return world


# What is right.


def test_a_group_that_keeps_to_its_plan_passes_and_nobody_has_more_than_its_slice() -> None:
    report = judged(trio().close())
    assert report.passed, report.findings
    (session,) = report.sessions
    assert (session.num_closed, session.num_steps, session.num_abandoned) == (5, 5, 0)
    assert [node.largest_fraction for node in session.nodes] == [0.5, 0.25, 0.25]
    assert [node.own_fraction for node in session.nodes] == [0.5, 0.25, 0.25]
    assert {node.after_layer for node in session.nodes} == {0}
    # 5 steps, 2 layers, 4 exchanges, 2 other members.
    assert [node.num_partials for node in session.nodes] == [80, 80, 80]
    assert all(step.status is Status.CLOSED and set(step.fractions) == set("abc") for step in session.steps)


def test_contributions_are_told_apart_from_states_and_said_to_be_invertible() -> None:
    report = judged(trio().close())
    # To the first member: its heads' values are more than the 24 columns of each of the others.
    assert share_of(report, "a").invertible_fraction == 1.0
    assert share_of(report, "a").largest_fraction == 0.5


def test_a_node_alone_in_its_stage_is_sent_whole_states_and_the_audit_says_so() -> None:
    world = World((group(0, 3, "a"), group(3, 5, "b")))
    world.steps(4, 1, 1)
    report = judged(world.close())
    assert kinds(report) == {Kind.WHOLE}
    assert report.sessions[0].num_closed == report.sessions[0].num_steps == 3
    assert [check.passed for check in report.checks] == [True, True, True, True, True, False]
    assert share_of(report, "b").largest_fraction == 1.0


def test_in_a_hybrid_only_the_node_that_is_alone_has_whole_states() -> None:
    report = judged(hybrid().close())
    assert kinds(report) == {Kind.WHOLE}
    assert report.counts[Kind.WHOLE] == 1
    assert "…f" in report.findings[0].what
    fractions = {node.peer: node.largest_fraction for node in report.sessions[0].nodes}
    assert fractions == {"a": 0.5, "b": 0.25, "c": 0.25, "d": 1 / 3, "e": 2 / 3, "f": 1.0}


def test_experts_have_an_exchange_more() -> None:
    world = World((group(0, 2, "ab"),), dims=EXPERTS)
    world.steps(3, 1)
    report = judged(world.close())
    assert report.passed, report.findings
    assert share_of(report, "a").num_partials == 2 * 2 * 5


def test_a_member_that_was_killed_is_replaced_and_the_audit_still_closes() -> None:
    world = World((group(0, 2, "ab"), group(2, 4, "cd")))
    world.steps(4, 1)
    world.step(1, stop_behind=0)  # it dies with this one
    world.kill("d")
    world.repair((group(0, 2, "ab"), group(2, 4, "ce")))
    world.replay(1, 0, covers=2, rows=5)
    world.next_sequence, world.next_node = 2, 6
    world.carry("a", "c", StepLine(0, 0, rows=1, width=48, sequence=2, first=6, nodes=1, wanted=1))
    world.carry("b", "e", StepLine(0, 0, rows=1, width=48, sequence=2, first=6, nodes=1, wanted=1))
    for peer in "ab":
        world.carry(USER, peer, msgspec.structs.replace(_order(2, 5), epoch=1))
    world.exchange(world.stages[1], 6, 1)
    world.answer(2)
    world.next_sequence, world.next_node = 3, 7
    world.step(1)
    report = judged(world.close())
    assert report.passed, report.findings
    (session,) = report.sessions
    assert (session.num_closed, session.num_steps, session.num_given_up, session.num_replays) == (4, 4, 1, 1)
    assert all(node.largest_fraction == 0.5 for node in session.nodes)
    assert [place.epoch for place in share_of(report, "e").places] == [1]
    assert report.unended == ()


def _order(sequence: int, first: int) -> AnyEvent:
    return OrderLine(0, 0, sequence=sequence, first=first, rows=1)


def test_a_log_that_was_cut_off_by_a_kill_is_told_and_is_no_fault_by_itself() -> None:
    world = trio().close()
    world.runs["b"].is_ended = False
    report = judged(world)
    assert report.passed
    assert report.unended == ("b.log",)


def test_logs_without_an_end_are_told_by_name_whatever_the_peers_are_called() -> None:
    world = trio().close()
    for peer, source in (("a", "node-3.log"), ("b", "node-1.log")):
        world.runs[peer].is_ended = False
        world.runs[peer].source = source
    assert judged(world).unended == ("node-1.log", "node-3.log")


def test_a_step_that_the_user_did_not_wait_for_is_abandoned_and_no_fault() -> None:
    world = trio()
    world.step(1, returns=False)
    report = judged(world.close())
    assert report.passed, report.findings
    assert (report.sessions[0].num_closed, report.sessions[0].num_abandoned) == (5, 1)


def test_a_step_that_was_under_way_when_a_stage_failed_is_abandoned_and_no_fault() -> None:
    world = trio()
    world.step(1, returns=False)
    world.carry("b", USER, SaidLine(0, 0, what="failed"))
    for run in world.runs.values():
        run.is_ended = True
    report = judged(world)
    assert report.passed, report.findings
    assert report.sessions[0].num_abandoned == 1


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_step_without_a_result_is_open_unless_its_user_was_killed(is_killed: bool) -> None:
    world = trio()
    world.step(1, returns=False)
    for run in world.runs.values():
        run.is_ended = True
    world.runs[USER].is_ended = not is_killed
    report = judged(world)
    assert kinds(report) == (set() if is_killed else {Kind.MISSING})


def test_results_of_a_frozen_node_that_never_came_are_given_up() -> None:
    world = World((group(0, 2, "a"), group(2, 4, "b")))
    world.steps(4)
    for _ in range(2):
        world.step(1, returns=False)
        world.carry("b", USER, ResultLine(0, 0, rows=1, width=96, sequence=world.next_sequence - 1), received=False)
    world.kill("b")
    world.repair((group(0, 2, "a"), group(2, 4, "c")))
    world.replay(1, 0, covers=1, rows=4)
    world.next_sequence, world.next_node = 1, 5
    world.steps(1, 1)
    report = judged(world.close())
    assert kinds(report) == {Kind.WHOLE}, report.findings
    assert (report.sessions[0].num_closed, report.sessions[0].num_given_up) == (3, 2)


def test_sessions_of_users_who_gave_no_log_are_not_judged() -> None:
    world = trio().close()
    stranger = World(world.stages, session=b"x" * 16)
    stranger.steps(1)
    for peer in "abc":
        run, other = world.runs[peer], stranger.runs[peer]
        numbers = {number: len(run.peers) + number for number in other.peers}
        run.peers |= {numbers[number]: f"other-{name}" for number, name in other.peers.items()}
        run.sessions[2] = other.sessions[1]
        event = other.events[0]
        assert isinstance(event, OpenLine)
        assert event.plan is not None
        plan = msgspec.structs.replace(event.plan, user="other-user")
        where = {"session": 2, "from_": numbers[event.from_], "n": len(run.events) + 1}
        run.events.append(msgspec.structs.replace(event, plan=plan, **where))
    report = judged(world)
    assert report.passed, report.findings
    assert len(report.skipped) == 1


def test_logs_without_their_user_are_refused() -> None:
    with pytest.raises(ConfigError, match="add the log of the user"):
        judged(trio().close(), without=USER)


# What the issue of a whole state is about: hidden AllGathers.


def allgather_as_steps(world: World) -> None:
    """Members send one another their own columns, as if they were stages."""
    for a, columns in world.holders(0):
        for b in "abc":
            if a != b:
                world.carry(a, b, StepLine(0, 0, rows=1, width=len(columns), sequence=1, first=6, nodes=1, wanted=1))


def allgather_as_results(world: World) -> None:
    for a, columns in world.holders(0):
        for b in "abc":
            if a != b:
                world.carry(a, b, ResultLine(0, 0, rows=1, width=len(columns), sequence=1))


def allgather_as_taps(world: World, sequence: int = 1) -> None:
    for a, columns in world.holders(0):
        for b in "abc":
            if a != b:
                world.carry(a, b, TapsLine(0, 0, rows=1, width=len(columns), sequence=sequence, layer=1))


def allgather_as_contributions(world: World) -> None:
    """Under the name of an exchange that there is, in a width that it has not."""
    for a, columns in world.holders(0):
        for b in "abc":
            if a != b:
                world.contribute(a, b, 1, Exchange.ROUTER, 6, 1, len(columns))


@pytest.mark.parametrize(
    "inject", [allgather_as_steps, allgather_as_results, allgather_as_taps, allgather_as_contributions]
)
def test_an_injected_allgather_is_found_and_counts_as_whole_states(inject: Callable[[World], None]) -> None:
    world = trio()
    inject(world)
    report = judged(world.close())
    assert not report.passed
    assert {Kind.PATH, Kind.WHOLE} <= kinds(report)
    assert [share_of(report, peer).largest_fraction for peer in "abc"] == [1.0, 1.0, 1.0]
    assert any(band.how is How.FOREIGN for band in report.sessions[0].bands)


def test_one_slice_too_many_is_no_whole_state_and_not_the_receivers_own() -> None:
    world = trio()
    world.carry("b", "c", StepLine(0, 0, rows=1, width=24, sequence=1, first=6, nodes=1, wanted=1))
    where = tuple(f"{peer}.log:{len(world.runs[peer].events)}" for peer in "bc")
    report = judged(world.close())
    assert {Kind.PATH, Kind.NOT_OWN} <= kinds(report)
    assert Kind.WHOLE not in kinds(report)
    assert share_of(report, "c").largest_fraction == 0.5
    assert report.findings[0].records == where


def test_an_oversent_slice_between_groups_is_found() -> None:
    world = hybrid()

    def widened(event: AnyEvent) -> AnyEvent:
        if isinstance(event, StepLine) and event.width == 16 and event.sequence == 1:
            return msgspec.structs.replace(event, width=40)
        return event

    for run in world.runs.values():
        run.events = [widened(event) for event in run.events]
    report = judged(world.close())
    assert Kind.OVERSENT in kinds(report)


def test_an_oversent_contribution_is_found() -> None:
    world = trio()
    world.contribute("a", "b", 0, Exchange.O, 6, 1, 48)
    report = judged(world.close())
    assert {Kind.OVERSENT, Kind.NOT_OWN} <= kinds(report)


def five(*, masks: bool) -> World:
    """An answer of a group of five members, of whom none can solve the sum of the four others."""
    world = World((group(0, 2, "abcde"),), masks=masks)
    world.steps(5, 1)
    return world


def test_a_group_with_masked_sums_passes_and_less_can_be_solved_from_them() -> None:
    masked, plain = judged(five(masks=True).close()), judged(five(masks=False).close())
    assert masked.passed, masked.findings
    assert share_of(plain, "a").invertible_fraction == 1.0
    assert share_of(masked, "a").invertible_fraction < 1.0
    assert share_of(masked, "a").num_partials == share_of(plain, "a").num_partials
    assert share_of(masked, "a").partials_bytes > 2 * share_of(plain, "a").partials_bytes


def test_contributions_without_the_masks_that_the_plan_has_are_found_and_so_are_masks_that_it_has_not() -> None:
    for has_masks in (True, False):
        world = five(masks=has_masks)
        world.masks = not has_masks
        width = exchange_width(world.dims, split(world.dims, (1,) * 5)[1], Exchange.O)
        world.contribute("a", "b", 0, Exchange.O, 6, 1, width)
        report = judged(world.close())
        assert {Kind.OVERSENT, Kind.NOT_OWN} <= kinds(report)


# Other ways to be wrong.


def test_a_tensor_to_a_peer_that_is_in_no_plan_is_found() -> None:
    world = trio()
    world.carry("a", "x", StepLine(0, 0, rows=1, width=48, sequence=1, first=6, nodes=1))
    report = judged(world.close())
    assert {Kind.STRANGER, Kind.NOT_OWN} <= kinds(report)
    assert share_of(report, "x").largest_fraction == 0.5
    assert share_of(report, "x").places == ()


def test_a_forged_digest_is_found_with_both_records() -> None:
    world = trio().close()
    run = world.runs["b"]
    index = next(i for i, e in enumerate(run.events) if isinstance(e, PartialsLine) and e.from_)
    event = run.events[index]
    run.events[index] = msgspec.structs.replace(event, digest="0" * 32)
    report = judged(world)
    assert kinds(report) == {Kind.DIGEST}
    assert f"b.log:{event.n}" in report.findings[0].records
    assert report.sessions[0].num_closed == 4


def test_the_same_rows_twice_are_found() -> None:
    world = trio()
    world.contribute("a", "b", 0, Exchange.QKV, 6, 1, 33)
    report = judged(world.close())
    assert Kind.DUPLICATE in kinds(report), report.counts


def test_a_party_without_a_log_is_named_once() -> None:
    report = judged(trio().close(), without="b")
    assert report.counts == {Kind.NO_LOG: 1}
    assert report.sessions[0].num_closed == 5
    assert {node.peer for node in report.sessions[0].nodes if not node.has_log} == {"b"}


def test_a_whole_step_that_nobody_has_a_record_of_is_missed() -> None:
    world = trio().close()

    def is_of(event: AnyEvent, sequence: int, node: int) -> bool:
        return getattr(event, "sequence", -1) == sequence or getattr(event, "node", -1) == node

    for run in world.runs.values():
        run.events = [event for event in run.events if not is_of(event, 2, 7)]
    assert Kind.SKIPPED in kinds(judged(world))


def test_a_layer_that_was_left_out_by_all_is_missed() -> None:
    world = trio().close()
    for run in world.runs.values():
        run.events = [e for e in run.events if not (isinstance(e, PartialsLine) and e.layer == 1 and e.node == 7)]
    report = judged(world)
    assert kinds(report) == {Kind.MISSING}
    assert report.sessions[0].num_closed == 4
    assert report.sessions[0].num_steps == 5


def test_a_result_that_the_user_was_not_sent_is_missed_when_a_later_one_came() -> None:
    world = trio().close()
    for run in world.runs.values():
        run.events = [e for e in run.events if not (isinstance(e, ResultLine) and e.sequence == 3)]
    assert kinds(judged(world)) == {Kind.MISSING}


def test_the_last_result_is_not_taken_for_lost_when_more_came_on_the_connection() -> None:
    world = trio().close()
    run = world.runs[USER]
    run.events = [e for e in run.events if not (isinstance(e, ResultLine) and e.sequence == 4)]
    assert Kind.NEVER_RECEIVED in kinds(judged(world))


def test_a_replay_that_nobody_ordered_is_found() -> None:
    world = World((group(0, 2, "ab"), group(2, 4, "cd")))
    world.steps(4, 1)
    world.repair((group(0, 2, "ab"), group(2, 4, "ce")))
    world.pass_through(0, 1, 5, begin=1, last=1, covers=2, stop=1)
    world.next_sequence = 2
    world.steps(1)
    report = judged(world.close())
    assert kinds(report) == {Kind.MISSING}
    assert "order" in report.findings[0].what


def test_two_slices_for_one_node_are_more_than_its_own() -> None:
    world = World((group(0, 2, "ab"),))
    world.steps(4, 1)
    world.repair((group(0, 2, "ba"),))
    world.steps(1)
    report = judged(world.close())
    assert kinds(report) == {Kind.WHOLE}
    assert share_of(report, "a").largest_fraction == 1.0


@pytest.mark.parametrize(
    "stages",
    [
        (group(0, 2, "abc"), group(3, 4, "d")),
        (group(2, 2, "abc"),),
        (group(0, 2, "abc", (1, 1)),),
        (group(0, 2, "abcdefgh", (1,) * 8),),
        (group(0, 2, "aab"),),
    ],
    ids=["gap", "nothing", "too few weights", "more members than heads", "one twice"],
)
def test_a_plan_that_no_node_would_obey_is_found(stages: tuple[StageSeen, ...]) -> None:
    world = trio()
    world.epoch, world.stages = 1, stages
    plan = PlanSeen(USER, MODEL, "fp32", stages)
    world.carry(USER, "a", OpenLine(0, 0, digest="00" * 16, plan=plan))
    assert Kind.PLAN_DIFFERS in kinds(judged(world.close()))


def test_a_step_that_is_to_stop_nowhere_is_found() -> None:
    world = trio()
    world.carry(USER, "a", StepLine(0, 0, rows=1, width=48, sequence=9, first=10, nodes=1, stop=5))
    assert Kind.PATH in kinds(judged(world.close()))


def test_different_plans_for_one_epoch_are_found() -> None:
    world = trio().close()
    run = world.runs["b"]
    index = next(i for i, e in enumerate(run.events) if isinstance(e, OpenLine))
    run.events[index] = msgspec.structs.replace(run.events[index], digest="00" * 16)
    assert {Kind.PLAN_DIFFERS, Kind.NEVER_SENT} <= kinds(judged(world))


def test_tensors_of_a_session_that_nobody_opened_are_found() -> None:
    world = trio().close()
    for peer, to, from_ in (("a", 2, 0), ("b", 0, 2)):
        line = PartialsLine(999, 0, to=to, from_=from_, rows=1, width=9, alias="0000000a", exchange="o")
        world.runs[peer].events.append(line)
    assert kinds(judged(world)) == {Kind.NO_PLAN}


def test_a_probe_that_carries_something_is_found() -> None:
    world = trio().close()
    world.runs["a"].events.append(ProbeLine(999, 0, to=1, bytes=100, zeros=False))
    assert kinds(judged(world)) == {Kind.PROBE}


@pytest.mark.parametrize(("missing", "is_full"), [((7,), False), ((), True)])
def test_a_log_with_a_gap_and_a_full_one_are_no_evidence(missing: tuple[int, ...], is_full: bool) -> None:
    world = trio().close()
    world.runs["a"].missing, world.runs["a"].is_full = missing, is_full
    assert kinds(judged(world)) == {Kind.LOG_GAP}


def test_many_findings_of_a_kind_are_counted_and_some_told() -> None:
    world = trio()
    for sequence in range(10):
        allgather_as_taps(world, sequence)
    report = judged(world.close())
    told = [finding for finding in report.findings if finding.kind is Kind.PATH]
    assert len(told) == 20
    assert report.counts[Kind.PATH] == 60


def test_a_model_that_is_to_be_known_is_named() -> None:
    assert models_in(trio().logs()) == {MODEL}


# Any group, and any single change.


@st.composite
def answers(draw: st.DrawFn) -> World:
    """A pipeline of groups and nodes, and an answer that is closed to its end."""
    names, at, stages = iter("abcdefghijklmnop"), 0, []
    for _ in range(draw(st.integers(1, 3))):
        num_members, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        weights = draw(st.lists(st.integers(1, 3), min_size=num_members, max_size=num_members))
        peers = "".join(next(names) for _ in range(num_members))
        stages.append(group(at, at + num_layers, peers, weights))
        at += num_layers
    dims = draw(st.sampled_from((DENSE, EXPERTS)))
    world = World(tuple(stages), dims=dims, unit_rows=draw(st.sampled_from((1, 4, 256))))
    world.steps(draw(st.integers(1, 6)), *draw(st.lists(st.integers(1, 2), max_size=2)))
    return world.close()


def is_whole_by_plan(report: Report) -> bool:
    """Whether the only thing that is wrong is that nodes are alone in their stages."""
    return set(report.counts) <= {Kind.WHOLE}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers())
def test_any_honest_answer_closes_and_gives_every_node_its_own_slice(world: World) -> None:
    report = judged(world)
    assert is_whole_by_plan(report), report.findings
    (session,) = report.sessions
    assert session.num_closed == session.num_steps == world.next_sequence
    for stage in world.stages:
        columns = [range(world.dims.hidden)]
        if len(stage.peers) > 1:
            columns = [bounds.columns for bounds in split(world.dims, stage.weights)]
        for peer, own in zip(stage.peers, columns, strict=True):
            share = share_of(report, peer)
            assert share.largest_fraction == share.own_fraction == len(own) / world.dims.hidden


_OTHER: dict[str, Callable[[Any], Any]] = {
    "digest": lambda value: "0" * len(value),
    "width": lambda value: value + 1,
    "rows": lambda value: value + 1,
    "bytes": lambda value: value + 4,
    "sequence": lambda value: value + 1000,
    "first": lambda value: value + 1000,
    "node": lambda value: value + 1000,
    "nodes": lambda value: value + 1,
    "wanted": lambda value: value + 1,
    "layer": lambda value: value + 1,
    "epoch": lambda value: value + 1,
    "exchange": lambda value: "o" if value != "o" else "down",
    "dtype": lambda value: "f16",
    "stage": lambda value: value + 1,
    "member": lambda value: value + 1,
}


def changed(draw: st.DrawFn, run: Run, event: AnyEvent) -> list[AnyEvent]:
    """What stands in a log in the place of one record of it."""
    fields = [name for name in _OTHER if name in event.__struct_fields__]
    if not isinstance(event, Tensor):
        fields = [name for name in fields if name not in ("rows", "first", "sequence")]
    how = draw(st.sampled_from(["drop", "repeat", "redirect", *fields]))
    if how == "drop":
        return []
    if how == "repeat":
        return [event, event]
    if how == "redirect":
        side = "to" if event.to else "from_"
        other = max(run.peers) + 1
        run.peers[other] = draw(
            st.sampled_from(["zzz", *(p for n, p in run.peers.items() if n != getattr(event, side))])
        )
        return [msgspec.structs.replace(event, **{side: other})]
    return [msgspec.structs.replace(event, **{how: _OTHER[how](getattr(event, how))})]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.data())
def test_any_single_change_of_one_record_of_a_tensor_or_a_plan_is_noticed(world: World, data: st.DataObject) -> None:
    before = judged(world)
    places = [
        (run.peer, index)
        for run in world.runs.values()
        for index, event in enumerate(run.events)
        if isinstance(event, Tensor | OpenLine)
    ]
    peer, index = data.draw(st.sampled_from(places))
    run = world.runs[peer]
    run.events[index : index + 1] = changed(data.draw, run, run.events[index])  # type: ignore[arg-type]
    after = judged(world)
    assert set(after.counts) - {Kind.WHOLE}, f"nothing was found where {before.counts} was before"


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.data())
def test_any_frame_that_both_ends_leave_out_is_missed(world: World, data: st.DataObject) -> None:
    """But for the last results, of which nobody can tell whether the user waited for them."""
    last = world.next_sequence - 1
    frames = [
        (run.peer, run.peers[event.to], event)
        for run in world.runs.values()
        for event in run.events
        if isinstance(event, Tensor) and event.to and not (isinstance(event, ResultLine) and event.sequence == last)
    ]
    sender, receiver, left_out = data.draw(st.sampled_from(frames))
    for run in world.runs.values():
        run.events = [
            event
            for event in run.events
            if not (
                isinstance(event, Tensor)
                and event.digest == left_out.digest
                and {run.peer, run.peers[event.to or event.from_]} == {sender, receiver}
            )
        ]
    assert set(judged(world).counts) - {Kind.WHOLE}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.data())
def test_any_frame_more_that_both_ends_agree_on_is_found(world: World, data: st.DataObject) -> None:
    """Between any two nodes, of any kind, width and step."""
    world.epoch = 0
    nodes = [peer for stage in world.stages for peer in stage.peers] + ["x"]
    sender = data.draw(st.sampled_from(nodes))
    receiver = data.draw(st.sampled_from([peer for peer in nodes if peer != sender]))
    width = data.draw(st.integers(1, 60))
    sequence = data.draw(st.integers(0, world.next_sequence))
    what = data.draw(st.sampled_from(["step", "result", "taps", "partials"]))
    line: AnyEvent
    match what:
        case "step":
            line = StepLine(0, 0, rows=1, width=width, sequence=sequence, first=1, nodes=1, covers=1, wanted=7)
        case "result":
            line = ResultLine(0, 0, rows=1, width=width, sequence=sequence)
        case "taps":
            line = TapsLine(0, 0, rows=1, width=width, sequence=sequence, layer=1)
        case _:
            exchange = data.draw(st.sampled_from([*(each.name.lower() for each in Exchange), "other"]))
            layer = data.draw(st.integers(0, 6))
            line = PartialsLine(0, 0, rows=1, width=width, layer=layer, exchange=exchange, node=1)
    world.carry(sender, receiver, line)
    assert not is_whole_by_plan(judged(world))


def any_line(kind: type[Any]) -> st.SearchStrategy[AnyEvent]:
    """Whatever a party may write about a session."""
    few = st.integers(0, 4)
    of: dict[str, st.SearchStrategy[Any]] = {
        "exchange": st.sampled_from(["qkv", "o", "down", "x"]),
        "live": st.sampled_from(["", "00", "ff", "0b"]),
        "what": st.sampled_from(["close", "opened"]),
        "dtype": st.just("f32"),
        "stop": st.none() | few,
        "width": st.integers(0, 96),
        **dict.fromkeys(("is_tree", "resumes", "folds", "zeros"), st.booleans()),
        **dict.fromkeys(("epoch", "sequence", "first", "nodes", "wanted", "covers", "rows", "layer", "node"), few),
        **dict.fromkeys(("stage", "member", "bytes"), few),
    }
    return st.builds(kind, st.just(0), st.just(0), **{name: of[name] for name in of if name in kind.__struct_fields__})


ANY_LINE = st.one_of([any_line(kind) for kind in AnyEvent.__args__])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.lists(st.tuples(st.integers(0, 9), st.booleans(), ANY_LINE), max_size=20))
def test_nothing_that_a_party_writes_makes_the_auditor_fail(
    world: World, lines: list[tuple[int, bool, AnyEvent]]
) -> None:
    for who, is_sent, line in lines:
        run = world.runs[sorted(world.runs)[who % len(world.runs)]]
        side = {"to" if is_sent else "from_": 1 + who % len(run.peers), "session": 1}
        run.events.append(msgspec.structs.replace(line, **side))
    judged(world)
