"""What a simulation is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fusion_node.errors import ConfigError
from fusion_node.simulator.devices import MODELS, ModelShape

Membership: TypeAlias = Literal["auto", "real", "modelled"]

REAL_HOST_SECONDS = 40_000.0
"""Up to so many hosts times seconds, ``auto`` runs the membership core on every host: some minute of CPU."""


@dataclass(frozen=True, slots=True)
class Partition:
    """For a time, a share of all hosts hear nothing of the others. In seconds from the beginning."""

    start_s: float
    stop_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One simulated world.

    Attributes:
        mean_lifetime_s: of a node; infinity: nobody comes or leaves.
        day_share: how far arrivals swing within a day.
        power_share, drain_share: of those that leave: without a word, as a machine that loses power; and after having
            been told to stop. The others are killed, which resets their connections.
        hangs_per_hour, resets_per_hour: of one node: it is stopped for a while; all its links are reset.
        garbage_share: of the nodes that now and then hand on rows that are none.
        liars_share: of the nodes that claim to be faster and larger than they are.
        think_s: on average between an answer and the next question of a user.
        prompt_tokens, answer_tokens: on average; the former log-normal, the latter geometric, as chats have them.
        tokens_per_event: that are computed in one step of the simulation, at most, see docs/simulator.md.
        turns: questions of a conversation, on average: while its route holds, the next one goes over it, as it does in
            the client for the sake of what the nodes have cached.
        stage_layers: a stage begins at multiples of this; above 1 plans are found faster.
        candidates: nodes that a user measures before it plans, at most.
        alternates: whether users keep warm alternates.
    """

    nodes: int = 300
    users: int = 20
    hours: float = 1.0
    model: str = "llama-70b"
    seed: int = 0
    mean_lifetime_s: float = 3 * 3600.0
    day_share: float = 0.4
    power_share: float = 0.2
    drain_share: float = 0.2
    hangs_per_hour: float = 0.05
    resets_per_hour: float = 0.05
    garbage_share: float = 0.01
    liars_share: float = 0.05
    partitions: tuple[Partition, ...] = ()
    think_s: float = 60.0
    prompt_tokens: float = 300.0
    answer_tokens: float = 150.0
    membership: Membership = "auto"
    tokens_per_event: int = 1
    candidates: int = 64
    stage_layers: int = 1
    turns: float = 4.0
    alternates: bool = True

    @property
    def duration_s(self) -> float:
        return self.hours * 3600.0

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model]

    @property
    def is_membership_real(self) -> bool:
        """Whether every host runs the membership core."""
        if self.membership == "auto":
            return (self.nodes + self.users) * self.duration_s <= REAL_HOST_SECONDS
        return self.membership == "real"

    def check(self) -> None:
        """Raises ConfigError for what makes no world."""
        if self.model not in MODELS:
            raise ConfigError(f"unknown model {self.model!r}: choose one of {', '.join(MODELS)}")
        if not 1 <= self.nodes <= 100_000:
            raise ConfigError(f"{self.nodes} nodes: choose between 1 and 100000")
        if not 0 <= self.users <= 10_000:
            raise ConfigError(f"{self.users} users: choose between 0 and 10000")
        if not (math.isfinite(self.hours) and 0 < self.hours <= 24 * 366):
            raise ConfigError(f"{self.hours} hours: choose more than 0 and at most a year")
        if not self.mean_lifetime_s >= 60.0:
            raise ConfigError("nodes that stay for less than a minute on average serve nobody: choose a longer --churn")
        for name in ("day_share", "power_share", "drain_share", "garbage_share", "liars_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name.replace('_', ' ')} {getattr(self, name)} is not between 0 and 1")
        if self.power_share + self.drain_share > 1.0:
            raise ConfigError("the shares of nodes that lose power and that drain are above 1 together")
        for name in ("hangs_per_hour", "resets_per_hour", "think_s"):
            if not 0.0 <= getattr(self, name) <= 1e6:
                raise ConfigError(f"{name.replace('_', ' ')} {getattr(self, name)} is below 0 or far too large")
        for name in ("prompt_tokens", "answer_tokens", "turns"):
            if not 1.0 <= getattr(self, name) <= 1e5:
                raise ConfigError(f"{name.replace('_', ' ')} {getattr(self, name)}: choose between 1 and 100000")
        if self.membership not in ("auto", "real", "modelled"):
            raise ConfigError(f"unknown membership {self.membership!r}: auto, real or modelled")
        if not 1 <= self.tokens_per_event <= 256:
            raise ConfigError(f"{self.tokens_per_event} tokens per event: choose between 1 and 256")
        if not 1 <= self.stage_layers <= self.shape.num_layers:
            raise ConfigError(f"stages that begin every {self.stage_layers} layers: choose between 1 and all of them")
        if not 1 <= self.candidates <= 4096:
            raise ConfigError(f"{self.candidates} candidates: choose between 1 and 4096")
        for each in self.partitions:
            if not (0 <= each.start_s < each.stop_s < math.inf and 0 < each.share < 1):
                raise ConfigError(
                    f"partition {each.start_s:g}:{each.stop_s:g}:{each.share:g}: START must be below STOP, in seconds "
                    "from the beginning, and SHARE between 0 and 1"
                )


def parse_partition(text: str) -> Partition:
    """Reads ``START:STOP:SHARE``.

    Raises:
        ConfigError: it is not of that form.
    """
    try:
        start, stop, share = (float(part) for part in text.split(":"))
    except ValueError as error:
        raise ConfigError(f"partition {text!r}: write START:STOP:SHARE, for example 600:900:0.3") from error
    return Partition(start, stop, share)
