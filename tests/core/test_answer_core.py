"""An answer over nodes that fail: its tokens are those of one machine, or its end is a named error."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from fusion_node.client.answer_core import (
    Opened,
    Place,
    RepairKind,
    RouteKind,
    RowsWanted,
    StepDone,
    WantsAlternates,
    WantsRoute,
)
from fusion_node.client.session_core import Prefix
from fusion_node.errors import LocalProtocolError, NoRoute, PeerError, PeerRefused, PeerRevoked, RemoteProtocolError
from fusion_node.types import PeerId
from p2p.messages import (
    NOT_RETAINED,
    AnyMessage,
    CloseSession,
    OpenSession,
    Replayed,
    Resend,
    SessionClosed,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import PlanStage
from scheduler.repair_core import MAX_OPEN_ATTEMPTS, MAX_TIMEOUT_S, STUCK_S
from tests.core.answer_world import NAN, ROW, USER, Node, User, World, embed, next_token, undisturbed

PROMPT = list(range(100, 190))
NUM_TOKENS = 12
EXPECTED = undisturbed(PROMPT, NUM_TOKENS)

Fault = Callable[[World, Node], None]


def world_of_three(seed: int = 0, *, num_spare: int = 1) -> tuple[World, list[Node], list[Node]]:
    """Three stages, and for each so many others that could serve it."""
    world = World(seed)
    ranges = ((0, 2), (2, 4), (4, 6))
    nodes = [world.node(*layers) for layers in ranges]
    spare = [world.node(*layers) for _ in range(num_spare) for layers in ranges]
    return world, nodes, spare


def at_token(user: User, count: int, work: Callable[[], None]) -> None:
    """Does it once, when so many tokens are there."""

    def on_token(num_tokens: int) -> None:
        if num_tokens == count:
            work()

    user.on_token = on_token


def at_event(user: User, matches: Callable[[object], bool], work: Callable[[], None]) -> None:
    """Does it once, at the first event that matches."""
    is_done = False

    def on_event(event: object) -> None:
        nonlocal is_done
        if not is_done and matches(event):
            is_done = True
            work()

    user.on_event = on_event


def kill(world: World, node: Node) -> None:
    world.kill(node)


def freeze(world: World, node: Node) -> None:
    world.freeze(node)


def reset(world: World, node: Node) -> None:
    """The user's link to it."""
    world.cut(USER, node.peer, for_good=False)


def spoil(world: World, node: Node) -> None:
    node.spoils = True


def drain(world: World, node: Node) -> None:
    node.serving.drain(now=world.now, grace_s=30.0, reason="it is told to stop")
    node.pump()


FAULTS: dict[str, Fault] = {"kill": kill, "freeze": freeze, "reset": reset, "spoil": spoil, "drain": drain}


def finish(world: World, user: User) -> None:
    world.run(stop=lambda: user.is_done)
    assert user.is_done
    assert user.error is None, repr(user.error)
    assert user.tokens == EXPECTED


def test_undisturbed_answer_asks_for_no_row_twice_and_repairs_nothing() -> None:
    world, _, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    wanted = [event for event in user.events if isinstance(event, RowsWanted)]
    assert [w.first_position for w in wanted] == sorted({w.first_position for w in wanted})
    assert not any(w.is_replay for w in wanted)
    assert user.repairs == []
    assert user.avoided == []


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["prefill", "decode", "between"])
def test_stage_that_fails_is_replaced_and_the_tokens_stay_the_same(fault: str, stage: int, when: str) -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        FAULTS[fault](world, nodes[stage])

    match when:
        case "prefill":
            at_event(user, lambda event: isinstance(event, StepDone), strike)
        case "decode":
            # The rows of the fifth token are on their way.
            at_token(user, 4, lambda: world.after(0.02, strike))
        case "between":
            at_token(user, 4, strike)
    finish(world, user)
    assert user.num_sessions == 1
    (repair,) = user.repairs
    assert (repair.kind, repair.stage, repair.peer) == (RepairKind.PATCHED, stage, nodes[stage].peer)
    assert repair.stall_s < 2.5
    # A stage's word about the one before it has nobody avoided.
    assert user.avoided == ([] if fault == "spoil" and stage < 2 else [nodes[stage].peer])
    assert repair.replayed_positions > 0


def test_replacement_gets_the_history_from_the_stage_before_and_not_from_the_user() -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 5, lambda: world.kill(nodes[1]))
    finish(world, user)
    assert user.repairs[0].replayed_bytes <= 16  # the row that was on its way
    assert nodes[0].serving.counters["rows_resent"] >= len(PROMPT) + 4
    # The stages that are left compute nothing twice.
    assert nodes[0].serving.counters["rows"] == len(PROMPT) + NUM_TOKENS - 1


def test_alternate_is_there_before_it_is_needed() -> None:
    """Nothing is looked for, so that the stall is little more than the replay."""
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 5, lambda: world.kill(nodes[2]))
    finish(world, user)
    assert [event.kind.value for event in user.events if isinstance(event, WantsRoute)] == ["whole"]


def test_lost_layers_may_be_served_by_several_others() -> None:
    world = World(0)
    nodes = [world.node(0, 3), world.node(3, 6)]
    world.node(0, 2)
    world.node(2, 3)
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 3, lambda: world.kill(nodes[0]))
    finish(world, user)
    assert user.num_sessions == 1
    assert len(user.core.places) == 3


@pytest.mark.parametrize("stages", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_several_stages_fail_at_once(stages: tuple[int, ...], fault: str) -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        for stage in stages:
            FAULTS[fault](world, nodes[stage])

    at_token(user, 4, lambda: world.after(0.02, strike))
    finish(world, user)
    assert user.num_sessions == 1


@pytest.mark.parametrize("fault", ["kill", "freeze", "reset"])
def test_all_of_six_stages_that_fail_at_once_are_one_attempt(fault: str) -> None:
    world = World(0)
    nodes, _ = ([world.node(layer, layer + 1) for layer in range(6)] for _ in range(2))
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        for node in nodes:
            FAULTS[fault](world, node)

    at_token(user, 4, strike)
    finish(world, user)
    assert user.num_sessions == 1
    assert [repair.kind for repair in user.repairs] == [RepairKind.PATCHED]


def test_stages_that_all_refuse_one_opening_are_one_attempt() -> None:
    world = World(0)
    nodes, _ = ([world.node(layer, layer + 1) for layer in range(6)] for _ in range(2))
    for node in nodes:
        node.serving.admission.paused = "the operator needs it"
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    assert user.num_sessions == 2


@pytest.mark.parametrize("second", [0, 1, 2])
@pytest.mark.parametrize("fault", ["kill", "freeze", "reset"])
def test_stage_fails_while_another_is_being_replaced(second: int, fault: str) -> None:
    world, nodes, spare = world_of_three(num_spare=2)
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.kill(nodes[1]))
    victim = spare[1] if second == 1 else nodes[second]
    at_event(
        user,
        lambda event: isinstance(event, Opened) and event.epoch == 1,
        lambda: world.after(0.03, lambda: FAULTS[fault](world, victim)),
    )
    finish(world, user)
    assert user.num_sessions == 1


def test_link_between_two_nodes_that_cannot_be_made_again_is_avoided_and_nobody_is_blamed() -> None:
    world, nodes, spare = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.cut(nodes[0].peer, nodes[1].peer, for_good=True))
    finish(world, user)
    assert user.avoided == []
    assert user.repairs[0].cause == "pair"
    assert {place.peer for place in user.core.places} in (
        {nodes[0].peer, spare[1].peer, nodes[2].peer},
        {spare[0].peer, nodes[1].peer, nodes[2].peer},
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_node_that_is_revoked_while_somebody_is_looked_for_in_its_place_gets_nothing_any_more(stage: int) -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    user, victim = world.answer(PROMPT, NUM_TOKENS), nodes[stage].peer
    is_revoked, sent, carry = False, list[AnyMessage](), world.send

    def send(sender: PeerId, receiver: PeerId, message: AnyMessage, rows: tuple[object, ...] = (), /) -> bool:
        if is_revoked and receiver == victim and not isinstance(message, CloseSession):
            sent.append(message)
        return carry(sender, receiver, message, rows)

    def revoke() -> None:
        nonlocal is_revoked
        is_revoked, user.sees = True, lambda place: place.peer != victim
        user.core.revoke(victim, PeerRevoked(victim, "revoked"), now=world.now)
        user.pump()

    world.send = send
    at_token(user, 4, lambda: world.cut(nodes[0].peer, nodes[1].peer, for_good=True))
    at_event(
        user,
        lambda event: isinstance(event, WantsRoute) and bool(event.lost),
        lambda: world.after(0.01, revoke),
    )
    world.run(stop=lambda: user.is_done)
    assert is_revoked
    assert sent == []
    assert isinstance(user.error, NoRoute)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stage", [0, 1])
def test_link_between_two_nodes_that_cannot_be_made_from_the_beginning_has_nobody_blamed(stage: int, seed: int) -> None:
    world, nodes, _ = world_of_three(seed)
    world.broken_links.add(frozenset((nodes[stage].peer, nodes[stage + 1].peer)))
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    assert user.avoided == []
    assert user.num_sessions == 2


@pytest.mark.parametrize("num_bad", [1, 2, 3])
@pytest.mark.parametrize("when", ["start", "decode"])
def test_several_holders_of_a_stage_that_compute_garbage_do_not_end_the_answer(num_bad: int, when: str) -> None:
    world, _, _ = world_of_three(num_spare=4)
    user = User(world, PROMPT, NUM_TOKENS, None)
    world.user = user

    def strike() -> None:
        for node in [node for node in world.nodes.values() if node.layers.start == 0][:num_bad]:
            node.spoils = True

    if when == "start":
        strike()
    else:
        at_token(user, 4, strike)
    user.start()
    finish(world, user)
    assert user.avoided == []  # by other answers: all of that was hearsay


def test_bad_holders_are_passed_by_though_they_fail_with_every_holder_of_the_next_stage() -> None:
    world = World(0)
    bad = [world.node(0, 2), world.node(0, 2)]
    for layers in ((2, 4), (2, 4), (4, 6), (0, 2)):
        world.node(*layers)
    for node in bad:
        node.spoils = True
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)


def test_stage_that_accuses_whoever_comes_before_it_is_replaced_itself() -> None:
    world, nodes, _ = world_of_three(num_spare=4)
    user = User(world, PROMPT, NUM_TOKENS, None)
    world.user = user
    send = world.send
    liar = nodes[1].peer

    def lying(sender: PeerId, receiver: PeerId, message: AnyMessage, rows: tuple[object, ...] = ()) -> bool:
        if receiver == liar and sender != USER and isinstance(message, Step):
            failed = SessionFailed(message.session, message.epoch, 1, "garbage", "not a number", sender, True)
            return send(liar, USER, failed)
        return send(sender, receiver, message, rows)

    world.send = lying
    user.start()
    finish(world, user)
    assert len(user.repairs) + sum(isinstance(event, Opened) for event in user.events) <= 4
    assert liar not in {place.peer for place in user.core.places}


def test_link_between_two_nodes_without_alternates_is_made_again() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.cut(nodes[0].peer, nodes[1].peer, for_good=False))
    finish(world, user)
    assert user.num_sessions == 1
    assert user.repairs[0].kind is RepairKind.RESUMED
    assert [node.serving.counters["rows"] for node in nodes] == [len(PROMPT) + NUM_TOKENS - 1] * 3


def test_frozen_stage_that_wakes_before_there_is_another_goes_on() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        world.freeze(nodes[1])
        world.after(4.0, lambda: world.thaw(nodes[1]))

    at_token(user, 4, strike)
    finish(world, user)
    assert user.num_sessions == 1
    assert user.core.epoch == 0
    assert user.avoided == []


@pytest.mark.parametrize("pause_s", [4.0, 5.0, 9.0, 15.0])
def test_stage_that_pauses_and_that_nobody_can_replace_costs_no_session(pause_s: float) -> None:
    """It answers meanwhile, and nobody else has its layers."""
    world, nodes, _ = world_of_three(num_spare=0)
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        nodes[1].row_s = pause_s
        world.after(0.9 * pause_s, lambda: setattr(nodes[1], "row_s", 0.002))

    at_token(user, 4, strike)
    finish(world, user)
    assert user.num_sessions == 1
    assert [(repair.kind, repair.cause) for repair in user.repairs] == [(RepairKind.RESUMED, "stuck")]
    assert user.repairs[0].replayed_positions <= 1  # the one that was on its way, ordered again
    assert user.avoided == []


def test_stage_that_nobody_can_replace_and_that_computes_nothing_is_resumed_once() -> None:
    """The second time another route is looked for, which comes up with somebody else."""
    world, nodes, spare = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    user.sees = lambda place: place.peer not in {node.peer for node in spare}

    def appear(event: object) -> None:
        if isinstance(event, WantsRoute) and event.kind is RouteKind.WHOLE and user.tokens:
            user.sees = lambda place: True

    user.on_event = appear
    at_token(user, 4, lambda: setattr(nodes[1], "row_s", 1e6))
    finish(world, user)
    assert user.num_sessions == 2
    assert user.core.places[1].peer == spare[1].peer
    assert [(repair.kind, repair.cause) for repair in user.repairs] == [(RepairKind.PREFILLED, "stuck")]
    assert user.repairs[0].stall_s < 30.0
    assert user.avoided == [nodes[1].peer]


def test_replacement_that_is_too_slow_for_the_replay_is_not_waited_for_twice() -> None:
    """The one that it replaced is back meanwhile."""
    world, nodes, spare = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    spare[1].row_s = 1e6

    def strike() -> None:
        world.kill(nodes[1])
        world.after(1.0, lambda: world.restart(nodes[1]))

    at_token(user, 4, strike)
    finish(world, user)
    assert [repair.kind for repair in user.repairs] == [RepairKind.PREFILLED]
    assert user.repairs[0].stall_s < STUCK_S + MAX_TIMEOUT_S


def test_frozen_stage_that_wakes_after_it_was_replaced_changes_nothing() -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, 60)

    def strike() -> None:
        world.freeze(nodes[1])
        world.after(1.3, lambda: world.thaw(nodes[1]))

    at_token(user, 4, strike)
    world.run(stop=lambda: user.is_done)
    assert user.tokens == undisturbed(PROMPT, 60)
    assert len(user.repairs) == 1


@pytest.mark.parametrize("later_s", [0.0, 1.0])
def test_look_that_was_put_off_does_not_undo_what_an_alternate_has_repaired(later_s: float) -> None:
    """A silent stage that nobody could replace dies when there is an alternate; the question about it is still open."""
    num_tokens = 40
    world = World(0)
    nodes = [world.node(0, 2), world.node(2, 4), world.node(4, 6)]
    hidden = {world.node(2, 4).peer, world.node(2, 4).peer}
    alternate = min(hidden)
    user = User(world, PROMPT, num_tokens, None)
    world.user = user
    user.sees = lambda place: place.peer not in hidden

    def strike() -> None:
        user.sees = lambda place: place.peer not in hidden or place.peer == alternate
        user._follow(WantsAlternates(frozenset(), frozenset()))
        world.kill(nodes[1])
        # What the search comes back with is the other one.
        user.sees = lambda place: place.peer != alternate

    user.start()
    at_token(user, 4, lambda: world.freeze(nodes[1]))
    at_event(
        user,
        lambda event: isinstance(event, WantsRoute) and event.kind is RouteKind.PATCH,
        lambda: world.after(later_s, strike) if later_s else strike(),
    )
    world.run(stop=lambda: user.is_done)
    assert user.tokens == undisturbed(PROMPT, num_tokens)
    assert user.num_sessions == 1
    assert [place.peer for place in user.core.places] == [nodes[0].peer, alternate, nodes[2].peer]
    assert len([event for event in user.events if isinstance(event, WantsRoute)]) == 2


def test_source_that_retains_nothing_has_everything_computed_again() -> None:
    world = World(0)
    nodes = [world.node(0, 2, retained_bytes=0), world.node(2, 4), world.node(4, 6)]
    world.node(2, 4)
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.kill(nodes[1]))
    finish(world, user)
    assert user.num_sessions == 2
    assert user.repairs[0].kind is RepairKind.PREFILLED
    assert user.repairs[0].replayed_positions >= 3 * (len(PROMPT) + 4)


def test_stage_that_always_says_that_its_rows_are_gone_is_replaced_once() -> None:
    num_tokens = 40
    world, nodes, _ = world_of_three()
    liar = nodes[1].peer
    user = world.answer(PROMPT, num_tokens)

    def lie() -> None:
        stages = [place.peer for place in user.core.places]
        if liar in stages and not user.is_done:
            core = user.core
            gone = SessionFailed(core.session, core.epoch, stages.index(liar), NOT_RETAINED, "a lie", "", True)
            world.send(liar, USER, gone)

    user.on_token = lambda count: world.after(0.03, lie)
    world.run(stop=lambda: user.is_done)
    assert user.tokens == undisturbed(PROMPT, num_tokens)
    assert user.num_sessions == 1
    assert [(repair.peer, repair.cause) for repair in user.repairs] == [(liar, "refused")]
    assert user.avoided == [liar]


@pytest.mark.parametrize("num_times", [1, 9])
def test_stage_that_says_many_times_that_its_rows_are_gone_has_said_it_once(num_times: int) -> None:
    world, nodes, _ = world_of_three(num_spare=2)
    liar, send = nodes[0].peer, world.send

    def deliver(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        if target != liar or not isinstance(message, Resend):
            return send(source, target, message, rows)
        gone = SessionFailed(message.session, message.epoch, 0, NOT_RETAINED, "gone", "", True)
        return all(send(liar, USER, gone) for _ in range(num_times))

    world.send = deliver
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.kill(nodes[1]))
    finish(world, user)
    assert user.num_sessions == 2
    # It did as it may, once.
    assert user.avoided == [nodes[1].peer]
    assert liar in {place.peer for place in user.core.places}


def test_source_that_drops_its_rows_during_a_replay_is_told_of_as_a_repair() -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.kill(nodes[1]))
    send = world.send

    def drop(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        if isinstance(message, Resend):
            nodes[0].serving.outputs.drop((USER, message.session))
        return send(source, target, message, rows)

    world.send = drop
    finish(world, user)
    assert user.num_sessions == 2
    assert [(repair.kind, repair.peer) for repair in user.repairs] == [(RepairKind.PREFILLED, nodes[1].peer)]


def test_alternate_that_the_rules_forbid_by_now_is_not_taken() -> None:
    world, nodes, _ = world_of_three(num_spare=2)
    user = world.answer(PROMPT, NUM_TOKENS)
    forbidden: list[Place] = []

    def strike() -> None:
        forbidden.extend(user.core._alternates[1])
        user.allows = lambda places: not set(places) & set(forbidden)
        user.sees = lambda place: place not in forbidden
        world.kill(nodes[1])

    at_token(user, 4, strike)
    finish(world, user)
    assert len(forbidden) == 1
    assert user.core.places[1].peer not in {nodes[1].peer, forbidden[0].peer}
    assert [repair.kind for repair in user.repairs] == [RepairKind.PATCHED]


def test_alternates_that_all_refuse_have_everything_computed_elsewhere() -> None:
    world = World(0)
    nodes = [world.node(0, 2), world.node(2, 4), world.node(4, 6)]
    full = [world.node(2, 4) for _ in range(2)]
    for node in full:
        node.serving.admission.paused = "the operator needs it"
    whole = [world.node(0, 3), world.node(3, 6)]
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.kill(nodes[1]))
    finish(world, user)
    assert user.repairs[0].kind in (RepairKind.PREFILLED, RepairKind.PATCHED)
    assert whole[0].serving.counters["rows"] > 0


@pytest.mark.parametrize("choose_s", [0.005, 0.03, 0.05, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("second", [None, 0, 1])
def test_bad_row_is_the_fault_of_who_sent_it_though_it_is_gone_when_that_is_seen(
    choose_s: float, second: int | None
) -> None:
    """It is seen while its sender is still there, while another is opened in its place, or when that one is ready."""
    world, nodes, spare = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    user.choose_s = choose_s

    def die() -> None:
        world.kill(nodes[2])
        if second is not None:
            # The plan after the next has the new last stage again, which may have begun by then.
            world.after(0.08, lambda: world.kill(nodes[second]))

    at_token(user, 4, lambda: spoil(world, nodes[2]))
    at_event(user, lambda event: isinstance(event, StepDone) and user.row == NAN, die)
    finish(world, user)
    assert set(user.avoided) == {nodes[2].peer, *([] if second is None else [nodes[second].peer])}
    assert user.core.places[2].peer == spare[2].peer
    assert user.num_sessions == 1
    assert user.repairs[0].peer == nodes[2].peer


def test_nobody_left_is_a_named_error_within_patience() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        world.kill(nodes[1])
        user.sees = lambda place: place.peer != nodes[1].peer

    at_token(user, 4, strike)
    world.run(stop=lambda: user.is_done)
    assert isinstance(user.error, NoRoute)
    assert isinstance(user.error.__cause__, PeerError)
    assert user.error.__cause__.peer == nodes[1].peer
    assert str(user.error) == f"{user.error.__cause__}; and nobody is there"
    assert user.tokens == EXPECTED[:4]
    assert world.now < 1000.0 + 20.0


def test_stage_that_comes_back_while_it_is_waited_for_serves_again() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    user = world.answer(PROMPT, NUM_TOKENS)

    def strike() -> None:
        world.kill(nodes[1])
        user.sees = lambda place: place.peer != nodes[1].peer
        world.after(3.0, back)

    def back() -> None:
        world.restart(nodes[1])
        user.sees = lambda place: True

    at_token(user, 4, strike)
    finish(world, user)


def test_node_that_always_fails_is_given_up_with_its_error() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: spoil(world, nodes[2]))
    world.run(stop=lambda: user.is_done)
    assert isinstance(user.error, RemoteProtocolError)
    assert user.error.peer == nodes[2].peer
    assert user.tokens == EXPECTED[:4]


def test_stage_with_leases_of_no_length_does_not_have_the_user_ask_without_a_pause() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    send, num_queries = world.send, 0

    def shorten(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        nonlocal num_queries
        num_queries += isinstance(message, SessionQuery)
        if source == nodes[1].peer and isinstance(message, SessionOpened | SessionProgress):
            message = msgspec.structs.replace(message, lease_s=1e-9)
        return send(source, target, message, rows)

    world.send = shorten
    user = world.answer(PROMPT, NUM_TOKENS)
    world.run(stop=lambda: user.is_done)
    assert user.tokens == EXPECTED
    assert num_queries <= 3 * (world.now - 1000.0 + 1.0)


@pytest.mark.parametrize("lie", ["nothing", "progress", "flapping", "replayed"])
def test_last_stage_that_withholds_results_is_replaced_whatever_it_says(lie: str) -> None:
    world, nodes, _ = world_of_three()
    liar, send, is_lying, num_told = nodes[2], world.send, False, 0

    def lying(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        nonlocal num_told
        if is_lying and source == liar.peer:
            if isinstance(message, StepResult):
                return True
            if isinstance(message, SessionProgress) and lie in ("progress", "flapping"):
                num_told += 1
                more = num_told if lie == "progress" else -(num_told % 2)
                done, come = message.num_done + more, message.next_sequence + more
                message = msgspec.structs.replace(message, num_done=done, next_sequence=come)
        return send(source, target, message, rows)

    def spam() -> None:
        stages = [place.peer for place in user.core.places]
        if liar.peer in stages and not user.is_done:
            replayed = Replayed(user.core.session, user.core.epoch, stages.index(liar.peer), 0, 0)
            send(liar.peer, USER, replayed)
            world.after(0.4, spam)

    def begin() -> None:
        nonlocal is_lying
        is_lying = True
        if lie == "replayed":
            spam()

    world.send = lying
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, begin)
    finish(world, user)
    assert len(user.repairs) == 1
    assert liar.peer not in {place.peer for place in user.core.places}
    # What it claims to have, the stage before it may have made up.
    assert user.avoided == ([] if lie == "progress" else [liar.peer])


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("since", [0, 1, 8])
def test_stage_that_answers_and_hands_nothing_on_is_found_in_one_repair(stage: int, since: int) -> None:
    world, nodes, _ = world_of_three()
    liar, send = nodes[stage].peer, world.send

    def withhold(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        if source == liar and isinstance(message, Step | StepResult) and message.sequence >= since:
            return True
        return send(source, target, message, rows)

    world.send = withhold
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    assert user.num_sessions == 1
    assert len(user.repairs) == 1
    assert liar not in {place.peer for place in user.core.places}
    # Before anything was measured, a step may take as long as it does on a slow machine.
    assert user.repairs[0].stall_s < (5.0 if since else 13.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("since", [0, 5])
@pytest.mark.parametrize("instead", ["closed", "replayed", "old epoch"])
def test_stage_that_hands_nothing_on_and_never_says_how_far_it_is_is_found_and_nobody_else(
    instead: str, since: int, stage: int
) -> None:
    """It is heard whenever it is asked."""
    world, nodes, _ = world_of_three(num_spare=2)
    liar, send = nodes[stage].peer, world.send

    def evade(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        if source == liar and isinstance(message, SessionProgress):
            match instead:
                case "closed":
                    message = SessionClosed(message.session, message.epoch)
                case "replayed":
                    message = Replayed(message.session, message.epoch, stage, 0, 0)
                case "old epoch" if message.epoch:
                    message = msgspec.structs.replace(message, epoch=message.epoch - 1)
        is_kept_back = source == liar and isinstance(message, Step | StepResult) and message.sequence >= since
        return is_kept_back or send(source, target, message, rows)

    world.send = evade
    user = world.answer(PROMPT, NUM_TOKENS)
    if instead == "old epoch":
        at_token(user, 3, lambda: world.kill(nodes[(stage + 1) % 3]))
    finish(world, user)
    assert user.num_sessions == 1
    assert liar not in {place.peer for place in user.core.places}
    assert {peer for peer in user.avoided if world.nodes[peer].is_up} <= {liar}
    assert sum(repair.stall_s for repair in user.repairs) < 15.0


@pytest.mark.parametrize(("stage", "stops_at"), [(0, 1), (0, 2), (1, 2)])
def test_stage_that_has_steps_stop_behind_it_is_found_and_nobody_avoided_by_others(stage: int, stops_at: int) -> None:
    """So there is never a result, and all behind it are well."""
    world, nodes, _ = world_of_three(num_spare=3)
    liar, send = nodes[stage].peer, world.send

    def shorten(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        if source == liar and isinstance(message, Step) and message.sequence >= 5:
            message = msgspec.structs.replace(message, stop_stage=stops_at)
        return send(source, target, message, rows)

    world.send = shorten
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    assert user.num_sessions == 1
    assert liar not in {place.peer for place in user.core.places}
    assert user.avoided == []
    assert sum(repair.stall_s for repair in user.repairs) < 2.0


@pytest.mark.parametrize("stage", [1, 2])
def test_stage_that_takes_longer_for_each_step_is_replaced_before_it_takes_minutes(stage: int) -> None:
    num_tokens = 40
    world, nodes, _ = world_of_three()
    liar, send, step_s = nodes[stage].peer, world.send, 2.0

    def delay(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        nonlocal step_s
        if source == liar and isinstance(message, Step | StepResult) and message.sequence >= 10:
            world.after(step_s, lambda: send(source, target, message, rows))
            step_s *= 1.4
            return True
        return send(source, target, message, rows)

    world.send = delay
    user = world.answer(PROMPT, num_tokens)
    world.run(stop=lambda: user.is_done)
    assert user.tokens == undisturbed(PROMPT, num_tokens)
    assert liar not in {place.peer for place in user.core.places}
    (repair,) = user.repairs
    # Until it is known that it has the rows, and then its patience.
    assert repair.stall_s < STUCK_S + MAX_TIMEOUT_S + 1.0


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("since", [0, 1, 5])
@pytest.mark.parametrize("kind", ["row", "position", "entry", "entry without answer", "entry that stops"])
def test_stage_that_makes_up_more_than_it_was_sent_is_found_and_nobody_else_avoided(
    kind: str, since: int, stage: int
) -> None:
    """Stages behind it are well, and say and have what makes them look otherwise."""
    world, nodes, _ = world_of_three(num_spare=2)
    liar, send = nodes[stage].peer, world.send

    def more(source: PeerId, target: PeerId, message: AnyMessage, rows: tuple[int, ...] = ()) -> bool:
        if source != liar or not isinstance(message, Step) or message.sequence < since or message.covers != 1:
            return send(source, target, message, rows)
        if kind in ("row", "position"):
            wider = msgspec.structs.replace(message.tensor, num_rows=message.tensor.num_rows + 1)
            advance = message.advance + (kind == "position")
            return send(source, target, msgspec.structs.replace(message, tensor=wider, advance=advance), (*rows, 7))
        is_sent = send(source, target, message, rows)
        node = message.advance + 1
        made_up = msgspec.structs.replace(
            message,
            sequence=message.sequence + 1,
            first_node=node,
            parent=message.advance,
            advance=node,
            want=(node,) if kind == "entry" else (),
            tensor=msgspec.structs.replace(message.tensor, num_rows=1),
            stop_stage=2 if kind == "entry that stops" else None,
        )
        send(source, target, made_up, (7,))
        return is_sent

    world.send = more
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    assert user.num_sessions == 1
    assert liar not in {place.peer for place in user.core.places}
    assert user.avoided == []
    assert sum(isinstance(event, Opened) for event in user.events) <= 3
    assert all(repair.stall_s < 2.0 for repair in user.repairs)


@pytest.mark.parametrize("is_known", [True, False])
def test_slow_nodes_have_the_time_that_they_need(is_known: bool) -> None:
    """Each chunk takes 16 s on each of three stages, and a step half a second."""
    world = World(0)
    for layers in ((0, 2), (2, 4), (4, 6)):
        for _ in range(2):
            world.node(*layers, row_s=0.5)
    user = User(world, PROMPT, NUM_TOKENS, None)
    world.user = user
    if is_known:
        user.expected_prefill_s = 100.0
    user.start()
    finish(world, user)
    assert user.num_sessions == 1
    if is_known:
        assert user.avoided == []
        assert [event for event in user.events if isinstance(event, Opened)][1:] == []
    else:
        # Two innocents at most are taken for stuck, of whom each has twice as long as the one before.
        assert len(user.avoided) <= 2


def test_nodes_that_refuse_from_the_beginning_are_each_tried_and_told_of() -> None:
    world, nodes, _ = world_of_three(num_spare=0)
    nodes[1].serving.admission.paused = "the operator needs it"
    user = world.answer(PROMPT, NUM_TOKENS)
    world.run(stop=lambda: user.is_done)
    assert isinstance(user.error, PeerRefused)
    assert user.error.peer == nodes[1].peer
    assert user.num_sessions == MAX_OPEN_ATTEMPTS


def test_for_another_in_place_of_a_node_that_leaves_there_are_ever_fewer_looks() -> None:
    world = World(0)
    nodes = [world.node(0, 3), world.node(3, 6)]
    user = world.answer(PROMPT, NUM_TOKENS)
    user.choose_s = 3.0
    at_token(user, 2, lambda: drain(world, nodes[1]))
    world.run(stop=lambda: len(user.tokens) == 2)
    began, looks = world.now, []
    user.on_event = lambda event: looks.append(world.now - began) if isinstance(event, WantsRoute) else None
    world.run(stop=lambda: world.now - began > 25.0)
    assert len(user.tokens) > 8, "it is served on"
    pauses = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert pauses == pytest.approx([2.0, 4.0, 8.0, 8.0], abs=0.5)


def test_error_of_our_own_ends_the_answer_as_it_is_and_nobody_is_avoided() -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    bug = LocalProtocolError("a bug")
    at_token(user, 4, lambda: user.core.link_closed(nodes[0].peer, bug, now=world.now))
    world.run(stop=lambda: user.is_done)
    assert user.error is bug
    assert user.avoided == []


def test_all_nodes_are_free_again_when_the_answer_is_over() -> None:
    world, nodes, spare = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    at_token(user, 4, lambda: world.kill(nodes[1]))
    finish(world, user)
    world.run(1.0)
    for node in (nodes[0], nodes[2], *spare):
        assert node.serving.admission.sessions == []


@pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 1060))]
)
def test_any_faults_at_any_time_give_the_same_tokens_or_a_named_error(seed: int) -> None:
    rng = random.Random(seed)
    world, nodes, spare = world_of_three(seed, num_spare=2)
    num_tokens = 40
    user = world.answer(PROMPT, num_tokens)
    everybody = nodes + spare
    for _ in range(rng.randrange(1, 6)):
        name, node = rng.choice(["kill", "freeze", "reset", "spoil", "drain", "cut", "thaw"]), rng.choice(everybody)

        def strike(name: str = name, node: Node = node) -> None:
            if not node.is_up:
                return
            match name:
                case "thaw":
                    world.freeze(node)
                    world.after(rng.uniform(0.1, 8.0), lambda: world.thaw(node))
                case "cut":
                    other = rng.choice([n for n in everybody if n is not node])
                    world.cut(node.peer, other.peer, for_good=rng.random() < 0.5)
                case "drain" if node.is_frozen:
                    pass
                case _:
                    FAULTS[name](world, node)

        world.after(rng.uniform(0.0, 4.0), strike)
    world.run(stop=lambda: user.is_done)
    assert user.is_done
    assert user.tokens == undisturbed(PROMPT, num_tokens)[: len(user.tokens)]
    if user.error is None:
        assert len(user.tokens) == num_tokens
    else:
        assert isinstance(user.error, PeerError | NoRoute)


def test_prefix_of_an_earlier_answer_survives_the_loss_of_a_stage() -> None:
    world, nodes, _ = world_of_three()
    first = world.answer(PROMPT, 4)
    world.run(stop=lambda: first.is_done)
    session = next(event.session for event in first.events if isinstance(event, Opened))
    world.run(1.0)
    prompt = [*first.ids, 7, 8, 9]
    user = world.answer(prompt, NUM_TOKENS, prefix=Prefix(session, 80))
    at_token(user, 4, lambda: world.kill(nodes[1]))
    world.run(stop=lambda: user.is_done)
    opened = next(event for event in user.events if isinstance(event, Opened))
    assert opened.reused_positions == 80
    assert user.error is None
    assert user.tokens == undisturbed(prompt, NUM_TOKENS)
    assert user.num_sessions == 1


def test_node_can_be_given_an_open_sessions_history_while_that_goes_on() -> None:
    """A second session over another node in the middle begins like the first, which nothing holds up meanwhile.

    The stage before hands on what it retains of the first, as rows of a prefix. Nobody does so yet: a user whose node
    is about to leave could go over without a pause by it.
    """
    num_tokens, key = 60, b"second session.."
    world, nodes, spare = world_of_three()
    route = [nodes[0], spare[1], nodes[2]]
    user = world.answer(PROMPT, num_tokens)
    opened: list[SessionOpened] = []
    found: list[tuple[int, int]] = []
    receive = user.receive

    def begin() -> None:
        stages = tuple(PlanStage(n.peer, n.layers.start, n.layers.stop, ("there",)) for n in route)
        _, signed = user._plan(key, 0, stages)
        user._sessions.add(key)
        num_positions = user.core.num_computed // 16 * 16
        for stage, node in enumerate(route):
            begun = OpenSession(key, 0, stage, signed, prefix=user.core.session, prefix_positions=num_positions)
            world.send(USER, node.peer, begun)

    def receive_both(source: PeerId, message: AnyMessage, rows: tuple[object, ...]) -> None:
        match message:
            case SessionOpened(session=session) if session == key:
                opened.append(message)
                if len(opened) == 3:
                    (num_positions,) = {each.reused_positions for each in opened} - {0}
                    world.send(USER, nodes[0].peer, Resend(key, 0, 0, 0, 0, num_positions, False, 1))
            case Replayed(session=session, num_positions=first) if session == key:
                last, rest = len(user.ids), user.ids[first:]
                tensor = TensorMeta(ROW, last - first, 4)
                step = Step(
                    session=key,
                    epoch=0,
                    sequence=0,
                    first_node=first + 1,
                    parent=first,
                    parents=(),
                    advance=last,
                    want=(last,),
                    tensor=tensor,
                    timings=(),
                )
                world.send(USER, nodes[0].peer, step, embed(rest))
            case StepResult(session=session) if session == key:
                found.append((message.nodes[0], next_token(rows[-1], message.nodes[0])))
            case _:
                receive(source, message, rows)

    user.receive = receive_both  # type: ignore[method-assign]
    at_token(user, 5, begin)
    world.run(stop=lambda: user.is_done)
    expected = undisturbed(PROMPT, num_tokens)
    assert user.tokens == expected
    assert user.repairs == []
    ((num_positions, token),) = found
    assert token == expected[num_positions - len(PROMPT)]
    # Who is in both computes a block again at most, and what has come meanwhile.
    assert nodes[0].serving.counters["rows"] < len(PROMPT) + num_tokens + 2 * 16
    assert nodes[0].serving.counters["rows_resent"] == max(each.reused_positions for each in opened) == 80
    assert spare[1].serving.counters["rows"] == num_positions


def test_place_knows_its_peer_and_layers() -> None:
    world, nodes, _ = world_of_three()
    user = world.answer(PROMPT, NUM_TOKENS)
    finish(world, user)
    place: Place = user.core.places[0]
    assert (place.peer, place.layers) == (nodes[0].peer, nodes[0].layers)
