"""One question answered twice in front of one's eyes: by plain decode, and with speculation. For the demonstration.

One after the other, so that neither computes in the other's time; both with clients that remember nothing, so that
the second answer is not guessed from the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fusion_node.cli.talk import describe
from fusion_node.client.sampling import SamplingParams
from fusion_node.wire import harmless

if TYPE_CHECKING:
    from fusion_node.client.swarm import GenerationStats, SwarmClient

PLAIN = "plain decode"

SPEED_AFTER_S = 0.5
"""From the first piece on, before a speed is told: guesses that are right come several at once."""


@dataclass(slots=True)
class Column:
    """One answer as far as it has come.

    Attributes:
        pieces: its text as it is.
        shown: its text without what would command a terminal.
    """

    title: str
    pieces: list[str] = field(default_factory=list, repr=False)
    shown: Text = field(default_factory=Text, repr=False)
    stats: GenerationStats | None = None
    is_over: bool = False
    clock: Callable[[], float] = time.perf_counter
    first: tuple[float, int] | None = None
    """When the first piece came, and with how many tokens: several of them may come at once."""

    def took(self, piece: str) -> None:
        self.pieces.append(piece)
        self.shown.append(harmless(piece))
        if self.first is None and self.stats is not None:
            self.first = self.clock(), self.stats.completion_tokens

    def numbers(self) -> Text:
        """What is known of its speed so far."""
        stats = self.stats
        if stats is None:
            return Text("waits for its turn", style="dim")
        speed = stats.tokens_per_s if self.is_over else self._speed_so_far(stats.completion_tokens)
        told = "–" if speed is None else f"{speed:.1f} tokens/s"
        first = "–" if stats.time_to_first_token_s is None else f"{stats.time_to_first_token_s:.2f} s"
        lines = Text.assemble((told, "bold"), f"\n{stats.completion_tokens} tokens, the first after {first}")
        report = stats.speculation
        if report is not None:
            right = "nothing guessed" if report.acceptance is None else f"{report.acceptance:.0%} of guesses right"
            lines.append(f"\n{right}, {report.rows_per_token:.1f} rows per token, {report.mode} at the end")
        return lines

    def _speed_so_far(self, num_tokens: int) -> float | None:
        if self.first is None:
            return None
        began, num_first = self.first
        elapsed_s = self.clock() - began
        return (num_tokens - num_first) / elapsed_s if elapsed_s >= SPEED_AFTER_S else None


@dataclass(frozen=True, slots=True)
class _SideBySide:
    columns: tuple[Column, ...]

    def __rich__(self) -> Table:
        grid = Table.grid(expand=True, padding=(0, 3, 0, 0))
        for _ in self.columns:
            grid.add_column(ratio=1)
        grid.add_row(*(Text(column.title, style="bold") for column in self.columns))
        grid.add_row(*(column.shown for column in self.columns))
        grid.add_row()
        grid.add_row(*(column.numbers() for column in self.columns))
        return grid


@dataclass(frozen=True, slots=True)
class Comparison:
    """How both answers came out.

    Attributes:
        is_equal: whether they are the same, token for token.
        speedup: tokens per second with speculation over those without; None for answers of less than two tokens.
    """

    plain_text: str = field(repr=False)
    plain: GenerationStats
    speculative_text: str = field(repr=False)
    speculative: GenerationStats

    @property
    def is_equal(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids and self.plain_text == self.speculative_text

    @property
    def speedup(self) -> float | None:
        plain, speculative = self.plain.tokens_per_s, self.speculative.tokens_per_s
        return None if plain is None or speculative is None else speculative / plain

    def to_json(self) -> dict[str, Any]:
        """The plain answer in the places where a demonstration without comparison has its answer, and the rest."""
        return {
            "text": self.plain_text,
            **describe(self.plain),
            "speculative": {"text": self.speculative_text, **describe(self.speculative)},
            "equal": self.is_equal,
            "speedup": self.speedup,
        }

    def verdict(self) -> str:
        """For people, with rich's markup."""
        equal = "[green]equal[/], token for token" if self.is_equal else "[bold red]NOT equal[/]"
        speedup = "" if self.speedup is None else f", and the second came [bold]{self.speedup:.2f}×[/] as fast"
        return f"The two answers are {equal}{speedup}."


async def compare(
    console: Console, prompt: str, params: SamplingParams, plain: SwarmClient, speculative: SwarmClient, *, mode: str
) -> Comparison:
    """Asks both, one after the other, and shows both answers as they come."""
    columns = Column(PLAIN), Column(f"with speculation ({mode})")
    answers = []
    with Live(_SideBySide(columns), console=console, refresh_per_second=8, vertical_overflow="visible"):
        for column, swarm in zip(columns, (plain, speculative), strict=True):
            answer = swarm.generate(prompt, params)
            column.stats = answer.stats
            async for piece in answer:
                column.took(piece)
            column.is_over = True
            answers.append(answer.stats)
    plain_text, speculative_text = ("".join(column.pieces) for column in columns)
    return Comparison(plain_text, answers[0], speculative_text, answers[1])
