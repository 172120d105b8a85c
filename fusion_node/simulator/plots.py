"""Pictures of a simulation. matplotlib is not part of the product: the extra ``bench`` has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_node.errors import ConfigError
from fusion_node.plotting import load_pyplot
from fusion_node.simulator.report import stalls_by_fault, tokens_per_s

if TYPE_CHECKING:
    from fusion_node.simulator.world import World

_NAMES = {
    "none": "nothing injected",
    "kill": "killed",
    "hang": "stopped",
    "power": "without power",
    "drain": "told to stop",
    "garbage": "sending garbage",
    "reset": "cut off by a reset",
    "partition": "in another part",
}
FEW = 5
"""Up to so many values are drawn as points: a curve would promise too much."""

_COLOURS = ("#0b6e99", "#d1495b", "#edae49", "#3c7a3b", "#7b4b94", "#666666", "#a0522d")


def check_available() -> None:
    """Raises ConfigError where there is no matplotlib; asked before a long simulation, not after it."""
    load_pyplot("--plots")


def write_plots(world: World, folder: Path) -> list[Path]:
    """Draws tokens per second, stalls by fault, and the swarm over time; returns the files.

    Raises:
        ConfigError: there is no matplotlib, or the folder cannot be written to.
    """
    pyplot = load_pyplot("--plots")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            _speeds(pyplot, world, folder / "tokens-per-second.png"),
            _stalls(pyplot, world, folder / "stalls.png"),
            _swarm(pyplot, world, folder / "swarm.png"),
        ]
    except OSError as error:
        raise ConfigError(f"cannot write plots to {folder}: {error.strerror}") from error


def _title(world: World) -> str:
    settings = world.settings
    return f"{settings.nodes:,} nodes, {settings.users} users, {settings.model}, seed {settings.seed}"


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _steps(axes: Any, values: list[float], **style: Any) -> None:
    """A cumulative distribution that begins at 0 and ends at 100 %."""
    ordered = sorted(values)
    shares = [100.0 * (index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *shares], where="post", **style)


def _speeds(pyplot: Any, world: World, path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    values = tokens_per_s(world.metrics)
    if values:
        _steps(axes, values, color=_COLOURS[0], linewidth=2)
        middle = sorted(values)[len(values) // 2]
        axes.axvline(middle, color=_COLOURS[1], linestyle="--", linewidth=1)
        axes.annotate(f"median {middle:.1f}", (middle, 4), xytext=(6, 0), textcoords="offset points", color=_COLOURS[1])
        axes.set_xlim(left=0)
    else:
        axes.text(0.5, 0.5, "no answer of two tokens or more", ha="center", transform=axes.transAxes)
    axes.set(xlabel="tokens per second of an answer, after its first token", ylabel="answers at most as fast, %")
    axes.set_ylim(0, 100)
    axes.set_title(_title(world))
    axes.grid(alpha=0.3)
    return _save(pyplot, figure, path)


def _stalls(pyplot: Any, world: World, path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    by_fault = stalls_by_fault(world.metrics)
    for (fault, values), colour in zip(by_fault.items(), _COLOURS * 2, strict=False):
        label = f"{_NAMES.get(fault, fault)} ({len(values)})"
        shown = [max(value, 0.01) for value in values]
        if len(shown) <= FEW:
            shares = [100.0 * (index + 0.5) / len(shown) for index in range(len(shown))]
            axes.plot(sorted(shown), shares, "o", color=colour, label=label)
        else:
            _steps(axes, shown, color=colour, linewidth=2, label=label)
    if by_fault:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(pyplot.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.legend(title="the node was", loc="upper left", fontsize=8)
    else:
        axes.text(0.5, 0.5, "no answer had to be repaired", ha="center", transform=axes.transAxes)
    axes.set(xlabel="seconds in which nothing came, until the answer went on", ylabel="repairs at most as long, %")
    axes.set_ylim(0, 100)
    axes.set_title(_title(world))
    axes.grid(alpha=0.3, which="both")
    return _save(pyplot, figure, path)


def _swarm(pyplot: Any, world: World, path: Path) -> Path:
    samples = world.metrics.samples
    hours = [sample.at_s / 3600.0 for sample in samples]
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 5.6), sharex=True, height_ratios=(2, 1))
    upper.plot(hours, [sample.live for sample in samples], color=_COLOURS[0], linewidth=1.5)
    upper.set_ylabel("live nodes", color=_COLOURS[0])
    upper.set_ylim(bottom=0)
    right = upper.twinx()
    right.plot(hours, [sample.active for sample in samples], color=_COLOURS[2], linewidth=0.8, alpha=0.8)
    right.set_ylabel("users being answered", color=_COLOURS[2])
    right.yaxis.get_major_locator().set_params(integer=True)
    right.set_ylim(0, max(1, world.settings.users) * 1.05)
    lower.plot(hours, [100.0 * sample.covered for sample in samples], color=_COLOURS[3], linewidth=1.5)
    lower.set(xlabel="hours", ylabel="layers served, %")
    least = min(sample.covered for sample in samples)
    lower.set_ylim(min(90.0, 95.0 * least), 101.0)
    for partition in world.settings.partitions:
        for axes in (upper, lower):
            axes.axvspan(partition.start_s / 3600, partition.stop_s / 3600, color="#999999", alpha=0.25, linewidth=0)
        middle = (partition.start_s + partition.stop_s) / 7200
        upper.text(middle, 0.02, "parted", transform=upper.get_xaxis_transform(), ha="center", fontsize=8)
    upper.set_title(_title(world))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.set_xlim(0, max(hours[-1], 1e-3))
    return _save(pyplot, figure, path)
