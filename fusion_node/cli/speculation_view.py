"""How an answer was guessed, for people: a few lines, rows of bars over time, and the same as a picture in a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_node.errors import ConfigError
from fusion_node.plotting import load_pyplot

if TYPE_CHECKING:
    from fusion_node.client.speculation import SpeculationReport
    from fusion_node.client.speculation_timeline import Sample, Timeline

OPTION = "--speculation-plot"

MAX_COLUMNS = 54
BESIDE_COLUMNS = 26
"""Of the rows of bars, and what is before and behind them: they fit on a terminal of 80, and have fewer on a narrower
one."""

MIN_COLUMNS = 4
"""Less is no picture of anything."""

FORMATS = (".png", ".svg", ".pdf")

_BARS = "▁▂▃▄▅▆▇█"
_LETTERS = {"tree": "T", "chain": "C", "plain": "P"}
_SHADES = {"tree": "#0b6e99", "chain": "#edae49", "plain": "#999999"}
_INK, _SECOND = "#222222", "#d1495b"


def lines(report: SpeculationReport) -> str:
    """The whole in a line, acceptance by depth in the second, and what happened over time below."""
    right = "nothing guessed" if report.acceptance is None else f"{report.acceptance:.0%} of first guesses right"
    first = (
        f"speculation: {report.mode}, {right}, {report.rows_per_token:.1f} rows per token, depth {report.depth:.1f}, "
        f"latency {1000 * report.latency_s:.0f} ms, {1000 * report.price_s:.2f} ms per row"
    )
    return "\n".join((first, *_depths(report), *_rows(report.timeline)))


def _depths(report: SpeculationReport) -> list[str]:
    shares = [
        f"{depth}: {each.num_right / each.num_guessed:.0%} of {each.num_guessed}"
        for depth, each in enumerate(report.by_depth, start=1)
        if each.num_guessed
    ]
    return [f"right by how many tokens ahead: {', '.join(shares)}"] if shares else []


def _rows(timeline: Timeline) -> list[str]:
    width = shutil.get_terminal_size().columns
    column_s, columns = timeline.columns(min(MAX_COLUMNS, max(MIN_COLUMNS, width - BESIDE_COLUMNS)))
    if len(columns) < MIN_COLUMNS:
        return []
    letters = "".join("·" if each is None else _LETTERS.get(each.mode, "?") for each in columns)
    return [
        f"over {timeline.length_s:.1f} s, a column being {column_s:.1f} s; T tree, C chain, P plain, · no token:",
        f"  mode       {letters}",
        f"  tokens/s   {_bars(columns, lambda each: each.num_tokens / column_s, '{:.0f}')}",
        f"  right      {_bars(columns, _share, '{:.0%}', most=1.0)}",
        f"  depth      {_bars(columns, lambda each: each.depths / each.num_tokens, '{:.1f}')}",
        f"  in flight  {_bars(columns, lambda each: float(each.in_flight), '{:.0f} rows')}",
    ]


def _share(sample: Sample) -> float | None:
    return sample.num_first / sample.num_candidates if sample.num_candidates else None


def _bars(
    columns: Sequence[Sample | None],
    value_of: Callable[[Sample], float | None],
    shown: str,
    most: float | None = None,
) -> str:
    """A bar per column, and what the highest stands for."""
    values = [None if each is None else value_of(each) for each in columns]
    top = max((value for value in values if value is not None), default=0.0) if most is None else most
    bars = "".join(
        " " if value is None else _BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] if top else _BARS[0]
        for value in values
    )
    return f"{bars}  █ {shown.format(top)}"


def check_plot(path: Path) -> None:
    """Whether a picture can be drawn there, asked before an answer and not after it.

    Raises:
        ConfigError: no.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{OPTION} {path}: the name has to end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not path.parent.is_dir():
        raise ConfigError(f"{OPTION} {path}: there is no folder {path.parent}")
    load_pyplot(OPTION)


def write_plot(report: SpeculationReport, path: Path) -> None:
    """Draws tokens per second by mode, acceptance, rows in flight, and L with the price of a row, over time; and
    acceptance by depth. There is nothing of the text in it.

    Raises:
        ConfigError: the file cannot be written.
    """
    pyplot = load_pyplot(OPTION)
    figure, axes = pyplot.subplot_mosaic(
        [["speed", "depth"], ["right", "depth"], ["rows", "depth"], ["cost", "depth"]],
        figsize=(10, 7),
        width_ratios=(3, 1),
        layout="constrained",
    )
    num_tokens = sum(each.num_tokens for each in report.timeline.samples)
    figure.suptitle(f"{num_tokens} tokens, {report.rows_per_token:.1f} rows per token, at the end {report.mode}")
    _draw_over_time([axes[name] for name in ("speed", "right", "rows", "cost")], report.timeline, pyplot)
    _draw_depths(axes["depth"], report)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _draw_over_time(axes: Sequence[Any], timeline: Timeline, pyplot: Any) -> None:
    speed, right, rows, cost = axes
    span_s, samples = timeline.span_s, timeline.samples
    starts = [each.at_s for each in samples]
    middles = [each.at_s + span_s / 2 for each in samples]
    rates = [each.num_tokens / span_s for each in samples]
    speed.bar(starts, rates, span_s, align="edge", color=[_SHADES.get(each.mode, _INK) for each in samples])
    speed.set_ylabel("tokens/s")
    modes = [mode for mode in _SHADES if any(each.mode == mode for each in samples)]
    speed.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=_SHADES[mode]) for mode in modes],
        modes, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    shares = [(at, _share(each)) for at, each in zip(middles, samples, strict=True)]
    known = [(at, 100 * share) for at, share in shares if share is not None]
    right.plot([at for at, _ in known], [share for _, share in known], ".", color=_INK, alpha=0.35, markersize=4)
    right.plot(*_smooth(samples, middles), color=_SHADES["tree"], linewidth=1.8)
    right.set(ylabel="first guess\nright, %", ylim=(-4, 104))
    rows.fill_between(middles, [each.in_flight for each in samples], color=_SHADES["tree"], alpha=0.35, linewidth=0)
    rows.set_ylabel("rows in flight", color=_SHADES["tree"])
    rows.set_ylim(bottom=0)
    _on_the_right(rows, middles, [each.depths / max(1, each.num_tokens) for each in samples], "depth of the tree")
    latencies = [1000 * each.latency_s or float("nan") for each in samples]  # 0 before the first frame is back
    cost.plot(middles, latencies, color=_INK, linewidth=1.5)
    cost.set(ylabel="latency L, ms", xlabel="seconds since the first token")
    cost.set_ylim(bottom=0)
    _on_the_right(cost, middles, [1000 * each.price_s for each in samples], "price of a row, ms")
    for each in axes:
        each.grid(alpha=0.3)
        each.set_xlim(0, max(timeline.length_s, span_s))
        each.label_outer()


def _smooth(samples: Sequence[Sample], middles: Sequence[float], width: int = 9) -> tuple[list[float], list[float]]:
    """Per cent over that many samples around each, where anything was guessed."""
    found: list[tuple[float, float]] = []
    for index, at in enumerate(middles):
        near = samples[max(0, index - width // 2) : index + width // 2 + 1]
        if guessed := sum(each.num_candidates for each in near):
            found.append((at, 100 * sum(each.num_first for each in near) / guessed))
    return [at for at, _ in found], [share for _, share in found]


def _on_the_right(axes: Any, x: Sequence[float], y: Sequence[float], label: str) -> None:
    twin = axes.twinx()
    twin.plot(x, y, color=_SECOND, linewidth=1.2)
    twin.set_ylabel(label, color=_SECOND)
    twin.set_ylim(0, max([*y, 1e-9]) * 1.1)


def _draw_depths(axes: Any, report: SpeculationReport) -> None:
    found = [(depth, each) for depth, each in enumerate(report.by_depth, start=1) if each.num_guessed]
    axes.set(xlabel="tokens ahead", ylabel="first guess right, %", ylim=(0, 108))
    if not found:
        axes.text(0.5, 0.5, "nothing was guessed", ha="center", transform=axes.transAxes)
        axes.set_xticks([])
        return
    bars = axes.bar(
        [depth for depth, _ in found], [100 * each.num_right / each.num_guessed for _, each in found],
        color=_SHADES["tree"],
    )  # fmt: skip
    axes.bar_label(bars, [str(each.num_guessed) for _, each in found], fontsize=7, padding=2)
    axes.set_title("by depth, with counts", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
