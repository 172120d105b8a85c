"""The loop of speculative decoding over rings of stages, in a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.speculation.oracle import OracleDrafter, OracleText
from benchmarks.speculation.ring import Costs, Drafter, World
from fusion_node.client.sampling import SamplingParams, choose_token
from scheduler.speculation import Mode, ModePolicy

Choice: TypeAlias = Callable[[Any, Sequence[int]], int]
"""From a row and the text so far."""
VOCABULARY = 7
EOS = 0
PENALTY = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.7)
GREEDY_PENALTY = SamplingParams(repetition_penalty=1.7)


# the target, and what it says without speculation


def target(seed: int | None, has_eos: bool = True) -> Choice:
    """Greedy, or with noise by seed and position."""
    least = 0 if has_eos else 1
    return lambda row, ids: least + hash((row, seed, len(ids))) % (VOCABULARY - least)


def ruled_target(seed: int | None, has_eos: bool, *, has_grammar: bool) -> Choice:
    """The sampler itself, with filters and a penalty by all that was said; and a grammar of three states, which goes by
    it too."""
    params = GREEDY_PENALTY if seed is None else PENALTY

    def choose(row: Any, ids: Sequence[int]) -> int:
        logits_V = np.array([hash((row, token)) % 1000 / 300 for token in range(VOCABULARY)], dtype=np.float32)
        state = sum(ids) % 3
        banned = [token for token in range(1, VOCABULARY) if has_grammar and token % 3 == state]
        logits_V[banned if has_eos else [EOS, *banned]] = -np.inf
        return choose_token(logits_V, params, seed=seed or 0, position=len(ids), seen=ids)

    return choose


def plain(prompt: Sequence[int], num_stages: int, choose: Choice, stop_position: int) -> list[int]:
    """The tokens of one machine that computes one row at a time."""
    seen: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    tokens = list(prompt)
    row = 0
    for position in range(stop_position):
        if position >= len(tokens):
            tokens.append(choose(row, tokens))
            if tokens[-1] == EOS:
                break
        row = hash((17, tokens[position]))
        for index, contents in enumerate(seen):
            contents.append((row, position))
            row = hash((index, tuple(contents)))
    return tokens[len(prompt) :]


class Guesser:
    """Right about the next token in some share of the cases, sure of itself or not, and silent now and then.

    Args:
        share: None: it draws tokens uniformly.
    """

    def __init__(self, text: Sequence[int], share: float | None, chance: random.Random) -> None:
        self._text, self._share, self._chance = text, share, chance

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        return [self._candidates(position, path, width) for path in paths]

    def _candidates(self, position: int, path: tuple[int, ...], width: int) -> list[tuple[int, float, str]]:
        chance = self._chance
        if chance.random() < 0.05:
            return []
        tokens = chance.sample(range(VOCABULARY), min(width, chance.randint(1, VOCABULARY)))
        at = position + len(path)
        if self._share is not None and at < len(self._text) and tuple(self._text[position:at]) == path:
            right = self._text[at]
            tokens = [token for token in tokens if token != right]
            if chance.random() < self._share:
                tokens.insert(0, right)
        return [(token, chance.choice((1.0, 0.9, 0.5, 0.2, 0.01)), "guess") for token in tokens]


def chosen_by(choose: Choice, world: World) -> Callable[[int, Any], int]:
    """For the only user of a world: from what was committed until then."""

    def from_row(position: int, row: Any) -> int:
        (user,) = world.users
        ids = (*user.prompt, *user.tokens)
        assert len(ids) == position
        return choose(row, ids)

    return from_row


rings = st.builds(
    Costs,
    num_stages=st.sampled_from((1, 2, 3, 5)),
    round_trip_s=st.sampled_from((0.0, 0.01, 0.06)),
    fixed_s=st.sampled_from((0.001, 0.008)),
    row_s=st.sampled_from((0.0, 0.0005, 0.005)),
    wire_row_s=st.sampled_from((0.0, 0.0007)),
    draft_s=st.sampled_from((0.004, 0.03)),
    user_s=st.just(0.0005),
    jitter_s=st.sampled_from((0.0, 0.02)),
    lost_cancels=st.sampled_from((0.0, 0.5, 1.0)),
    doubled_cancels=st.sampled_from((0.0, 0.5)),
)


@given(
    costs=rings,
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from((None, 0.0, 0.5, 1.0)),
    rule=st.sampled_from(("none", "penalty", "grammar")),
    noise=st.none() | st.integers(0, 5),
    modes=st.sampled_from(((Mode.TREE,), (Mode.CHAIN,), (Mode.PLAIN,), tuple(Mode))),
    num_prompt=st.integers(1, 4),
    num_tokens=st.integers(1, 14),
    has_eos=st.booleans(),
    spare=st.sampled_from((0, 1, 5, 400)),
    max_in_flight=st.sampled_from((1, 8, 256)),
    interruptions=st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 6), st.sampled_from((0.0, 0.05))), max_size=2),
)
@settings(max_examples=500, deadline=None)
@example(  # a sure candidate was put before its parent, which was sent again after an interruption
    costs=Costs(3, 0.0, fixed_s=0.001, row_s=0.0, wire_row_s=0.0007, draft_s=0.004, user_s=0.0005, jitter_s=0.02),
    seed=202642486,
    share=0.5,
    rule="none",
    noise=5,
    modes=(Mode.TREE,),
    num_prompt=1,
    num_tokens=11,
    has_eos=True,
    spare=1,
    max_in_flight=256,
    interruptions=[(0.0, 1, 0.0)],
)
def test_any_drafter_delay_mode_and_fault_leave_the_text_as_it_is(
    costs: Costs,
    seed: int,
    share: float | None,
    rule: str,
    noise: int | None,
    modes: tuple[Mode, ...],
    num_prompt: int,
    num_tokens: int,
    has_eos: bool,
    spare: int,
    max_in_flight: int,
    interruptions: list[tuple[float, int, float]],
) -> None:
    chance = random.Random(seed)
    prompt = [chance.randrange(1, VOCABULARY) for _ in range(num_prompt)]
    stop_position = num_prompt + num_tokens
    choose = target(noise, has_eos)
    if rule != "none":
        choose = ruled_target(noise, has_eos, has_grammar=rule == "grammar")
    text = plain(prompt, costs.num_stages, choose, stop_position)
    world = World(costs, seed=seed, digests=True)
    user = world.add(
        prompt,
        drafter=Guesser([*prompt, *text], share, chance),
        choose=chosen_by(choose, world),
        stop_position=stop_position,
        max_positions=stop_position + spare,
        stop_tokens=frozenset((EOS,)),
        max_in_flight=max_in_flight,
        policy=ModePolicy(modes),
    )
    for at_s, num_lost, pause_s in interruptions:
        world.clock.at(at_s, partial(world.interrupt, user, num_lost, pause_s))
    world.clock.run(until_s=60.0)
    assert user.tokens == text
    assert user.core.is_over


class Knows:
    """Always right, and sure of it."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        places = (position + len(path) for path in paths)
        return [[(self._text[at], 0.95, "x")] if at < len(self._text) else [] for at in places]


class KnowsNothing:
    """Always wrong, and sure of it."""

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        return [[(VOCABULARY, 0.95, "x")] for _ in paths]


def test_a_good_drafter_brings_many_times_the_speed_and_a_bad_one_costs_little() -> None:
    prompt, choose = [1, 2], target(None, has_eos=False)
    text = plain(prompt, 3, choose, 80)

    def seconds(drafter: Drafter, modes: tuple[Mode, ...]) -> float:
        world = World(Costs(3, 0.05), seed=1, digests=True)
        user = world.add(
            prompt,
            drafter=drafter,
            choose=chosen_by(choose, world),
            stop_position=80,
            max_positions=500,
            stop_tokens=frozenset((EOS,)),
            policy=ModePolicy(modes),
        )
        world.clock.run()
        assert user.finished_at is not None
        return user.finished_at

    knows = Knows([*prompt, *text])
    without = seconds(knows, (Mode.PLAIN,))
    assert seconds(knows, (Mode.TREE,)) < without / 8
    assert seconds(knows, (Mode.CHAIN,)) < without / 2
    assert seconds(KnowsNothing(), tuple(Mode)) < 1.06 * without


def test_many_users_of_one_ring_send_fewer_rows_each_and_get_more_tokens_in_all() -> None:
    def rates(num_users: int) -> tuple[float, float]:
        world = World(Costs(2, 0.05, row_s=0.0005), seed=1)
        for seed in range(num_users):
            world.add(
                [1],
                drafter=OracleDrafter(0.8, OracleText(0.8, 200, seed), seed),
                choose=lambda position, row: 0,
                stop_position=10_000,
                max_positions=20_000,
                stop_tokens=frozenset(),
            )
        world.clock.run(until_s=1.0)
        tokens = sum(user.core.stats.num_tokens for user in world.users)
        rows = sum(user.core.stats.num_rows for user in world.users)
        return tokens, rows / tokens

    (alone, rows_alone), (together, rows_together) = rates(1), rates(6)
    assert together > 2 * alone
    assert rows_together < 0.9 * rows_alone
