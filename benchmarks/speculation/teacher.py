"""What every token lacks to the best one when its answer is looked at again in one prefill (teacher forcing).

In ``fp32`` an answer is held against plain decode's, token for token. In 16 bits two answers may part where the two
best tokens are closer than rounding (docs/speculation.md, "In 16 bits"); what holds instead is a bound of this gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fusion_node.engine.device import choose_device, set_threads
from fusion_node.engine.draft_data import DraftTarget
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.stage import StepInput
from fusion_node.store import ModelStore

BOUNDS = {"fp32": 1e-4, "f16r32": 0.02, "bf16": 0.25}
"""Of a token's gap, in standard deviations of its position's logits; docs/speculation.md."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of the tokens of some answers.

    Attributes:
        worst: the largest gap, in standard deviations of its position's logits.
        num_other: tokens that were not the best.
    """

    worst: float
    num_other: int
    num_tokens: int


def load_target(model: str, numerics: str) -> DraftTarget:
    """A model of the store, in the arithmetic of a class."""
    set_threads(1)
    return DraftTarget.load(ModelStore().pull(model), numerics=numerics_class(numerics), device=choose_device("cpu"))


def gaps_of(target: DraftTarget, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Gaps:
    """Looks at greedy answers again.

    Args:
        answers: token ids of prompt and answer.
    """
    worst, num_other, num_tokens = 0.0, 0, 0
    for prompt, tokens in dict.fromkeys((tuple(prompt), tuple(tokens)) for prompt, tokens in answers):
        ids = [*prompt, *tokens][:-1]  # nothing was chosen from the last row
        rows = tuple(range(len(ids)))
        step = StepRows(
            live_rows=rows,
            nodes=tuple(row + 1 for row in rows),
            positions=rows,
            first_slot=0,
            is_chain=True,
            visible=(),
            num_committed=0,
            move=None,
        )
        pool = target.stage.new_pool(len(ids))
        _, (rows_TD,) = target.forward([StepInput(step, target.boundary.embed(ids), (range(len(ids)),))], pool)
        logits_TV = target.boundary.logits_there(rows_TD[len(prompt) - 1 :])
        gap_T = logits_TV.amax(dim=1) - logits_TV.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
        worst = max(worst, float((gap_T / logits_TV.std(dim=1)).max()))
        num_other += int((gap_T > 0).sum())
        num_tokens += len(tokens)
    return Gaps(worst, num_other, num_tokens)
