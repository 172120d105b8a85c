"""What a node decides about sessions: who is served, what is repeated, what is kept, and what strangers can cost it."""

from __future__ import annotations

import random
from functools import partial

import pytest

from fusion_node.daemon.admission_core import (
    ASKED_S,
    LEASE_S,
    MAX_QUEUED_ROWS,
    RESUMES_AT_ONCE,
    Session,
    SessionState,
)
from fusion_node.daemon.serving_core import (
    EARLY_S,
    LEASE_REUSE_S,
    MAX_ALL_EARLY_ROWS,
    MAX_BACKLOG_BYTES,
    MAX_DIALS,
    MAX_DIALS_OF_USER,
    MAX_EARLY_ROWS,
    MAX_EARLY_ROWS_OF_USER,
    MAX_RESENDS,
    RESEND_AGAIN_S,
    RESEND_TIMES,
    RETRY_S,
)
from fusion_node.types import LayerRange, PeerId
from p2p.messages import (
    DRAINING,
    KEPT_S,
    MAX_NODES_PER_STEP,
    NOT_RETAINED,
    PEER_LOST,
    UNKNOWN_SESSION,
    AnyMessage,
    CloseSession,
    Replayed,
    Resend,
    SessionClosed,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    StageTiming,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import Plan
from tests.core.serving_world import KEY, PEERS, Node, World, embed, entry, expected_row, open_, plan_of

USER, OTHER = PEERS[30], PEERS[31]


def three() -> list[Node]:
    return [Node(PEERS[n], LayerRange(*layers)) for n, layers in enumerate(((0, 3), (3, 5), (5, 7)))]


def opened(nodes: list[Node], **changes: object) -> Plan:
    """All stages have the session open."""
    plan = plan_of(USER, nodes, **changes)
    for node in nodes:
        open_(node, plan)
        for _ in list(node.connecting):
            node.connected()
        assert node.told(SessionOpened)
    return plan


def session_of(node: Node) -> Session:
    (session,) = node.admission.sessions
    return session


def rows_of(first: int, num_rows: int) -> tuple[int, ...]:
    return tuple(embed(first + i) for i in range(num_rows))


def feed(node: Node, plan: Plan, step: Step, *, computes: bool = True) -> None:
    """The peer in front sends a step, and it is computed."""
    stage = next(i for i, s in enumerate(plan.stages) if s.peer == node.peer)
    timings = (StageTiming(0, 0),) * stage
    message = Step(**{name: getattr(step, name) for name in step.__struct_fields__} | {"timings": timings})
    source = PeerId(plan.stages[stage - 1].peer) if stage else USER
    node.receive(source, message, rows_of(step.first_node - 1, step.tensor.num_rows))
    while computes and node.waiting:
        node.compute()


def only(messages: list[AnyMessage]) -> AnyMessage:
    (message,) = messages
    return message


def failure(node: Node) -> SessionFailed:
    message = only(node.told(SessionFailed))
    assert isinstance(message, SessionFailed)
    return message


def resend(epoch: int, sequence: int, first: int, num: int, **changes: object) -> Resend:
    fields: dict[str, object] = {"covers": 1, "want_last": False, "stop_stage": 2} | changes
    return Resend(KEY, epoch, sequence, first_position=first, num_positions=num, **fields)  # type: ignore[arg-type]


# what must work


def run(seed: int) -> World:
    """A session of some entries whose stages are replaced, dead or alive, at any moment and while it is repaired."""
    rng = random.Random(seed)
    world = World(rng)
    world.settle()
    num_replaced = 0
    for _ in range(rng.randrange(5, 40)):
        if not world.is_repairing and world.num_positions < 80 and rng.random() < 0.4:
            for _ in range(rng.choice((1, 1, 3))):
                world.send(rng.choice((1, 1, 1, 2, 7)))
        if num_replaced < 6 and rng.random() < 0.12:
            num_replaced += 1
            world.replace(rng.randrange(3), is_dead=rng.random() < 0.7)
        for _ in range(rng.randrange(0, 12)):
            world.step()
    world.settle()
    return world


def check(seed: int) -> int:
    world = run(seed)
    assert not world.expected, f"seed {seed}: a replay was not acknowledged"
    for sequence, (first, num_rows) in enumerate(world.entries):
        expected = expected_row(world.ranges, first + num_rows - 1)
        assert world.results.get(sequence) == expected, f"seed {seed}: entry {sequence} is not what it was to be"
    return world.epoch


@pytest.mark.parametrize("part", range(4))
def test_every_entry_comes_to_its_result_whatever_stages_are_replaced_and_when(part: int) -> None:
    assert sum(check(seed) for seed in range(20 * part, 20 * part + 20)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_entry_comes_to_its_result_in_a_thousand_runs(part: int) -> None:
    for seed in range(1000 + 50 * part, 1050 + 50 * part):
        check(seed)


def test_adopting_stage_says_what_it_has() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 5))
    feed(nodes[1], plan, entry(plan, 1, 5, 1), computes=False)
    fresh = Node(PEERS[10], LayerRange(5, 7))
    later = plan_of(USER, [*nodes[:2], fresh], 3)
    open_(nodes[1], later, resumes=True)
    assert nodes[1].connecting[-1].peer == fresh.peer
    assert session_of(nodes[1]).state is SessionState.OPENING
    nodes[1].connected()
    told = only(nodes[1].told(SessionOpened))
    # What is being computed counts as retained: it will be, by the time it is asked for.
    assert told == SessionOpened(KEY, 3, 1, LEASE_S, 0, b"3 120", 2, 6, 6)
    nodes[1].compute()
    assert not any(isinstance(m, Step) and m.sequence == 1 for _, m, _ in nodes[1].sent)
    open_(fresh, later, resumes=True)
    assert only(fresh.told(SessionOpened)) == SessionOpened(KEY, 3, 2, LEASE_S, 0, b"3 120", 0, 0, 0)
    assert nodes[1].core.counters["sessions_adopted"] == 1


def test_last_stage_returns_under_the_old_epoch_what_it_had_begun() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[2], plan, entry(plan, 0, 0, 2), computes=False)
    open_(nodes[2], plan_of(USER, nodes, 1), resumes=True)
    nodes[2].compute()
    result = only(nodes[2].told(StepResult))
    assert isinstance(result, StepResult)
    assert (result.epoch, result.sequence, result.nodes) == (0, 0, (2,))


def test_rows_of_several_entries_are_handed_on_again_as_one() -> None:
    nodes = three()
    plan = opened(nodes)
    for sequence, (first, num) in enumerate(((0, 5), (5, 1), (6, 1), (7, 2))):
        feed(nodes[0], plan, entry(plan, sequence, first, num))
    rows = [row for _, message, rows in nodes[0].sent if isinstance(message, Step) for row in rows]
    nodes[0].sent.clear()
    later = plan_of(USER, nodes, 1)
    open_(nodes[0], later, resumes=True)
    nodes[0].connected()
    nodes[0].told(SessionOpened)
    nodes[0].receive(USER, resend(1, 1, 5, 3, covers=3))
    nodes[0].receive(USER, resend(1, 3, 8, 1, want_last=True, stop_stage=None))
    expected = [
        Step(KEY, 1, 1, 6, 5, (), 8, (), TensorMeta("f32", 3, 4), (StageTiming(0, 0),), 3, 2),
        Step(KEY, 1, 3, 9, 8, (), 9, (9,), TensorMeta("f32", 1, 4), (StageTiming(0, 0),)),
    ]
    assert nodes[0].sent == [
        (nodes[1].peer, expected[0], tuple(rows[5:8])),
        (nodes[1].peer, expected[1], tuple(rows[8:9])),
    ]


def test_order_that_came_before_the_link_to_the_next_stage_is_followed_when_that_is_there() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 8))
    open_(nodes[0], plan_of(USER, nodes, 1), resumes=True)
    nodes[0].sent.clear()
    nodes[0].receive(USER, resend(1, 0, 0, 8))
    assert not nodes[0].sent
    nodes[0].connected()
    assert [type(message) for _, message, _ in nodes[0].sent] == [SessionOpened, Step]


def test_order_for_rows_that_are_not_computed_yet_waits_for_them_and_so_do_those_behind_it() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 4))
    open_(nodes[0], plan_of(USER, nodes, 1), resumes=True)
    nodes[0].connected()
    nodes[0].sent.clear()
    nodes[0].receive(USER, resend(1, 0, 0, 6, covers=2))
    nodes[0].receive(USER, resend(1, 2, 6, 1))
    assert not nodes[0].sent
    later = plan_of(USER, nodes, 1)
    for sequence, (first, num) in ((1, (4, 2)), (2, (6, 1))):
        feed(nodes[0], later, entry(later, sequence, first, num, want=(), stop_stage=0))
    assert [m.sequence for _, m, _ in nodes[0].sent if isinstance(m, Step)] == [0, 2]
    assert nodes[0].told(Replayed) == [Replayed(KEY, 1, 0, 2, 6), Replayed(KEY, 1, 0, 3, 7)]


def test_step_that_stops_here_is_acknowledged_and_retained_and_not_handed_on() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 6, covers=4, want=(), stop_stage=1))
    assert nodes[1].sent == [(USER, Replayed(KEY, 0, 1, 4, 6), ())]
    assert nodes[1].outputs.num_positions((USER, KEY)) == 6
    feed(nodes[2], plan, entry(plan, 0, 0, 6, covers=4, want=(), stop_stage=2))
    assert nodes[2].sent == [(USER, Replayed(KEY, 0, 2, 4, 6), ())]


def test_entries_that_come_before_those_that_they_follow_wait_for_them() -> None:
    nodes = three()
    plan = plan_of(USER, nodes, 1)
    open_(nodes[2], plan, resumes=True)
    for step in (
        entry(plan, 4, 8, 1),
        entry(plan, 1, 5, 1),
        entry(plan, 0, 3, 2),  # hangs on a prefix that is not here yet
        entry(plan, 2, 6, 2, covers=2, want=(), stop_stage=2),
        entry(plan, 4, 8, 1),
    ):
        feed(nodes[2], plan, step)
        assert not nodes[2].told(StepResult)
    feed(nodes[2], plan, entry(plan, 0, 0, 3, covers=0, want=(), stop_stage=2))
    assert [m.sequence for m in nodes[2].told(StepResult) if isinstance(m, StepResult)] == [0, 1, 4]
    assert session_of(nodes[2]).log.next_sequence == 5
    assert nodes[2].core.counters["steps_duplicate"] == 1
    assert not session_of(nodes[2]).early


# neighbours


@pytest.mark.parametrize("neighbour", [0, 2])
def test_lost_neighbour_leaves_the_session_kept_and_what_is_computed_is_finished(neighbour: int) -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 3), computes=False)
    nodes[1].lose(nodes[neighbour].peer)
    nodes[1].lose(nodes[neighbour].peer)
    assert failure(nodes[1]) == SessionFailed(
        KEY, 0, 1, PEER_LOST, "the link is gone", nodes[neighbour].peer, is_kept=True
    )
    nodes[1].compute()
    assert not nodes[1].sent
    assert nodes[1].outputs.num_positions((USER, KEY)) == 3
    feed(nodes[1], plan, entry(plan, 1, 3, 1))
    assert session_of(nodes[1]).log.next_sequence == 1
    assert KEPT_S < LEASE_S  # which was signed when it was opened, and is not taken back
    nodes[1].tick(LEASE_S - 1)
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))  # gives it no more time
    assert only(nodes[1].told(SessionProgress)) == SessionProgress(KEY, 0, 1, 1, 1, 1.0, 0.0, b"0 120")
    nodes[1].tick(1)
    assert failure(nodes[1]).code == "lease-expired"
    assert not nodes[1].admission.sessions
    assert len(nodes[1].outputs) == 0


def test_new_session_has_no_lease_while_its_successor_is_dialled() -> None:
    nodes = three()
    node = nodes[1]
    open_(node, plan_of(USER, nodes))
    node.receive(USER, SessionQuery(KEY, 0, 1))
    assert only(node.told(SessionProgress)) == SessionProgress(KEY, 0, 1, 0, 0, 0.0, 0.0, b"")


def test_lost_user_ends_the_session() -> None:
    nodes = three()
    opened(nodes)
    nodes[1].lose(USER)
    assert not nodes[1].admission.sessions
    assert nodes[1].admission.free_positions == nodes[1].admission.max_positions
    assert len(nodes[1].forgotten) == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tensor": TensorMeta("f16", 1, 4)}, "bad-shape"),
        ({"tensor": TensorMeta("f32", 1, 5)}, "bad-shape"),
        ({"want": (), "stop_stage": 3}, "bad-stop"),
        ({"want": (), "stop_stage": 0}, "bad-stop"),
        ({"sequence": 1}, "gap"),
        ({"first_node": 2, "parent": 1, "advance": 2, "want": ()}, "unknown-parent"),
        ({"covers": 2, "want": (), "stop_stage": 2}, "bad-replay"),
        ({"covers": 2**32 - 1, "want": (), "stop_stage": 2}, "bad-replay"),
        ({"covers": 0, "advance": 0, "want": (), "stop_stage": 2}, "bad-replay"),
    ],
)
def test_neighbour_that_errs_is_named_and_the_session_kept_but_a_user_that_errs_ends_it(
    changes: dict[str, object], code: str
) -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 1, **changes))
    failed = failure(nodes[1])
    assert (failed.code, failed.culprit, failed.is_kept) == (code, nodes[0].peer, True)
    assert session_of(nodes[1]).state is SessionState.KEPT
    if changes.get("stop_stage") != 0:
        feed(nodes[0], plan, entry(plan, 0, 0, 1, **changes))
        failed = failure(nodes[0])
        assert (failed.code, failed.culprit, failed.is_kept) == (code, USER, False)
        assert not nodes[0].admission.sessions


def test_own_failure_ends_the_session_and_names_nobody() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 1), computes=False)
    nodes[1].core.end(session_of(nodes[1]), "internal", "an error inside the node")
    nodes[1].carry_out()
    failed = failure(nodes[1])
    assert (failed.code, failed.culprit, failed.is_kept) == ("internal", "", False)
    nodes[1].compute()
    assert not nodes[1].sent


def test_successor_that_cannot_be_reached_leaves_an_adopted_session_kept_and_no_new_one() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 1))
    open_(nodes[1], plan_of(USER, nodes, 1), resumes=True)
    nodes[1].connected(is_reachable=False)
    refused = only(nodes[1].told(SessionRefused))
    assert isinstance(refused, SessionRefused)
    assert (refused.epoch, refused.code) == (1, "successor-unreachable")
    assert session_of(nodes[1]).state is SessionState.KEPT
    open_(nodes[1], plan_of(USER, nodes, 2), resumes=True)
    nodes[1].connected()
    assert only(nodes[1].told(SessionOpened))
    fresh = Node(PEERS[10], LayerRange(3, 5))
    open_(fresh, plan_of(USER, [nodes[0], fresh, nodes[2]], 1), resumes=True)
    fresh.connected(is_reachable=False)
    assert only(fresh.told(SessionRefused))
    assert not fresh.admission.sessions


def test_dial_of_an_earlier_plan_says_nothing_of_a_later_one() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 1))
    open_(nodes[1], plan_of(USER, nodes, 1), resumes=True)
    open_(nodes[1], plan_of(USER, nodes, 2), resumes=True)
    nodes[1].connected(is_reachable=False)
    assert not nodes[1].told(SessionRefused)
    nodes[1].connected()
    assert only(nodes[1].told(SessionOpened))


# whom a session belongs to


def test_plan_of_no_higher_epoch_or_by_somebody_else_is_not_adopted() -> None:
    nodes = three()
    opened(nodes, epoch=4)
    for plan in (plan_of(USER, nodes, 4), plan_of(USER, nodes, 3), plan_of(OTHER, nodes, 9)):
        open_(nodes[1], plan, resumes=True)
        refused = only(nodes[1].told(SessionRefused))
        assert isinstance(refused, SessionRefused)
        assert refused.code == "duplicate"
    open_(nodes[1], plan_of(USER, nodes, 9))  # of a higher epoch, but not to resume
    assert only(nodes[1].told(SessionRefused))
    assert session_of(nodes[1]).plan.epoch == 4


@pytest.mark.parametrize(
    "changes", [{"max_positions": 99}, {"wire": "i8b32"}, {"stages": ()}], ids=["positions", "wire", "layers"]
)
def test_session_that_cannot_be_adopted_is_opened_anew_and_empty(changes: dict[str, object]) -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 4))
    later = plan_of(USER, nodes, 1)
    if "stages" in changes:
        other = Node(nodes[1].peer, LayerRange(3, 4)), Node(PEERS[12], LayerRange(4, 5))
        changes = {"stages": plan_of(USER, [nodes[0], *other, nodes[2]], 1).stages}
    later = plan_of(USER, nodes, 1, **changes)
    before = session_of(nodes[1])
    open_(nodes[1], later, resumes=True)
    nodes[1].connected()
    told = only(nodes[1].told(SessionOpened))
    assert isinstance(told, SessionOpened)
    assert (told.next_sequence, told.retained_positions, told.num_positions) == (0, 0, 0)
    assert nodes[1].forgotten == [before]
    assert session_of(nodes[1]) is not before


def test_close_of_an_earlier_epoch_does_not_end_a_later_one_but_of_a_later_one_does() -> None:
    nodes = three()
    opened(nodes, epoch=2)
    nodes[1].receive(USER, CloseSession(KEY, 1))
    nodes[1].receive(OTHER, CloseSession(KEY, 5))
    assert nodes[1].admission.sessions
    assert not nodes[1].sent
    nodes[1].receive(USER, CloseSession(KEY, 5))
    assert not nodes[1].admission.sessions
    assert nodes[1].sent == [(USER, SessionClosed(KEY, 5), ())]


def test_answer_to_a_query_tells_how_long_what_was_sent_on_is_under_way() -> None:
    nodes = three()
    opened(nodes)
    # What is on the way to others, or to the user, is none of this session's next stage's.
    nodes[1].backlogs_s = {nodes[2].peer: 12.5, USER: 99.0, OTHER: 99.0}
    nodes[2].backlogs_s = {USER: 99.0}
    for node, stage, seconds in ((nodes[1], 1, 12.5), (nodes[2], 2, 0.0)):
        node.sent.clear()
        node.receive(USER, SessionQuery(KEY, 0, stage))
        assert only(node.told(SessionProgress)).backlog_s == seconds
    nodes[1].backlogs_s = {nodes[2].peer: 1e9}
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
    assert nodes[1].told(SessionProgress)[-1].backlog_s == 1e6


def test_query_is_answered_while_rows_wait_and_renews_the_lease_for_nobody_but_the_user() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 4))
    feed(nodes[1], plan, entry(plan, 1, 4, 1), computes=False)
    nodes[1].sent.clear()
    nodes[1].now += 50
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
    assert only(nodes[1].told(SessionProgress)) == SessionProgress(KEY, 0, 1, 2, 1, LEASE_S, 0.0, b"0 120")
    answers = []
    for node, source in ((nodes[1], OTHER), (nodes[2], nodes[0].peer), (Node(PEERS[11], LayerRange(3, 5)), USER)):
        node.receive(source, SessionQuery(KEY, 7, 1))
        answers.append(failure(node))
    assert answers == [SessionFailed(KEY, 7, 1, UNKNOWN_SESSION, "no such session is open here", "")] * 3


def test_questions_hold_a_session_no_longer_than_ten_minutes_after_its_last_step() -> None:
    nodes = three()
    plan = opened(nodes)
    begin = nodes[1].now
    feed(nodes[1], plan, entry(plan, 0, 0, 4))
    while nodes[1].admission.sessions:
        assert nodes[1].now - begin <= ASKED_S
        nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
        nodes[1].tick(LEASE_S / 2)
    assert nodes[1].now - begin >= ASKED_S
    assert failure(nodes[1]).code == "lease-expired"


def test_questions_hold_a_session_whose_rows_wait_for_the_device() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, entry(plan, 0, 0, 4), computes=False)
    for _ in range(2 * int(ASKED_S / LEASE_S)):
        nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
        nodes[1].tick(LEASE_S)
    nodes[1].sent.clear()
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
    answer = only(nodes[1].told(SessionProgress))
    assert isinstance(answer, SessionProgress)
    assert answer.lease_s == LEASE_S
    nodes[1].compute()
    nodes[1].tick(LEASE_S - 1)
    assert session_of(nodes[1])


def test_signed_lease_is_told_again_while_it_is_young_and_never_promises_more_than_there_is() -> None:
    nodes = three()
    opened(nodes)
    told = []
    for seconds in (1.0, LEASE_REUSE_S - 1.5, 1.0):
        nodes[1].now += seconds
        nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
        told += [m.lease for m in nodes[1].told(SessionProgress) if isinstance(m, SessionProgress)]
    session = session_of(nodes[1])
    assert session.lease_envelope is not None
    assert session.lease_envelope[1] == nodes[1].now + LEASE_S
    assert told == [b"0 120"] * 3
    nodes[1].core.drain(now=nodes[1].now, grace_s=7.0, reason="moving")  # type: ignore[arg-type]
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
    answer = only(nodes[1].told(SessionProgress))
    assert isinstance(answer, SessionProgress)
    assert (answer.lease, answer.lease_s) == (b"0 7", 7.0)


# leaving


def test_drained_session_is_served_until_its_grace_is_over() -> None:
    nodes = three()
    plan = opened(nodes)
    nodes[1].admission.draining = True
    nodes[1].core.drain(now=nodes[1].now, grace_s=30.0, reason="the node is shutting down")  # type: ignore[arg-type]
    nodes[1].core.drain(now=nodes[1].now, grace_s=40.0, reason="again")  # type: ignore[arg-type]
    nodes[1].carry_out()
    assert nodes[1].sent == [(USER, SessionDraining(KEY, 0, 1, 30.0, "the node is shutting down"), ())]
    nodes[1].tick(29)
    feed(nodes[1], plan, entry(plan, 0, 0, 4))
    assert any(isinstance(m, Step) for _, m, _ in nodes[1].sent)
    open_(nodes[1], plan_of(USER, nodes, 1), resumes=True)  # another stage was replaced meanwhile
    nodes[1].connected()
    assert only(nodes[1].told(SessionOpened))
    open_(nodes[1], plan_of(OTHER, nodes, session=b"x" * 16))
    assert only(nodes[1].told(SessionRefused))
    nodes[1].tick(1)
    failed = failure(nodes[1])
    assert (failed.code, failed.reason, failed.is_kept) == (DRAINING, "the node is shutting down", False)
    assert not nodes[1].admission.sessions


def test_session_that_may_stay_after_all_is_not_ended() -> None:
    nodes = three()
    opened(nodes)
    nodes[1].core.drain(now=nodes[1].now, grace_s=5.0, reason="paused", may_stay=True)  # type: ignore[arg-type]
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
    nodes[1].sent.clear()
    nodes[1].core.stay()
    nodes[1].receive(USER, SessionQuery(KEY, 0, 1))
    answer = only(nodes[1].told(SessionProgress))
    assert isinstance(answer, SessionProgress)
    assert (answer.lease, answer.lease_s) == (b"0 120", LEASE_S)
    nodes[1].tick(6)
    assert session_of(nodes[1]).state is SessionState.OPEN
    assert not nodes[1].told(SessionFailed)


@pytest.mark.parametrize("is_paused_first", [False, True])
def test_session_of_a_node_that_leaves_may_not_stay_though_a_pause_is_over(is_paused_first: bool) -> None:
    nodes = three()
    opened(nodes)
    drain = partial(nodes[1].core.drain, now=nodes[1].now)  # type: ignore[arg-type]
    if is_paused_first:
        drain(grace_s=5.0, reason="paused", may_stay=True)
    drain(grace_s=7.0, reason="the node is shutting down")
    if not is_paused_first:
        drain(grace_s=5.0, reason="paused", may_stay=True)
    nodes[1].core.stay()
    nodes[1].tick(7)
    assert failure(nodes[1]).code == DRAINING
    assert not nodes[1].admission.sessions


def test_some_sessions_may_be_drained_and_others_not() -> None:
    nodes = three()
    opened(nodes)
    other = plan_of(OTHER, nodes, session=b"x" * 16)
    open_(nodes[1], other)
    chosen = [s for s in nodes[1].admission.sessions if s.user == OTHER]
    nodes[1].core.drain(now=nodes[1].now, grace_s=5.0, reason="moving", sessions=chosen)  # type: ignore[arg-type]
    nodes[1].tick(5)
    assert [s.user for s in nodes[1].admission.sessions] == [USER]


# what strangers can cost


def test_plans_for_one_session_are_adopted_at_a_bounded_rate() -> None:
    nodes = three()
    opened(nodes)
    for epoch in range(1, 2 * RESUMES_AT_ONCE):
        open_(nodes[1], plan_of(USER, nodes, epoch * 1_000_000), resumes=True)
    assert len(nodes[1].connecting) == RESUMES_AT_ONCE
    refused = nodes[1].told(SessionRefused)
    assert {m.code for m in refused if isinstance(m, SessionRefused)} == {"too-often"}
    nodes[1].now += 1.0
    open_(nodes[1], plan_of(USER, nodes, 2**32 - 1), resumes=True)
    assert session_of(nodes[1]).plan.epoch == 2**32 - 1


def test_plans_that_cannot_be_adopted_come_at_the_same_bounded_rate() -> None:
    nodes = three()
    opened(nodes)
    for epoch in range(1, 5 * RESUMES_AT_ONCE):
        open_(nodes[1], plan_of(USER, nodes, epoch, max_positions=100 - epoch % 2), resumes=True)
    refused = nodes[1].told(SessionRefused)
    assert len(refused) == 4 * RESUMES_AT_ONCE - 1
    assert {m.code for m in refused if isinstance(m, SessionRefused)} == {"too-often"}


def test_next_stages_are_dialled_few_at_a_time_and_the_others_in_their_turn() -> None:
    nodes = three()
    crowd = Node(PEERS[1], LayerRange(3, 5), num_blocks=10_000)
    plans = [plan_of(USER, nodes, session=bytes([n]) * 16) for n in range(2 * MAX_DIALS_OF_USER)]
    for plan in plans:
        open_(crowd, plan)
    assert len(crowd.connecting) == MAX_DIALS_OF_USER
    theirs = plan_of(OTHER, nodes, session=b"x" * 16)
    open_(crowd, theirs)  # another's does not wait for them
    assert len(crowd.connecting) == MAX_DIALS_OF_USER + 1
    waiting = plans[MAX_DIALS_OF_USER]
    crowd.receive(USER, CloseSession(waiting.session, 0))  # nobody wants that one any more
    crowd.connected(is_reachable=False)
    assert crowd.connecting[-1].session.key == plans[MAX_DIALS_OF_USER + 1].session
    while crowd.connecting:
        crowd.connected()
    assert len(crowd.told(SessionOpened)) == 2 * MAX_DIALS_OF_USER - 1


def test_dials_of_all_users_together_are_bounded() -> None:
    nodes = three()
    crowd = Node(PEERS[1], LayerRange(3, 5), num_blocks=10_000)
    number = 0
    for user in PEERS[3:20]:
        for _ in range(MAX_DIALS_OF_USER):
            number += 1
            open_(crowd, plan_of(user, nodes, session=number.to_bytes(16, "big")))
    assert number > MAX_DIALS
    assert len(crowd.connecting) == MAX_DIALS
    while crowd.connecting:
        crowd.connected()
    assert len(crowd.told(SessionOpened)) == number


def resumed(nodes: list[Node], num_positions: int = 8) -> Plan:
    """The first stage has adopted a plan of epoch 1 and has so many positions."""
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, num_positions))
    later = plan_of(USER, nodes, 1)
    open_(nodes[0], later, resumes=True)
    nodes[0].connected()
    nodes[0].sent.clear()
    return later


@pytest.mark.parametrize(
    "order",
    [
        resend(1, 0, 0, 101),
        resend(1, 0, 2**32 - 2, 1),
        resend(1, 0, 0, 4, covers=5),
        resend(1, 1, 0, 4, covers=0),
        resend(1, 0, 0, 4, stop_stage=0),
        resend(1, 0, 0, 4, stop_stage=3),
    ],
)
def test_order_that_no_stage_could_follow_ends_the_session(order: Resend) -> None:
    nodes = three()
    resumed(nodes)
    nodes[0].receive(USER, order)
    failed = failure(nodes[0])
    assert (failed.code, failed.culprit, failed.is_kept) == ("bad-resend", USER, False)


def test_last_stage_repeats_nothing() -> None:
    nodes = three()
    opened(nodes)
    nodes[2].receive(USER, resend(0, 0, 0, 1))
    assert failure(nodes[2]).code == "bad-resend"


def test_position_is_handed_on_again_once_per_epoch() -> None:
    nodes = three()
    resumed(nodes)
    nodes[0].receive(USER, resend(1, 0, 0, 4))
    assert len(nodes[0].sent) == 1
    nodes[0].receive(USER, resend(1, 0, 3, 1))
    assert failure(nodes[0]).code == "bad-resend"


def test_rows_are_handed_on_again_a_bounded_number_of_times_over_all_epochs() -> None:
    nodes = three()
    resumed(nodes)
    nodes[0].receive(USER, resend(1, 0, 0, 8))
    for epoch in range(2, RESEND_TIMES + 2):
        nodes[0].now += 1.0
        open_(nodes[0], plan_of(USER, nodes, epoch), resumes=True)
        nodes[0].connected()
        nodes[0].receive(USER, resend(epoch, 0, 0, 8))
    assert len([m for _, m, _ in nodes[0].sent if isinstance(m, Step)]) == RESEND_TIMES
    failed = failure(nodes[0])
    assert (failed.code, failed.culprit, failed.is_kept) == (NOT_RETAINED, "", True)
    nodes[0].sent.clear()
    for epoch in range(RESEND_TIMES + 2, 3 * RESEND_TIMES):
        nodes[0].now += RESEND_AGAIN_S
        open_(nodes[0], plan_of(USER, nodes, epoch), resumes=True)
        nodes[0].connected()
        nodes[0].receive(USER, resend(epoch, 0, 0, 8))
    assert not nodes[0].told(SessionFailed)


def test_orders_of_strangers_and_of_other_epochs_do_nothing() -> None:
    nodes = three()
    resumed(nodes)
    for source, epoch in ((OTHER, 1), (nodes[1].peer, 1), (USER, 0), (USER, 2)):
        nodes[0].receive(source, resend(epoch, 0, 0, 4))
    assert not nodes[0].sent
    assert not session_of(nodes[0]).resends


def test_waiting_orders_are_bounded() -> None:
    nodes = three()
    resumed(nodes)
    for index in range(MAX_RESENDS):
        nodes[0].receive(USER, resend(1, index, 8 + index, 1))
    assert not nodes[0].sent
    nodes[0].receive(USER, resend(1, MAX_RESENDS, 8 + MAX_RESENDS, 1))
    assert failure(nodes[0]).code == "flooded"


def test_rows_are_repeated_only_as_fast_as_the_next_stage_takes_them() -> None:
    nodes = three()
    resumed(nodes)
    nodes[0].backlog = MAX_BACKLOG_BYTES + 1
    nodes[0].receive(USER, resend(1, 0, 0, 4))
    nodes[0].receive(USER, resend(1, 1, 4, 4))
    assert not nodes[0].sent
    assert nodes[0].core.get_timer() == nodes[0].now + RETRY_S
    nodes[0].tick(RETRY_S)
    assert not nodes[0].sent
    nodes[0].backlog = MAX_BACKLOG_BYTES
    nodes[0].tick(RETRY_S)
    assert len(nodes[0].sent) == 1  # which is above the bound before the link knows of it
    nodes[0].tick(RETRY_S)
    assert len(nodes[0].sent) == 2
    assert nodes[0].core.retry_at is None


def test_orders_that_waited_do_not_all_go_at_once() -> None:
    nodes = three()
    later = resumed(nodes)
    row_bytes = 16
    nodes[0].backlog = MAX_BACKLOG_BYTES + 1
    for position in range(4):
        nodes[0].receive(USER, resend(1, position, position, 1))
    nodes[0].backlog = MAX_BACKLOG_BYTES - row_bytes  # the second one is above the bound before the link knows of it
    nodes[0].tick(RETRY_S)
    assert len(nodes[0].sent) == 2
    assert nodes[0].core.retry_at is not None
    nodes[0].tick(RETRY_S)
    assert len(nodes[0].sent) == 4
    assert later.epoch == 1


def test_rows_that_are_still_being_compressed_count_as_under_way() -> None:
    nodes = three()
    resumed(nodes)
    nodes[0].holds_back = True
    nodes[0].backlog = MAX_BACKLOG_BYTES - 16
    for position in range(8):
        nodes[0].receive(USER, resend(1, position, position, 1))
    assert len(nodes[0].sent) == 2
    for _ in range(3):
        nodes[0].tick(RETRY_S)
    assert len(nodes[0].sent) == 2
    nodes[0].let_go()
    nodes[0].tick(RETRY_S)
    assert len(nodes[0].sent) == 4
    nodes[0].receive(USER, CloseSession(KEY, 1))  # what is not sent any more is not waited for either
    assert not nodes[0].core.unsent_bytes(nodes[1].peer)


def test_order_of_more_than_a_frame_holds_ends_the_session() -> None:
    nodes = three()
    resumed(nodes)
    nodes[0].core._row_size = 2**22  # of float32: four rows are twice a frame
    nodes[0].receive(USER, resend(1, 0, 0, 4))
    assert failure(nodes[0]).code == "bad-resend"


def test_rows_that_are_retained_no_more_are_told_and_the_kv_is_kept() -> None:
    nodes = three()
    later = resumed(nodes)
    nodes[0].outputs.drop((USER, KEY))
    nodes[0].receive(USER, resend(1, 0, 0, 4))
    failed = failure(nodes[0])
    assert (failed.code, failed.culprit, failed.is_kept) == (NOT_RETAINED, "", True)
    open_(nodes[0], plan_of(USER, nodes, 2), resumes=True)
    nodes[0].connected()
    told = only(nodes[0].told(SessionOpened))
    assert isinstance(told, SessionOpened)
    assert (told.next_sequence, told.retained_positions, told.num_positions) == (1, 0, 8)
    assert later.epoch == 1


def test_node_without_memory_for_it_retains_nothing_and_says_so() -> None:
    node = Node(PEERS[0], LayerRange(0, 3), max_bytes=0)
    nodes = [node, *three()[1:]]
    plan = opened(nodes)
    feed(node, plan, entry(plan, 0, 0, 8))
    open_(node, plan_of(USER, nodes, 1), resumes=True)
    node.connected()
    told = only(node.told(SessionOpened))
    assert isinstance(told, SessionOpened)
    assert (told.retained_positions, told.num_positions) == (0, 8)


def test_rows_of_a_tree_are_retained_as_they_are_committed() -> None:
    nodes = three()
    plan = opened(nodes)
    outputs, key = nodes[0].outputs, (USER, KEY)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    tree = entry(plan, 1, 3, 4, parents=(3, 3, 4, 6), advance=0)
    nodes[0].receive(USER, tree, rows_of(3, 4))
    (step,) = nodes[0].waiting
    nodes[0].waiting.clear()
    # The log runs ahead: 6 is committed before the rows of the tree are computed, and 5 is dead.
    feed(nodes[0], plan, entry(plan, 2, 7, 1, first_node=8, parent=7, advance=6, want=()), computes=False)
    assert outputs.num_positions(key) == 3
    nodes[0].core.step_computed(step, (40, 50, 60, 70), StageTiming(0, 0), now=nodes[0].now)  # type: ignore[arg-type]
    nodes[0].carry_out()
    assert outputs.rows(key, 3, 2) == (40, 60)
    feed(nodes[0], plan, entry(plan, 3, 8, 1, first_node=9, parent=8, advance=7, want=()), computes=False)
    assert outputs.rows(key, 5, 1) == (70,)
    assert outputs.num_positions(key) == 6


def test_tree_that_was_not_folded_has_no_rows_to_repeat() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    feed(nodes[0], plan, entry(plan, 1, 3, 2, parents=(3, 3), advance=4, want=()))
    open_(nodes[0], plan_of(USER, nodes, 1), resumes=True)
    nodes[0].connected()
    told = only(nodes[0].told(SessionOpened))
    assert isinstance(told, SessionOpened)
    assert (told.next_sequence, told.num_positions, told.retained_positions) == (2, 4, 0)


def test_rows_that_wait_for_earlier_ones_are_bounded_per_session_and_for_all() -> None:
    nodes = three()
    plan = plan_of(USER, nodes, 1)
    open_(nodes[2], plan, resumes=True)
    feed(nodes[2], plan, entry(plan, 1, 0, MAX_EARLY_ROWS, first_node=2, parent=1, advance=0, want=()))
    assert session_of(nodes[2]).num_early_rows == MAX_EARLY_ROWS
    feed(nodes[2], plan, entry(plan, 2, 0, 1, first_node=5000, parent=4999, advance=0, want=()))
    failed = failure(nodes[2])
    assert (failed.code, failed.is_kept) == ("flooded", True)
    assert not session_of(nodes[2]).early


def early(crowd: Node, nodes: list[Node], user: PeerId, number: int, num_rows: int = MAX_EARLY_ROWS) -> Plan:
    """A session in a repair, with rows of which the first that they follow never came."""
    plan = plan_of(user, nodes, 1, session=bytes([number]) * 16)
    open_(crowd, plan, resumes=True)
    feed(crowd, plan, entry(plan, 1, 0, num_rows, first_node=2, parent=1, advance=0, want=()))
    return plan


def test_one_user_cannot_take_the_room_for_early_rows_from_others() -> None:
    nodes, crowd = three(), Node(PEERS[2], LayerRange(5, 7), num_blocks=1000)
    for number in range(MAX_EARLY_ROWS_OF_USER // MAX_EARLY_ROWS):
        early(crowd, nodes, OTHER, number)
    assert not crowd.told(SessionFailed)
    early(crowd, nodes, OTHER, 100, num_rows=1)
    failed = failure(crowd)
    assert (failed.code, failed.culprit, failed.is_kept) == ("flooded", "", True)
    early(crowd, nodes, USER, 101)
    assert not crowd.told(SessionFailed)


def test_early_rows_of_all_are_bounded_in_number_and_in_bytes_and_that_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, crowd = three(), Node(PEERS[2], LayerRange(5, 7), num_blocks=1000)
    num_users = MAX_ALL_EARLY_ROWS // MAX_EARLY_ROWS_OF_USER
    users = [user for user in PEERS[3 : 3 + num_users] for _ in range(MAX_EARLY_ROWS_OF_USER // MAX_EARLY_ROWS)]
    for number, user in enumerate(users):
        early(crowd, nodes, user, number)
    assert sum(s.num_early_rows for s in crowd.admission.sessions) == MAX_ALL_EARLY_ROWS
    assert not crowd.told(SessionFailed)
    early(crowd, nodes, USER, 100, num_rows=1)
    failed = failure(crowd)
    assert (failed.code, failed.culprit, failed.is_kept) == ("flooded", "", True)
    for number, user in enumerate(users):
        crowd.receive(user, CloseSession(bytes([number]) * 16, 1))
    early(crowd, nodes, USER, 101)
    assert not crowd.told(SessionFailed)
    monkeypatch.setattr("fusion_node.daemon.serving_core.MAX_ALL_EARLY_BYTES", 16 * MAX_EARLY_ROWS + 15)
    early(crowd, nodes, OTHER, 102, num_rows=1)
    assert failure(crowd).culprit == ""


def test_early_rows_wait_no_longer_than_they_may_whatever_is_asked_meanwhile() -> None:
    nodes = three()
    plan = plan_of(USER, nodes, 1)
    open_(nodes[2], plan, resumes=True)
    begin = nodes[2].now
    feed(nodes[2], plan, entry(plan, 2, 5, 1, want=(), stop_stage=2))
    assert nodes[2].core.get_timer() == begin + EARLY_S
    nodes[2].tick(EARLY_S - 1)
    feed(nodes[2], plan, entry(plan, 0, 0, 1, want=(), stop_stage=2))  # what is missing still comes, and comes on
    nodes[2].receive(USER, SessionQuery(KEY, 1, 2))
    nodes[2].tick(EARLY_S - 1)
    nodes[2].receive(USER, SessionQuery(KEY, 1, 2))
    assert not nodes[2].told(SessionFailed)
    nodes[2].tick(1)
    failed = failure(nodes[2])
    assert (failed.code, failed.culprit, failed.is_kept) == ("gap", "", True)
    assert not session_of(nodes[2]).early
    later = plan_of(USER, nodes, 2)
    open_(nodes[2], later, resumes=True)
    feed(nodes[2], later, entry(later, 1, 1, 5, want=(), stop_stage=2))
    nodes[2].tick(2 * EARLY_S)
    assert not nodes[2].told(SessionFailed)


def test_rows_that_wait_for_the_device_are_bounded_in_a_replay_too() -> None:
    nodes = three()
    for node in nodes:
        node.admission.blocks = Node(OTHER, LayerRange(0, 1), num_blocks=2000).admission.blocks
    plan = plan_of(USER, nodes, 1, max_positions=5000)
    open_(nodes[2], plan, resumes=True)
    assert MAX_QUEUED_ROWS == MAX_NODES_PER_STEP
    feed(nodes[2], plan, entry(plan, 0, 0, MAX_QUEUED_ROWS, covers=16, want=(), stop_stage=2), computes=False)
    feed(nodes[2], plan, entry(plan, 16, MAX_QUEUED_ROWS, 1, want=(), stop_stage=2), computes=False)
    assert failure(nodes[2]).code == "flooded"


def test_rows_of_an_earlier_plan_that_wait_for_the_device_are_nobodys_fault() -> None:
    nodes = three()
    for node in nodes:
        node.admission.blocks = Node(OTHER, LayerRange(0, 1), num_blocks=2000).admission.blocks
    plan = opened(nodes, max_positions=5000)
    feed(nodes[2], plan, entry(plan, 0, 0, MAX_QUEUED_ROWS - 10, want=()), computes=False)
    later = plan_of(USER, nodes, 1, max_positions=5000)
    open_(nodes[2], later, resumes=True)
    nodes[2].sent.clear()
    feed(nodes[2], later, entry(later, 1, MAX_QUEUED_ROWS - 10, 20, want=(), stop_stage=2), computes=False)
    failed = failure(nodes[2])
    assert (failed.code, failed.culprit, failed.is_kept) == ("flooded", "", True)
    nodes[2].compute()
    assert (session_of(nodes[2]).num_queued_rows, session_of(nodes[2]).num_queued_before) == (0, 0)


# beginning like an earlier session


def test_rows_of_a_reused_prefix_can_be_repeated_too() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 10))
    rows = next(rows for _, m, rows in nodes[0].sent if isinstance(m, Step))
    nodes[0].receive(USER, CloseSession(KEY, 0, retain=True))
    second = plan_of(USER, nodes, session=b"s" * 16)
    open_(nodes[0], second, prefix=KEY, asked=9)
    nodes[0].connected()
    told = only(nodes[0].told(SessionOpened))
    assert isinstance(told, SessionOpened)
    assert (told.reused_positions, told.retained_positions, told.num_positions) == (8, 8, 8)
    later = plan_of(USER, nodes, 1, session=b"s" * 16)
    open_(nodes[0], later, resumes=True)
    nodes[0].connected()
    told = only(nodes[0].told(SessionOpened))
    assert isinstance(told, SessionOpened)
    assert (told.next_sequence, told.retained_positions, told.num_positions) == (0, 8, 8)
    nodes[0].sent.clear()
    nodes[0].receive(USER, Resend(b"s" * 16, 1, 0, 0, 0, 8, False, 1))
    ((_, message, again),) = nodes[0].sent
    assert isinstance(message, Step)
    assert (message.covers, again) == (0, rows[:8])


def test_session_that_declines_its_prefix_retains_from_its_own_beginning() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 10))
    nodes[0].receive(USER, CloseSession(KEY, 0, retain=True))
    second = plan_of(USER, nodes, session=b"s" * 16)
    open_(nodes[0], second, prefix=KEY, asked=8)
    nodes[0].connected()
    feed(nodes[0], second, entry(second, 0, 0, 3, first_node=1, parent=0))
    assert nodes[0].outputs.num_positions((USER, b"s" * 16)) == 3


def test_what_is_retained_of_a_closed_session_goes_with_its_kv() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 10))
    nodes[0].receive(USER, CloseSession(KEY, 0, retain=True))
    assert nodes[0].outputs.num_positions((USER, KEY)) == 10
    nodes[0].admission.blocks.evict(64)
    nodes[0].tick(1)
    assert len(nodes[0].outputs) == 0
