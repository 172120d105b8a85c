"""Drafters: what may come next, guessed on the user's own machine.

A drafter is one object per answer, and a new one is one file: it is told what the text is (``begin``, ``extend``) and
asked what may follow paths of tokens beyond it (``propose``). What it says never changes the answer, only how fast it
comes. All calls of one answer come from one thread at a time, and in the order in which things were committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fusion_node.engine.drafts import Proposals, SharedNoise, Verified

__all__ = ["Calibration", "Candidate", "Drafter", "Proposals", "SharedNoise", "Verified"]


class Drafter(Protocol):
    """A source of guesses for one answer."""

    @property
    def name(self) -> str:
        """Of the source, for calibration and statistics."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers whose outputs it would like to be told of (``Verified.taps_TLD``); empty when it has no use for them.

        Numbered as transformers numbers hidden states: n is what layer n - 1 puts out, 0 the embedding.
        """
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


class Calibration(Protocol):
    """What a source's confidence has been worth (scheduler.speculation)."""

    def probability(self, source: str, confidence: float) -> float:
        """How often candidates of this source and confidence were chosen, in (0, 1)."""
        ...

    def record(self, source: str, confidence: float, is_chosen: bool) -> None:
        """One more candidate was verified: the text went on to where it hung, and then with it or otherwise."""
        ...
