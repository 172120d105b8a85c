"""What the event simulation expects of a swarm that was measured: the same answers, guessed as they were guessed.

The production loop runs in a virtual clock (ring) over stages, links, drafter and LM head that take as long as those
of the real swarm took. Where the text goes, the drafter offers as many candidates with the same probabilities as in
reality, the token that came at the same rank; elsewhere, what was offered at some place of the same answers, all wrong.

What it leaves out: that processes of one machine share its cores (only what they took while they did is known), that a
pass of a CPU is no straight line of its rows, and that times vary.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.speculation.measured import Guess
from benchmarks.speculation.ring import Costs, World
from scheduler.speculation import Mode, ModePolicy

MODES = {"chain": (Mode.CHAIN,), "tree": (Mode.TREE,), "auto": tuple(Mode)}

NUM_RUNS = 2
"""Whose mean is taken: what is guessed off the text is drawn."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """An answer.

    Attributes:
        guesses: by place.
    """

    num_prompt: int
    num_tokens: int
    guesses: Mapping[int, Guess]


class ReplayDrafter:
    """The text is all zeros; a wrong token is the rank that it was offered at, from 1."""

    def __init__(self, answer: Replayed, others: Sequence[Guess], chance: random.Random) -> None:
        self._answer = answer
        self._others = others
        self._chance = chance

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        """See ring.Drafter."""
        return [self._candidates(position - self._answer.num_prompt, path, width) for path in paths]

    def _candidates(self, num_tokens: int, path: tuple[int, ...], width: int) -> list[tuple[int, float, str]]:
        guess = None if any(path) else self._answer.guesses.get(num_tokens + len(path))
        right = None if guess is None else guess.rank
        if guess is None:  # off the text, or never asked for in reality: a guess came too late there
            if not self._others:
                return []
            guess = self._chance.choice(self._others)
            right = None if any(path) else guess.rank
        offered = enumerate(guess.probabilities[:width])
        return [(0 if rank == right else rank + 1, p, "replay") for rank, p in offered]


def expected_rate(
    answers: Sequence[Replayed], costs: Costs, mode: str, *, remembers: bool = True, seed: int = 0
) -> float:
    """Tokens per second after the first, of all answers, one after the other, by one user.

    Args:
        remembers: whether an answer begins with what earlier ones have taught of modes.
    """
    return sum(_one_run(answers, costs, mode, remembers, seed + run) for run in range(NUM_RUNS)) / NUM_RUNS


def _one_run(answers: Sequence[Replayed], costs: Costs, mode: str, remembers: bool, seed: int) -> float:
    others = [guess for answer in answers for guess in answer.guesses.values()]
    policy, chance = ModePolicy(MODES[mode]), random.Random(seed)
    num_tokens, seconds = 0, 0.0
    for answer in answers:
        world = World(costs, seed=chance.randrange(2**32))
        if not remembers:
            policy = ModePolicy(MODES[mode])
        policy.paused()
        user = world.add(
            [1] * answer.num_prompt,
            drafter=ReplayDrafter(answer, others, chance),
            choose=lambda position, row: 0,
            stop_position=answer.num_prompt + answer.num_tokens,
            max_positions=answer.num_prompt + answer.num_tokens + 256,
            stop_tokens=frozenset(),
            policy=policy,
        )
        user_began = _run_until_first(world, user.tokens)
        world.clock.run(is_done=lambda user=user: user.finished_at is not None)  # type: ignore[misc]
        num_tokens += len(user.tokens) - 1
        seconds += world.clock.now - user_began
    return num_tokens / seconds


def _run_until_first(world: World, tokens: Sequence[int]) -> float:
    world.clock.run(is_done=lambda: bool(tokens))
    return world.clock.now
