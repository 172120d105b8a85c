"""Rows of layers at the user's: what is asked for, what is believed of whom, and what drafters are told when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusion_node.client.drafting import Candidate
from fusion_node.client.held_text import MAX_HELD, HeldText
from fusion_node.client.session_core import Fault, Fold, Opened, RowsWanted, SessionCore, SessionState, TreeRowsWanted
from fusion_node.client.speculation_core import TAP_PROBABILITY, Choose, Expand, Frame, SpeculationCore, StageCost
from fusion_node.client.taps_core import MAX_AWAITED, NodeTaps, SessionTaps
from fusion_node.engine.drafts import Verified
from fusion_node.types import MonotonicS
from p2p.messages import OpenSession, SessionOpened, Step, StepTaps, TensorMeta
from scheduler.repair_core import Cause
from scheduler.speculation import Mode, ModePolicy
from tests.core.test_session_core import EPOCH, KEY, PEERS, STRANGER, T0, core, events, plan_of, result, sent

# The plan's stages hold two layers each.
LAYERS = (1, 4)
OF_STAGE = ((1,), (4,), ())
PROMPT = 3
FIRST = Frame(1, 4, (28,), (3,), (3,), 4, (4,), (4,))
SECOND = Frame(2, 5, (35, 42, 49), (4, 4, 5), (4, 4, 5), 0, (5, 6, 7), (5, 7))


def opened(granted: Sequence[tuple[int, ...]] = OF_STAGE) -> SessionCore:
    session = core(taps=LAYERS)
    session.start(now=T0)
    asked = [message.taps for _, message in session.messages_to_send() if isinstance(message, OpenSession)]
    assert asked == list(OF_STAGE)
    for stage, peer in enumerate(PEERS):
        session.receive(SessionOpened(KEY, EPOCH, stage, 120.0, taps=granted[stage]), source=peer, now=T0)
    return session


def speculating(granted: Sequence[tuple[int, ...]] = OF_STAGE) -> tuple[SessionCore, list[Step]]:
    """The prompt is computed, and two frames are under way. What was sent for these."""
    session = opened(granted)
    assert events(session) == [Opened(0, EPOCH)]
    session.append(PROMPT, want_last=True, now=T0)
    (wanted,) = events(session)
    assert isinstance(wanted, RowsWanted)
    steps = [sent(session, wanted, TensorMeta("f32", PROMPT, 8))]
    session.receive(result(0, PROMPT), source=PEERS[2], now=T0)
    events(session)
    for frame in (FIRST, SECOND):
        session.append_tree(frame, now=T0)
        (of_tree,) = events(session)
        assert isinstance(of_tree, TreeRowsWanted)
        ready = session.rows_ready(of_tree, TensorMeta("f32", len(frame.tokens), 8), now=T0)
        assert ready is not None
        steps.append(ready[1])
    return session, steps


def taps(sequence: int, layer: int, *nodes: int, epoch: int = EPOCH, tensor: TensorMeta | None = None) -> StepTaps:
    return StepTaps(KEY, epoch, sequence, layer, nodes, tensor or TensorMeta("f32", len(nodes), 8))


def come(session: SessionCore, stage: int, message: StepTaps, rows: object = "rows") -> None:
    session.receive_taps(message, rows, source=PEERS[stage], now=T0)


def rows_of(session: SessionCore, node: int) -> dict[int, tuple[Any, int]] | None:
    found = session.taps.of(node)
    return None if found is None else found.rows


def test_nodes_are_asked_for_by_their_bits_and_of_a_prompt_the_last_one() -> None:
    session, (prompt, first, second) = speculating()
    assert session.taps.are_sent
    assert (prompt.tap, first.tap, second.tap) == (b"\x04", b"\x01", b"\x05")


def test_rows_go_with_their_nodes() -> None:
    session, _ = speculating()
    come(session, 0, taps(2, 1, 5, 7), "low")
    come(session, 1, taps(2, 4, 5), "high")
    come(session, 0, taps(0, 1, 3), "prompt")
    assert rows_of(session, 5) == {1: ("low", 0), 4: ("high", 0)}
    assert rows_of(session, 7) == {1: ("low", 1)}
    assert rows_of(session, 3) == {1: ("prompt", 0)}
    complete, lacking = session.taps.of(5), session.taps.of(7)
    assert complete is not None
    assert complete.is_complete
    assert lacking is not None
    assert not lacking.is_complete
    assert session.taps.of(6) is None, "it was not asked for"
    assert events(session) == []


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (0, taps(2, 1, 6)),
        (0, taps(2, 1, 5, 6)),
        (0, taps(1, 1, 5)),
        (0, taps(9, 1, 5)),
        (0, taps(2, 1, 99)),
        (0, taps(2, 1, 5, epoch=EPOCH - 1)),
        (0, taps(2, 1, 5, epoch=EPOCH + 1)),
    ],
    ids=["node", "one-node-of-two", "other-step", "step", "unknown", "earlier", "later"],
)
def test_what_a_stage_before_may_have_made_it_say_is_ignored(stage: int, message: StepTaps) -> None:
    session, _ = speculating()
    come(session, stage, message)
    assert rows_of(session, 5) == {}
    assert events(session) == []
    assert session.state is SessionState.READY


def test_what_comes_again_changes_nothing() -> None:
    session, _ = speculating()
    come(session, 0, taps(2, 1, 5, 7), "first")
    come(session, 0, taps(2, 1, 5, 7), "second")
    assert rows_of(session, 5) == {1: ("first", 0)}
    assert events(session) == []


@pytest.mark.parametrize(
    ("stage", "message", "text"),
    [
        (0, taps(2, 4, 5), "layer that it was not asked for"),
        (2, taps(2, 6, 5), "layer that it was not asked for"),
        (0, taps(2, 1, 5, tensor=TensorMeta("f16", 1, 8)), "another form"),
        (0, taps(2, 1, 5, tensor=TensorMeta("f32", 1, 9)), "another form"),
    ],
)
def test_what_only_its_sender_can_have_made_wrong_is_its_fault(stage: int, message: StepTaps, text: str) -> None:
    session, _ = speculating()
    come(session, stage, message)
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause, fault.accuser) == (stage, Cause.GARBAGE, None)
    assert text in str(fault.error)
    come(session, stage, taps(2, 1, 5))
    assert events(session) == [], "who is over is not listened to"


def test_strangers_have_no_say() -> None:
    session, _ = speculating()
    session.receive_taps(taps(2, 1, 5), "rows", source=STRANGER, now=T0)
    assert rows_of(session, 5) == {}
    assert events(session) == []


@pytest.mark.parametrize("granted", [((), (4,), ()), ((), (), ())])
def test_stage_that_sends_none_costs_the_taps_and_not_the_session(granted: Sequence[tuple[int, ...]]) -> None:
    session, steps = speculating(granted)
    assert session.state is SessionState.READY
    assert not session.taps.are_sent
    assert [step.tap for step in steps] == [b"", b"", b""]
    assert session.taps.of(5) is None


def test_stage_that_promises_more_than_it_was_asked_for_is_at_fault() -> None:
    session = opened(((1, 2), (4,), ()))
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (0, Cause.GARBAGE)


def test_another_plan_begins_anew() -> None:
    session, _ = speculating()
    come(session, 0, taps(2, 1, 5, 7))
    peers = [PEERS[0], STRANGER, PEERS[2]]
    later = replace_stages(session, peers)
    assert session.taps.of(5) is None
    asked = {peer: message.taps for peer, message in later if isinstance(message, OpenSession)}
    assert asked == dict(zip(peers, OF_STAGE, strict=True))
    assert not session.taps.are_sent


def replace_stages(session: SessionCore, peers: Sequence[Any]) -> list[tuple[Any, Any]]:
    fold = Fold(session.fold_from, (3, 4)[session.fold_from - 2 :], False)
    session.replace(plan_of(peers, EPOCH + 1), b"signed", round_trips_s=[0.0] * 3, now=T0, fold=fold)
    return session.messages_to_send()


def test_no_more_is_held_than_may_be() -> None:
    book = SessionTaps((1,), TensorMeta("f32", 1, 8))
    book.begin(plan_of())
    assert book.opened(0, (1,))
    for node in range(1, 3 * MAX_AWAITED):
        assert book.ask(node, node, 1, (node,)) == b"\x01"
    held = [node for node in range(1, 3 * MAX_AWAITED) if book.of(node) is not None]
    assert held == list(range(2 * MAX_AWAITED, 3 * MAX_AWAITED)), "the latest"


# what drafters are told


class Notes:
    """Drafting that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float | None]] = []
        self.asked: list[list[tuple[int, ...]]] = []

    def extend(self, verified: Verified) -> None:
        rows = verified.taps_TLD
        self.told.append((verified.tokens[0], None if rows is None else float(rows[0, 0, 0])))

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> asyncio.Future[list[list[Candidate]] | None]:
        self.asked.append([tuple(path) for path in paths])
        return asyncio.Future()


def decode(rows: Any, index: int) -> np.ndarray | None:
    return None if rows == "bad" else np.full(2, float(rows) + index, dtype=np.float32)


def node_taps(*rows: Any) -> NodeTaps:
    found = NodeTaps(0, (1, 4))
    found.rows.update({layer: (row, 0) for layer, row in zip((1, 4), rows, strict=False)})
    return found


async def test_token_whose_taps_are_late_is_guessed_beyond_until_they_come() -> None:
    notes = Notes()
    text, late = HeldText(notes, decode), node_taps()
    text.extend(Verified([10]), node_taps(1, 2), are_sent=True)
    text.extend(Verified([11]), late, are_sent=True)
    text.propose([(), (7,)], 8)
    assert notes.told == [(10, 1.0)]
    late.rows.update({1: (5, 0), 4: (6, 0)})
    text.propose([(), (7,)], 8)
    assert notes.told == [(10, 1.0), (11, 5.0)]
    assert notes.asked == [[(11,), (11, 7)], [(), (7,)]]
    assert (text.num_with_taps, text.num_without) == (2, 0)


async def test_later_taps_let_go_of_tokens_whose_own_are_lost_or_were_never_asked_for() -> None:
    notes = Notes()
    text = HeldText(notes, decode)
    text.extend(Verified([10]), node_taps(1), are_sent=True)
    text.extend(Verified([11]), None, are_sent=True)
    text.propose([(7,)], 8)
    text.extend(Verified([12]), node_taps(3, 4), are_sent=True)
    text.propose([(7,)], 8)
    assert notes.told == [(10, None), (11, None), (12, 3.0)]
    assert notes.asked == [[(10, 11, 7)], [(7,)]]


async def test_no_more_tokens_are_held_than_can_be_guessed_beyond() -> None:
    notes = Notes()
    text = HeldText(notes, decode)
    for token in range(MAX_HELD + 1):
        assert not notes.told
        text.extend(Verified([token]), node_taps(), are_sent=True)
    assert notes.told == [(token, None) for token in range(MAX_HELD + 1)]


async def test_nothing_is_held_where_no_taps_can_be_had_and_a_bad_row_counts_as_none() -> None:
    notes = Notes()
    text = HeldText(notes, decode)
    text.extend(Verified([10]))
    text.extend(Verified([11]), node_taps(1), are_sent=False)
    text.extend(Verified([12]), node_taps(1, "bad"), are_sent=True)
    assert notes.told == [(10, None), (11, None), (12, None)]
    text.propose([(7,)], 8)
    assert notes.asked == [[(7,)]]


async def test_what_is_held_back_at_the_end_of_an_answer_is_told() -> None:
    """Later answers are guessed from earlier ones, to their end."""
    notes = Notes()
    text, complete = HeldText(notes, decode), node_taps()
    text.extend(Verified([10]), complete, are_sent=True)
    text.extend(Verified([11]), node_taps(1), are_sent=True)
    complete.rows.update(node_taps(3, 4).rows)
    text.finish()
    assert notes.told == [(10, 3.0), (11, None)]


# which nodes are asked for


def drain(speculation: SpeculationCore) -> tuple[list[Frame], list[Choose]]:
    """Follows it; whatever it asks for is drafted: of two candidates the first is probable."""
    frames, chooses = [], []
    while (event := speculation.next_event()) is not None:
        match event:
            case Frame():
                frames.append(event)
            case Choose():
                chooses.append(event)
            case Expand():
                found = [[(20 + 2 * len(path), 0.6, "x"), (21 + 2 * len(path), 0.2, "x")] for path in event.paths]
                speculation.drafted(event.number, found, now=T0)
    return frames, chooses


@pytest.mark.parametrize("wants_taps", [True, False])
@pytest.mark.parametrize("mode", [Mode.TREE, Mode.PLAIN])
def test_probable_nodes_are_asked_for_and_where_nobody_reads_them_none(mode: Mode, wants_taps: bool) -> None:
    speculation = SpeculationCore(
        last_token=1, num_prompt=3, stop_position=60, stop_tokens=frozenset(), max_positions=90, next_sequence=1,
        policy=ModePolicy((mode,)), wants_taps=wants_taps,
    )  # fmt: skip
    speculation.start(now=T0)
    drain(speculation)
    speculation.returned(0, [(3, "row")], costs=[StageCost(0.01, 0.0)], now=T0)
    _, (choose,) = drain(speculation)
    speculation.chosen(choose.position, 50, now=T0)
    frames, _ = drain(speculation)
    assert frames[0].tokens == (50,)
    assert frames[0].tap == ((frames[0].first_node,) if wants_taps else ())
    if wants_taps and mode is Mode.TREE:
        due = speculation.get_timer()
        assert due is not None
        speculation.handle_timer(now=MonotonicS(due))
        (guesses,), _ = drain(speculation)
        probability = {frames[0].first_node: 1.0}
        for node, (parent, token) in enumerate(zip(guesses.parents, guesses.tokens, strict=True), guesses.first_node):
            probability[node] = probability[parent] * (0.2 if token % 2 else 0.6)
            assert (node in guesses.tap) is (probability[node] >= TAP_PROBABILITY)
        assert 1 <= len(guesses.tap) < len(guesses.tokens)


def test_frame_without_wishes_has_none() -> None:
    assert replace(FIRST, tap=()) == Frame(1, 4, (28,), (3,), (3,), 4, (4,))
