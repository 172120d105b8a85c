"""The loop of speculative decoding, alone: a shell of tests answers at once what it asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fusion_node.client.speculation_core import (
    MAX_PRICE_S,
    CancelDead,
    Choose,
    Commit,
    Expand,
    Frame,
    SpeculationCore,
    StageCost,
)
from fusion_node.client.speculative_answer import Chosen
from fusion_node.client.token_tree import TokenTree
from fusion_node.engine.drafts import Verified
from fusion_node.errors import LocalProtocolError
from fusion_node.types import MonotonicS
from scheduler.speculation import Mode, ModePolicy

EOS = 0


class Shell:
    """Answers at once what a core asks, with the tokens of a text that counts up from the prompt's end."""

    def __init__(self, core: SpeculationCore) -> None:
        self.core = core
        self.now = 0.0
        self.frames: list[Frame] = []
        self.commits: list[int] = []
        self.cancels: list[CancelDead] = []
        self.expands: list[Expand] = []
        self.num_drafts = 0

    def pump(self, wrong: frozenset[int] = frozenset()) -> None:
        """Takes all events. Tokens at the positions ``wrong`` are others than anybody would guess."""
        while (event := self.core.next_event()) is not None:
            match event:
                case Frame():
                    self.frames.append(event)
                case Expand():
                    self.expands.append(event)
                case Choose(position):
                    token = 1000 + position if position in wrong else position
                    self.core.chosen(position, token, now=self.at)
                case Commit(token):
                    self.commits.append(token)
                case CancelDead():
                    self.cancels.append(event)

    def tick(self, now: float) -> None:
        """It is then, and the timer of the core is called."""
        self.now = now
        self.core.handle_timer(now=self.at)
        self.pump()

    @property
    def at(self) -> MonotonicS:
        return MonotonicS(self.now)

    @property
    def is_asked(self) -> bool:
        """Whether an Expand is out."""
        return len(self.expands) > self.num_drafts

    def draft(self, probability: float = 0.9, extra: int = 0) -> None:
        """Answers the Expand that is out, rightly, with so many wrong candidates beside."""
        event = self.expands[-1]
        self.num_drafts = len(self.expands)
        found = [
            [(event.position + len(path), probability, "x"), *((2000 + i, 0.05, "x") for i in range(extra))]
            for path in event.paths
        ]
        self.core.drafted(event.number, found, now=self.at)
        self.pump()

    def prompt_returns(self, price_s: float) -> None:
        """While candidates for the first token are awaited, which are of no use then."""
        self.core.start(now=self.at)
        self.core.returned(0, [(NUM_PROMPT, "row")], costs=[StageCost(0.05, price_s)] * 2, now=self.at)
        self.pump()
        self.draft()

    def frame_returns(
        self, index: int = -1, costs: Sequence[StageCost] = (), wrong: frozenset[int] = frozenset()
    ) -> None:
        frame = self.frames[index]
        self.core.returned(frame.sequence, [(node, "row") for node in frame.want], costs=costs, now=self.at)
        self.pump(wrong)


NUM_PROMPT = 3
TREE_ONLY = (Mode.TREE,)


def shell(
    stop_position: int = 100, modes: tuple[Mode, ...] = TREE_ONLY, price_s: float = 0.0001, **options: Any
) -> Shell:
    made = Shell(core_of(modes, stop_position, **options))
    made.prompt_returns(price_s)
    return made


def core_of(modes: tuple[Mode, ...], stop_position: int = 100, **options: Any) -> SpeculationCore:
    return SpeculationCore(
        last_token=2,
        num_prompt=NUM_PROMPT,
        stop_position=stop_position,
        stop_tokens=options.pop("stop_tokens", frozenset((EOS,))),
        max_positions=options.pop("max_positions", 1000),
        next_sequence=4,
        policy=ModePolicy(modes),
        **options,
    )


def test_the_first_token_is_sent_at_once_and_numbered_after_the_prompt() -> None:
    made = shell()
    assert made.commits == [3]
    assert made.frames == [Frame(4, 4, (3,), (3,), (3,), 4, (4,))]


def test_a_node_is_sent_with_its_parent_when_the_next_pass_is_due() -> None:
    made = shell()
    made.now = 0.003
    made.draft()
    made.draft()
    assert len(made.frames) == 1, "the first frame's pass is not over"
    timer = made.core.get_timer()
    assert timer is not None
    made.tick(timer)
    assert made.frames[1] == Frame(5, 5, (4, 5), (4, 5), (4, 5), 0, (5, 6))


def corrected(extra: int = 0) -> Shell:
    """Its first guess, and so many beside it, were sent and wrong."""
    made = shell()
    made.draft(extra=extra)
    made.tick(0.02)
    made.now = 0.1
    made.frame_returns(0, wrong=frozenset((4,)))
    return made


def test_a_token_that_was_not_guessed_leaves_in_the_call_that_found_out() -> None:
    made = corrected()
    assert made.commits == [3, 1004]
    assert made.frames[-1].tokens[0] == 1004
    assert made.frames[-1].parents[0] == 4
    assert made.frames[-1].advance == made.frames[-1].first_node
    assert made.cancels == []  # the frame says what is dead


def test_guessed_tokens_come_out_with_the_rows_that_are_there() -> None:
    made = shell()
    for _ in range(5):
        made.draft()
    made.tick(0.02)
    made.frame_returns(0)
    made.frame_returns(1)
    assert made.commits == [3, 4, 5, 6, 7, 8, 9]


def test_a_guessed_token_is_named_to_the_stages_that_compute_others_in_its_place() -> None:
    made = shell()
    made.draft(extra=3)
    made.tick(0.02)
    assert made.frames[1].positions == (4, 4, 4, 4)
    made.frame_returns(0)
    assert made.commits == [3, 4]
    assert made.cancels == [CancelDead(made.frames[1].first_node)]


def test_nothing_is_sent_below_what_ends_the_answer() -> None:
    made = shell(stop_position=6)
    for _ in range(2):
        made.draft()
    made.tick(1.0)
    assert [frame.positions for frame in made.frames] == [(3,), (4,)]
    made.frame_returns(0)
    made.frame_returns(1)
    assert made.commits == [3, 4, 5]
    assert made.core.is_over
    assert made.core.get_timer() is None


def test_an_end_of_text_that_was_guessed_is_not_sent() -> None:
    made = shell(stop_tokens=frozenset((4,)))
    made.draft()
    made.tick(1.0)
    assert len(made.frames) == 1
    made.frame_returns()
    assert made.commits == [3, 4]
    assert made.core.is_over


def test_a_dear_row_keeps_improbable_nodes_back() -> None:
    def num_sent(price_s: float) -> int:
        made = shell(price_s=price_s)
        made.now = 0.1
        made.frame_returns(costs=[StageCost(0.01, price_s)] * 2)
        num_drafts = 0
        while num_drafts < 3 and made.is_asked:
            made.draft(extra=3)
            num_drafts += 1
        made.tick(1.0)
        return sum(len(frame.tokens) for frame in made.frames)

    assert num_sent(0.05) < num_sent(0.0001)


def test_before_anything_is_known_of_speed_a_dear_row_keeps_improbable_nodes_back() -> None:
    """The first frames leave before the first token was chosen: on CPUs 24 of them once held it up for 150 ms."""

    def num_sent(price_s: float) -> int:
        core, num_rows = core_of(TREE_ONLY), 0
        core.start(now=MonotonicS(0.0))
        event = core.next_event()
        assert isinstance(event, Expand)
        guesses = [(token, 0.05, "x") for token in range(2000, 2006)]
        core.drafted(event.number, [guesses], now=MonotonicS(0.0))
        core.returned(0, [(NUM_PROMPT, "row")], costs=[StageCost(0.05, price_s)] * 3, now=MonotonicS(0.0))
        core.handle_timer(now=MonotonicS(0.005))  # the token is still being chosen
        while (sent := core.next_event()) is not None:
            num_rows += len(sent.tokens) if isinstance(sent, Frame) else 0
        return num_rows

    assert num_sent(0.0001) == 6
    assert num_sent(0.0014) == 0


def test_rows_that_shared_a_pass_do_not_seem_to_take_as_long_alone() -> None:
    """Or else what is guessed after a token that was missed waits for twice a pass, although the stages are free."""
    made, num_returned, missed = shell(), 0, frozenset(range(100))
    for step in range(16):
        made.now += 0.2
        frames = made.frames[num_returned:]
        num_returned += len(frames)
        assert len(frames) == 1 + step % 2
        for frame in frames:
            costs = [StageCost(0.015 if len(frames) == 1 else 0.045, 0.0001)] * 2
            made.core.returned(frame.sequence, [(node, "row") for node in frame.want], costs=costs, now=made.at)
            made.pump(missed)
        while made.is_asked:
            made.draft(probability=0.9 if made.core.num_positions == made.expands[-1].position else 0.0005)
        if step % 2 == 0:
            made.tick(made.now + 0.05)
    due = made.core.get_timer()
    assert due is not None
    assert due - made.now == pytest.approx(0.015, abs=0.002)


DEAR_S = 0.002
"""Of a row on each of three stages, where a step takes 0.1 s."""


def dear_shell(price_s: float) -> Shell:
    """A few tokens that nobody guessed, one after the other; the last one has just been sent."""
    made = shell(price_s=price_s)
    for step in range(5):
        if step:
            made.now = 0.1 * step
            made.frame_returns(costs=[StageCost(0.02, price_s)] * 3, wrong=frozenset(range(100)))
        made.now += 0.005
        while made.is_asked:
            made.draft(probability=0.0005)
    return made


@pytest.mark.parametrize(("probability", "is_sent"), [(0.3, False), (0.6, True)])
def test_where_rows_are_dear_guesses_that_bring_little_wait_for_the_next_frame(
    probability: float, is_sent: bool
) -> None:
    for price_s in (0.00001, DEAR_S):
        made = dear_shell(price_s)
        made.now += 0.1
        made.frame_returns(costs=[StageCost(0.02, price_s)] * 3, wrong=frozenset(range(100)))
        made.tick(made.now + 0.02)  # the draft does not come in time
        num_frames = len(made.frames)
        assert made.frames[-1].advance == made.frames[-1].first_node
        made.draft(probability)
        made.tick(made.now + 0.05)
        assert (len(made.frames) > num_frames) is (is_sent or price_s < DEAR_S)
        if not is_sent and price_s == DEAR_S:
            assert made.core.get_timer() is None, "nothing is to be done until something comes"


def test_where_rows_are_dear_a_token_that_nobody_guessed_takes_along_what_may_follow() -> None:
    for price_s in (0.00001, DEAR_S):
        made = dear_shell(price_s)
        num_frames = len(made.frames)
        made.now += 0.1
        made.frame_returns(costs=[StageCost(0.02, price_s)] * 3, wrong=frozenset(range(100)))
        assert len(made.frames) - num_frames == (price_s < DEAR_S)
        made.now += 0.004
        made.draft(0.6)
        assert len(made.frames) - num_frames == 1
        assert len(made.frames[-1].tokens) == (1 if price_s < DEAR_S else 2)


def test_a_token_that_nobody_guessed_waits_no_longer_than_a_pass_takes() -> None:
    made = dear_shell(DEAR_S)
    num_frames = len(made.frames)
    made.now += 0.1
    made.frame_returns(costs=[StageCost(0.02, DEAR_S)] * 3, wrong=frozenset(range(100)))
    due = made.core.get_timer()
    assert due is not None
    assert made.now < due <= made.now + 0.02
    made.tick(due)
    assert len(made.frames) == num_frames + 1


def test_a_price_that_no_stage_can_have_still_lets_sure_nodes_through() -> None:
    made = shell()
    made.now = 0.1
    for index in range(3):
        made.frame_returns(index, costs=[StageCost(0.01, 1e9)] * 2)
        made.now += 0.1
    assert made.core.stats.price_s <= 2 * MAX_PRICE_S
    made.draft()
    made.draft(probability=1.0)
    made.core.handle_timer(now=made.at)
    made.pump()
    assert len(made.frames) == 5, "the sure node was sent beside the token that had to be"


def test_no_more_rows_are_in_flight_than_allowed() -> None:
    made = shell(max_in_flight=5)
    for step in range(1, 40):
        made.now = 0.1 * step
        if made.expands[-1].number == len(made.expands):
            made.draft(extra=4)
        made.core.handle_timer(now=made.at)
        made.pump()
    assert sum(len(frame.tokens) for frame in made.frames) == 1 + 5


def test_rows_that_nobody_asked_for_are_refused() -> None:
    made = shell()
    with pytest.raises(LocalProtocolError, match="node 9 was not awaited"):
        made.core.returned(4, [(9, "row")], now=made.at)
    made.frame_returns()
    with pytest.raises(LocalProtocolError, match="node 4 was not awaited"):
        made.frame_returns(0)


def test_a_token_or_candidates_out_of_turn_are_refused() -> None:
    made = shell()
    with pytest.raises(LocalProtocolError, match="position 4 was not to be chosen"):
        made.core.chosen(4, 4, now=made.at)
    with pytest.raises(LocalProtocolError, match="number 7 were not asked for"):
        made.core.drafted(7, [], now=made.at)


def test_a_drafter_that_fails_for_good_leaves_plain_decode() -> None:
    made = shell()
    made.core.not_drafted(made.expands[-1].number, is_final=True, now=made.at)
    num = len(made.expands)
    for _ in range(3):
        made.now += 0.1
        made.frame_returns()
    assert made.commits == [3, 4, 5, 6]
    assert [len(frame.tokens) for frame in made.frames] == [1, 1, 1, 1]
    assert len(made.expands) == num


def test_a_chain_leaves_in_one_frame_when_it_is_drafted() -> None:
    made = shell(modes=(Mode.CHAIN,))
    assert made.core.stats.num_frames == 0
    while not made.frames:
        made.now += 0.001
        made.draft()
    (frame,) = made.frames
    assert len(frame.tokens) > 1
    assert frame.parents == tuple(range(3, 3 + len(frame.tokens)))
    made.now += 0.1
    made.frame_returns()
    assert made.commits == list(range(3, 3 + len(frame.tokens) + 1))


def test_after_a_restart_lost_tokens_and_the_live_tree_are_sent_again() -> None:
    made = shell()
    for _ in range(4):
        made.draft()
    made.tick(0.02)
    made.frame_returns(0)
    assert made.commits == [3, 4]
    assert made.core.committed_ids(2) == (3, 4, 5)
    made.core.pause()
    made.now = 1.0
    made.core.handle_timer(now=made.at)
    assert made.core.next_event() is None
    assert not made.core.restart(3, next_sequence=3, now=made.at)
    made.pump()
    frame = made.frames[-1]
    assert frame.sequence == 3
    assert frame.first_node == 4
    assert frame.tokens[:2] == (3, 4)
    assert frame.parents[:2] == (3, 4)
    assert frame.want == tuple(range(5, 4 + len(frame.tokens)))
    assert frame.advance == 5
    made.frame_returns()
    assert made.commits == list(range(3, 4 + len(frame.tokens)))


def test_after_a_restart_the_row_that_was_awaited_comes_from_what_the_stages_hold() -> None:
    made = shell()
    made.core.pause()
    assert made.core.restart(4, next_sequence=4, now=made.at)
    made.core.returned(3, [(4, "row")], now=made.at)
    made.pump()
    assert made.commits == [3, 4]
    assert made.frames[-1].first_node == 5


def test_stages_cannot_hold_what_was_never_committed() -> None:
    made = shell()
    with pytest.raises(LocalProtocolError, match="cannot hold 9 positions"):
        made.core.restart(9, next_sequence=9, now=made.at)


def test_a_row_that_cannot_be_used_is_awaited_again() -> None:
    made = shell()
    made.now = 0.1
    made.core.returned(4, [(4, "bad")], now=made.at)
    assert isinstance(made.core.next_event(), Choose)
    made.core.row_unfit(4)
    assert made.core.is_row_awaited
    with pytest.raises(LocalProtocolError):
        made.core.row_unfit(4)
    made.core.returned(4, [(4, "good")], now=made.at)
    assert not made.core.is_row_awaited
    made.pump()
    assert made.commits == [3, 4]


def test_nodes_below_a_token_that_is_being_chosen_from_hang_on_its_new_name() -> None:
    made = corrected()
    correction = made.frames[-1]
    assert correction.first_node > 5
    made.core.returned(correction.sequence, [(correction.first_node, "row")], now=made.at)
    assert isinstance(made.core.next_event(), Choose), "its answer is still under way"
    made.core.pause()
    made.core.restart(5, next_sequence=20, now=made.at)
    made.pump()
    made.draft()
    made.draft()
    made.tick(2.0)
    frame = made.frames[-1]
    assert (frame.sequence, frame.first_node) == (20, 6)
    assert frame.parents[0] == 5


def chosen_from_while_taken_back() -> Shell:
    """A chain is being drafted and a token chosen, while the one before it was lost on the stages."""
    made = shell(modes=(Mode.CHAIN,))
    made.core.pause()
    assert made.core.restart(4, next_sequence=4, now=made.at)
    made.core.returned(3, [(4, "row")], now=made.at)
    assert isinstance(made.core.next_event(), Choose)
    made.core.pause()
    assert not made.core.restart(3, next_sequence=3, now=made.at)
    assert not made.frames
    return made


def test_a_token_that_is_chosen_after_its_row_was_taken_back_is_sent_again_before_its_followers() -> None:
    made = chosen_from_while_taken_back()
    made.core.chosen(4, 4, now=made.at)
    made.pump()
    for _ in range(10):
        if not made.frames:
            made.now += 0.001
            made.draft()
    (frame,) = made.frames
    assert (frame.first_node, frame.tokens[:2], frame.parents[:2], frame.advance) == (4, (3, 4), (3, 4), 5)
    assert frame.want[0] == 5


def test_an_unfit_row_of_a_token_that_is_to_be_sent_again_is_awaited_from_then_on() -> None:
    made = chosen_from_while_taken_back()
    made.core.row_unfit(4)
    for _ in range(10):
        if not made.frames:
            made.now += 0.001
            made.draft()
    (frame,) = made.frames
    assert (frame.first_node, frame.tokens[0], frame.want[0]) == (4, 3, 4)
    made.frame_returns()
    assert made.commits[:2] == [3, 4]


def test_dead_nodes_whose_rows_were_left_out_are_not_in_flight_any_more() -> None:
    made = corrected(extra=2)
    guesses, correction = made.frames[-2:]
    assert guesses.want
    made.core.returned(guesses.sequence, [], now=made.at)
    with pytest.raises(LocalProtocolError, match=f"node {guesses.want[0]} was not awaited"):
        made.core.returned(guesses.sequence, [(guesses.want[0], "row")], now=made.at)
    made.frame_returns()
    assert made.commits == [3, 1004, correction.positions[0] + 1]


def test_no_token_is_in_what_events_and_nodes_look_like() -> None:
    secret = 271828
    shown = [
        Frame(1, 4, (secret,), (3,), (3,), 4, (4,)),
        Commit(secret, 3, is_last=False),
        Expand(1, 3, ((secret,),), 8),
        TokenTree(secret, 2).root,
        Chosen(Verified([secret])),
    ]
    assert str(secret) not in repr(shown)


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_a_chain_does_not_wait_for_ever_for_a_draft(num_drafts: int) -> None:
    """The drafting thread is at the prompt of another answer, or hangs."""
    core = SpeculationCore(
        last_token=1,
        num_prompt=4,
        stop_position=40,
        stop_tokens=frozenset(),
        max_positions=100,
        next_sequence=0,
        policy=ModePolicy((Mode.CHAIN,)),
    )
    now, position, left = 0.0, 3, num_drafts
    core.start(now=MonotonicS(now))
    core.returned(0, [(4, None)], costs=[StageCost(0.01, 0.0001)], now=MonotonicS(now))
    while position < 38:
        match core.next_event():
            case Frame() as frame:
                now += 0.1
                core.returned(frame.sequence, [(n, None) for n in frame.want], costs=(), now=MonotonicS(now))
            case Choose() as choose:
                core.chosen(choose.position, 7, now=MonotonicS(now))
                position = choose.position
            case Expand() as expand if left:
                left -= 1
                now += 0.01
                core.drafted(expand.number, [[(8, 0.5, "x")] for _ in expand.paths], now=MonotonicS(now))
            case None:
                due = core.get_timer()
                assert due is not None
                now = max(now, due)
                core.handle_timer(now=MonotonicS(now))
    assert now < 35 * 0.1 + 0.01 * num_drafts + 0.3
