"""Drafts from what the target thought of last time: after this token, these were its most probable next ones.

Every choice of a token leaves the target's most probable candidates behind, of which one was used. They are kept by the
token that they followed, and proposed again when it comes again. This knows little of the text, but has something to
say nearly everywhere, and costs a look-up.

One table serves all answers of a model: at most 48 bytes per token of the vocabulary, taken as tokens are met.

Shapes: T tokens, V vocabulary, K kept per token.

Source: Token Recycling, Luo et al. 2024 (arXiv 2408.08696), the table without its search: the tree is grown by
fusion_node.client.speculation_core.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fusion_node.engine.drafts import Proposals, SharedNoise, Verified

NUM_KEPT = 8
"""Successors per token, as in the paper."""

_RANKS = np.array([0.3, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008], dtype=np.float32)
"""How often the successor of each rank came, where nobody has said its probability. Measured with greedy answers of a
model of 135M parameters: .29 for the first, .54 for eight."""

_LEAST = 1e-4
"""A probability at rest: 0 stands for none."""

_BLOCK = 64
"""Logits of which only the largest is looked at first."""


def most_probable(
    logits_TV: npt.NDArray[np.float32], num: int = NUM_KEPT
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The most probable tokens of each row, best first, and their probabilities at temperature 1: ``[T, num]`` each."""
    num_rows, vocabulary = logits_TV.shape
    num = min(num, vocabulary)
    rows = np.arange(num_rows)[:, None]
    best = logits_TV.max(axis=1, keepdims=True)
    shares = logits_TV - best
    np.exp(shares, out=shares)
    # The largest are in the blocks with the largest maxima: a tenth of the time that a partition of all takes. A block
    # is spread over the row, since a maximum of whole rows is taken four times as fast as one within them.
    num_blocks = vocabulary // _BLOCK
    if num_blocks > num:
        whole = num_blocks * _BLOCK
        maxima = logits_TV[:, :whole].reshape(num_rows, _BLOCK, num_blocks).max(axis=1)
        blocks = np.argpartition(-maxima, num - 1, axis=1)[:, :num]
        ids = (blocks[:, :, None] + num_blocks * np.arange(_BLOCK)).reshape(num_rows, -1)
        ids = np.concatenate([ids, np.broadcast_to(np.arange(whole, vocabulary), (num_rows, vocabulary - whole))], 1)
    else:
        ids = np.broadcast_to(np.arange(vocabulary), (num_rows, vocabulary))
    values = logits_TV[rows, ids]
    order = np.argsort(-values, axis=1, kind="stable")[:, :num]
    ids = ids[rows, order]
    probabilities = shares[rows, ids] / shares.sum(axis=1, keepdims=True)
    return ids.astype(np.int32), probabilities.astype(np.float32)


class RecyclingTable:
    """Per token, what may come after it, best first.

    Args:
        vocabulary: number of token ids; others are passed over.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._ids_VK = np.zeros((vocabulary, NUM_KEPT), dtype=np.int32)
        self._probabilities_VK = np.zeros((vocabulary, NUM_KEPT), dtype=np.float16)

    @property
    def num_bytes(self) -> int:
        """At most: pages of tokens that never came are not there."""
        return self._ids_VK.nbytes + self._probabilities_VK.nbytes

    def learn(self, token: int, ids_K: npt.NDArray[np.int32], probabilities_K: npt.NDArray[np.float32]) -> None:
        """What was most probable after a token; what was said of it before is forgotten."""
        if not 0 <= token < self.vocabulary:
            return
        known = (ids_K >= 0) & (ids_K < self.vocabulary)
        ids_K, probabilities_K = ids_K[known][:NUM_KEPT], probabilities_K[known][:NUM_KEPT]
        self._ids_VK[token, : len(ids_K)] = ids_K
        self._probabilities_VK[token] = 0.0
        self._probabilities_VK[token, : len(ids_K)] = np.clip(probabilities_K, _LEAST, 1.0)

    def learn_successor(self, token: int, successor: int) -> None:
        """What came after a token, where nothing else is known: it goes in front of the others."""
        if 0 <= token < self.vocabulary and 0 <= successor < self.vocabulary:
            ids_K = self._ids_VK[token][self._probabilities_VK[token] > 0]
            ids_K = np.concatenate([[np.int32(successor)], ids_K[ids_K != successor]])[:NUM_KEPT]
            self.learn(token, ids_K, _RANKS[: len(ids_K)])

    def successors(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and probabilities after each token, ``[T, K]``; a probability of 0 stands for no entry.

        Tokens must be within the vocabulary.
        """
        return self._ids_VK[tokens], self._probabilities_VK[tokens].astype(np.float32)


class RecyclingDrafter:
    """A Drafter (fusion_node.client.drafting) over a table that other answers use too."""

    def __init__(self, table: RecyclingTable) -> None:
        self._table = table
        self._noise: SharedNoise | None = None
        self._last: int | None = None
        self._num_tokens = 0

    @property
    def name(self) -> str:
        return "recycling"

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        """See Drafter."""
        self._noise = noise
        self._last = prompt[-1] if prompt else None
        self._num_tokens = len(prompt)

    def extend(self, verified: Verified) -> None:
        """See Drafter."""
        ids_TK, probabilities_TK = verified.top_ids_TK, verified.top_probabilities_TK
        if ids_TK is None and verified.logits_TV is not None:
            ids_TK, probabilities_TK = most_probable(verified.logits_TV)
        for index, token in enumerate(verified.tokens):
            if self._last is not None:
                if ids_TK is not None and probabilities_TK is not None:
                    self._table.learn(self._last, ids_TK[index], probabilities_TK[index])
                else:
                    self._table.learn_successor(self._last, token)
            self._last = token
        self._num_tokens += len(verified.tokens)

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        """See Drafter."""
        vocabulary = self._table.vocabulary
        ends = [path[-1] if path else self._last for path in paths]
        known = [end if end is not None and 0 <= end < vocabulary else None for end in ends]
        ids_TK, probabilities_TK = self._table.successors([end or 0 for end in known])
        if self._noise is not None:
            ids_TK, probabilities_TK = self._reordered(paths, self._noise, ids_TK, probabilities_TK)
        found = zip(known, ids_TK[:, :width].tolist(), probabilities_TK[:, :width].tolist(), strict=True)
        return [
            [] if end is None else [(i, p) for i, p in zip(ids, probabilities, strict=True) if p]
            for end, ids, probabilities in found
        ]

    def close(self) -> None:
        """See Drafter."""
        self._noise = self._last = None

    def _reordered(
        self,
        paths: Sequence[Sequence[int]],
        noise: SharedNoise,
        ids_TK: npt.NDArray[np.int32],
        probabilities_TK: npt.NDArray[np.float32],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """As the noise of each position makes them likely."""
        drawn = [noise.at(self._num_tokens + len(path))[ids_K] for path, ids_K in zip(paths, ids_TK, strict=True)]
        is_there = probabilities_TK > 0
        logs = np.log(np.where(is_there, probabilities_TK, 1.0)) / noise.temperature
        scores = np.where(is_there, logs + np.stack(drawn), -np.inf)
        best = scores.max(axis=1, keepdims=True, initial=-1e9)
        shares = np.exp(scores - best)
        shares *= probabilities_TK.sum(axis=1, keepdims=True) / np.maximum(shares.sum(axis=1, keepdims=True), 1e-9)
        order = np.argsort(-shares, axis=1, kind="stable")
        return np.take_along_axis(ids_TK, order, 1), np.take_along_axis(shares, order, 1).astype(np.float32)
