"""Which mode an answer is in, through the production loop over rings in a virtual clock: what it costs and brings."""

from __future__ import annotations

import random
from functools import partial

import pytest

from benchmarks.speculation.oracle import EASY, HARD
from benchmarks.speculation.ring import Costs
from fusion_node.types import MonotonicS
from scheduler.speculation import Mode, ModePolicy
from tests.core.mode_world import COPY, NOVEL, POOR, Part, Text, UserCosts, answer_s

CPU_PAIR = (Costs(2, 0.0004, fixed_s=0.012, row_s=0.003, user_s=0.0005), UserCosts(0.008, 0.0008))
DEAR_ROWS = (Costs(3, 0.0004, fixed_s=0.004, row_s=0.006, user_s=0.0005), UserCosts(0.008, 0.0008))
ONE_CPU = (Costs(1, 0.0004, fixed_s=0.02, row_s=0.004, user_s=0.0005), UserCosts(0.008, 0.0008))
GPUS = (Costs(3, 0.0004, user_s=0.0005), UserCosts(0.001, 0.003))
FAR_GPUS = (Costs(4, 0.05), UserCosts(0.001, 0.003))
HOME_UPLINKS = (Costs(4, 0.06, wire_row_s=0.004), UserCosts(0.001, 0.003))
FAR_CPUS = (Costs(3, 0.05, fixed_s=0.018, row_s=0.0014, user_s=0.0015), UserCosts(0.009, 0.004))
RINGS = (CPU_PAIR, DEAR_ROWS, ONE_CPU, GPUS, FAR_GPUS, HOME_UPLINKS)

MAX_LOSS = 0.03
MAX_LOST_TOKENS = 2.0


class Kept(ModePolicy):
    """One mode, whatever it brings."""

    def _choose(self, step_s: float, now: MonotonicS) -> None:
        pass


def only(mode: Mode) -> ModePolicy:
    return Kept((mode,))


def plain_step_s(ring: tuple[Costs, UserCosts]) -> float:
    """Exactly: the first token needs none."""
    seconds = answer_s(*ring, Text([((POOR,), 20)], 0), ModePolicy((Mode.PLAIN,)))[0]
    return (seconds - ring[1].choose_s) / 19


@pytest.mark.parametrize("seed", range(18))
def test_answers_over_any_ring_lose_no_more_than_three_per_cent_and_two_tokens(seed: int) -> None:
    chance = random.Random(seed)
    ring = RINGS[seed % len(RINGS)]
    policy, step_s = ModePolicy(), plain_step_s(ring)
    seconds, num_tokens = 0.0, 0
    for _ in range(chance.randint(1, 4)):
        kinds = (((POOR,), 3), ((NOVEL,), 3), ((NOVEL, POOR), 2), ((HARD, NOVEL), 1), ((COPY,), 1))
        parts: list[Part] = [
            (chance.choices([profiles for profiles, _ in kinds], [weight for _, weight in kinds])[0], tokens)
            for tokens in chance.choice(((20,), (40,), (100,), (60, 60)))
        ]
        text = Text(parts, chance.randrange(1 << 30))
        seconds += answer_s(*ring, text, policy, seed=seed)[0] - ring[1].choose_s
        num_tokens += len(text) - 1
        assert seconds / step_s - num_tokens <= MAX_LOSS * num_tokens + MAX_LOST_TOKENS


@pytest.mark.parametrize(
    ("ring", "profiles"),
    [*((ring, (COPY,)) for ring in RINGS), *((ring, (EASY, HARD)) for ring in (CPU_PAIR, DEAR_ROWS, ONE_CPU, GPUS))],
)
def test_where_speculation_pays_a_first_answer_has_nine_tenths_of_the_best_speed(
    ring: tuple[Costs, UserCosts], profiles: tuple[tuple[float, ...], ...]
) -> None:
    text, step_s = Text([(profiles, 200)], 3), plain_step_s(ring)
    best_s = min(answer_s(*ring, text, only(mode))[0] for mode in (Mode.CHAIN, Mode.TREE))
    auto_s = answer_s(*ring, text, ModePolicy())[0]
    if best_s < 200 * step_s / 1.3:
        # The two steps that tell what a step takes count where all the answer takes thirty times less.
        assert auto_s <= best_s / 0.9 + 2 * step_s
    else:
        assert auto_s <= 200 * step_s * (1 + MAX_LOSS) + 2 * step_s


@pytest.mark.parametrize("ring", RINGS)
def test_after_an_answer_that_nobody_guessed_a_copied_one_is_as_fast_as_if_it_was_the_first(
    ring: tuple[Costs, UserCosts],
) -> None:
    answer = partial(answer_s, *ring)
    copy, policy, step_s = Text([((COPY,), 100)], 4), ModePolicy(), plain_step_s(ring)
    answer(Text([((NOVEL, POOR), 150)], 5), policy)
    # A few plain steps, until the guesses are believed.
    assert answer(copy, policy)[0] <= min(answer(copy, only(mode))[0] for mode in Mode) / 0.9 + 8 * step_s


@pytest.mark.parametrize(
    ("profiles", "most_rows"), [((COPY,), 2.5), ((COPY, NOVEL), 3.5), ((NOVEL,), 5.0), ((NOVEL, POOR), 3.0)]
)
def test_where_rows_are_dear_a_tree_sends_few_and_is_as_fast_as_a_chain(
    profiles: tuple[tuple[float, ...], ...], most_rows: float
) -> None:
    """Rows per token: on cores that stages, drafter and LM head share, ten of them take more than a tree brings."""
    text = Text([(profiles, 150)], 3)
    chain_s, _ = answer_s(*FAR_CPUS, text, only(Mode.CHAIN))
    tree_s, core = answer_s(*FAR_CPUS, text, only(Mode.TREE))
    assert tree_s <= chain_s
    assert core.stats.num_rows <= most_rows * len(text)
