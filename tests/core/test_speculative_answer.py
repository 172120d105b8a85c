"""Speculation through the production cores of both sides: the text is that of plain decode, whatever fails."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion_node.cli.options import Speculate
from fusion_node.client.drafting import Candidate, SharedNoise
from fusion_node.client.speculation import MODES, OFF, Drafts, modes_of
from fusion_node.engine.drafts import Proposals, Verified
from fusion_node.errors import ConfigError, NoPeers, RemoteProtocolError
from scheduler.repair_core import MAX_REPAIRS
from scheduler.speculation import Mode
from tests.core.answer_world import NAN, NUM_LAYERS, undisturbed
from tests.core.speculation_world import Guesser, SpeculativeWorld

PROMPT = (5, 6, 7, 8)
FAULTS = ("kill", "freeze", "cut", "spoil")


def world_of(seed: int, num_stages: int, copies: int = 1) -> SpeculativeWorld:
    world = SpeculativeWorld(seed)
    cuts = [NUM_LAYERS * index // num_stages for index in range(num_stages + 1)]
    for _ in range(copies):
        for start, stop in itertools.pairwise(cuts):
            world.node(start, stop)
    return world


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_speculated_answer_equals_plain_decode(num_stages: int, share: float) -> None:
    world = world_of(num_stages, num_stages)
    text = undisturbed(PROMPT, 40)
    user = world.speculate(PROMPT, 40, Guesser((*PROMPT, *text), share, random.Random(1)))
    world.run(stop=lambda: user.is_done)
    assert user.error is None
    assert user.tokens == text
    assert not user.repairs


def test_cancels_that_are_lost_or_come_twice_change_nothing() -> None:
    world = world_of(1, 3)
    world.lost_cancels = world.doubled_cancels = 0.5
    text = undisturbed(PROMPT, 60)
    user = world.speculate(PROMPT, 60, Guesser((*PROMPT, *text), 0.7, random.Random(1)))
    world.run(stop=lambda: user.is_done)
    assert user.tokens == text
    assert world.num_cancels_lost > 5
    assert world.num_cancels_doubled > 5


class Knows:
    """Always right, and nearly sure of it."""

    def __init__(self, text: tuple[int, ...]) -> None:
        self._text = text

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        places = (position + len(path) for path in paths)
        return [[(self._text[at], 0.95, "x")] if at < len(self._text) else [] for at in places]


def test_a_right_drafter_is_several_times_as_fast() -> None:
    def seconds(modes: tuple[Mode, ...]) -> float:
        world = world_of(3, 3)
        for node in world.nodes.values():
            node.row_s = 0.0002
        text = undisturbed(PROMPT, 80)
        user = world.speculate(PROMPT, 80, Knows((*PROMPT, *text)), modes=modes)
        began = world.now
        world.run(stop=lambda: user.is_done)
        assert user.tokens == text
        return world.now - began

    assert seconds((Mode.TREE,)) < seconds((Mode.PLAIN,)) / 3


def run_with_faults(
    seed: int,
    num_stages: int,
    share: float,
    faults: list[tuple[int, int, str]],
    *,
    modes: tuple[Mode, ...] = (Mode.TREE,),
    num_tokens: int = 40,
    spare: int = 400,
    lost: float = 0.0,
    doubled: float = 0.0,
    retained_bytes: int = 1 << 30,
) -> None:
    world = world_of(seed, num_stages, copies=4)
    world.lost_cancels, world.doubled_cancels = lost, doubled
    for node in world.nodes.values():
        node.retained_bytes = node.serving.outputs.max_bytes = retained_bytes
    text = undisturbed(PROMPT, num_tokens)
    drafter = Guesser((*PROMPT, *text), share, random.Random(seed))
    user = world.speculate(PROMPT, num_tokens, drafter, modes=modes, spare=spare)
    pending = sorted(faults)

    def strike(stage: int, kind: str) -> None:
        if not user.core.places:
            return
        stage %= len(user.core.places)
        node, after_s = world.nodes[user.core.places[stage].peer], world.rng.uniform(0.0, 0.05)
        if kind == "kill":
            world.after(after_s, lambda: world.kill(node) if node.is_up else None)
        elif kind == "freeze":
            world.after(after_s, lambda: world.freeze(node))
        elif kind == "spoil":
            node.spoils = True
        elif stage:
            other = user.core.places[stage - 1].peer
            world.after(after_s, lambda: world.cut(other, node.peer, for_good=world.rng.random() < 0.5))

    def on_token(count: int) -> None:
        while pending and pending[0][0] <= count:
            _, stage, kind = pending.pop(0)
            strike(stage, kind)

    user.on_token = on_token
    world.run(stop=lambda: user.is_done)
    assert user.error is None, user.error
    assert user.is_done
    assert user.tokens == text


@given(
    seed=st.integers(0, 2**32 - 1),
    num_stages=st.sampled_from((1, 2, 3, 5)),
    share=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    faults=st.lists(
        st.tuples(st.integers(0, 35), st.integers(0, 4), st.sampled_from(("kill", "freeze", "cut", "spoil"))),
        max_size=3,
    ),
    modes=st.sampled_from(((Mode.TREE,), (Mode.CHAIN,), (Mode.PLAIN,), tuple(Mode))),
    spare=st.sampled_from((0, 3, 400)),
    lost=st.sampled_from((0.0, 0.5, 1.0)),
    doubled=st.sampled_from((0.0, 0.5)),
    retained_bytes=st.sampled_from((0, 1 << 30)),
)
@settings(max_examples=150, deadline=None)
@example(  # the timer announced a node that was exactly as probable as it had to be, and that was never handed out
    seed=1804, num_stages=3, share=0.9, faults=[(14, 2, "spoil")], modes=(Mode.TREE,), spare=0, lost=0.0, doubled=0.5,
    retained_bytes=0,
)  # fmt: skip
@example(  # a root that was being chosen from kept its old name over a fold
    seed=163, num_stages=5, share=0.5, faults=[(18, 1, "cut"), (13, 2, "freeze"), (9, 1, "kill")], modes=(Mode.TREE,),
    spare=3, lost=0.0, doubled=0.0, retained_bytes=0,
)  # fmt: skip
@example(  # a fault was followed before the rows that came with it
    seed=276, num_stages=3, share=0.0, faults=[(20, 2, "cut")], modes=(Mode.TREE,), spare=3, lost=0.0, doubled=0.5,
    retained_bytes=1 << 30,
)  # fmt: skip
@example(  # a row that came for the second time, after a bad one, did not come out
    seed=11, num_stages=5, share=1.0, faults=[(32, 4, "freeze"), (11, 4, "spoil"), (11, 0, "spoil")],
    modes=(Mode.PLAIN,), spare=0, lost=0.0, doubled=0.0, retained_bytes=1 << 30,
)  # fmt: skip
def test_any_fault_leaves_the_text_as_it_is(
    seed: int,
    num_stages: int,
    share: float,
    faults: list[tuple[int, int, str]],
    modes: tuple[Mode, ...],
    spare: int,
    lost: float,
    doubled: float,
    retained_bytes: int,
) -> None:
    run_with_faults(
        seed, num_stages, share, faults, modes=modes, spare=spare, lost=lost, doubled=doubled,
        retained_bytes=retained_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("is_last_lost", [False, True])
def test_a_bad_row_that_a_new_route_was_not_asked_for_is_computed_again(mode: Mode, is_last_lost: bool) -> None:
    """While a token was being chosen from it another session was opened, which was asked for no row."""
    world = SpeculativeWorld(1)
    world.node(0, 2, retained_bytes=0).serving.outputs.max_bytes = 0
    middle, last, _, _ = (world.node(*layers) for layers in ((2, 4), (4, 6), (2, 4), (4, 6)))
    text = undisturbed(PROMPT, 40)
    user = world.speculate(PROMPT, 40, Guesser((*PROMPT, *text), 0.7, random.Random(1)), modes=(mode,))
    has_struck = False

    def on_token(count: int) -> None:
        if count == 9:
            last.spoils, user.choose_s = True, 2.0

    def strike() -> bool:
        nonlocal has_struck
        root = user.speculation._tree.root
        if not has_struck and user.speculation._is_choosing and root.row is not None and root.row[0] == NAN:
            has_struck, last.spoils, user.choose_s = True, False, 0.002
            for node in (middle, last) if is_last_lost else (middle,):
                world.kill(node)
        return user.is_done

    user.on_token = on_token
    world.run(stop=strike)
    assert has_struck
    assert user.error is None
    assert user.is_done
    assert user.tokens == text


def test_guesses_that_come_back_do_not_count_as_progress_of_an_answer_that_has_none() -> None:
    """Else who returns bad rows, with guesses behind them, would be replaced by one like it without end."""
    world = SpeculativeWorld(1)
    world.node(0, 3)
    lasts = [world.node(3, 6) for _ in range(2 * MAX_REPAIRS)]
    text = undisturbed(PROMPT, 40)
    user = world.speculate(PROMPT, 40, Guesser((*PROMPT, *text), 0.9, random.Random(1)))

    def on_token(count: int) -> None:
        if count == 9:
            user.choose_s = 1.0
            for node in lasts:
                node.spoils = True

    user.on_token = on_token
    world.run(stop=lambda: user.is_done)
    assert isinstance(user.error, RemoteProtocolError)
    assert len(user.avoided) == MAX_REPAIRS + 1
    assert user.tokens == text[: len(user.tokens)]


def test_what_may_be_asked_for_is_what_the_help_names() -> None:
    (option,) = get_args(Speculate)[1:]
    assert option.metavar == "|".join((*MODES, OFF))
    with pytest.raises(ConfigError, match="auto, tree, chain, off"):
        modes_of("plain")


# the thread that drafts


class Waits:
    """A drafter that answers when it may, and notes what it is told."""

    name = "waits"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_answer, self.is_asked = threading.Event(), threading.Event()

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        self.calls.append("begin")

    def extend(self, verified: Verified) -> None:
        self.calls.append("extend")

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        self.calls.append("propose")
        self.is_asked.set()
        assert self.may_answer.wait(60.0)
        return [[(7, 0.9)] for _ in paths]

    def close(self) -> None:
        pass


async def test_candidates_are_those_for_the_text_as_it_was_when_they_were_asked_for() -> None:
    drafter = Waits()
    drafter.may_answer.set()
    drafts = Drafts(100, [lambda _: drafter])
    answer = drafts.begin([1, 2], None, 10)
    proposed = answer.propose([()], 8)
    answer.extend(Verified([3]))
    assert await proposed
    assert await answer.propose([()], 8)
    assert drafter.calls == ["begin", "propose", "extend", "propose"]
    drafts.close()


async def test_the_drafting_thread_is_woken_when_frames_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that wakes before takes the interpreter from the loop that is about to send them."""
    drafter = Waits()
    drafter.may_answer.set()
    drafts = Drafts(100, [lambda _: drafter])
    answer = drafts.begin([1, 2], None, 10)
    assert await answer.propose([()], 8)
    woken: list[bool] = []
    submit, is_sent = drafts._executor.submit, False

    def noted(*work: Any) -> Any:
        woken.append(is_sent)
        return submit(*work)

    monkeypatch.setattr(drafts._executor, "submit", noted)
    answer.extend(Verified([3]))
    proposed = answer.propose([()], 8)
    is_sent = True
    assert await proposed
    assert woken == [True, True]
    assert drafter.calls == ["begin", "propose", "extend", "propose"]
    answer.extend(Verified([4]))
    answer.close()
    drafts._executor.shutdown()
    assert drafter.calls[4:] == ["extend"]


async def test_a_drafter_that_cannot_be_made_is_left_out_and_none_is_made_on_the_event_loop() -> None:
    threads: list[str] = []

    def broken(num_positions: int) -> Waits:
        threads.append(threading.current_thread().name)
        raise MemoryError("no room for its KV")

    drafter = Waits()
    drafter.may_answer.set()
    drafts = Drafts(100, [broken, lambda _: drafter])
    answer = drafts.begin([1, 2], None, 10)
    assert await answer.propose([()], 8) == [[Candidate(7, 0.9, "waits")]]
    assert threads == ["drafting_0"]
    drafts.close()


class Sure(Waits):
    """Always says 7, and is always wrong."""

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        return [[(7, 0.9)] for _ in paths]


@pytest.mark.parametrize("remembers", [False, True])
async def test_what_one_answer_has_shown_of_a_drafter_shows_in_another_only_where_they_may_share(
    remembers: bool,
) -> None:
    drafts = Drafts(100, [lambda _: Sure()], remembers=remembers)
    first = drafts.begin([1, 2], None, 10)
    for _ in range(30):
        assert await first.propose([()], 8)
        first.extend(Verified([3]))
    found = await drafts.begin([1, 2], None, 10).propose([()], 8)
    assert found is not None
    assert (found[0][0].probability < 0.5) is remembers
    drafts.close()


async def test_candidates_that_a_closed_client_will_never_have_are_an_error() -> None:
    drafter = Waits()
    drafts = Drafts(100, [lambda _: drafter])
    answer = drafts.begin([1, 2], None, 10)
    running = asyncio.ensure_future(answer.propose([()], 8))
    pending, unwanted = (asyncio.ensure_future(answer.propose([()], 8)) for _ in range(2))
    await asyncio.to_thread(drafter.is_asked.wait, 60.0)
    unwanted.cancel()
    drafts.close()
    drafter.may_answer.set()
    with pytest.raises(NoPeers, match="closed"):
        await pending
    with pytest.raises(NoPeers, match="closed"):
        await answer.propose([()], 8)
    with pytest.raises(asyncio.CancelledError):
        await unwanted
    assert await running
