"""Recordings as batches: which texts go together, padded tensors of them, and what the target's two ends say of them.

Shapes: B texts, T positions, k features, D hidden size, K kept tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_data import DraftData, Recording


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """Padded texts.

    Attributes:
        ids_BT: token ids, 0 behind the end.
        features_BTkD: as recorded.
        first_starts_B, lengths_B: where chains may begin, and where the text ends.
        top_ids_BTK, top_probabilities_BTK: the target's next tokens after each position.
    """

    ids_BT: torch.Tensor
    features_BTkD: torch.Tensor
    first_starts_B: torch.Tensor
    lengths_B: torch.Tensor
    top_ids_BTK: torch.Tensor
    top_probabilities_BTK: torch.Tensor

    def valid(self, step: int) -> torch.Tensor:
        """Which starts ``[B, T - step]`` have a next token after so many steps."""
        starts = torch.arange(self.ids_BT.shape[1] - step, device=self.ids_BT.device)
        return (starts >= self.first_starts_B[:, None]) & (starts + step < self.lengths_B[:, None])


def collate(recordings: Sequence[Recording], device: torch.device) -> Batch:
    """Texts side by side, on a device, features in float32."""
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        pad([r.tokens_T.long() for r in recordings], batch_first=True).to(device),
        pad([r.features_TkD for r in recordings], batch_first=True).to(device).float(),
        torch.tensor([r.first_start for r in recordings], device=device),
        torch.tensor([r.num_positions for r in recordings], device=device),
        pad([r.top_ids_TK.long() for r in recordings], batch_first=True).to(device),
        pad([r.top_probabilities_TK for r in recordings], batch_first=True).to(device).float(),
    )


def plan_batches(lengths: Sequence[int], batch_positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Which texts go into which step of an epoch: at random, but those of one step of about one length.

    A batch is as many texts as fit, padded to the longest; at least one.
    """
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(lengths)).tolist()
    average = max(1, sum(lengths) // max(1, len(lengths)))
    window = 8 * max(1, batch_positions // average)
    batches: list[list[int]] = []
    for first in range(0, len(order), window):
        batch: list[int] = []
        for text in sorted(order[first : first + window], key=lambda text: lengths[text]):
            if batch and (len(batch) + 1) * lengths[text] > batch_positions:
                batches.append(batch)
                batch = []
            batch.append(text)
        batches.append(batch)
    shuffled = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1])).permutation(len(batches))
    return [batches[index] for index in shuffled.tolist()]


def choose_draft_vocab(data: DraftData, vocab_size: int, size: int) -> torch.Tensor:
    """The tokens to which the target gives the most probability, in the order of their ids.

    Fewer than ``size`` seen: the lowest other ids, which are a tokenizer's earliest merges.
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for recording in data:
        mass.index_add_(0, recording.top_ids_TK.flatten().long(), recording.top_probabilities_TK.flatten().double())
    order = torch.argsort(mass, descending=True, stable=True)
    return order[: min(size, vocab_size)].sort().values


def batches_of(
    recordings: Sequence[Recording] | DraftData, batch_positions: int, device: torch.device
) -> Iterator[Batch]:
    """All texts in order, none on its own that would be too short to say anything."""
    batch: list[Recording] = []
    longest = 0
    for recording in recordings:
        longest = max(longest, recording.num_positions)
        if batch and (len(batch) + 1) * longest > batch_positions:
            yield collate(batch, device)
            batch, longest = [], recording.num_positions
        batch.append(recording)
    if batch:
        yield collate(batch, device)


def embed(target: Boundary, ids_BT: torch.Tensor) -> torch.Tensor:
    """Embeddings ``[B, T, D]`` in float32 that training may use."""
    rows = target.embed(ids_BT.flatten().tolist())
    # A copy: what was made in inference mode cannot be differentiated through.
    return rows.float().clone().view(*ids_BT.shape, -1)


def normed_rows(target: Boundary, rows_BTD: torch.Tensor) -> torch.Tensor:
    """What the LM head multiplies by, in float32; the recorded rows are up to a factor those of the last layer."""
    flat = target.norm(rows_BTD.reshape(-1, rows_BTD.shape[-1]))
    return flat.float().clone().view(rows_BTD.shape)
