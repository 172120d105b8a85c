"""Tokens per second against the round trip: real drafts on one side, the engine group on the other, each labelled.

    python -m benchmarks.speculation.plot RESULT.json [RESULT.json ...] PICTURE.svg

draws what ``python -m benchmarks.speculation --json RESULT.json`` has measured, of several results the last word.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODES = {"tree": "asynchronous tree", "auto": "auto", "chain": "synchronous chain", "plain": "plain decode"}
COLOURS = {"plain": "#666666", "chain": "#edae49", "tree": "#0b6e99", "auto": "#3c7a3b"}
ENGINE = {"measured": ("tree", MODES["tree"]), "sync_chain": ("chain", "best synchronous chain"),
          "plain": ("plain", MODES["plain"])}  # fmt: skip
ENGINE_ACCEPTANCE, ENGINE_STAGES = 0.8, 3


def draw(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture, in the format of the path's ending.

    Raises:
        ValueError: neither of the two groups is in the documents.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data: dict[str, Any] = {}
    for document in documents:
        data |= document["data"]
    groups = [name for name in ("novel", "engine") if name in data]
    if not groups:
        raise ValueError("no group that can be drawn was measured: novel, engine")
    with pyplot.rc_context({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "speculation"}):
        figure, all_axes = pyplot.subplots(1, len(groups), figsize=(4.6 * len(groups), 4.0), squeeze=False)
        for name, axes in zip(groups, all_axes[0], strict=True):
            (_novel if name == "novel" else _engine)(axes, data[name])
            axes.set_xlabel("round trip between any two machines, ms")
            axes.set_ylabel("tokens per second, one user")
            axes.set_xlim(-4, 104)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", color="#dddddd")
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            axes.legend(frameon=False)
        figure.tight_layout()
        # Without the date, so that the same numbers are the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)
        pyplot.close(figure)


def _novel(axes: Any, data: dict[str, Any]) -> None:
    trips = [cell["round_trip_ms"] for cell in data["cells"]]
    for mode, name in MODES.items():
        rates = [cell["modes"][mode]["tokens_per_s"] for cell in data["cells"]]
        style = "--" if mode == "auto" else "-"
        axes.plot(trips, rates, style, marker="o", markersize=4, color=COLOURS[mode], label=name)
    axes.set_xticks(trips)
    drafts = "trained draft" if data["draft"].startswith("trained") else "no trained draft"
    axes.set_title(f"MEASURED: real drafts, new text\n135M model, 3 CPU processes on 2 cores, {drafts}", fontsize=10)


def _engine(axes: Any, data: dict[str, Any]) -> None:
    cells = [
        cell
        for cell in data["cells"]
        if cell["acceptance"] == ENGINE_ACCEPTANCE and cell["num_stages"] == ENGINE_STAGES
    ]
    trips = [cell["round_trip_ms"] for cell in cells]
    for key, (mode, name) in ENGINE.items():
        rates = [cell[key] for cell in cells]
        axes.plot(trips, rates, "-", marker="o", markersize=4, color=COLOURS[mode], label=name)
    axes.set_xticks(trips)
    axes.set_title(
        f"SIMULATED: engine in a virtual clock\n{ENGINE_STAGES} stages like GPUs, a drafter that is right "
        f"{100 * ENGINE_ACCEPTANCE:.0f} % of the time",
        fontsize=10,
    )


if __name__ == "__main__":
    *results, picture = map(Path, sys.argv[1:])
    draw([json.loads(result.read_text()) for result in results], picture)
