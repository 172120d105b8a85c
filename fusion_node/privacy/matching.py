"""Matching: which of many candidates for a token would have made what a node saw of it.

The attacker has read the tokens before, and computes what each candidate would make after them. What is measured is
teacher-forced: the tokens before are the true ones.

Shapes: T tokens, B candidates, X values of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_node.engine.public_model import LayerStates, Prompt, PublicModel
from fusion_node.privacy.attacks import Floats, choose_candidates, nearest
from fusion_node.privacy.findings import MATCHING, Tally


@dataclass(frozen=True, slots=True)
class Seen:
    """One view of a prompt.

    Attributes:
        rows: what the node has, ``[T, X]`` by layer.
        make: what it would have of candidates, ``[B, X]``.
        is_control: the rows are not those of their positions.
    """

    name: str
    rows: Mapping[int, Floats]
    make: Callable[[LayerStates], Floats]
    is_control: bool = False


def match_views(
    model: PublicModel,
    prompt: Prompt,
    token_ids: Sequence[int],
    views: Sequence[Seen],
    layers: Collection[int],
    tally: Tally,
    *,
    num_candidates: int,
    num_positions: int,
    rng: np.random.Generator,
) -> None:
    """Tells tokens apart by every view, at some positions from the first to the last.

    Args:
        prompt: of these tokens, with room for the candidates.
    """
    count = min(num_positions, len(token_ids))
    for position in np.unique(np.linspace(0, len(token_ids) - 1, count).round().astype(int)).tolist():
        true = token_ids[position]
        prior_V = prompt.logits_TV[position - 1] if position else None
        candidates = choose_candidates(true, prior_V, model.vocabulary, num_candidates, rng)
        tally.num_positions += 1
        tally.prior_found += prior_V is not None and candidates[int(prior_V[candidates].argmax())] == true
        states = model.try_tokens(prompt, position, candidates, layers)
        for view in views:
            for layer, rows_TX in view.rows.items():
                found = candidates[nearest(rows_TX[position], view.make(states[layer]))]
                tally.note_read(
                    view.name, MATCHING, layer, len(candidates), [found], [true], is_control=view.is_control
                )
