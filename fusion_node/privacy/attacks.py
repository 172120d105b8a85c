"""The attacks, as arithmetic: solving a linear map for its input, and telling tokens apart by what they would make.

Shapes: T tokens, B candidates of one position, R outputs and I inputs of a known linear map, X values of a view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def solve(block_RI: Floats, outputs_TR: Floats) -> Floats:
    """Inputs ``[T, I]`` of a linear map from its outputs: least squares, and of those the smallest.

    With no fewer equations than unknowns, and a map that tells all inputs apart, they are the true ones.
    """
    solution_IT, *_ = np.linalg.lstsq(block_RI.astype(np.float64), outputs_TR.T.astype(np.float64), rcond=None)
    solved: Floats = solution_IT.T.astype(np.float32)
    return solved


def relative_error(found_TI: Floats, true_TI: Floats) -> float:
    """Of the row that is worst: the length of what is wrong, over that of the true row."""
    wrong = np.linalg.norm(found_TI.astype(np.float64) - true_TI, axis=1)
    lengths = np.linalg.norm(true_TI.astype(np.float64), axis=1)
    return float((wrong / np.maximum(lengths, np.finfo(np.float64).tiny)).max())


def nearest(view_X: Floats, candidates_BX: Floats) -> int:
    """Index of the candidate that would have made what is nearest to a view."""
    return int(np.square(candidates_BX.astype(np.float64) - view_X).sum(axis=1).argmin())


def choose_candidates(
    true_token: int, prior_V: Floats | None, vocabulary: int, count: int, rng: np.random.Generator
) -> list[int]:
    """Tokens among which an attacker who knows those before has to find the true one, in no telling order.

    One half are those that the language model thinks likeliest, the other half are drawn by lot; the true one is
    among them.

    Args:
        prior_V: logits of the language model; None: it has nothing to go by.
        count: at most so many; all tokens of a small vocabulary.
    """
    likely: Sequence[int] = [] if prior_V is None else np.argsort(-prior_V)[: count // 2].tolist()
    order = dict.fromkeys([true_token, *likely, *rng.permutation(vocabulary).tolist()])
    chosen = list(order)[: min(count, vocabulary)]
    rng.shuffle(chosen)
    return chosen


def count_equal(found: Sequence[int] | npt.NDArray[np.int64], true: Sequence[int]) -> int:
    """At how many places both have the same token."""
    return sum(int(a) == int(b) for a, b in zip(found, true, strict=True))
