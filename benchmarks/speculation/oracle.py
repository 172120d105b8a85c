"""A drafter of known quality, and what other ways of speculating would reach with it at best.

The text is all zeros. A node is easy or hard, and the drafter knows which: its candidates for what follows an easy one
are right with the probabilities EASY, by rank, else HARD. How many are easy makes the acceptance.

Source: docs/speculation.md.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

from scheduler.speculation import Ring, async_chain_rate, chain_rate

EASY = (0.970, 0.012, 0.005, 0.003, 0.002, 0.001, 0.001, 0.001)
HARD = (0.400, 0.170, 0.090, 0.060, 0.042, 0.031, 0.024, 0.019)


def easy_share(acceptance: float) -> float:
    return (acceptance - HARD[0]) / (EASY[0] - HARD[0])


class OracleText:
    """Which positions are easy, and at which rank of the candidates the next token is to be found; None: at none.

    Of ``num_tokens`` positions exactly so many are easy, and so many are found at each rank, as the acceptance says;
    only their order is drawn. What is measured over the whole text has no luck in it.
    """

    def __init__(self, acceptance: float, num_tokens: int, seed: int) -> None:
        chance = random.Random(seed)
        num_easy = round(easy_share(acceptance) * num_tokens)
        self.positions: list[tuple[tuple[float, ...], int | None]] = []
        for profile, num in ((EASY, num_easy), (HARD, num_tokens - num_easy)):
            bounds = tuple(itertools.accumulate(profile))
            for index in range(num):
                drawn = (index + 0.5) / num
                rank = next((rank for rank, bound in enumerate(bounds) if drawn < bound), None)
                self.positions.append((profile, rank))
        chance.shuffle(self.positions)

    def at(self, position: int) -> tuple[tuple[float, ...], int | None]:
        return self.positions[position % len(self.positions)]


class OracleDrafter:
    """Puts the next token where the text says, as long as the path is right; anything elsewhere."""

    def __init__(self, acceptance: float, text: OracleText, seed: int) -> None:
        self._share = easy_share(acceptance)
        self._text = text
        self._chance = random.Random(seed)

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        return [self._candidates(position + len(path), path, width) for path in paths]

    def _candidates(self, position: int, path: tuple[int, ...], width: int) -> list[tuple[int, float, str]]:
        if any(path):
            profile, right = EASY if self._chance.random() < self._share else HARD, None
        else:
            profile, right = self._text.at(position)
        return [(0 if rank == right else rank + 1, p, "oracle") for rank, p in enumerate(profile[:width])]


TREE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


def tree_curve(acceptance: float, trials: int, seed: int = 0) -> dict[int, tuple[float, float]]:
    """By number of nodes of the best tree: accepted tokens and depth, on average over ``trials`` texts."""
    chance, share = random.Random(seed), easy_share(acceptance)
    sums = {size: [0.0, 0.0] for size in TREE_SIZES}
    for _ in range(trials):
        count = itertools.count()
        found: list[tuple[float, int, int]] = []

        def grow(probability: float, depth: int, found: list[tuple[float, int, int]] = found) -> None:
            for p in EASY if chance.random() < share else HARD:
                heapq.heappush(found, (-probability * p, next(count), depth))  # noqa: B023 - called in this turn only

        grow(1.0, 1)
        total, deepest = 0.0, 0
        for num_nodes in range(1, TREE_SIZES[-1] + 1):
            probability, _, depth = heapq.heappop(found)
            total, deepest = total - probability, max(deepest, depth)
            grow(-probability, depth + 1)
            if num_nodes in sums:
                sums[num_nodes][0] += total
                sums[num_nodes][1] += deepest
    return {size: (tokens / trials, depth / trials) for size, (tokens, depth) in sums.items()}


def best_sync_tree(curve: dict[int, tuple[float, float]], ring: Ring) -> float:
    """Tokens per second of the best synchronous tree: a forward of the drafter per level, then one frame."""
    return max(
        (1.0 + tokens) / (max(1.0, depth) * ring.draft_s + ring.latency_s(size + 1))
        for size, (tokens, depth) in curve.items()
    )


def best_sync_chain(acceptance: float, ring: Ring) -> float:
    return max(chain_rate(acceptance, ring, length) for length in range(1, 65))


def best_async_chain(acceptance: float, ring: Ring) -> float:
    return max(async_chain_rate(acceptance, ring, rows) for rows in (1, 2, 3, 4, 6, 8, 12, 16))
