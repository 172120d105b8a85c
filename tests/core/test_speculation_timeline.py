"""How an answer's speculation went over time: bounded, whole, and without a word of the text."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.speculation.oracle import OracleDrafter, OracleText
from benchmarks.speculation.ring import Costs, World
from fusion_node.cli import speculation_view
from fusion_node.cli.main import app
from fusion_node.client.generation import GenerationStats
from fusion_node.client.speculation import SpeculationReport
from fusion_node.client.speculation_core import SpeculationCore
from fusion_node.client.speculation_timeline import MAX_DEPTH, MAX_SAMPLES, SPAN_S, DepthCount, TimelineRecorder, Totals
from fusion_node.errors import ConfigError
from fusion_node.gateway.openai_schema import SpeculationUsage
from fusion_node.gateway.server import usage_of
from fusion_node.types import MonotonicS
from scheduler.speculation import MAX_CHAIN, Mode, ModePolicy


def totals(num_tokens: int, mode: str = "tree") -> Totals:
    """After so many tokens, of which each took three rows, and every second was guessed rightly."""
    return Totals(mode, num_tokens, 3 * num_tokens, num_tokens, num_tokens // 2, 4 * num_tokens, 0.1, 0.001)


def recorded(gaps_s: list[float]) -> TimelineRecorder:
    recorder, now = TimelineRecorder(), 5.0
    for index, gap_s in enumerate(gaps_s, start=1):
        recorder.committed(totals(index), in_flight=7, now=MonotonicS(now))
        now += gap_s
    return recorder


@given(st.lists(st.sampled_from((0.0, 0.01, 0.09, 0.3, 7.0, 1000.0)), min_size=1, max_size=400), st.integers(1, 80))
@settings(deadline=None)
def test_samples_are_bounded_and_hold_every_token_once(gaps_s: list[float], most: int) -> None:
    timeline = recorded(gaps_s).timeline()
    assert 1 <= len(timeline.samples) <= MAX_SAMPLES
    assert math.log2(timeline.span_s / SPAN_S).is_integer()
    starts = [sample.at_s for sample in timeline.samples]
    assert starts == sorted(set(starts))
    assert starts[-1] <= sum(gaps_s[:-1]) + 1e-6 < timeline.length_s + 1e-3
    column_s, columns = timeline.columns(most)
    assert len(columns) <= most
    assert len(columns) * column_s >= timeline.length_s - 1e-6
    for found in (timeline.samples, [each for each in columns if each is not None]):
        assert sum(sample.num_tokens for sample in found) == len(gaps_s)
        assert sum(sample.num_rows for sample in found) == 3 * len(gaps_s)
        assert sum(sample.num_first for sample in found) == len(gaps_s) // 2


def test_columns_leave_the_timeline_as_it_is() -> None:
    timeline = recorded([0.05] * 100).timeline()
    before = msgspec.json.encode(timeline)
    timeline.columns(3)
    assert msgspec.json.encode(timeline) == before


def test_guesses_count_by_how_far_ahead_they_were_made_and_the_deepest_together() -> None:
    recorder = TimelineRecorder()
    for depth, is_right in ((1, True), (1, False), (3, True), (MAX_DEPTH, True), (MAX_DEPTH + 5, False)):
        recorder.guessed(depth, is_right=is_right)
    found = recorder.by_depth()
    assert found[:3] == (DepthCount(2, 1), DepthCount(0, 0), DepthCount(1, 1))
    assert (len(found), found[-1]) == (MAX_DEPTH, DepthCount(2, 1))


# what an answer leaves


def answered(modes: tuple[Mode, ...] = (Mode.TREE,), acceptance: float = 0.8, num_tokens: int = 300) -> SpeculationCore:
    world = World(Costs(3, 0.05), seed=1)
    user = world.add(
        [1],
        drafter=OracleDrafter(acceptance, OracleText(acceptance, num_tokens, 3), 3),
        choose=lambda position, row: 0,
        stop_position=num_tokens,
        max_positions=num_tokens + 400,
        stop_tokens=frozenset(),
        policy=ModePolicy(modes),
    )
    world.clock.run()
    return user.core


@pytest.fixture(scope="module")
def report() -> SpeculationReport:
    return SpeculationReport.of(answered())


def test_report_adds_up(report: SpeculationReport) -> None:
    samples = report.timeline.samples
    num_tokens = sum(each.num_tokens for each in samples)
    assert num_tokens == 299
    assert sum(each.num_first for each in samples) == sum(each.num_right for each in report.by_depth)
    assert sum(each.num_candidates for each in samples) == sum(each.num_guessed for each in report.by_depth)
    assert {each.mode for each in samples} == {"tree"}
    assert sum(each.depths for each in samples) / num_tokens == pytest.approx(report.depth)
    assert max(each.in_flight for each in samples) > 16
    assert samples[-1].latency_s == pytest.approx(report.latency_s, rel=0.2)


def test_acceptance_by_depth_is_the_drafters(report: SpeculationReport) -> None:
    """Whose first guess is right as often at every depth."""
    assert len(report.by_depth) > 3
    for each in report.by_depth[:3]:
        share = each.num_right / each.num_guessed
        assert abs(share - 0.8) < 4 * math.sqrt(0.16 / each.num_guessed)


def test_modes_are_told_apart() -> None:
    def modes(mode: Mode) -> tuple[set[str], int]:
        samples = SpeculationReport.of(answered((mode,), num_tokens=60)).timeline.samples
        return {each.mode for each in samples}, max(each.in_flight for each in samples)

    assert modes(Mode.PLAIN) == ({"plain"}, 1)
    names, in_flight = modes(Mode.CHAIN)
    assert "chain" in names
    assert 1 < in_flight <= MAX_CHAIN + 1


# shown to people


def test_rows_of_bars_fit_on_a_terminal(report: SpeculationReport) -> None:
    first, depths, over, *rows = speculation_view.lines(report).split("\n")
    assert first.startswith("speculation: tree, ")
    assert depths.startswith("right by how many tokens ahead: 1: ")
    assert over.startswith("over ")
    assert [row.split()[0] for row in rows] == ["mode", "tokens/s", "right", "depth", "in"]
    bars = [row[13:].split("  ")[0] for row in rows]
    assert len({len(each) for each in bars}) == 1
    assert len(bars[0]) <= speculation_view.MAX_COLUMNS
    assert set(bars[0]) <= {"T", "·"}
    assert "█" in bars[1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_rows_of_bars_are_no_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    recorder = TimelineRecorder()
    for index in range(1, 2400):
        recorder.committed(totals(10 * index), in_flight=384, now=MonotonicS(index / 40))
    report = SpeculationReport("tree", 0.5, 3.0, 0.1, 0.001, 4.0, 0, (), recorder.timeline())
    _, over, *rows = speculation_view.lines(report).split("\n")
    assert len(over) <= 80
    assert len(rows) == 5
    assert max(map(len, rows)) <= min(width, 80)


def test_an_answer_too_short_for_a_picture_has_none() -> None:
    report = SpeculationReport.of(answered(num_tokens=3))
    assert "mode " not in speculation_view.lines(report)


def test_picture_is_drawn_of_any_answer(report: SpeculationReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = SpeculationReport.of(answered((Mode.PLAIN,), num_tokens=2))
    for each, name in ((report, "guesses.png"), (nothing, "nothing.svg")):
        speculation_view.check_plot(tmp_path / name)
        speculation_view.write_plot(each, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000


def test_picture_that_cannot_be_drawn_is_refused_before_an_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has to end with \.png"):
        speculation_view.check_plot(tmp_path / "guesses.xls")
    with pytest.raises(ConfigError, match="no folder"):
        speculation_view.check_plot(tmp_path / "nowhere" / "guesses.svg")


def test_picture_of_an_answer_without_guesses_is_refused(tmp_path: Path) -> None:
    words = ["generate", "smollm2-135m", "hello", "--speculation-plot", str(tmp_path / "guesses.png")]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert "add --speculate auto" in str(error)


def test_usage_of_the_gateway_has_the_counts_by_depth_and_not_the_timeline(report: SpeculationReport) -> None:
    told = usage_of(GenerationStats(speculation=report)).fusion.speculation
    assert isinstance(told, SpeculationUsage)
    assert [(each.guessed, each.right) for each in told.by_depth] == [
        (each.num_guessed, each.num_right) for each in report.by_depth
    ]
    assert len(msgspec.json.encode(told)) < 1000


def test_no_token_is_in_what_is_told() -> None:
    secret = 271_828
    chance = random.Random(1)
    world = World(Costs(2, 0.05), seed=1, digests=True)
    user = world.add(
        [secret],
        drafter=OracleDrafter(0.5, OracleText(0.5, 60, 3), 3),
        choose=lambda position, row: secret + chance.randrange(5),
        stop_position=60,
        max_positions=400,
        stop_tokens=frozenset(),
    )
    world.clock.run()
    told = msgspec.to_builtins(SpeculationReport.of(user.core))
    assert "27182" not in json.dumps(told)
    assert len(json.dumps(told)) < 250 * MAX_SAMPLES
