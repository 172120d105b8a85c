"""The demonstration's two answers side by side, with clients that only pretend; and what it refuses."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fusion_node.cli import demo
from fusion_node.cli.comparison import Column, Comparison, compare
from fusion_node.cli.local_swarm import emulation_options
from fusion_node.cli.main import app
from fusion_node.cli.options import emulated_line
from fusion_node.client.generation import Generation, GenerationStats
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import ConfigError
from p2p.link_emulation_core import LineShape


class PretendingSwarm:
    """Answers with these tokens, each a letter, in so many seconds; asks ``before`` first."""

    def __init__(self, tokens: str, decode_s: float, *, before: Callable[[], None] = lambda: None) -> None:
        self.tokens = tokens
        self.decode_s = decode_s
        self.before = before
        self.is_over = False

    def generate(self, prompt: str, params: SamplingParams) -> Generation:
        stats = GenerationStats(prompt_tokens=3, seed=1)
        return Generation(self._pieces(stats), stats)

    async def _pieces(self, stats: GenerationStats) -> AsyncGenerator[str, None]:
        self.before()
        stats.time_to_first_token_s = 0.25
        for letter in self.tokens:
            stats.token_ids.append(ord(letter))
            stats.completion_tokens += 1
            yield letter
        stats.decode_s = self.decode_s
        self.is_over = True


async def compared(plain: PretendingSwarm, speculative: PretendingSwarm) -> tuple[Comparison, str]:
    out = io.StringIO()
    console = Console(file=out, width=100)
    clients = cast(SwarmClient, plain), cast(SwarmClient, speculative)
    return await compare(console, "?", SamplingParams(), *clients, mode="tree"), out.getvalue()


async def test_equal_answers_are_shown_beside_each_other_with_their_speeds() -> None:
    plain = PretendingSwarm("[b]paris", 3.5)
    comparison, shown = await compared(plain, PretendingSwarm("[b]paris", 1.4))
    assert comparison.is_equal
    assert comparison.speedup == pytest.approx(2.5)
    texts = next(line for line in shown.splitlines() if "paris" in line)
    assert texts.split() == ["[b]paris", "[b]paris"]
    assert "2.0 tokens/s" in shown
    assert "5.0 tokens/s" in shown
    assert "2.50×" in comparison.verdict()


def test_speed_of_an_answer_on_its_way_is_not_that_of_the_tokens_that_came_at_once() -> None:
    now = [100.0]
    column = Column("", clock=lambda: now[0], stats=GenerationStats(prompt_tokens=3, seed=1))
    assert column.stats is not None
    column.stats.completion_tokens = 5
    column.took("hello")
    now[0] += 0.0001
    assert column.numbers().plain.startswith("–")
    now[0], column.stats.completion_tokens = 102.0, 25
    assert column.numbers().plain.startswith("10.0 tokens/s")


async def test_second_question_is_asked_when_the_first_is_answered() -> None:
    plain = PretendingSwarm("abc", 1.0)
    over = []
    await compared(plain, PretendingSwarm("abc", 1.0, before=lambda: over.append(plain.is_over)))
    assert over == [True]


async def test_answers_that_differ_in_a_token_are_said_to() -> None:
    comparison, _ = await compared(PretendingSwarm("abc", 1.0), PretendingSwarm("abd", 1.0))
    assert not comparison.is_equal
    assert "NOT equal" in comparison.verdict()
    told = comparison.to_json()
    assert told["equal"] is False
    assert (told["text"], told["speculative"]["text"]) == ("abc", "abd")
    assert told["token_ids"] == [97, 98, 99]


async def test_answers_command_no_terminal_and_are_told_as_they_are() -> None:
    hostile = "a\x1b[2J\x07\r\x9b"
    comparison, shown = await compared(PretendingSwarm(hostile, 1.0), PretendingSwarm(hostile, 1.0))
    assert comparison.to_json()["text"] == comparison.speculative_text == hostile
    assert "a?[2J??" in shown
    assert not set("\x1b\x07\r\x9b") & set(shown)


async def test_only_answer_of_a_demonstration_commands_no_terminal() -> None:
    hostile = "a\x1b[2J\x9b"
    for is_terminal, expected in ((True, "a?[2J?"), (False, hostile)):
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=is_terminal, color_system=None)
        answer = PretendingSwarm(hostile, 1.0).generate("?", SamplingParams())
        assert await demo.show_answer(console, answer) == hostile
        assert out.getvalue() == expected


async def test_answer_of_one_token_has_no_speed_and_no_comparison_of_it() -> None:
    comparison, shown = await compared(PretendingSwarm("a", 0.0), PretendingSwarm("a", 0.0))
    assert comparison.speedup is None
    assert "×" not in comparison.verdict()
    assert "1 tokens" in shown


@pytest.mark.parametrize(
    "options",
    [
        ["demo", "--rtt", "nan"],
        ["demo", "--rtt", "-1"],
        ["demo", "--jitter", "5"],
        ["demo", "--rtt", "50", "--rate", "0"],
        ["demo", "--draft-model", "m"],
        ["join", "m", "--emulate-rtt", "1e9"],
        ["generate", "m", "?", "--emulate-rate", "inf"],
    ],
)
def test_line_that_makes_no_sense_is_refused_before_anything_starts(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(demo, "pull_with_progress", started)
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, ConfigError)


def test_demo_refuses_a_speculation_that_there_is_not() -> None:
    assert CliRunner().invoke(app, ["demo", "--rtt", "50", "--speculate", "wildly"]).exit_code == 2


def test_line_reaches_a_node_by_its_options() -> None:
    for shape in (LineShape(50.0, 5.0, 100.0), LineShape(0.123456789), LineShape(0.0, 0.0, 0.1)):
        options = emulation_options(shape)
        given = {name: float(value) for name, value in zip(options[::2], options[1::2], strict=True)}
        back = emulated_line(*(given.get(f"--emulate-{name}") for name in ("rtt", "jitter", "rate")))
        assert back == shape
    assert emulation_options(None) == []
    assert emulated_line(None, None, None) is None
