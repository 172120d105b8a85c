"""What a drafter is told. Free of torch: drafters without a model use it too.

Shapes: T tokens, D hidden size, L tapped layers, K most probable tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Proposals = list[list[tuple[int, float]]]
"""Per path, tokens that may come next with a drafter's own confidence in each, the best first."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens that were committed, in order, with what is known of how each was chosen.

    A token is chosen from the row of the token *before* it. What is said of token i here is said of that row: it is the
    pair that an EAGLE-style head takes as one input.

    Attributes:
        rows_TD: rows of the last stage, before the final norm; None when they are not at hand.
        taps_TLD: rows after the layers that ``tap_layers`` names; None when they did not come.
        top_ids_TK: the K most probable tokens of each choice, best first; the chosen one need not be among them.
        top_probabilities_TK: theirs, by a softmax at temperature 1.
        logits_TV: that each was chosen from, for who wants to know the most probable ones; None when not at hand.
        tap_layers: at least those that a drafter has asked for: n is the row after n layers.
    """

    tokens: Sequence[int] = field(repr=False)
    rows_TD: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    taps_TLD: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    top_ids_TK: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    top_probabilities_TK: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    tap_layers: tuple[int, ...] = ()
    logits_TV: npt.NDArray[np.float32] | None = field(default=None, repr=False)


class SharedNoise(Protocol):
    """The noise with which the target's tokens are going to be chosen. A drafter that adds it to its own scores guesses
    the target's choice more often than one that only knows its distribution.

    Source: drafter-invariant speculative decoding, Daliri, Musco & Suresh 2024.
    """

    @property
    def temperature(self) -> float:
        """Above 0; what logits are divided by."""
        ...

    def at(self, position: int) -> npt.NDArray[np.float32]:
        """What is added to the scores ``[V]`` of the token at this position, counted from the prompt's first."""
        ...
