"""Recycled tokens, and several drafters as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fusion_node.client.drafters.recycling import NUM_KEPT, RecyclingDrafter, RecyclingTable, most_probable
from fusion_node.client.drafters.suffix import SuffixDrafter
from fusion_node.client.drafting import MAX_KEPT_NOISE, Candidate, GumbelNoise, MixedDrafter, check_same_tokens
from fusion_node.client.sampling import SamplingParams, choose_token, gumbel_noise
from fusion_node.engine.draft_prompts import Prompt
from fusion_node.engine.drafts import Proposals, SharedNoise, Verified
from fusion_node.errors import ConfigError
from scheduler.speculation import Calibration


def chosen(token: int, ids: Sequence[int], probabilities: Sequence[float]) -> Verified:
    return Verified(
        [token],
        top_ids_TK=np.array([ids], dtype=np.int32),
        top_probabilities_TK=np.array([probabilities], dtype=np.float32),
    )


class Scripted:
    """A drafter that says after every path what it was told to, or raises it."""

    def __init__(self, name: str, says: list[tuple[int, float]] | Exception, *, fails_in: str = "propose") -> None:
        self.name = name
        self.calls: list[str] = []
        self.asked: list[tuple[int, ...]] = []
        self._says = says
        self._fails_in = fails_in

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if isinstance(self._says, Exception) and name == self._fails_in:
            raise self._says

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        self._call("begin")

    def extend(self, verified: Verified) -> None:
        self._call("extend")

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        self._call("propose")
        self.asked += [tuple(path) for path in paths]
        return [list(self._says) if isinstance(self._says, list) else [] for _ in paths]

    def close(self) -> None:
        self._call("close")


# recycling


@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2_000)),
    num=st.integers(1, 12),
    scale=st.sampled_from([0.0, 1.0, 300.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_most_probable_are_those_of_a_full_sort(shape: tuple[int, int], num: int, scale: float, seed: int) -> None:
    logits = (np.random.default_rng(seed).permutation(shape[0] * shape[1]).reshape(shape) / 1e3 * scale).astype("f4")
    ids, probabilities = most_probable(logits, num)
    num = min(num, shape[1])
    wide = np.exp(logits.astype("f8") - logits.max(axis=1, keepdims=True))
    wide /= wide.sum(axis=1, keepdims=True)
    if scale:
        assert np.array_equal(ids, np.argsort(-logits, axis=1)[:, :num])
    assert all(len(set(row)) == num for row in ids.tolist())
    np.testing.assert_allclose(probabilities, np.take_along_axis(wide, ids.astype(int), 1), rtol=1e-4, atol=1e-6)


def test_successors_last_seen_are_proposed_again_for_the_end_of_each_path() -> None:
    table = RecyclingTable(100)
    drafter = RecyclingDrafter(table)
    drafter.begin([4, 5])
    drafter.extend(chosen(6, [6, 7], [0.75, 0.125]))
    drafter.extend(chosen(5, [9, 5, 8], [0.5, 0.25, 0.125]))
    expected = [[(6, 0.75), (7, 0.125)], [(9, 0.5), (5, 0.25), (8, 0.125)], [], [(6, 0.75), (7, 0.125)]]
    assert drafter.propose([(), (6,), (6, 9), (9, 5)], width=8) == expected
    assert drafter.propose([(6,)], width=1) == [[(9, 0.5)]]
    drafter.extend(chosen(1, [1], [0.5]))
    other = RecyclingDrafter(table)
    other.begin([5])
    assert other.propose([()], width=8) == [[(1, 0.5)]]


def test_without_probabilities_the_latest_successor_comes_first_and_the_others_move_back() -> None:
    drafter = RecyclingDrafter(RecyclingTable(10))
    drafter.begin([0])
    drafter.extend(Verified([1, 0, 2, 0, 1, 0]))
    (found,) = drafter.propose([()], width=8)
    assert [token for token, _ in found] == [1, 2]
    assert found[0][1] > found[1][1] > 0


@settings(max_examples=100, deadline=None)
@given(
    vocabulary=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.integers(0, 20), st.none() | st.lists(st.integers(0, 20), unique=True, max_size=12)), max_size=40
    ),
)
def test_table_is_bounded_and_knows_no_token_beyond_the_vocabulary(
    vocabulary: int, steps: list[tuple[int, list[int] | None]]
) -> None:
    table = RecyclingTable(vocabulary)
    drafter = RecyclingDrafter(table)
    before = table.num_bytes
    drafter.begin([20])
    for token, ids in steps:
        drafter.extend(Verified([token]) if ids is None else chosen(token, ids, [1 / (2 + i) for i in range(len(ids))]))
        for found in drafter.propose([(), (token,), (token, 3), (19,)], width=20):
            tokens = [token for token, _ in found]
            assert len(tokens) <= min(NUM_KEPT, vocabulary)
            assert len(set(tokens)) == len(tokens)
            assert all(0 <= token < vocabulary for token in tokens)
            assert all(0 < confidence <= 1 for _, confidence in found)
    assert table.num_bytes == before == vocabulary * 48


def test_what_else_was_probable_is_read_off_the_logits_where_nobody_has_done_so() -> None:
    logits = np.random.default_rng(1).normal(0, 2, (2, 300)).astype(np.float32)
    ids, probabilities = most_probable(logits, NUM_KEPT)
    tables = RecyclingTable(300), RecyclingTable(300)
    told = Verified([5, 6], logits_TV=logits), Verified([5, 6], top_ids_TK=ids, top_probabilities_TK=probabilities)
    for table, verified in zip(tables, told, strict=True):
        drafter = RecyclingDrafter(table)
        drafter.begin([4])
        drafter.extend(verified)
    for one, other in zip(*(table.successors([4, 5]) for table in tables), strict=True):
        assert np.array_equal(one, other)
        assert one.any()


def test_noise_of_the_position_puts_the_token_first_that_it_will_choose() -> None:
    rng, vocabulary = np.random.default_rng(0), 64
    logits = rng.normal(0, 2, vocabulary).astype(np.float32)
    ids, probabilities = most_probable(logits[None], 8)
    table, hits, covered, plain = RecyclingTable(vocabulary), 0, 0, 0
    table.learn(3, ids[0], probabilities[0])
    for seed in range(200):
        noise = GumbelNoise(seed=seed, temperature=0.7, vocabulary=vocabulary)
        drafter = RecyclingDrafter(table)
        drafter.begin([1, 2, 3], noise)
        (with_noise,) = drafter.propose([(5, 3)], width=8)
        token = choose_token(logits, SamplingParams(temperature=0.7), seed=seed, position=5, seen=())
        hits += with_noise[0][0] == token
        covered += token in ids
        plain += int(ids[0, 0]) == token
        assert sorted(t for t, _ in with_noise) == sorted(ids[0].tolist())
        assert [c for _, c in with_noise] == sorted((c for _, c in with_noise), reverse=True)
    assert hits == covered > 1.5 * plain


def test_noise_is_that_of_the_sampler_and_little_of_it_is_kept() -> None:
    noise = GumbelNoise(seed=5, temperature=0.5, vocabulary=40)
    for position in range(3 * MAX_KEPT_NOISE):
        assert np.array_equal(noise.at(position), gumbel_noise(5, position, 40).astype(np.float32))
        assert noise.at(position) is noise.at(position)
    assert len(noise._kept) == MAX_KEPT_NOISE


# several as one


def test_of_a_candidate_proposed_twice_the_better_calibrated_probability_wins() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.record("boaster", 0.8, False)
        calibration.record("modest", 0.3, True)
    mixed = MixedDrafter(
        [Scripted("boaster", [(1, 0.8), (2, 0.8)]), Scripted("modest", [(3, 0.3), (1, 0.3)])],
        calibration,
        vocabulary=100,
    )
    mixed.begin([0])
    (found,) = mixed.propose([()], width=8)
    sure, doubted = calibration.probability("modest", 0.3), calibration.probability("boaster", 0.8)
    assert sure > 0.9 > 0.1 > doubted
    assert found == [Candidate(1, sure, "modest"), Candidate(3, sure, "modest"), Candidate(2, doubted, "boaster")]
    assert [[c.probability for c in found] for found in mixed.propose([()], width=1)] == [[sure]]


@settings(max_examples=100, deadline=None)
@given(
    says=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 0.85)), max_size=6, unique_by=lambda c: c[0]), max_size=4
    ),
    width=st.integers(1, 8),
)
def test_every_candidate_is_merged_once_with_its_best_probability(
    says: list[list[tuple[int, float]]], width: int
) -> None:
    mixed = MixedDrafter(
        [Scripted(f"drafter {index}", said) for index, said in enumerate(says)], Calibration(), vocabulary=100
    )
    mixed.begin([])
    (found,) = mixed.propose([(4, 4)], width)
    expected: dict[int, float] = {}
    for said in says:
        for token, confidence in said[:width]:
            expected[token] = max(expected.get(token, 0.0), confidence)
    best = sorted(expected.values(), reverse=True)[:width]
    assert [candidate.probability for candidate in found] == pytest.approx(best)
    assert all(expected[c.token] == pytest.approx(c.probability) for c in found)
    assert len({candidate.token for candidate in found}) == len(found)


def test_record_of_a_source_grows_by_what_the_text_goes_on_with() -> None:
    counts: dict[tuple[str, float], list[bool]] = defaultdict(list)

    class Counting(Calibration):
        def record(self, source: str, confidence: float, is_chosen: bool) -> None:
            counts[source, confidence].append(is_chosen)

    mixed = MixedDrafter([Scripted("a", [(7, 0.5), (8, 0.25)])], Counting(), vocabulary=100)
    mixed.begin([1])
    mixed.propose([(), (7,), (8,), (7, 9)], width=2)
    mixed.propose([(7, 9)], width=2)  # asked again, and counted once
    mixed.extend(Verified([7, 9]))
    assert counts == {("a", 0.5): [True, False], ("a", 0.25): [False, False]}
    mixed.extend(Verified([8, 7]))
    assert counts == {("a", 0.5): [True, False, False], ("a", 0.25): [False, False, True]}


def test_where_a_fast_drafter_is_sure_the_slow_one_is_not_asked() -> None:
    fast, slow = SuffixDrafter(), Scripted("slow", [(5, 0.5)])
    mixed = MixedDrafter([fast, slow], Calibration(), vocabulary=200)
    passage = list(range(100, 150))
    mixed.begin([*passage, 1, *passage[:20]])
    found = mixed.propose([(), (77,)], width=4)
    assert found[0][0] == Candidate(passage[20], found[0][0].probability, "suffix")
    assert [c.source for c in found[1]] == ["slow"]
    assert slow.asked == [(77,)]


@pytest.mark.parametrize("where", ["begin", "extend", "propose", "close"])
def test_drafter_that_fails_is_left_out_and_told_once_without_any_of_the_text(where: str) -> None:
    bad = Scripted("bad", RuntimeError("secret text 424242"), fails_in=where)
    good = Scripted("good", [(3, 0.5)])
    mixed = MixedDrafter([bad, good], Calibration(), vocabulary=100)
    with capture_logs() as logs:
        for _ in range(2):
            mixed.begin([424242])
            mixed.extend(Verified([424242]))
            assert [[c.token for c in found] for found in mixed.propose([(), (424242,)], width=4)] == [[3], [3]]
            mixed.close()
    assert bad.calls.count(where) == 1
    assert bad.calls[-1] == where
    assert mixed.names == ("good",)
    assert [(entry["log_level"], entry["drafter"], entry["error"]) for entry in logs] == [
        ("warning", "bad", "RuntimeError")
    ]
    assert not any(secret in str(logs) for secret in ("secret", "424242"))


@pytest.mark.parametrize(
    "said", [[(-1, 0.5)], [(100, 0.5)], [(10**9, 0.5)], [(1, 0.0)], [(1, float("nan"))], [(1, 1.5)]]
)
def test_drafter_that_says_what_none_may_say_is_left_out(said: list[tuple[int, float]]) -> None:
    mixed = MixedDrafter([Scripted("bad", said)], Calibration(), vocabulary=100)
    mixed.begin([1])
    with capture_logs() as logs:
        assert mixed.propose([()], width=4) == [[]]
    assert mixed.names == ()
    assert len(logs) == 1


def test_draft_model_with_other_tokens_is_refused_with_how_many_it_shares() -> None:
    target = {f"token {index}": index for index in range(1_000)}
    check_same_tokens(target, target, name="twin")
    # Of one family: padded otherwise, and with special tokens of its own.
    sibling = {token: index for token, index in target.items() if index < 980} | {"<|new|>": 980, "<|more|>": 1_001}
    check_same_tokens(sibling, target, name="sibling")
    shifted = {token: (index + 1) % 1_000 for token, index in target.items()}
    with pytest.raises(ConfigError, match=r"shifted cannot draft: of the model's 1000 tokens it has 0; choose"):
        check_same_tokens(shifted, target, name="shifted")
    part = {token: index for token, index in target.items() if index < 500}
    with pytest.raises(ConfigError, match=r"of the model's 1000 tokens it has 500"):
        check_same_tokens(part, target, name="part")


def test_no_token_is_in_what_drafters_are_told_and_say_looks_like() -> None:
    secret = 271828
    ids = np.array([[secret]], dtype=np.int32)
    rows = np.full((1, 1), secret, dtype=np.float32)
    shown = [
        Verified([secret], rows_TD=rows, taps_TLD=rows[None], top_ids_TK=ids, top_probabilities_TK=rows),
        Candidate(secret, 0.5, "source"),
        Prompt("topic", f"text {secret}"),
    ]
    assert str(secret) not in repr(shown)
