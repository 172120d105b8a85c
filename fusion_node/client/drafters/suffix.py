"""Drafts from what was written before: where the end of the text has occurred already, the same may follow again.

The longest end of text and path that occurs earlier, in this answer's own text or in the user's earlier ones, is found
by suffix automata, exactly and in constant time per token. The longer it is, the more its continuation is trusted, so a
copied passage is drafted as deep as anybody asks, and a chance repetition hardly at all.

An automaton of n tokens has at most 2 n states and 3 n transitions. Memory is bounded by the tokens that may be
indexed, some 150 bytes each.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; prompt look-up decoding;
SuffixDecoding, Oliaro et al. 2024; escape to shorter contexts as in PPM, Cleary & Witten 1984.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter

from fusion_node.engine.drafts import Proposals, SharedNoise, Verified

MAX_TEXT_TOKENS = 65_536
"""Of one answer that are indexed in one piece: 0.15 s for all of them at its begin, 10 MB."""

MAX_CORPUS_TOKENS = 131_072
"""Of the user's earlier texts: some hundred pages."""

MAX_ADDED_TOKENS = 16_384
"""Of one answer's text that earlier texts are extended by, its end: 40 ms."""

LOOK_BACK_TOKENS = 256
"""Longest match that is looked for in earlier texts when an answer begins."""

_MAX_COUNTED = 32
"""Suffixes of every prefix whose occurrences are counted, the longest. Natural text has less than half as many that
occur in different places; without a limit, one token repeated n times would take n steps each time."""

_MAX_LOOKED_AT = 8
"""Continuations of one context that are looked at, the most recent: short contexts have thousands."""

_MAX_CONTEXTS = 3
"""Contexts, longest first, that one path's candidates are taken from."""

_LEAST_REST = 0.01
"""Where less than this is left to believe, shorter contexts are not asked."""

_TRUST = tuple(1 - 0.75**length for length in range(64))
"""By length of the match, how much of its continuation is believed before anything was measured. Measured with greedy
answers of a model of 135M parameters: .46 for two tokens, .61 for three, .76 for four or more; where whole passages are
copied, .97."""


_FIRST, _SECOND = itemgetter(0), itemgetter(1)


class SuffixAutomaton:
    """All substrings of a text that grows, with what follows each and how often.

    State 0 is the empty string. Every other state stands for strings that occur at the same places: suffixes of one
    another, the longest of ``length[state]`` tokens; the next shorter string that occurs elsewhere too is one of
    ``link[state]``.
    """

    def __init__(self) -> None:
        self.length = array("i", [0])
        self.link = array("i", [-1])
        self.occurrences = array("i", [0])
        """How often the state's strings occur; too few of those with more than _MAX_COUNTED longer ones."""
        # Nearly all states have one transition: a dict for each would take ten times the memory.
        self._token = array("q", [-1])
        self._next = array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}
        """State -> all its transitions, where there are several; the last ones are those that were used last."""
        self._end = 0
        self.num_tokens = 0

    def append(self, tokens: Iterable[int]) -> None:
        """Lets the text grow. Negative tokens end one text and begin another: nothing matches across them."""
        for token in tokens:
            self._append(token)

    @property
    def suffix(self) -> tuple[int, int]:
        """The longest end of the text that occurs earlier in it as well: its state and its length."""
        state = max(self.link[self._end], 0)
        return state, self.length[state]

    def step(self, match: tuple[int, int], token: int) -> tuple[int, int]:
        """From the longest end of a string that occurs here, state and length, to that of the string and a token.

        The state may be from before the text has grown.
        """
        state, length = match
        tokens, more = self._token, self._more
        while True:
            if tokens[state] == token:
                return self._next[state], length + 1
            if state in more and (after := more[state].get(token, -1)) >= 0:
                return after, length + 1
            state = self.link[state]
            if state < 0:
                return 0, 0
            # The state may have been divided since, and what it links to then be longer than the match.
            length = min(length, self.length[state])

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """How many tokens of the beginning occur here side by side."""
        state = 0
        for index, token in enumerate(tokens):
            state = self._go(state, token)
            if state < 0:
                return index
        return len(tokens)

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """How often the state's strings were followed by which token, the most often first.

        Of many tokens the most recent, and of equals the more recent first.
        """
        more = self._more.get(state)
        if more is None:
            token = self._token[state]
            return [(self.occurrences[self._next[state]], token)] if token >= 0 else []
        occurrences = self.occurrences
        found = [(occurrences[more[t]], t) for t in itertools.islice(reversed(more), _MAX_LOOKED_AT) if t >= 0]
        found.sort(key=_FIRST, reverse=True)
        return found

    def _go(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _set(self, state: int, token: int, target: int) -> None:
        more = self._more.get(state)
        if more is not None:
            more[token] = target
        elif self._next[state] < 0 or self._token[state] == token:
            self._token[state], self._next[state] = token, target
            return
        else:
            self._more[state] = {self._token[state]: self._next[state], token: target}
        if self._token[state] == token:
            self._next[state] = target

    def _new(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.occurrences.append(0)
        self._token.append(-1)
        self._next.append(-1)
        return len(self.length) - 1

    def _append(self, token: int) -> None:
        links, lengths = self.link, self.length
        self.num_tokens += 1
        new = self._new(lengths[self._end] + 1, 0)
        state = self._end
        while state >= 0 and (target := self._go(state, token)) < 0:
            self._set(state, token, new)
            state = links[state]
        if state >= 0:
            self._mark_used(state, token)
            if lengths[target] == lengths[state] + 1:
                links[new] = target
            else:
                links[new] = links[target] = clone = self._clone(target, lengths[state] + 1)
                while state >= 0 and self._go(state, token) == target:
                    self._set(state, token, clone)
                    state = links[state]
        self._end = state = new
        for _ in range(_MAX_COUNTED):
            if state <= 0:
                break
            self.occurrences[state] += 1
            state = links[state]

    def _clone(self, state: int, length: int) -> int:
        clone = self._new(length, self.link[state])
        self._token[clone], self._next[clone] = self._token[state], self._next[state]
        self.occurrences[clone] = self.occurrences[state]
        if state in self._more:
            self._more[clone] = dict(self._more[state])
        return clone

    def _mark_used(self, state: int, token: int) -> None:
        """The token has followed the state's strings, and all shorter ones, once more."""
        for _ in range(_MAX_COUNTED):
            if state < 0:
                break
            more = self._more.get(state)
            if more is not None:
                more[token] = more.pop(token)
            state = self.link[state]


class SuffixCorpus:
    """Texts of a user's earlier answers, for the next ones. They stay in this process.

    Two automata: when the younger has half of what is allowed, the older is given up and a new one begun. So nothing is
    ever built anew, and the latest half is always there.

    Args:
        max_tokens: of all texts together.
    """

    def __init__(self, max_tokens: int = MAX_CORPUS_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_texts = 0
        self._automata: tuple[SuffixAutomaton, ...] = ()

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        """That hold the texts, the younger first."""
        return self._automata

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automaton in self._automata)

    def add(self, text: Sequence[int]) -> None:
        """Takes up a text, or of a very long one the end; of a conversation that it has, only what is new."""
        known = max((automaton.common_prefix(text) for automaton in self._automata), default=0)
        longest = min(MAX_ADDED_TOKENS, self._max_tokens // 2 - 1)
        if known == len(text) or longest < 1:
            return
        # With some of what it has, for the new to be found by.
        text = text[max(0, known - LOOK_BACK_TOKENS) :][-longest:]
        if not self._automata or self._automata[0].num_tokens + len(text) + 1 > self._max_tokens // 2:
            self._automata = (SuffixAutomaton(), *self._automata[:1])
        # Every text ends with a token of its own, so that no two ends are taken for a repetition.
        self._num_texts += 1
        self._automata[0].append([*text, -1 - self._num_texts])


class _Walk:
    """A path of tokens, as far as it was walked, and the paths that go on.

    Attributes:
        text_length: of the own text when ``own`` and ``candidates`` were found.
        own, others: the longest match in the own text, and in each of the other automata.
        candidates: that were asked for with this ``width``.
    """

    __slots__ = ("after", "candidates", "others", "own", "text_length", "width")

    def __init__(self, text_length: int, own: tuple[int, int], others: list[tuple[int, int]]) -> None:
        self.text_length = text_length
        self.own = own
        self.others = others
        self.after: dict[int, _Walk] = {}
        self.width = 0
        self.candidates: list[tuple[int, float]] = []


class SuffixDrafter:
    """A Drafter (fusion_node.client.drafting) that copies.

    Args:
        corpus: earlier texts to copy from, which the answer's own is added to at its end; None: only from its own.
        max_text_tokens: of the answer's own text that are indexed in one piece.
    """

    def __init__(self, corpus: SuffixCorpus | None = None, *, max_text_tokens: int = MAX_TEXT_TOKENS) -> None:
        self._corpus = corpus
        self._max_text_tokens = max_text_tokens
        self._text: list[int] = []
        self._own = SuffixAutomaton()
        self._others: list[SuffixAutomaton] = []
        """Whatever else is matched: an earlier piece of the own text, and the corpus."""
        self._num_corpus = 0
        self._root = _Walk(0, (0, 0), [])

    @property
    def name(self) -> str:
        return "suffix"

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        """See Drafter."""
        self._start(prompt)

    def extend(self, verified: Verified) -> None:
        """See Drafter."""
        tokens = verified.tokens
        self._text.extend(tokens)
        root: _Walk | None = self._root
        others = self._root.others
        for token in tokens:
            root = None if root is None else root.after.get(token)
            others = [a.step(match, token) for a, match in zip(self._others, others, strict=True)]
        if self._own.num_tokens + len(tokens) > self._max_text_tokens + LOOK_BACK_TOKENS:
            # Only an answer of very many tokens comes here. The piece before the last one is given up.
            self._others = [self._own, *self._others[-self._num_corpus :]] if self._num_corpus else [self._own]
            self._own, root = SuffixAutomaton(), None
            self._own.append(self._text[-LOOK_BACK_TOKENS:])
            others = [self._match_end(automaton) for automaton in self._others]
        else:
            self._own.append(tokens)
        self._root = root or _Walk(0, (0, 0), others)
        self._root.own, self._root.text_length, self._root.width = self._own.suffix, len(self._text), 0

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        """See Drafter."""
        proposals = []
        for path in paths:
            walk = self._walk(path)
            if walk.width != width:
                walk.width, walk.candidates = width, self._continue(walk, width)
            proposals.append(walk.candidates)
        return proposals

    def close(self) -> None:
        """See Drafter."""
        if self._corpus is not None:
            self._corpus.add(self._text)
        self._text, self._own, self._others, self._num_corpus = [], SuffixAutomaton(), [], 0
        self._root = _Walk(0, (0, 0), [])

    def match_length(self, path: Sequence[int]) -> int:
        """Tokens of the longest end of text and path that has occurred before."""
        walk = self._walk(path)
        return max(length for _, length in (walk.own, *walk.others))

    def _start(self, text: Sequence[int]) -> None:
        self._text = list(text)
        self._own = SuffixAutomaton()
        self._own.append(self._text[-self._max_text_tokens :])
        self._others = list(self._corpus.automata) if self._corpus is not None else []
        self._num_corpus = len(self._others)
        others = [self._match_end(automaton) for automaton in self._others]
        self._root = _Walk(len(self._text), self._own.suffix, others)

    def _match_end(self, automaton: SuffixAutomaton) -> tuple[int, int]:
        match = (0, 0)
        for token in self._text[-LOOK_BACK_TOKENS:]:
            match = automaton.step(match, token)
        return match

    def _walk(self, path: Sequence[int]) -> _Walk:
        walk, own, text_length = self._root, self._own, len(self._text)
        for token in path:
            after = walk.after.get(token)
            if after is None:
                others = [a.step(m, token) for a, m in zip(self._others, walk.others, strict=True)]
                after = walk.after[token] = _Walk(text_length, own.step(walk.own, token), others)
            elif after.text_length != text_length:
                # The text has grown, and what the path ends with may occur in it where it did not.
                after.own, after.text_length, after.width = own.step(walk.own, token), text_length, 0
            walk = after
        return walk

    def _continue(self, walk: _Walk, width: int) -> list[tuple[int, float]]:
        contexts = [(walk.own[1], walk.own[0], self._own)] if walk.own[1] else []
        for automaton, (state, length) in zip(self._others, walk.others, strict=True):
            if length:
                contexts.append((length, state, automaton))
        found: dict[int, float] = {}
        # What is left to believe once longer contexts have had their say.
        rest = 1.0
        for _ in range(_MAX_CONTEXTS):
            if not contexts:
                break
            longest = max(contexts, key=_FIRST) if len(contexts) > 1 else contexts[0]
            contexts.remove(longest)
            length, state, automaton = longest
            if length == 1 and found:
                break  # has followed so much that none of it is likely
            if after := automaton.continuations(state):
                trust = rest * _TRUST[min(length, len(_TRUST) - 1)]
                rest -= trust
                # Not all occurrences: the last one may be the end of the text, which nothing has followed yet.
                seen = sum(map(_FIRST, after))
                if len(after) == _MAX_LOOKED_AT:
                    seen = max(seen, automaton.occurrences[state])
                for count, token in after:
                    found[token] = found.get(token, 0.0) + trust * count / seen
                if len(found) >= width or rest < _LEAST_REST:
                    break
            link = automaton.link[state]
            if link > 0:
                contexts.append((automaton.length[link], link, automaton))
        if len(found) == 1:
            return list(found.items())
        return sorted(found.items(), key=_SECOND, reverse=True)[:width]
