"""Answers over one ring in a virtual clock, of texts whose parts are guessed well, badly or not at all.

The world of benchmarks.speculation.ring, with the user's own part in it: to choose a token takes time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.speculation.ring import Costs, User, World
from fusion_node.client.speculation_core import Choose, Commit, Expand, Frame, SpeculationCore, StageCost
from fusion_node.types import MonotonicS
from scheduler.speculation import ModePolicy

COPY = (0.97, 0.005, 0.005)
NOVEL = (0.25, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01)
POOR = (0.04, 0.02, 0.01)

Profile = tuple[float, ...]
Part = tuple[Sequence[Profile], int]
"""Of a text: profiles that its places are drawn from, and tokens."""


class Text:
    """At which rank of its candidates each token is found; None: at none."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        chance = random.Random(seed)
        self.places: list[tuple[Profile, int | None]] = []
        for profiles, num_tokens in parts:
            for _ in range(num_tokens):
                profile, drawn = chance.choice(profiles), chance.random()
                bounds = itertools.accumulate(profile)
                self.places.append((profile, next((rank for rank, bound in enumerate(bounds) if drawn < bound), None)))

    def __len__(self) -> int:
        return len(self.places)


class TextDrafter:
    """All tokens are zeros; off the text, candidates are as before."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def propose(
        self, position: int, paths: Sequence[tuple[int, ...]], width: int
    ) -> list[list[tuple[int, float, str]]]:
        return [self._candidates(position + len(path) - 1, any(path), width) for path in paths]

    def _candidates(self, index: int, is_off: bool, width: int) -> list[tuple[int, float, str]]:
        if index >= len(self._text):
            return []
        profile, right = self._text.places[index]
        right = None if is_off else right
        return [(0 if rank == right else rank + 1, p, "x") for rank, p in enumerate(profile[:width])]


@dataclass(frozen=True)
class UserCosts:
    """Seconds on the user's side."""

    choose_s: float = 0.0
    draft_s: float = 0.0005
    noise: float = 0.0
    """Of every choice: it takes longer by this share of a step now and then."""


class ChoosingUser(User):
    """Whose choices take time."""

    side = UserCosts()

    def pump(self) -> None:
        clock, core = self._world.clock, self.core
        while (event := core.next_event()) is not None:
            match event:
                case Choose():
                    took = self.side.choose_s
                    if self._world.chance.random() < 0.1:
                        took += self.side.noise * 10 * self._world.chance.random()
                    clock.at(clock.now + took, partial(self._chosen, event.position))
                case Expand():
                    self._expand(event)
                case Frame():
                    nodes = tuple(range(event.first_node, event.first_node + len(event.tokens)))
                    rows = tuple(None for _ in event.tokens)
                    self._link.send(
                        len(rows), partial(self._world.stages[0].receive, self, self.epoch, event, nodes, rows, ())
                    )
                case Commit():
                    self.tokens.append(event.token)
                    if event.is_last:
                        self.finished_at = clock.now
        self._set_timer()

    def _chosen(self, position: int) -> None:
        if not self.core.is_over:
            self.core.chosen(position, 0, now=MonotonicS(self._world.clock.now))
            self.pump()


def answer_s(
    costs: Costs, side: UserCosts, text: Text, policy: ModePolicy, *, seed: int = 0
) -> tuple[float, SpeculationCore]:
    """Seconds of an answer, from the row of its prompt on."""
    world = World(replace(costs, draft_s=side.draft_s), seed=seed)
    policy.paused()
    core = SpeculationCore(
        last_token=0,
        num_prompt=1,
        stop_position=len(text) + 1,
        stop_tokens=frozenset((99,)),
        max_positions=2 * len(text) + 600,
        next_sequence=1,
        policy=policy,
    )
    core.uplink_changed(costs.wire_row_s)
    user = ChoosingUser(world, core, TextDrafter(text), lambda position, row: 0, (0,), 2 * len(text) + 600)
    user.side = side
    user.prompt_row = world._compute(user, 1)
    world.users.append(user)
    world.clock.at(0.0, partial(start, user, costs))
    world.clock.run(is_done=lambda: user.finished_at is not None)
    assert user.finished_at is not None
    return user.finished_at, core


def start(user: ChoosingUser, costs: Costs) -> None:
    """The prompt's result says what the stages cost."""
    now = MonotonicS(0.0)
    user.core.start(now=now)
    stage = StageCost(costs.fixed_s + costs.row_s, costs.row_s)
    user.core.returned(0, [(1, None)], costs=[stage] * costs.num_stages, now=now)
    user.pump()
