"""What is believed of a node: absurd claims are bounded, and measurements take their place."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from fusion_node.types import PeerId
from scheduler.claims import (
    FASTEST,
    HALF_LIFE_S,
    MAX_BETTER,
    MAX_DISCOUNT,
    MAX_MESSAGE_S,
    MAX_PEERS,
    MAX_QUEUE_S,
    MAX_SAMPLE_ROWS,
    MIN_MEASURED,
    SLOWEST_S,
    TOLERANCE_S,
    Claim,
    ClaimBook,
    Measurements,
    StageStep,
    clamp_speed,
    fastest_speed,
)
from scheduler.topology import Speed

ALICE, BOB, CAROL, MALLORY = (PeerId(name) for name in ("alice", "bob", "carol", "mallory"))
HONEST = (0.003, 0.004, 0.02)
TOO_GOOD = (1e-12, 1e-12, 1e-12)

ABSURD = [math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-300, 1e-12, 1.0, 1e12, 1e308]


def observe(book: ClaimBook, peer: PeerId, seconds_per_layer: float, *, rows: int = 1, now: float = 0.0) -> None:
    book.observe_step(peer, 10, rows, 10 * seconds_per_layer, 0.0, 0.0, now)


def test_no_claim_is_believed_beyond_what_is_possible() -> None:
    for claimed in itertools.product(ABSURD, repeat=3):
        belief = ClaimBook().believed(Claim(MALLORY, claimed, queue_s=claimed[0]), now=0.0)

        speed = belief.speed
        assert FASTEST.rows_1_s <= speed.rows_1_s <= speed.rows_16_s <= speed.rows_256_s <= SLOWEST_S
        assert FASTEST.rows_256_s <= speed.rows_256_s
        assert 0.0 <= belief.queue_s <= MAX_QUEUE_S


def test_a_claim_that_makes_no_sense_attracts_nobody() -> None:
    for nonsense in (math.nan, -1.0, -math.inf):
        assert clamp_speed((nonsense, nonsense, nonsense)) == Speed(SLOWEST_S, SLOWEST_S, SLOWEST_S)


def test_a_layer_cannot_be_faster_than_its_weights_are_read() -> None:
    parameters = 856e6  # of a layer of Llama 3 70B
    fastest = fastest_speed(2 * parameters, parameters)

    assert fastest.rows_1_s == pytest.approx(171e-6, rel=0.01)
    assert fastest.rows_1_s <= fastest.rows_16_s <= fastest.rows_256_s
    assert ClaimBook(fastest).believed(Claim(MALLORY, TOO_GOOD), now=0.0).speed == fastest


@pytest.mark.parametrize("node", [HONEST, (0.01, 0.02, 0.3), (1e-4, 1e-4, 5e-4)])
def test_an_honest_claim_is_believed_as_it_is_before_and_after_it_was_measured(
    node: tuple[float, float, float],
) -> None:
    book = ClaimBook()
    assert book.believed(Claim(ALICE, node), now=0.0).speed == Speed(*node)
    for rows, seconds in zip((1, 16, 256), node, strict=True):
        observe(book, ALICE, seconds, rows=rows)

    belief = book.believed(Claim(ALICE, node), now=1.0)
    assert belief.is_measured
    assert belief.note == ""
    assert (belief.speed.rows_1_s, belief.speed.rows_16_s, belief.speed.rows_256_s) == pytest.approx(node)


def test_after_one_request_a_liar_is_as_slow_as_it_is() -> None:
    book = ClaimBook()
    lie = Claim(MALLORY, TOO_GOOD)
    assert book.believed(lie, now=0.0).speed.rows_1_s < book.believed(Claim(ALICE, HONEST), now=0.0).speed.rows_1_s
    observe(book, MALLORY, 0.0091)

    belief = book.believed(lie, now=0.0)
    assert belief.speed.rows_1_s == pytest.approx(0.0091)
    assert belief.speed.rows_256_s >= belief.speed.rows_16_s >= belief.speed.rows_1_s
    assert belief.note == "announces 0.002 ms per layer, measured 9.1 ms"


def test_a_liar_that_also_lies_about_its_times_is_charged_what_the_round_took() -> None:
    book = ClaimBook()
    told = StageStep(MALLORY, 10, compute_s=1e-6, queue_s=0.0)
    book.observe_round([told], 1, round_s=0.130, legs_s=0.030, now=0.0)

    believed_s = 10 * book.believed(Claim(MALLORY, TOO_GOOD), now=0.0).speed.rows_1_s
    assert believed_s == pytest.approx(0.1 - TOLERANCE_S - 0.013, rel=0.01)


def test_jitter_within_the_tolerance_is_charged_to_nobody() -> None:
    book = ClaimBook()
    stage = StageStep(ALICE, 10, compute_s=0.030, queue_s=0.005)
    book.observe_round([stage], 1, round_s=0.069, legs_s=0.030, now=0.0)

    belief = book.believed(Claim(ALICE, HONEST), now=0.0)
    assert belief.speed.rows_1_s == pytest.approx(0.003)
    assert belief.queue_s == pytest.approx(0.005)


def test_pauses_now_and_then_are_charged_to_nobody_and_a_slowdown_that_stays_is() -> None:
    book = ClaimBook()
    stages = [StageStep(ALICE, 10, 0.030, 0.0), StageStep(BOB, 10, 0.030, 0.0)]
    for number in range(32):
        pause_s = 0.5 if number % 4 == 2 else 0.0
        book.observe_round(stages, 1, round_s=0.125 + pause_s, legs_s=0.060, now=0.0)
    for peer in (ALICE, BOB):
        assert book.believed(Claim(peer, HONEST), now=0.0).speed.rows_1_s == pytest.approx(0.003)
    for _ in range(16):
        book.observe_round(stages, 1, round_s=0.625, legs_s=0.060, now=0.0)
    believed_s = sum(book.believed(Claim(peer, HONEST), now=0.0).speed.rows_1_s for peer in (ALICE, BOB))
    assert 10 * believed_s == pytest.approx(0.060 + 0.5, rel=0.15)


def test_what_is_tolerated_is_counted_for_every_message_of_a_plan_and_charged_to_nobody() -> None:
    book = ClaimBook()
    assert book.message_excess_s(0.0) == 0.0
    stages = [StageStep(ALICE, 10, 0.030, 0.0), StageStep(BOB, 10, 0.030, 0.0)]
    for rest_s in (0.006, 0.009, 0.012, 0.009, 0.5):  # a pause of anybody's is charged, and counts as one round
        book.observe_round(stages, 1, round_s=0.120 + rest_s, legs_s=0.060, now=0.0)
    assert book.message_excess_s(0.0) == pytest.approx(0.003)
    assert book.message_excess_s(HALF_LIFE_S) == pytest.approx(0.0015)


def test_what_prefills_leave_unexplained_is_not_the_price_of_a_message_of_a_decode_step() -> None:
    book = ClaimBook()
    stages = [StageStep(peer, 10, 1.0, 0.0) for peer in (ALICE, BOB, CAROL)]
    for rows in (5, 16, 200):
        book.observe_round(stages, rows, round_s=3.4, legs_s=0.1, now=0.0)
    assert book.message_excess_s(0.0) == 0.0
    decode = [StageStep(peer, 10, 0.020, 0.0) for peer in (ALICE, BOB, CAROL)]
    for _ in range(3):
        book.observe_round(decode, 1, round_s=0.080, legs_s=0.012, now=0.0)
        book.observe_round(stages, 200, round_s=3.4, legs_s=0.1, now=0.0)
    assert book.message_excess_s(0.0) == pytest.approx(0.002)


def test_a_liar_makes_messages_no_dearer_than_what_is_tolerated() -> None:
    book = ClaimBook()
    for _ in range(50):
        book.observe_round([StageStep(MALLORY, 10, 0.0, 0.0)], 1, round_s=0.100, legs_s=0.020, now=0.0)
    assert book.message_excess_s(0.0) == pytest.approx((TOLERANCE_S + 0.010) / 2)
    book = ClaimBook()
    book.observe_round([StageStep(MALLORY, 10, 1e9, 1e9)], 1, round_s=0.100, legs_s=0.250, now=0.0)
    book.observe_round([StageStep(MALLORY, 10, 0.0, 0.0)], 1, round_s=0.100, legs_s=math.inf, now=0.0)
    assert book.message_excess_s(0.0) == pytest.approx(-0.075)


@pytest.mark.parametrize("seed", range(5))
def test_over_rounds_with_different_stages_the_liar_among_them_is_found(seed: int) -> None:
    """Ten nodes of 10 layers at 3 ms each; one of them takes 9 ms and says 1 us. Routes of three, by chance."""
    rng = random.Random(seed)
    nodes = [PeerId(f"node-{number}") for number in range(10)]
    book = ClaimBook()
    for _ in range(200):
        route = rng.sample(nodes, 3)
        steps = [StageStep(peer, 10, 1e-6 if peer == nodes[0] else 0.030, 0.0) for peer in route]
        took_s = sum(0.090 if peer == nodes[0] else 0.030 for peer in route)
        # The tolerance is what an honest swarm uses up.
        total_s = (took_s + 0.060 + 3 * TOLERANCE_S) / 0.9 + rng.gauss(0.0, 0.002)
        book.observe_round(steps, 1, round_s=total_s, legs_s=0.060, now=0.0)

    speeds = [book.believed(Claim(peer, HONEST), now=0.0).speed.rows_1_s for peer in nodes]
    assert speeds[0] > 0.007
    assert max(speeds[1:]) < 0.004


def test_a_newcomer_is_charged_rather_than_those_that_have_always_kept_their_word() -> None:
    book = ClaimBook()
    honest = [StageStep(ALICE, 10, 0.03, 0.0), StageStep(BOB, 10, 0.03, 0.0)]
    for _ in range(20):
        book.observe_round(honest, 1, round_s=0.06, legs_s=0.0, now=0.0)
    for _ in range(5):  # one request with a stage that takes 500 ms, and says 0
        told = [honest[0], StageStep(MALLORY, 10, 0.0, 0.0), honest[1]]
        book.observe_round(told, 1, round_s=0.56, legs_s=0.0, now=0.0)

    believed = [book.believed(Claim(peer, HONEST), now=0.0).speed.rows_1_s for peer in (ALICE, BOB, MALLORY)]
    assert max(believed[:2]) < 0.006
    assert believed[2] > 0.03


def test_a_stage_that_says_too_much_of_itself_does_not_clear_the_other_at_once() -> None:
    book = ClaimBook()
    slow = StageStep(MALLORY, 10, 1e-6, 0.0)
    book.observe_round([slow], 1, round_s=0.2, legs_s=0.0, now=0.0)
    before = book.believed(Claim(MALLORY, HONEST), now=0.0).speed.rows_1_s
    for _ in range(3):
        book.observe_round([slow, StageStep(BOB, 10, 4000.0, 0.0)], 1, round_s=0.2, legs_s=0.0, now=0.0)

    assert book.believed(Claim(MALLORY, HONEST), now=0.0).speed.rows_1_s > before / 2
    # All of the round, and not the 4,000 s: they may be another's words.
    assert book.believed(Claim(BOB, HONEST), now=0.0).speed.rows_1_s == pytest.approx(0.02, rel=1e-3)


def test_times_that_a_last_stage_writes_for_others_make_nobody_slower_than_the_round_was_long() -> None:
    book = ClaimBook()
    observe(book, ALICE, 0.003)
    for second in range(9):
        told = [StageStep(ALICE, 10, 4294.0, 4294.0), StageStep(MALLORY, 10, 0.0, 0.0)]
        book.observe_round(told, 1, round_s=0.070, legs_s=0.010, now=float(second))

    belief = book.believed(Claim(ALICE, HONEST), now=9.0)
    assert 10 * belief.speed.rows_1_s + belief.queue_s <= 0.060 * 1.001
    assert belief.speed.rows_1_s < 2 * 0.003


def test_legs_that_were_expected_too_long_make_nobody_much_faster_than_it_claims() -> None:
    book = ClaimBook()
    for _ in range(3):
        book.observe_round([StageStep(ALICE, 10, 0.03, 0.0)], 1, round_s=0.04, legs_s=0.25, now=0.0)

    assert book.believed(Claim(ALICE, HONEST), now=0.0).speed.rows_1_s == pytest.approx(0.003 / MAX_BETTER)


def test_a_shortfall_is_remembered_whatever_is_announced_next_and_fades_slowly() -> None:
    book = ClaimBook()
    observe(book, MALLORY, 0.010)

    def believed(claim_s: float, age_s: float) -> float:
        claim = Claim(MALLORY, (claim_s, claim_s, claim_s))
        return book.believed(claim, now=age_s).speed.rows_1_s

    assert believed(0.001, 0.0) == pytest.approx(0.010)
    assert believed(0.0001, 0.0) == pytest.approx(0.010)
    assert believed(0.001, HALF_LIFE_S) == pytest.approx((0.010 + 0.001) / 2)
    assert believed(0.001, 20 * HALF_LIFE_S) == pytest.approx(0.001, rel=0.01)


def test_a_node_that_was_slow_once_is_not_called_slow() -> None:
    book = ClaimBook()
    for seconds in (0.003, 0.003, 5.0, 0.003):
        observe(book, ALICE, seconds)

    assert book.believed(Claim(ALICE, HONEST), now=0.0).speed.rows_1_s == pytest.approx(0.003)


def test_a_width_that_was_not_measured_is_as_much_too_good_as_the_nearest_one() -> None:
    book = ClaimBook()
    observe(book, ALICE, 0.009)

    assert book.believed(Claim(ALICE, HONEST), now=0.0).speed == Speed(
        pytest.approx(0.009), pytest.approx(0.012), pytest.approx(0.06)
    )


def test_being_faster_than_claimed_at_one_width_says_nothing_of_the_others() -> None:
    book = ClaimBook()
    observe(book, ALICE, 0.001)

    belief = book.believed(Claim(ALICE, HONEST), now=0.0)
    assert belief.speed == Speed(pytest.approx(0.001), pytest.approx(0.004), pytest.approx(0.02))
    assert belief.note == ""


def test_a_measured_queue_counts_for_a_minute_rather_than_the_announced_one() -> None:
    book = ClaimBook()
    book.observe_step(ALICE, 10, 1, 0.03, 0.2, 0.0, now=0.0)

    assert book.believed(Claim(ALICE, HONEST, queue_s=0.0), now=0.0).queue_s == pytest.approx(0.2)
    assert book.believed(Claim(ALICE, HONEST, queue_s=0.0), now=60.0).queue_s == pytest.approx(0.1)
    assert book.believed(Claim(ALICE, HONEST, queue_s=0.0), now=3600.0).queue_s == pytest.approx(0.0, abs=1e-6)


def test_where_others_fell_short_a_newcomer_is_believed_less_but_never_much_less() -> None:
    book = ClaimBook()
    newcomer = Claim(CAROL, HONEST)
    for number in range(MIN_MEASURED):
        peer = PeerId(f"node-{number}")
        observe(book, peer, 0.0045)
        book.believed(Claim(peer, HONEST), now=0.0)
    assert book.believed(newcomer, now=0.0).speed.rows_1_s == pytest.approx(0.0045)
    for number in range(50):
        peer = PeerId(f"liar-{number}")
        observe(book, peer, 1.0)
        book.believed(Claim(peer, TOO_GOOD), now=0.0)
    assert book.believed(newcomer, now=0.0).speed.rows_1_s == pytest.approx(MAX_DISCOUNT * 0.003)


def test_what_one_node_claims_changes_nothing_of_what_was_measured_of_another() -> None:
    book = ClaimBook()
    observe(book, ALICE, 0.003)
    before = book.believed(Claim(ALICE, HONEST), now=0.0)
    for claimed in itertools.product(ABSURD, repeat=3):
        observe(book, MALLORY, claimed[0])
        book.believed(Claim(MALLORY, claimed), now=0.0)

    assert book.believed(Claim(ALICE, HONEST), now=0.0) == before


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_absurd_observations_leave_finite_beliefs(absurd: float) -> None:
    book = ClaimBook()
    book.observe_step(ALICE, 10, 1, absurd, absurd, absurd, now=0.0)
    book.observe_step(ALICE, 0, 1, 1.0, 1.0, 1.0, now=0.0)
    book.observe_step(ALICE, 10, 0, 1.0, 1.0, 1.0, now=0.0)
    book.observe_round([StageStep(ALICE, 10, absurd, absurd)], 1, round_s=absurd, legs_s=0.0, now=0.0)
    book.observe_round([StageStep(ALICE, 10, absurd, absurd)], 1, round_s=1.0, legs_s=0.0, now=0.0)
    belief = book.believed(Claim(ALICE, HONEST), now=0.0)

    assert FASTEST.rows_1_s <= belief.speed.rows_1_s <= SLOWEST_S
    assert math.isfinite(belief.speed.rows_256_s)
    assert 0.0 <= belief.queue_s <= MAX_QUEUE_S


@pytest.mark.parametrize("round_s", [0.0, 1e-9, 0.1, 130.0, 2500.0, 1e308])
@pytest.mark.parametrize("legs_s", [-1e308, 0.0, 0.1, 200.0, 1e308])
@pytest.mark.parametrize("told_s", [0.0, 0.1, 70.0, 1e308])
def test_what_is_remembered_of_any_round_is_within_bounds(round_s: float, legs_s: float, told_s: float) -> None:
    book = ClaimBook()
    for rows in (1, 2**40):
        for num_layers in (1, 10):
            stages = [StageStep(ALICE, num_layers, told_s, told_s), StageStep(BOB, num_layers, told_s, told_s)]
            for _ in range(3):
                book.observe_round(stages, rows, round_s=round_s, legs_s=legs_s, now=0.0)

    for node in book.measurements(0.0):
        samples = [sample for samples in node.samples for sample in samples]
        assert samples
        assert all(1 <= rows <= MAX_SAMPLE_ROWS and 0.0 <= seconds <= SLOWEST_S for rows, seconds in samples)
        assert all(0.0 <= excess_s <= SLOWEST_S for excess_s in node.excess_s)
    assert all(-MAX_MESSAGE_S <= each <= MAX_MESSAGE_S for each in book.message_samples(0.0)[0])


def test_what_is_restored_is_within_the_same_bounds() -> None:
    book = ClaimBook()
    node = Measurements(ALICE, (((2**40, 1e9),), (), ()), (0.0, None, None), (1e9, 0.0, 0.0), 10**9)
    book.restore([node], [-1e9, 1e9, math.nan], now=0.0)

    (kept,) = book.measurements(0.0)
    assert kept.samples[0] == ((MAX_SAMPLE_ROWS, SLOWEST_S),)
    assert kept.excess_s[0] == SLOWEST_S
    assert book.message_samples(0.0)[0] == [-MAX_MESSAGE_S, MAX_MESSAGE_S]


def test_a_flood_of_identities_is_forgotten_oldest_first() -> None:
    book = ClaimBook()
    observe(book, MALLORY, 1.0)
    for number in range(MAX_PEERS):
        observe(book, PeerId(str(number)), 0.001)

    assert not book.believed(Claim(MALLORY, TOO_GOOD), now=0.0).is_measured
    assert book.believed(Claim(PeerId("0"), TOO_GOOD), now=0.0).is_measured


def test_routes_lead_past_a_liar_after_its_first_request() -> None:
    """The effect on the choice, without a planner: who is best by belief serves, and is measured doing it."""
    book = ClaimBook()
    claims = [Claim(ALICE, HONEST), Claim(BOB, (0.004, 0.005, 0.03)), Claim(MALLORY, TOO_GOOD)]
    really_s = {ALICE: 0.003, BOB: 0.004, MALLORY: 0.05}
    served = []
    for request in range(6):
        best = min(claims, key=lambda claim: book.believed(claim, now=float(request)).speed.rows_1_s).peer
        served.append(best)
        observe(book, best, really_s[best], now=float(request))

    assert served[0] == MALLORY
    assert served.count(MALLORY) == 1
    assert statistics.mode(served) == ALICE


def test_of_a_round_with_a_group_nodes_are_believed_within_the_round_and_not_cleared_of_what_was_charged() -> None:
    book, group = ClaimBook(), PeerId("a group")

    def shared(seconds: float, of_group_s: float, round_s: float) -> None:
        steps = [StageStep(BOB, 10, seconds, 0.0), StageStep(group, 10, of_group_s, 0.0)]
        book.observe_shared_round(steps, 1, unknown={group}, round_s=round_s, now=0.0)

    for _ in range(9):
        shared(0.05, 0.1, 1.0)
    belief = book.believed(Claim(BOB, HONEST), now=0.0)
    assert (belief.is_measured, belief.speed.rows_1_s) == (True, pytest.approx(0.005))
    assert not book.believed(Claim(group, HONEST), now=0.0).is_measured
    for _ in range(9):
        shared(0.5, 0.5, 0.1)  # more than has passed
    assert book.believed(Claim(BOB, HONEST), now=0.0).speed.rows_1_s == pytest.approx(0.005)
    slow = [StageStep(BOB, 10, 0.01, 0.0)]
    for _ in range(9):
        book.observe_round(slow, 1, round_s=1.0, legs_s=0.0, now=0.0)
    charged = book.believed(Claim(BOB, HONEST), now=0.0).speed.rows_1_s
    for _ in range(9):
        shared(0.01, 0.9, 1.0)
    assert book.believed(Claim(BOB, HONEST), now=0.0).speed.rows_1_s == pytest.approx(charged, rel=0.01)
    for round_s in (math.nan, math.inf, -1.0):
        shared(0.01, 0.9, round_s)
    assert book.believed(Claim(BOB, HONEST), now=0.0).speed.rows_1_s == pytest.approx(charged, rel=0.01)
