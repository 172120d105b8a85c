"""The drafter that copies, against a search through the text by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.client.drafters.suffix import (
    LOOK_BACK_TOKENS,
    SuffixAutomaton,
    SuffixCorpus,
    SuffixDrafter,
)
from fusion_node.engine.drafts import Verified

Tokens = list[int]
TEXT = st.lists(st.integers(0, 2), max_size=28)
PATH = st.lists(st.integers(0, 3), max_size=6)


def ends_of(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where in the text the part ends."""
    size = len(part)
    return [stop for stop in range(size, len(text) + 1) if list(text[stop - size : stop]) == list(part)]


def longest_end(text: Sequence[int], string: Sequence[int], *, is_own_end: bool) -> Tokens:
    """The longest end of the string that occurs in the text; for the text's own end, earlier than there."""
    for start in range(len(string)):
        ends = ends_of(text, string[start:])
        if [end for end in ends if not is_own_end or end < len(text)]:
            return list(string[start:])
    return []


def followers(text: Sequence[int], part: Sequence[int]) -> Counter[int]:
    return Counter(text[end] for end in ends_of(text, part) if end < len(text))


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_automaton_knows_every_substring_and_what_followed_it_how_often(text: Tokens) -> None:
    automaton = SuffixAutomaton()
    automaton.append(text)
    assert len(automaton.length) <= max(2 * len(text), 2)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            part = text[start:stop]
            match = (0, 0)
            for token in part:
                match = automaton.step(match, token)
            assert match[1] == len(part)
            assert {token: count for count, token in automaton.continuations(match[0])} == followers(text, part)
            assert automaton.occurrences[match[0]] == len(ends_of(text, part))


@settings(max_examples=300, deadline=None)
@given(prompt=TEXT, growth=st.lists(st.tuples(st.lists(PATH, max_size=3), PATH), max_size=5))
def test_match_is_the_longest_end_that_occurred_while_the_text_grows(
    prompt: Tokens, growth: list[tuple[list[Tokens], Tokens]]
) -> None:
    drafter, text = SuffixDrafter(), list(prompt)
    drafter.begin(prompt)
    for paths, tokens in [*growth, ([[], [0], [0, 1, 2], [2]], [])]:
        # What was walked before must not be taken for the match in a longer text.
        for path in [*paths, tokens]:
            expected = longest_end(text, [*text, *path], is_own_end=not path)
            assert drafter.match_length(path) == len(expected)
            (candidates,) = drafter.propose([path], width=8)
            after = followers(text, expected) if expected else Counter()
            assert set(after) <= {token for token, _ in candidates}
            assert all(0 < confidence <= 1 for _, confidence in candidates)
            assert [c for _, c in candidates] == sorted((c for _, c in candidates), reverse=True)
        drafter.extend(Verified(tokens))
        text += tokens


@settings(max_examples=100, deadline=None)
@given(earlier=st.lists(TEXT, min_size=1, max_size=3), prompt=TEXT, path=PATH, tokens=PATH)
def test_match_in_earlier_texts_is_found_too_and_never_across_two_of_them(
    earlier: list[Tokens], prompt: Tokens, path: Tokens, tokens: Tokens
) -> None:
    corpus = SuffixCorpus()
    for text in earlier:
        corpus.add(text)
    drafter = SuffixDrafter(corpus)
    drafter.begin(prompt)
    drafter.extend(Verified(tokens))
    text = [*prompt, *tokens]
    own = longest_end(text, [*text, *path], is_own_end=not path)
    others = [longest_end(other, [*text, *path], is_own_end=False) for other in earlier]
    assert drafter.match_length(path) == max(map(len, [own, *others]))


def test_copied_passage_is_drafted_to_its_end_with_growing_trust() -> None:
    passage = list(range(100, 160))
    drafter = SuffixDrafter()
    drafter.begin([*passage, 1, 2, 3, *passage[:3]])
    path: Tokens = []
    confidences = []
    while len(path) < len(passage) - 3:
        ((token, confidence), *_) = drafter.propose([path], width=4)[0]
        path.append(token)
        confidences.append(confidence)
    assert path == passage[3:]
    assert confidences == sorted(confidences)
    assert confidences[0] < 0.6 < 0.99 < confidences[-1]


def test_of_two_continuations_the_more_frequent_comes_first_and_then_the_more_recent() -> None:
    drafter = SuffixDrafter()
    drafter.begin([7, 8, 1, 7, 8, 2, 7, 8, 2, 7, 8, 3, 7, 8])
    assert [token for token, _ in drafter.propose([()], width=3)[0]] == [2, 3, 1]


def test_width_is_filled_from_shorter_ends() -> None:
    drafter = SuffixDrafter()
    drafter.begin([5, 8, 9, 1, 6, 8, 9, 2, 5, 8, 9])
    assert [token for token, _ in drafter.propose([()], width=1)[0]] == [1]
    assert [token for token, _ in drafter.propose([()], width=4)[0]] == [1, 2]


def test_text_without_repetition_is_not_drafted() -> None:
    drafter = SuffixDrafter(SuffixCorpus())
    drafter.begin(range(500))
    assert drafter.propose([(), (3, 501)], width=4) == [[], []]
    drafter.begin(())
    assert drafter.propose([(), (3,)], width=4) == [[], []]


def test_answer_is_there_for_the_next_one() -> None:
    corpus = SuffixCorpus()
    first = SuffixDrafter(corpus)
    first.begin([1, 2, 3])
    first.extend(Verified([4, 5, 6, 7]))
    first.close()
    second = SuffixDrafter(corpus)
    second.begin([9, 4, 5])
    assert second.propose([(), (6,)], width=2)[0][0][0] == 6
    assert second.propose([(6,)], width=2)[0][0][0] == 7


def test_corpus_takes_of_a_conversation_only_what_is_new() -> None:
    corpus, talk = SuffixCorpus(), list(range(5_000))
    corpus.add(talk)
    corpus.add(talk)
    assert corpus.num_tokens == 5_001
    corpus.add([*talk, 7, 7, 7])
    assert corpus.num_tokens == 5_001 + LOOK_BACK_TOKENS + 3 + 1


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 70), max_size=30), limit=st.integers(0, 100))
def test_corpus_never_holds_more_than_it_may_and_keeps_the_latest(sizes: list[int], limit: int) -> None:
    corpus, text = SuffixCorpus(limit), list[int]()
    for index, size in enumerate(sizes):
        text = [index * 100 + i for i in range(size)]
        corpus.add(text)
        assert corpus.num_tokens <= limit
    latest = text[-(limit // 2 - 1) :] if limit >= 4 else []
    assert not latest or any(a.common_prefix(latest) == len(latest) for a in corpus.automata)


def test_very_long_answer_is_matched_in_pieces_and_memory_stays_bounded() -> None:
    drafter = SuffixDrafter(max_text_tokens=600)
    drafter.begin(range(600))
    for start in range(600, 5_000, 7):
        drafter.extend(Verified(range(start, start + 7)))
    held = sum(a.num_tokens for a in (drafter._own, *drafter._others))
    assert held <= 2 * (600 + LOOK_BACK_TOKENS) + 7
    # What was said at the end of the piece before is still known.
    last = 600 + 7 * -(-(5_000 - 600) // 7) - 1
    assert drafter.propose([(last - 400, last - 399)], width=1)[0][0][0] == last - 398


@pytest.mark.parametrize("text", [[0] * 3_000, [0, 1] * 1_500, list(range(3_000))])
def test_uniform_text_costs_no_more_than_any_other(text: Tokens) -> None:
    automaton = SuffixAutomaton()
    automaton.append(text)
    assert len(automaton.length) <= 2 * len(text)
    assert automaton.suffix[1] == (len(text) - 1 if text[1] == 0 else len(text) - 2 if text[2] == 0 else 0)
