"""What speculation is worth: closed forms, calibration, and the choice of mode."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.types import MonotonicS
from scheduler.speculation import (
    FIRST_CHECK_TOKENS,
    LEAST_PROBABILITY,
    Calibration,
    Decision,
    Guess,
    Mode,
    ModePolicy,
    Ring,
    StepCosts,
    async_chain_limit,
    async_chain_rate,
    best_chain_length,
    chain_length_estimate,
    chain_rate,
    least_worth,
    plain_rate,
    tree_depth,
    tree_rate,
)


def gpu_ring(num_stages: int, round_trip_ms: int) -> Ring:
    legs_s = (num_stages + 1) * round_trip_ms / 2000
    return Ring(legs_s, (0.008,) * num_stages, (0.0001,) * num_stages, 0.00002, 0.003, 0.001)


# closed forms, against the table of docs/speculation.md


@pytest.mark.parametrize(
    ("num_stages", "round_trip_ms", "acceptance", "plain", "chain", "length", "async_chain"),
    [
        (3, 20, 0.6, 15.3, 29.2, 4, 33.9),
        (4, 20, 0.8, 12.0, 38.8, 8, 50.3),
        (5, 50, 0.8, 5.2, 20.1, 11, 24.1),
        (8, 100, 0.9, 1.9, 15.2, 26, 18.3),
    ],
)
def test_formulas_give_the_speeds_of_the_table(
    num_stages: int,
    round_trip_ms: int,
    acceptance: float,
    plain: float,
    chain: float,
    length: int,
    async_chain: float,
) -> None:
    ring = gpu_ring(num_stages, round_trip_ms)
    assert plain_rate(ring) == pytest.approx(plain, abs=0.05)
    assert best_chain_length(acceptance, ring) == length
    assert chain_rate(acceptance, ring, length) == pytest.approx(chain, abs=0.05)
    assert max(async_chain_rate(acceptance, ring, rows) for rows in (1, 2, 3, 4)) == pytest.approx(
        async_chain, abs=0.05
    )
    assert chain_length_estimate(acceptance, ring) == pytest.approx(length, rel=0.15)


def test_a_chain_of_known_acceptance_takes_as_long_as_the_formula_says() -> None:
    chance, ring, acceptance, length = random.Random(1), gpu_ring(5, 50), 0.8, 11
    tokens = seconds = 0.0
    for _ in range(20_000):
        accepted = next((i for i in range(length) if chance.random() >= acceptance), length)
        tokens += accepted + 1
        seconds += length * ring.draft_s + ring.latency_s(length + 1)
    assert tokens / seconds == pytest.approx(chain_rate(acceptance, ring, length), rel=0.02)


def test_no_chain_passes_its_limit_and_a_sure_drafter_has_none() -> None:
    ring = gpu_ring(5, 50)
    assert async_chain_rate(0.8, ring, 2) < async_chain_limit(0.8, ring)
    assert async_chain_limit(1.0, ring) > 1e6
    assert chain_rate(1.0, ring, 7) == pytest.approx(8 / (7 * ring.draft_s + ring.latency_s(8)))
    assert chain_length_estimate(0.0, ring) == 0.0
    assert best_chain_length(0.0, ring) == 0


def test_a_tree_of_one_candidate_is_a_chain_and_more_candidates_are_worth_more() -> None:
    assert tree_depth((0.8,), 50) == pytest.approx(0.8 / 0.2, rel=1e-4)
    assert tree_depth((0.8, 0.1), 1) == 0.8
    assert tree_depth((0.8, 0.1), 3) == pytest.approx(0.8 + 0.64 + 0.512)
    assert tree_depth((0.5, 0.4), 3) == pytest.approx(0.5 + 0.4 + 0.25)
    assert tree_depth((), 5) == 0.0
    ring = gpu_ring(4, 50)
    assert tree_rate((0.8, 0.08, 0.04), ring, 16) > async_chain_limit(0.8, ring)


def test_a_node_is_worth_its_row_when_it_brings_more_than_it_delays() -> None:
    assert least_worth(40.0, 0.0005) == pytest.approx(0.02)
    assert least_worth(40.0, 0.0) == LEAST_PROBABILITY
    assert least_worth(1e9, 1e9) == 1.0


# calibration


def test_a_source_is_believed_until_it_was_counted() -> None:
    calibration = Calibration()
    assert calibration.probability("head", 0.7) == 0.7
    calibration.record("other", 0.7, False)
    assert calibration.probability("head", 0.7) == 0.7


def test_a_source_that_is_right_less_often_than_it_says_is_believed_less() -> None:
    calibration, chance = Calibration(), random.Random(1)
    for _ in range(2000):
        calibration.record("boaster", 0.9, chance.random() < 0.3)
        calibration.record("honest", 0.9, chance.random() < 0.9)
    assert calibration.probability("boaster", 0.9) == pytest.approx(0.3, abs=0.08)
    assert calibration.probability("honest", 0.9) == pytest.approx(0.9, abs=0.05)


def test_expected_calibration_error_is_small_for_any_monotone_distortion() -> None:
    calibration, chance = Calibration(), random.Random(2)
    for _ in range(20_000):
        truth = chance.random()
        calibration.record("x", truth**3, chance.random() < truth)
    error = 0.0
    for step in range(1, 100):
        truth = step / 100
        error += abs(calibration.probability("x", truth**3) - truth) / 99
    assert error < 0.05


def test_counts_follow_a_new_topic() -> None:
    calibration = Calibration()
    for _ in range(5000):
        calibration.record("x", 0.5, True)
    for _ in range(1500):
        calibration.record("x", 0.5, False)
    assert calibration.probability("x", 0.5) < 0.2


@given(st.floats(allow_nan=True, allow_infinity=True), st.lists(st.booleans(), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_confidence_becomes_a_probability(confidence: float, outcomes: list[bool]) -> None:
    calibration = Calibration()
    for is_right in outcomes:
        calibration.record("x", confidence, is_right)
    assert 0.0 < calibration.probability("x", confidence) < 1.0


# modes


def speeds(plain: float, chain: float, tree: float) -> dict[Mode, float]:
    return {Mode.PLAIN: plain, Mode.CHAIN: chain, Mode.TREE: tree}


class Session:
    """Tokens come at the rate of the mode that the policy chose, evenly or by chance."""

    def __init__(self, policy: ModePolicy, seed: int | None = None, costs: StepCosts | None = None) -> None:
        self.policy = policy
        self.now = 0.0
        self.modes: list[Mode] = []
        self.worst = 0.0
        """Most tokens behind plain decode, at any time, beyond MAX_LOSS of those so far."""
        self._behind = 0.0
        self._costs = costs
        self._chance = None if seed is None else random.Random(seed)

    def run(
        self,
        rates: dict[Mode, float],
        num_tokens: int,
        acceptance: float = 0.5,
        probability: float | None = None,
        is_even: bool = False,
        stalls: Mapping[int, float] = MappingProxyType({}),
    ) -> float:
        """Tokens per second, over plain decode's.

        Args:
            stalls: seconds that go by before some of the tokens, whatever the mode; they count for nothing here.
        """
        policy, since, step_s = self.policy, self.now, 1 / rates[Mode.PLAIN]
        policy.costs_are(self._costs or StepCosts(0.02 * step_s, 0.1 * step_s, 0.0, 0.05 * step_s))
        policy.committed(now=MonotonicS(self.now))
        for index in range(num_tokens):
            mode = policy.decide(now=MonotonicS(self.now)).mode
            self.modes.append(mode)
            is_uneven = self._chance is not None and mode is not Mode.PLAIN and not is_even
            took = (self._chance.expovariate(1.0) if self._chance and is_uneven else 1.0) / rates[mode]
            self.now += took + stalls.get(index, 0.0)
            is_first = 0.618 * index % 1.0 < acceptance
            if mode is not Mode.PLAIN:
                policy.step_at_most(max(took, step_s))
            policy.guessed(Guess(is_first, is_first, acceptance if probability is None else probability, 2))
            policy.committed(now=MonotonicS(self.now))
            self._behind += took / step_s - 1.0
            self.worst = max(self.worst, self._behind - MAX_LOSS * len(self.modes))
        policy.paused()
        return num_tokens / (self.now - since - sum(stalls.values())) / rates[Mode.PLAIN]


MAX_LOSS = 0.03
MAX_LOST_TOKENS = 2.0


def test_a_tree_that_pays_is_never_left() -> None:
    session = Session(ModePolicy())
    assert session.run(speeds(10, 15, 30), 500) == pytest.approx(3.0, rel=0.01)
    assert session.modes[:2] == [Mode.PLAIN, Mode.TREE]
    assert set(session.modes[2:]) == {Mode.TREE}


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("rates", [(10, 9, 9.5), (10, 7, 7), (10, 5, 5), (10, 2, 2), (10, 1, 9.9)])
def test_speculation_that_does_not_pay_costs_three_per_cent_at_most(
    rates: tuple[float, float, float], seed: int | None
) -> None:
    assert Session(ModePolicy(), seed).run(speeds(*rates), 2000) > 0.97


@pytest.mark.parametrize("seed", range(150))
def test_no_answers_whatever_modes_bring_lose_more_than_three_per_cent_and_two_tokens(seed: int) -> None:
    """What guesses are worth and what modes bring has nothing to do with each other here: no formula helps."""
    chance = random.Random(seed)
    step_s = chance.choice((0.005, 0.04, 0.3))
    costs = StepCosts(
        price_s=step_s * chance.choice((0.0, 0.005, 0.05, 0.3)),
        pass_s=step_s * chance.choice((0.02, 0.3, 0.9)),
        choose_s=step_s * chance.choice((0.0, 0.3)),
        draft_s=step_s * chance.choice((0.001, 0.1, 0.7)),
    )
    session = Session(ModePolicy(), seed, costs)
    for _ in range(chance.randint(1, 5)):
        for _ in range(chance.choice((1, 1, 2, 4))):
            chain, tree = (chance.choice((0.5, 0.8, 0.95, 1.05, 1.5, 4.0)) / step_s for _ in range(2))
            acceptance = chance.choice((0.02, 0.25, 0.5, 0.8, 0.97))
            num_tokens = chance.choice((20, 40, 100, 300, 800))
            session.run(speeds(1 / step_s, chain, tree), num_tokens, acceptance, chance.random(), is_even=True)
    assert session.worst <= MAX_LOST_TOKENS


@pytest.mark.parametrize("rates", [(10, 13, 13), (10, 20, 14), (10, 12, 25), (10, 5, 60)])
def test_what_pays_is_found_within_an_answer(rates: tuple[float, float, float]) -> None:
    gain = max(rates[1], rates[2]) / rates[0]
    assert Session(ModePolicy()).run(speeds(*rates), 200, acceptance=0.8) > 0.85 * gain


def test_a_copy_after_an_answer_that_was_guessed_badly_is_sped_up_within_a_few_tokens() -> None:
    session = Session(ModePolicy(), costs=StepCosts(0.01, 0.05, 0.02, 0.0005))
    session.run(speeds(10, 8, 7), 300, acceptance=0.15, probability=0.2)
    assert session.modes[-1] is Mode.PLAIN
    session.run(speeds(10, 25, 30), 12, acceptance=0.95, probability=0.95)
    assert Mode.PLAIN not in session.modes[-4:]


@pytest.mark.parametrize("num_tokens", [10, 24])
def test_a_text_that_begins_to_be_copied_need_not_wait_for_what_a_poor_trial_has_cost(num_tokens: int) -> None:
    session = Session(ModePolicy((Mode.PLAIN, Mode.TREE)))
    session.run(speeds(10, 7, 7), num_tokens, acceptance=0.7, probability=0.45)
    assert session.modes[1] is Mode.TREE
    assert session.modes[-1] is Mode.PLAIN
    session.modes.clear()
    session.run(speeds(10, 30, 40), 60, acceptance=1.0, probability=0.95)
    assert set(session.modes[8:]) == {Mode.TREE}


def test_nothing_is_tried_that_guesses_speak_against() -> None:
    session = Session(ModePolicy())
    session.run(speeds(10, 9, 9), 300, acceptance=0.0)
    session.modes.clear()
    session.run(speeds(10, 9, 9), 100, acceptance=0.0)
    assert set(session.modes) == {Mode.PLAIN}


def test_where_a_row_costs_as_much_as_a_step_no_tree_is_begun() -> None:
    session = Session(ModePolicy(), costs=StepCosts(0.1, 0.05, 0.0, 0.0))
    session.run(speeds(10, 5, 2), 300, acceptance=0.5)
    assert set(session.modes) == {Mode.PLAIN}


def test_the_rows_of_a_round_are_few_while_little_may_be_lost() -> None:
    session = Session(ModePolicy(), costs=StepCosts(0.01, 0.01, 0.0, 0.0))
    session.run(speeds(10, 5, 20), 2, acceptance=0.9)
    first = session.policy.decide(now=MonotonicS(session.now))
    assert first.mode is Mode.TREE
    session.run(speeds(10, 5, 20), 100, acceptance=0.9)
    later = session.policy.decide(now=MonotonicS(session.now))
    assert first.max_rows < 8 < later.max_rows


def test_a_mode_that_begins_to_pay_is_found() -> None:
    session = Session(ModePolicy())
    session.run(speeds(10, 5, 5), 1000)
    before = session.modes[-1]
    session.run(speeds(10, 5, 30), 1000)
    assert (before, session.modes[-1]) == (Mode.PLAIN, Mode.TREE)


def test_plain_decode_that_has_become_faster_is_found() -> None:
    session = Session(ModePolicy())
    session.run(speeds(10, 5, 12), 300)
    before = session.modes[-1]
    session.run(speeds(20, 5, 12), 600)
    assert (before, session.modes[-1]) == (Mode.TREE, Mode.PLAIN)


@pytest.mark.parametrize("at", [3, 50])
@pytest.mark.parametrize("seconds", [1.0, 30.0, 3600.0])
def test_one_stall_does_not_keep_what_pays_away_for_long(at: int, seconds: float) -> None:
    """Of which nobody says that it was one: a node was busy with a prompt, or a wire was down for a while."""
    session = Session(ModePolicy())
    session.run(speeds(10, 5, 30), 2000, stalls={at: seconds})
    assert session.modes[-1] is Mode.TREE
    if at == 50:  # that the tree pays was known by then
        assert session.modes.count(Mode.TREE) > 1900


@pytest.mark.parametrize("first", [0.15, 1.0, 30.0])
@pytest.mark.parametrize("rates", [(10, 8, 8), (10, 9.3, 9.3), (10, 9.8, 9.8)])
def test_a_first_step_that_was_slow_by_chance_does_not_have_modes_seem_to_pay(
    rates: tuple[float, float, float], first: float
) -> None:
    session = Session(ModePolicy())
    session.run(speeds(*rates), 1000, stalls={0: first})
    # No more than until plain decode is measured once more, and the mode has been left then.
    assert session.worst <= MAX_LOST_TOKENS + FIRST_CHECK_TOKENS / 2


def test_stalls_of_plain_decode_do_not_have_modes_seem_to_pay() -> None:
    session = Session(ModePolicy())
    session.run(speeds(10, 8, 8), 1000, stalls=dict.fromkeys(range(20, 1000, 100), 30.0))
    assert session.worst <= MAX_LOST_TOKENS


def test_plain_decode_that_has_become_much_faster_is_found() -> None:
    session = Session(ModePolicy())
    session.run(speeds(2, 1, 8), 300)
    session.run(speeds(20, 5, 8), 3000)
    assert session.modes[-1] is Mode.PLAIN


def test_modes_that_are_not_allowed_are_not_chosen() -> None:
    session = Session(ModePolicy((Mode.CHAIN,)))
    session.policy.plain_step(0.1)  # of a row that was alone: it is never in plain decode before it has been compared
    session.run(speeds(10, 5, 100), 500)
    assert Mode.TREE not in session.modes
    assert session.modes.count(Mode.PLAIN) > 450


def test_a_pause_is_held_against_no_mode() -> None:
    session = Session(ModePolicy())
    session.run(speeds(10, 5, 30), 100)
    session.policy.paused()
    session.now += 60.0
    session.modes.clear()
    session.run(speeds(10, 5, 30), 100)
    assert set(session.modes) == {Mode.TREE}


def test_a_chain_goes_as_far_as_its_tokens_are_worth_what_they_cost() -> None:
    def decided(draft_s: float, price_s: float) -> Decision:
        policy = ModePolicy((Mode.CHAIN,))
        policy.plain_step(0.1)
        policy.costs_are(StepCosts(price_s, 0.01, 0.02, draft_s))
        return policy.decide(now=MonotonicS(0.0))

    cheap, dear, slow = decided(0.003, 0.001), decided(0.003, 0.02), decided(0.05, 0.001)
    assert cheap.least < dear.least < 1.0
    assert cheap.least == slow.least
    assert cheap.least_to_draft < dear.least_to_draft
    assert cheap.least_to_draft < 1.0 < slow.least_to_draft
