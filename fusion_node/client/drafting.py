"""Drafters: what may come next, guessed on the user's own machine; and several of them as one.

A drafter is one object per answer, and a new one is one file: it is told what the text is (``begin``, ``extend``) and
asked what may follow paths of tokens beyond it (``propose``). What it says never changes the answer, only how fast it
comes. All calls of one answer come from one thread at a time, and in the order in which things were committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from fusion_node.client.sampling import gumbel_noise
from fusion_node.engine.drafts import Proposals, SharedNoise, Verified
from fusion_node.errors import ConfigError

__all__ = [
    "Calibration", "Candidate", "Drafter", "GumbelNoise", "MixedDrafter", "Proposals", "SharedNoise", "Verified",
    "check_same_tokens",
]  # fmt: skip

SURE = 0.9
"""Where a candidate is this probable, drafters that come later in the order are not asked: in copied text a model would
only slow the copying down."""

MAX_OTHER_TOKENS = 64
"""Ids that may stand for something else with a draft model: members of one family name their special tokens anew. A
wrong guess costs no more than any other."""

MAX_KEPT_NOISE = 64
"""Positions whose noise is kept: deeper trees are rare. 8 MiB at a vocabulary of 32k, 64 MiB at 256k."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Drafter(Protocol):
    """A source of guesses for one answer."""

    @property
    def name(self) -> str:
        """Of the source, for calibration and statistics."""
        ...

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        """Starts an answer, or starts it anew.

        Args:
            noise: that the tokens will be chosen with; None when they are chosen greedily.
        """
        ...

    def extend(self, verified: Verified) -> None:
        """The text has grown by these tokens. What was computed for paths that begin with them is kept."""
        ...

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        """Guesses what comes next.

        Args:
            paths: of token ids beyond the text so far; the empty path asks for the next token itself.
            width: candidates per path, at most.

        Returns:
            Per path at most ``width`` different tokens with confidences in (0, 1], best first; none where it has
            nothing to say.
        """
        ...

    def close(self) -> None:
        """The answer is over. Nothing else is called afterwards but ``begin``."""
        ...


class Candidate(NamedTuple):
    """A token that may come next.

    Attributes:
        probability: calibrated: of candidates with this one, so many come.
        source: name of the drafter whose word counts.
    """

    token: int
    probability: float
    source: str

    def __repr__(self) -> str:
        # Without the token: reprs end up in tracebacks and logs.
        return f"Candidate(probability={self.probability:.3g}, source={self.source!r})"


class Calibration(Protocol):
    """What a source's confidence has been worth (scheduler.speculation)."""

    def probability(self, source: str, confidence: float) -> float:
        """How often candidates of this source and confidence were chosen, in (0, 1)."""
        ...

    def record(self, source: str, confidence: float, is_chosen: bool) -> None:
        """One more candidate was verified: the text went on to where it hung, and then with it or otherwise."""
        ...


class MixedDrafter:
    """Several drafters as one: their candidates merged, each with the probability that its source's record gives it.

    A candidate that several propose counts with the best of their probabilities. A drafter that fails is left out from
    then on, and the answer goes on without it.

    Args:
        drafters: of this answer, each with another name, the fastest first.
        calibration: shared by all answers of a user, so that a new one begins with what is known.
        vocabulary: of the target; a drafter that proposes a token beyond it has failed.
    """

    def __init__(self, drafters: Sequence[Drafter], calibration: Calibration, *, vocabulary: int) -> None:
        self._drafters = list(drafters)
        self._calibration = calibration
        self._vocabulary = vocabulary
        self._root = _Asked()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the drafters that have not failed. With none, nothing will ever be proposed."""
        return tuple(drafter.name for drafter in self._drafters)

    def add(self, make: Callable[[], Drafter]) -> None:
        """One more, slower than those that are there. One that cannot be made is left out like one that fails."""
        drafter = self._try(None, make)
        if drafter is not None:
            self._drafters.append(drafter)

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        """See Drafter."""
        self._root = _Asked()
        for drafter in list(self._drafters):
            self._try(drafter, partial(drafter.begin, prompt, noise))

    def extend(self, verified: Verified) -> None:
        """See Drafter. What was proposed where the text has gone on counts in the record of its source."""
        for token in verified.tokens:
            for source, confidence, proposed in self._root.candidates:
                self._calibration.record(source, confidence, proposed == token)
            self._root = self._root.after.get(token) or _Asked()
        for drafter in list(self._drafters):
            self._try(drafter, partial(drafter.extend, verified))

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        """Per path at most ``width`` different tokens, the most probable first."""
        asked = [self._asked(path) for path in paths]
        merged: list[dict[int, Candidate]] = [{} for _ in paths]
        for node in asked:
            node.candidates = []
        probability_of = self._calibration.probability
        unsure = list(range(len(paths)))
        for drafter in list(self._drafters):
            if not unsure:
                break
            proposals = self._try(drafter, partial(self._ask, drafter, [paths[index] for index in unsure], width))
            if proposals is None:
                continue
            source, still_unsure = drafter.name, []
            for index, found in zip(unsure, proposals, strict=True):
                best, known = merged[index], asked[index].candidates
                most = 0.0
                for token, confidence in found[:width]:
                    probability = probability_of(source, confidence)
                    known.append((source, confidence, token))
                    there = best.get(token)
                    if there is None or there.probability < probability:
                        best[token] = Candidate(token, probability, source)
                    if probability > most:
                        most = probability
                if most < SURE:
                    still_unsure.append(index)
            unsure = still_unsure
        return [sorted(best.values(), key=_PROBABILITY, reverse=True)[:width] for best in merged]

    def close(self) -> None:
        """See Drafter."""
        for drafter in list(self._drafters):
            self._try(drafter, drafter.close)
        self._root = _Asked()

    def _asked(self, path: Sequence[int]) -> _Asked:
        node = self._root
        for token in path:
            after = node.after.get(token)
            if after is None:
                after = node.after[token] = _Asked()
            node = after
        return node

    def _ask(self, drafter: Drafter, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        """Raises ValueError when the drafter does not keep to its contract."""
        proposals, vocabulary = drafter.propose(paths, width), self._vocabulary
        if len(proposals) != len(paths):
            raise ValueError("another number of paths than was asked for")
        for found in proposals:
            for token, confidence in found:
                if not (0 <= token < vocabulary and 0.0 < confidence <= 1.0):
                    raise ValueError("neither a token nor a confidence")
        return proposals

    def _try(self, drafter: Drafter | None, call: Callable[[], T]) -> T | None:
        """What the call returns; None when it fails, which it does only once.

        Args:
            drafter: None: it is about to be made.
        """
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a drafter's fault costs its proposals, and not the answer
            # Its message may hold text or token ids.
            name = None if drafter is None else drafter.name
            log.warning("a drafter has failed: going on without it", drafter=name, error=type(error).__name__)
            if drafter is not None:
                self._drafters.remove(drafter)
            return None


class GumbelNoise:
    """The noise of fusion_node.client.sampling, for drafters: at every position drawn once, and kept for a while.

    Args:
        temperature: above 0.
    """

    def __init__(self, *, seed: int, temperature: float, vocabulary: int) -> None:
        self._seed = seed
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._kept: dict[int, npt.NDArray[np.float32]] = {}

    @property
    def temperature(self) -> float:
        """See SharedNoise."""
        return self._temperature

    def at(self, position: int) -> npt.NDArray[np.float32]:
        """See SharedNoise."""
        noise = self._kept.get(position)
        if noise is None:
            if len(self._kept) == MAX_KEPT_NOISE:
                # The text grows: what lies furthest back is not asked for again.
                del self._kept[min(self._kept)]
            noise = self._kept[position] = gumbel_noise(self._seed, position, self._vocabulary).astype(np.float32)
        return noise


_PROBABILITY = attrgetter("probability")


def check_same_tokens(draft: Mapping[str, int], target: Mapping[str, int], *, name: str) -> None:
    """Whether a draft model's token ids mean what the target's do.

    Args:
        draft, target: the vocabularies of their tokenizers, token to id.
        name: of the draft model.

    Raises:
        ConfigError: they do not.
    """
    meaning = {token_id: token for token, token_id in target.items()}
    num_other = sum(meaning.get(token_id, token) != token for token, token_id in draft.items())
    num_shared = sum(token_id in meaning for token_id in draft.values())
    if num_other > MAX_OTHER_TOKENS or num_shared < len(target) - MAX_OTHER_TOKENS:
        raise ConfigError(
            f"{name} cannot draft: of the model's {len(target)} tokens it has {max(0, num_shared - num_other)}; "
            "choose a draft model with the same tokenizer"
        )


class _Asked:
    """A path that was asked for: what was proposed as drafters said it, and the paths that go on."""

    __slots__ = ("after", "candidates")

    def __init__(self) -> None:
        self.candidates: list[tuple[str, float, int]] = []
        self.after: dict[int, _Asked] = {}
