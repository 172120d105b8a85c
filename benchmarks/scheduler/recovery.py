"""How long an answer stands still when a node dies, freezes, is cut off, leaves or lies in the middle of it.

Six node processes on this machine hold every third of the built-in model twice; a user asks, and the fault happens at
a moment that is a frame and not a time: while the prompt is computed, when a token has just come, and while a row is
between two stages (tests.live.chaos). Every answer must be what it is undisturbed, token for token.

The stall is what a reader of the answer sees: from the fault to the next token, less what a token takes otherwise. It
includes finding out, opening a session with the node that takes over, and the replay of what that one has to compute
again. What of it the replay is, this machine's cores decide, on which all six nodes compute; so the share of positions
that were computed again is told beside it.

Each trial is told as it ends, on one line of standard error and of a file, so that what a campaign had found is there
when it is cut off.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Check
from fusion_node import ModelStore
from fusion_node.errors import FusionError
from tests.live.chaos import GREEDY, SAMPLED, ChaosSwarm, Fault, Place, Trial, Undisturbed, chaos_swarm, try_fault

MODEL = "smollm2-135m"
RANGES = ("0:10", "10:20", "20:30")
MAX_STALL_S = 2.0
"""At the median of each kind of fault, replay included; no more on loopback."""

QUICK = (
    (Fault.GARBAGE, Place.DECODE, 1),
    (Fault.RESET, Place.BETWEEN, 1),
    (Fault.FREEZE, Place.BETWEEN, 2),
    (Fault.KILL, Place.DECODE, 1),
)
FULL_ROUNDS = 5


class Journal:
    """Takes trials as they end.

    Args:
        path: a file that gets one JSON object a line.
        num_trials: that there will be.
    """

    def __init__(self, path: Path, num_trials: int) -> None:
        self._path = path
        self._num_trials = num_trials
        self._num_told = 0
        self._began = time.monotonic()
        print(f"every trial goes to {path} as it ends", file=sys.stderr, flush=True)

    def tell(self, fault: Fault, place: Place, told: dict[str, Any]) -> None:
        line = json.dumps({"fault": fault.value, "place": place.value, **told})
        with self._path.open("a") as file:
            file.write(line + "\n")
        self._num_told += 1
        progress = f"{self._num_told} of {self._num_trials}, {time.monotonic() - self._began:.0f} s"
        print(f"{progress}: {line}", file=sys.stderr, flush=True)


async def trials(
    swarm: ChaosSwarm, cases: Sequence[tuple[Fault, Place, int]], rounds: int, path: Path
) -> dict[tuple[Fault, Place], list[dict[str, Any]]]:
    """Each case so many times, every second time with sampling. A stage is the case's, and the next one in the next
    round. What has ended is in the file at ``path``, see Journal."""
    journal = Journal(path, rounds * len(cases))
    found: dict[tuple[Fault, Place], list[dict[str, Any]]] = defaultdict(list)
    undisturbed = Undisturbed()
    for number in range(rounds):
        for fault, place, first in cases:
            stage = (first + number) % len(RANGES)
            params = SAMPLED if number % 2 else GREEDY
            told: dict[str, Any] = {"stage": stage, "sampled": bool(number % 2)}
            try:
                told |= _told(await try_fault(swarm, undisturbed, fault, place, stage, params))
            except (FusionError, AssertionError, TimeoutError) as error:
                told |= {"is_equal": False, "error": f"{type(error).__name__}: {error}"[:300]}
            found[fault, place].append(told)
            journal.tell(fault, place, told)
    return found


def _told(trial: Trial) -> dict[str, Any]:
    computed = sum(len(RANGES) * each for each in (trial.outcome.stats.prompt_tokens, len(trial.outcome.tokens) - 1))
    return {
        "is_equal": trial.is_equal,
        "stall_s": round(trial.stall_s, 3),
        "repair_s": round(trial.resumed_s, 3),
        "repairs": trial.causes,
        "replayed_share": round(trial.outcome.stats.replayed_positions / computed, 3),
        "ms_per_token": round(1000 / (trial.whole.stats.tokens_per_s or math.nan), 1),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least so many are not above; not a number for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(found: dict[tuple[Fault, Place], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One entry per fault and place."""
    rows = []
    for (fault, place), each in found.items():
        stalls = [one["stall_s"] for one in each if "stall_s" in one]
        rows.append(
            {
                "fault": fault.value,
                "place": place.value,
                "answers": len(each),
                "equal": sum(one["is_equal"] for one in each),
                "stall_median_s": quantile(stalls, 0.5),
                "stall_p95_s": quantile(stalls, 0.95),
                "replayed_share": statistics.mean([one.get("replayed_share", 0.0) for one in each]),
            }
        )
    return rows


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """As one table."""
    table = Table(title="An answer stands still")
    for column in ("fault", "in", "equal", "median", "95 %", "computed again"):
        table.add_column(column, justify="left" if column in ("fault", "in") else "right")
    for row in rows:
        table.add_row(
            row["fault"], row["place"], f"{row['equal']} of {row['answers']}", f"{row['stall_median_s']:.2f} s",
            f"{row['stall_p95_s']:.2f} s", f"{100 * row['replayed_share']:.0f} %",
        )  # fmt: skip
    Console().print(table)


async def _measure(swarm: ChaosSwarm, quick: bool) -> dict[tuple[Fault, Place], list[dict[str, Any]]]:
    with tempfile.NamedTemporaryFile(prefix="recovery-", suffix=".jsonl", delete=False) as file:
        path = Path(file.name)
    if quick:
        return await trials(swarm, QUICK, 1, path)
    cases = [(fault, place, index) for fault in Fault for index, place in enumerate(Place)]
    return await trials(swarm, cases, FULL_ROUNDS, path)


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Some faults once, or all of them everywhere several times."""
    store = ModelStore()
    store.pull(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        (home / "models").symlink_to(store.home / "models")
        with chaos_swarm(home, Path(folder)) as swarm:
            swarm.start(*RANGES * 2)
            found = asyncio.run(_measure(swarm, quick))
    rows = summary(found)
    print_summary(rows)
    everything = [one for each in found.values() for one in each]
    equal = sum(one["is_equal"] for one in everything) / len(everything)
    checks = [Check("equal", "hurt answers that equal the undisturbed ones", equal, "", 1.0, "==")]
    for fault in dict.fromkeys(fault for fault, _ in found):
        stalls = [one["stall_s"] for key, each in found.items() if key[0] is fault for one in each if "stall_s" in one]
        checks += [
            Check(f"stall-{fault}", f"stall after {fault}, median", quantile(stalls, 0.5), "s", MAX_STALL_S, "<="),
            Check(
                f"stall-{fault}-p95", f"stall after {fault}, 95 %", quantile(stalls, 0.95), "s", 2 * MAX_STALL_S, "<="
            ),
        ]
    return checks, {"summary": rows, "answers": {f"{f} {p}": each for (f, p), each in found.items()}}
