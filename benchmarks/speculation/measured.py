"""What was measured of answers over a real swarm, and what follows from it: ratios, acceptance, and what is expected.

Pure: measurements in, numbers out. A *cell* is one round trip with all modes; in it every prompt was answered in every
mode, one after the other, so that ratios are of neighbours in time.

Source of the formulas: scheduler/speculation.py, docs/speculation.md.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.speculation import Ring, tree_rate

WIDTH = 8
"""Candidates per place, at most."""

NUM_DEPTHS = 6
MAX_FRAME_ROWS = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """What the drafters answered for one path.

    Attributes:
        num_tokens: of the answer that were there when they were asked.
        path: tokens beyond those.
        candidates: token and calibrated probability, best first.
    """

    num_tokens: int
    path: tuple[int, ...] = field(repr=False)
    candidates: tuple[tuple[int, float], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Guess:
    """What was guessed for a place of an answer, whose token is known now.

    Attributes:
        depth: of the place below what was committed when it was guessed, from 1.
        probabilities: of the candidates, best first.
        rank: of the token that came among them, from 0; None: it was not among them.
    """

    depth: int
    probabilities: tuple[float, ...]
    rank: int | None


def guesses_of(tokens: Sequence[int], asked: Iterable[Asked]) -> dict[int, Guess]:
    """By place in the answer, what was first guessed where the path was right."""
    found: dict[int, Guess] = {}
    for each in asked:
        place = each.num_tokens + len(each.path)
        if place < len(tokens) and place not in found and tuple(tokens[each.num_tokens : place]) == each.path:
            ids = [token for token, _ in each.candidates]
            rank = ids.index(tokens[place]) if tokens[place] in ids else None
            found[place] = Guess(len(each.path) + 1, tuple(p for _, p in each.candidates), rank)
    return found


def rank_shares(guesses: Sequence[Guess]) -> tuple[float, ...]:
    """How often the first, second, … candidate was right, of the places for which anybody was asked."""
    counts = [0] * WIDTH
    for guess in guesses:
        if guess.rank is not None and guess.rank < WIDTH:
            counts[guess.rank] += 1
    return tuple(count / max(1, len(guesses)) for count in counts)


def acceptance_by_depth(guesses: Sequence[Guess]) -> list[dict[str, float]]:
    """Per depth: how often the first candidate was right, and one of all; ``num`` places were guessed there.

    Of what the loop asked for: a place is guessed at depth 1 where the token before it came as a surprise.
    """
    by_depth: dict[int, list[Guess]] = defaultdict(list)
    for guess in guesses:
        by_depth[guess.depth].append(guess)
    return [
        {
            "depth": depth,
            "num": len(there),
            "first": sum(guess.rank == 0 for guess in there) / len(there),
            "any": sum(guess.rank is not None for guess in there) / len(there),
        }
        for depth in range(1, NUM_DEPTHS + 1)
        if (there := by_depth.get(depth))
    ]


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer in one mode.

    Attributes:
        prompt: its number.
        decode_s: from the first token to the last.
        first_token_s: from the question to the first token.
        rows_per_token: that stages computed; 1 where nothing was guessed.
        ended_in: the mode at its end.
    """

    prompt: int
    tokens: tuple[int, ...] = field(repr=False)
    decode_s: float
    first_token_s: float
    rows_per_token: float = 1.0
    ended_in: str = "plain"

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / self.decode_s


def total_rate(answers: Sequence[Answered]) -> float:
    """Tokens per second of all answers together, their first tokens left out."""
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(answer.decode_s for answer in answers)


def median_gain(answers: Sequence[Answered], partners: Sequence[Answered]) -> float:
    """The median over prompts of how many times as fast as its partner an answer was."""
    partner_of = {partner.prompt: partner for partner in partners}
    return statistics.median(answer.rate / partner_of[answer.prompt].rate for answer in answers)


def num_different(answers: Sequence[Answered], partners: Sequence[Answered]) -> int:
    """Answers whose tokens are not their partner's."""
    partner_of = {partner.prompt: partner for partner in partners}
    return sum(answer.tokens != partner_of[answer.prompt].tokens for answer in answers)


def line_through(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Seconds at no rows, and per row, from rows and seconds of passes; neither is below zero.

    Through the medians of each number of rows, each as heavy as often as it occurred: a pass that was disturbed, or
    that other frames shared, is not to bend the line.

    Raises:
        ValueError: nothing was measured.
    """
    by_rows: dict[int, list[float]] = defaultdict(list)
    for rows, seconds in points:
        by_rows[rows].append(seconds)
    if not by_rows:
        raise ValueError("nothing was measured")
    xs: list[float] = []
    ys: list[float] = []
    for rows, there in by_rows.items():
        xs += [float(rows)] * len(there)
        ys += [statistics.median(there)] * len(there)
    if len(by_rows) == 1:
        return ys[0], 0.0
    slope, start = statistics.linear_regression(xs, ys)
    if slope < 0.0:
        return statistics.fmean(ys), 0.0
    if start < 0.0:
        return 0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
    return start, slope


def tree_limit(ranks: Sequence[float], ring: Ring) -> float:
    """Tokens per second that no asynchronous tree exceeds on this ring, whatever the size of its frames, where a
    drafter's candidates are right so often at every place alike.

    A loop that knows which places are hard may exceed it a little.
    """
    return max(tree_rate(ranks, ring, rows) for rows in range(1, MAX_FRAME_ROWS + 1))


def error_of(expected: float, measured: float) -> float:
    """By which part of what was measured something else was expected."""
    return abs(expected / measured - 1.0)


def by_prompt_in_turns(modes: Sequence[str], number: int) -> list[str]:
    """The order of modes for a prompt: each begins as often as any."""
    turn = number % len(modes)
    return [*modes[turn:], *modes[:turn]]


def summary_of(modes: Mapping[str, Sequence[Answered]], partner: str = "plain") -> dict[str, dict[str, float]]:
    """By mode: tokens per second of all together, median gain over the partner, rows per token, time to first token."""
    mean: Callable[[Iterable[float]], float] = statistics.fmean
    return {
        mode: {
            "tokens_per_s": total_rate(answers),
            "gain": median_gain(answers, modes[partner]),
            "total_gain": total_rate(answers) / total_rate(modes[partner]),
            "rows_per_token": mean(answer.rows_per_token for answer in answers),
            "first_token_s": statistics.median(answer.first_token_s for answer in answers),
            "ended_plain": mean(answer.ended_in == "plain" for answer in answers),
            "num_tokens": sum(len(answer.tokens) for answer in answers),
        }
        for mode, answers in modes.items()
    }
