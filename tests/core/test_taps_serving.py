"""Rows of layers that a stage sends its user: which, whose, to whom, and how much strangers can make of it."""

from __future__ import annotations

import pytest

from fusion_node.daemon.taps_core import MAX_TAP_BACKLOG_BYTES
from fusion_node.types import PeerId
from p2p.connection import route
from p2p.messages import (
    Cancel,
    CloseSession,
    OpenSession,
    SessionOpened,
    SessionRefused,
    StageTiming,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    decode_message,
    encode_message,
)
from p2p.records import Plan
from p2p.transfer_core import Transfer
from tests.core.serving_world import KEY, ROW_BYTES, Node, entry, plan_of, tap_of
from tests.core.test_serving_core import OTHER, USER, feed, rows_of, session_of, three


def open_tapped(node: Node, nodes: list[Node], *taps: int, epoch: int = 0, resumes: bool = False) -> Plan:
    plan = plan_of(USER, nodes, epoch)
    envelope = f"tapped {epoch}".encode()
    node.plans[envelope] = plan
    node.receive(USER, OpenSession(KEY, epoch, nodes.index(node), envelope, resumes=resumes, taps=taps))
    while node.connecting:
        node.connected()
    return plan


def told(node: Node) -> SessionOpened:
    (message,) = node.told(SessionOpened)
    assert isinstance(message, SessionOpened)
    return message


def taps(node: Node) -> list[tuple[PeerId, StepTaps, tuple[int, ...]]]:
    """Takes what was sent of them."""
    found = [(peer, message, rows) for peer, message, rows in node.sent if isinstance(message, StepTaps)]
    node.told(StepTaps)
    return found


def handed_on(node: Node) -> tuple[Step, tuple[int, ...]]:
    ((_, message, rows),) = [each for each in node.sent if isinstance(each[1], Step)]
    assert isinstance(message, Step)
    return message, rows


def test_user_is_sent_the_rows_of_the_nodes_and_layers_that_it_asks_for_and_nobody_else_is() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 1, 3)
    assert told(nodes[0]).taps == (1, 3)
    feed(nodes[0], plan, entry(plan, 0, 0, 4, tap=b"\x0a"))
    step, rows = handed_on(nodes[0])
    assert step.tap == b"\x0a", "the next stage has layers of its own"
    sent = taps(nodes[0])
    assert [(peer, m.layer, m.nodes, m.sequence) for peer, m, _ in sent] == [(USER, 1, (2, 4), 0), (USER, 3, (2, 4), 0)]
    assert [payload for _, _, payload in sent] == [(tap_of(layer, rows[1]), tap_of(layer, rows[3])) for layer in (1, 3)]


def test_last_stage_sends_the_result_before_what_nobody_waits_for() -> None:
    nodes = three()
    plan = open_tapped(nodes[2], nodes, 6)
    feed(nodes[2], plan, entry(plan, 0, 0, 4, tap=b"\x08"))
    messages = [message for _, message, _ in nodes[2].sent if isinstance(message, StepResult | StepTaps)]
    assert [type(message) for message in messages] == [StepResult, StepTaps]


@pytest.mark.parametrize("layers", [(3,), (4, 6), (0 + 3, 4), (6,)])
def test_layers_of_other_stages_are_refused(layers: tuple[int, ...]) -> None:
    """The middle stage has layers 3 and 4, and so the rows after four and after five."""
    nodes = three()
    open_tapped(nodes[1], nodes, *layers)
    (refused,) = nodes[1].told(SessionRefused)
    assert isinstance(refused, SessionRefused)
    assert refused.code == "bad-taps"
    assert "after 4 to 5 layers" in refused.reason
    assert not nodes[1].admission.sessions


def test_nothing_is_sent_where_nothing_was_asked_for() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes)
    assert told(nodes[0]).taps == ()
    feed(nodes[0], plan, entry(plan, 0, 0, 2, tap=b"\x03"))
    assert not taps(nodes[0])
    other = three()
    plan = open_tapped(other[0], other, 2)
    feed(other[0], plan, entry(plan, 0, 0, 2))
    assert not taps(other[0])


def test_plan_that_is_adopted_brings_its_own_wishes_and_old_ones_are_not_answered_any_more() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 2)
    nodes[0].receive(USER, entry(plan, 0, 0, 2, tap=b"\x03"), rows_of(0, 2))
    later = open_tapped(nodes[0], nodes, 1, 3, epoch=1, resumes=True)
    nodes[0].compute()
    assert not taps(nodes[0])
    feed(nodes[0], later, entry(later, 1, 2, 1, tap=b"\x01"))
    assert [message.layer for _, message, _ in taps(nodes[0])] == [1, 3]
    without = open_tapped(nodes[0], nodes, epoch=2, resumes=True)
    feed(nodes[0], without, entry(without, 2, 3, 1, tap=b"\x01"))
    assert not taps(nodes[0])
    assert session_of(nodes[0]).taps == ()


def test_rows_of_nodes_that_are_dead_or_cancelled_are_not_sent() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 2)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    tree = entry(plan, 1, 3, 4, parents=(3, 3, 4, 5), advance=0, want=(), tap=b"\x0f")
    nodes[0].receive(USER, tree, rows_of(3, 4))
    nodes[0].receive(USER, Cancel(KEY, 0, 4))
    nodes[0].compute()
    ((_, message, _),) = taps(nodes[0])
    assert message.nodes == (4, 6)


def test_layer_whose_rows_could_not_be_had_is_left_out() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 1, 2)
    nodes[0].receive(USER, entry(plan, 0, 0, 1, tap=b"\x01"), rows_of(0, 1))
    step = nodes[0].waiting.popleft()
    nodes[0].core.step_computed(step, (5,), StageTiming(0, 0), now=plan_of(USER, nodes).issued_at, taps=[(2, (7,))])  # type: ignore[arg-type]
    nodes[0].carry_out()
    ((_, message, payload),) = taps(nodes[0])
    assert (message.layer, payload) == (2, (7,))


def test_taps_are_left_out_while_much_waits_for_the_user_and_steps_are_not() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 2)
    nodes[0].backlog = MAX_TAP_BACKLOG_BYTES + 1
    feed(nodes[0], plan, entry(plan, 0, 0, 1, tap=b"\x01"))
    assert not taps(nodes[0])
    assert handed_on(nodes[0])
    assert nodes[0].core.counters["taps_left_out"] == 1
    nodes[0].backlog = 0
    feed(nodes[0], plan, entry(plan, 1, 1, 1, tap=b"\x01"))
    assert len(taps(nodes[0])) == 1


def test_rows_that_are_still_being_compressed_wait_for_the_user_as_well() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 1, 2)
    nodes[0].backlog = MAX_TAP_BACKLOG_BYTES - ROW_BYTES
    nodes[0].holds_back = True
    for position in range(3):
        feed(nodes[0], plan, entry(plan, position, position, 1, tap=b"\x01"))
    assert [message.sequence for _, message, _ in taps(nodes[0])] == [0, 0]
    assert nodes[0].core.unsent_bytes(USER) == 2 * ROW_BYTES
    nodes[0].let_go()
    assert not nodes[0].core.unsent_bytes(USER)
    feed(nodes[0], plan, entry(plan, 3, 3, 1, tap=b"\x01"))
    assert len(taps(nodes[0])) == 2
    nodes[0].receive(USER, CloseSession(KEY, 0))  # what is not sent any more is not waited for either
    assert not nodes[0].core.unsent_bytes(USER)


def test_result_does_not_wait_for_taps_on_its_link() -> None:
    tensor = TensorMeta("f32", 64, 1024)
    beside = StepTaps(KEY, 0, 0, 1, tuple(range(1, 65)), tensor)
    result = StepResult(KEY, 0, 1, (65,), TensorMeta("f32", 1, 1024), ())
    node, user = Transfer(), Transfer()
    position = user.begin_link()
    node.resume(*user.tell())
    arrived = []
    for message in (beside, result):
        rows = bytes(message.tensor.num_bytes)
        lane, key = route(message, rows)
        node.queue(lane, key, encode_message(message), rows)
        segment = node.next_segment()  # of the rows of a layer, the first only: they are under way
        while segment is not None:
            frame = user.receive(position, segment)
            if frame is not None:
                arrived.append(decode_message(frame).message)
            segment = node.next_segment() if message is result else None
    assert arrived == [result, beside]


def test_stranger_cannot_have_rows_sent_to_itself() -> None:
    nodes = three()
    plan = open_tapped(nodes[0], nodes, 2)
    nodes[0].receive(OTHER, entry(plan, 0, 0, 1, tap=b"\x01"), rows_of(0, 1))
    nodes[0].receive(OTHER, OpenSession(KEY, 1, 0, b"tapped 0", resumes=True, taps=(1,)))
    assert not nodes[0].waiting
    assert session_of(nodes[0]).taps == (2,)
