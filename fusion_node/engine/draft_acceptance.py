"""How good a draft head is: acceptance by depth, and how sure it may be.

Shapes: B texts, T positions, N rows that count, D hidden size, K kept tokens, W draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_batches import Batch, batches_of, embed
from fusion_node.engine.draft_data import DraftData, Recording
from fusion_node.engine.trained_head import TrainedHead
from fusion_node.errors import ConfigError

MEASURED_STEPS = 6
"""Depths of which acceptance is measured and temperatures are fitted."""

_TOP = 8
"""Children of a node of a wide tree: acceptance is told for the first one and for the first of so many."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the head guesses what the target would have said, by depth, given that what lies between was right.

    Attributes:
        top1: how often its first guess is the target's most probable token, for depths 1, 2, ….
        top8: how often one of its first eight is.
        chain_length: tokens accepted on average of a chain of so many first guesses.
        num_positions: that depth 1 was measured at.
    """

    top1: tuple[float, ...]
    top8: tuple[float, ...]
    chain_length: float
    num_positions: int


def measure(
    head: TrainedHead,
    boundary: Boundary,
    recordings: Sequence[Recording] | DraftData,
    *,
    num_steps: int = MEASURED_STEPS,
    batch_positions: int = 1024,
) -> Acceptance:
    """Acceptance by depth on these texts, of a head that is not told a prompt's rows, which not every swarm returns.

    Raises:
        ConfigError: none of them is long enough to say anything.
    """
    head_WD = boundary.head_rows(head.token_ids.tolist()).to(head.log_scales.device)
    firsts, within, totals = [0] * num_steps, [0] * num_steps, [0] * num_steps
    chains, accepted = 0, 0
    for batch in batches_of(recordings, batch_positions, head.log_scales.device):
        hits = []
        for step, (hidden, valid, goals) in enumerate(_unrolled(head, boundary, batch, num_steps), 1):
            guesses = _best_tokens(head, hidden[valid], head_WD, step) == goals[valid][:, None]
            firsts[step - 1] += int(guesses[:, 0].sum())
            within[step - 1] += int(guesses.any(dim=1).sum())
            totals[step - 1] += len(guesses)
            is_right = torch.zeros_like(valid)
            is_right[valid] = guesses[:, 0]
            hits.append(is_right)
        if len(hits) == num_steps:
            whole = batch.valid(num_steps)
            run = torch.stack([hit[:, : whole.shape[1]][whole] for hit in hits]).long().cumprod(dim=0)
            chains += run.shape[1]
            accepted += int(run.sum())
    if not totals[0]:
        raise ConfigError("the held-out texts are too short to measure anything on")
    return Acceptance(
        tuple(hit / max(1, total) for hit, total in zip(firsts, totals, strict=True)),
        tuple(hit / max(1, total) for hit, total in zip(within, totals, strict=True)),
        accepted / max(1, chains),
        totals[0],
    )


@torch.no_grad()
def calibrate(
    head: TrainedHead, boundary: Boundary, recordings: Sequence[Recording] | DraftData, *, max_rows: int = 768
) -> None:
    """Sets one temperature per depth, so that the head's probabilities are as sure as they are right.

    Args:
        max_rows: per depth that are looked at.
    """
    head_WD, to_draft_V = draft_maps(head, boundary)
    rows: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in head.log_scales]
    num_rows = 0
    for batch in batches_of(recordings, 1024, head.log_scales.device):
        if num_rows >= max_rows:
            break
        for step, (hidden, valid, _) in enumerate(_unrolled(head, boundary, batch, len(rows)), 1):
            ids, probabilities = batch.top_ids_BTK[:, step:], batch.top_probabilities_BTK[:, step:]
            rows[step - 1].append((hidden[valid], ids[valid], probabilities[valid]))
            num_rows += len(rows[0][-1][0]) if step == 1 else 0
    for index, parts in enumerate(rows):
        if not sum(len(part) for part, _, _ in parts):
            continue
        hidden, ids, probabilities = (torch.cat(tensors)[:max_rows] for tensors in zip(*parts, strict=True))
        products_NW = hidden @ head_WD.t()

        def loss(log_scale: float, args: tuple[torch.Tensor, ...] = (products_NW, ids, probabilities)) -> float:
            return float(cross_entropy(args[0] * math.exp(log_scale), args[1], args[2], to_draft_V))

        # Convex in the scale, and so unimodal in its logarithm: ternary search.
        low, high = (float(head.log_scales[index]) + sign * 3.0 for sign in (-1, 1))
        for _ in range(20):
            one, two = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, two) if loss(one) < loss(two) else (one, high)
        head.log_scales.data[index] = (low + high) / 2


@torch.no_grad()
def _unrolled(
    head: TrainedHead, boundary: Boundary, batch: Batch, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per step the hidden states, which of them count, and the target's most probable tokens there."""
    embedded = embed(boundary, batch.ids_BT).to(head.log_scales.device)
    hiddens = head.unroll(batch.features_BTkD, embedded, num_steps, first_seen_B=batch.first_starts_B)
    for step, hidden in enumerate(hiddens, 1):
        yield hidden, batch.valid(step), batch.top_ids_BTK[:, step:, 0]


def _best_tokens(head: TrainedHead, hidden_ND: torch.Tensor, head_WD: torch.Tensor, step: int) -> torch.Tensor:
    """The eight best guesses ``[N, 8]``, as the target's token ids."""
    parts = [
        head.logits(part, head_WD, step).topk(min(_TOP, len(head_WD))).indices for part in torch.split(hidden_ND, 512)
    ]
    if not parts:
        return torch.zeros((0, 1), dtype=torch.long, device=hidden_ND.device)
    return head.token_ids[torch.cat(parts)]


def draft_maps(head: TrainedHead, boundary: Boundary) -> tuple[torch.Tensor, torch.Tensor]:
    """The LM head's rows ``[W, D]`` of the draft vocabulary, and where in it each token is ``[V]``, -1 if nowhere."""
    device = head.log_scales.device
    to_draft_V = torch.full((head.config.vocab_size,), -1, dtype=torch.long, device=device)
    to_draft_V[head.token_ids] = torch.arange(len(head.token_ids), device=device)
    return boundary.head_rows(head.token_ids.tolist()).clone().to(device), to_draft_V


def cross_entropy(
    logits_NW: torch.Tensor, ids_NK: torch.Tensor, probabilities_NK: torch.Tensor, to_draft_V: torch.Tensor
) -> torch.Tensor:
    """Against the target's kept probabilities, those of tokens outside the draft vocabulary left out."""
    places = to_draft_V[ids_NK]
    shares = torch.where(places >= 0, probabilities_NK, 0.0)
    total = shares.sum(dim=1, keepdim=True)
    shares = shares / total.clamp(min=1e-6)
    chosen = logits_NW.gather(1, places.clamp(min=0))
    losses = torch.logsumexp(logits_NW, dim=1) * (total[:, 0] > 0) - (shares * chosen).sum(dim=1)
    return losses.sum() / max(1, len(losses))
