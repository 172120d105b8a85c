"""One round trip with all modes: measured, and held against what formulas and the event simulation expect.

Groups 2 and 3 differ in prompts, drafters and targets (novel, copied) and are made of such cells.
"""

from __future__ import annotations

import math
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Check
from benchmarks.speculation.measured import (
    MAX_FRAME_ROWS,
    Answered,
    Guess,
    acceptance_by_depth,
    by_prompt_in_turns,
    error_of,
    guesses_of,
    line_through,
    num_different,
    rank_shares,
    summary_of,
    tree_limit,
)
from benchmarks.speculation.replay import Replayed, expected_rate
from benchmarks.speculation.rig import MODEL, NUM_STAGES, OtherLoad, Swarm, swarm_of
from benchmarks.speculation.ring import Costs
from benchmarks.speculation.teacher import BOUNDS, gaps_of, load_target
from scheduler.speculation import Ring, async_chain_limit, plain_rate

QUIET_CORES = 0.2
"""Used by others, beyond which a cell is called noisy."""

MAX_MODEL_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question of a group."""

    topic: str
    text: str
    kind: str = "novel"


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file beside this one. Those of ``kind`` other than novel end in the text that they name."""
    told = tomllib.loads(path.read_text())
    texts: dict[str, str] = told.get("texts", {})
    return [
        Prompt(
            each["topic"],
            f"{each['text']}\n\n{texts[each['topic']].strip()}" if texts else each["text"],
            each.get("kind", "novel"),
        )
        for each in told["prompt"]
    ]


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured at one round trip.

    Attributes:
        round_trip_ms: emulated, between any two.
        answers: by mode, one per prompt.
        data: for the report.
    """

    round_trip_ms: int
    answers: dict[str, list[Answered]]
    data: dict[str, Any]

    @property
    def summary(self) -> dict[str, dict[str, float]]:
        """By mode."""
        found: dict[str, dict[str, float]] = self.data["modes"]
        return found


async def measure(
    label: str,
    round_trip_ms: int,
    modes: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    draft: Path | None = None,
    remembers: bool = True,
    numerics: str = "fp32",
) -> Cell:
    """Asks every prompt in every mode, all modes in turn. For the arguments see ``swarm_of``."""
    answers: dict[str, list[Answered]] = defaultdict(list)
    async with swarm_of(round_trip_ms, modes, draft=draft, remembers=remembers, numerics=numerics) as swarm:
        load = OtherLoad()
        for number, prompt in enumerate(prompts):
            found = {
                mode: await swarm.answer(mode, number, prompt.text, max_tokens)
                for mode in by_prompt_in_turns(modes, number)
            }
            if all(len(answer.tokens) > 1 for answer in found.values()):  # else there is no time between tokens
                for mode, answer in found.items():
                    answers[mode].append(answer)
        other_cores = load.cores()
    ordered = {mode: answers[mode] for mode in modes}
    gaps = gaps_of(
        load_target(MODEL, numerics),
        [(swarm.prompt_ids[answer.prompt], answer.tokens) for mode in modes for answer in ordered[mode]],
    )
    data = {
        "round_trip_ms": round_trip_ms,
        "measured_round_trips_ms": [round(each, 2) for each in swarm.round_trips_ms],
        "other_cores": round(other_cores, 2),
        "is_noisy": other_cores > QUIET_CORES,
        "num_prompts": len(ordered["plain"]),
        "modes": summary_of(ordered),
        "numerics": numerics,
        "different": sum(num_different(ordered[mode], ordered["plain"]) for mode in modes),
        "worst_gap": gaps.worst,
        "not_the_best": gaps.num_other,
        "looked_at": gaps.num_tokens,
        **_plain_model(swarm, ordered["plain"]),
        **_tree_model(swarm, ordered["plain"], ordered["tree"], round_trip_ms, remembers=remembers),
        "answers": {
            mode: [
                {"prompt": each.prompt, "tokens": len(each.tokens), "tokens_per_s": round(each.rate, 3)}
                for each in there
            ]
            for mode, there in ordered.items()
        },
    }
    cell = Cell(round_trip_ms, ordered, data)
    print(in_words(label, cell), file=sys.stderr, flush=True)
    return cell


def _plain_ms(plain: Sequence[Answered]) -> float:
    return statistics.median(1000 / answer.rate for answer in plain)


def _plain_model(swarm: Swarm, plain: Sequence[Answered]) -> dict[str, Any]:
    """What the planner said before the first answer, and what a token took."""
    predicted_ms, measured_ms = swarm.plan.ms_per_token, _plain_ms(plain)
    return {
        "plain_ms": measured_ms,
        "planned_ms": predicted_ms,
        "planned_error": None if predicted_ms is None else error_of(predicted_ms, measured_ms),
        "legs_ms": [(leg.source, round(leg.ms, 2)) for leg in swarm.plan.legs],
        "planned_compute_ms": [round(stage.compute_ms + stage.queue_ms, 2) for stage in swarm.plan.stages],
        "planned_user_ms": round(swarm.plan.user_ms, 2),
        "compute_ms": [round(1000 * each, 2) for each in _plain_stages_s(swarm)],
    }


def _plain_stages_s(swarm: Swarm) -> list[float]:
    """Per stage, what a pass of plain decode takes."""
    passes = [stages for note in swarm.noted["plain"] for rows, stages in note.passes if rows == 1]
    return [statistics.median(each) for each in zip(*passes, strict=True)]


def _tree_model(
    swarm: Swarm, plain: Sequence[Answered], tree: Sequence[Answered], round_trip_ms: int, *, remembers: bool
) -> dict[str, Any]:
    """What the tree's guesses were, and what is expected of them.

    Compute times are those that stages told while a tree was under way, so that what they take from one another on the
    same cores is in them.
    """
    noted = swarm.noted["tree"]
    guesses = {answer.prompt: guesses_of(answer.tokens, noted[answer.prompt].asked) for answer in tree}
    every: list[Guess] = [guess for each in guesses.values() for guess in each.values()]
    # Frames, and not prompts, whose many rows would bend the line.
    passes = [(rows, stages) for note in noted for rows, stages in note.passes if rows <= MAX_FRAME_ROWS]
    lines = [line_through((rows, stages[stage]) for rows, stages in passes) for stage in range(NUM_STAGES)]
    drafts = [each for note in noted for each in note.drafts]
    draft_s, draft_path_s = line_through(drafts) if drafts else (0.0, 0.0)  # none where all went on as plain decode
    choose_s = statistics.fmean(each for note in noted for each in note.choices)
    plain_choose_s = statistics.median(each for note in swarm.noted["plain"] for each in note.choices)
    legs_s = (NUM_STAGES + 1) * round_trip_ms / 2000
    # What a step takes beyond links, stages and the choice of a token: messages, threads, and the encoding of rows.
    rest_s = max(0.0, _plain_ms(plain) / 1000 - legs_s - sum(_plain_stages_s(swarm)) - plain_choose_s)
    ring = Ring(
        legs_s=legs_s,
        fixed_s=tuple(fixed for fixed, _ in lines),
        row_s=tuple(row for _, row in lines),
        draft_s=draft_s + draft_path_s,
        user_s=rest_s + choose_s,
    )
    costs = Costs(
        NUM_STAGES,
        round_trip_ms / 1000,
        fixed_s=statistics.fmean(ring.fixed_s),
        row_s=statistics.fmean(ring.row_s),
        wire_row_s=0.0,
        draft_s=draft_s,
        draft_path_s=draft_path_s,
        user_s=rest_s,
        choose_s=choose_s,
    )
    replayed = [
        Replayed(swarm.num_prompt[answer.prompt], len(answer.tokens), guesses[answer.prompt]) for answer in tree
    ]
    rates = summary_of({"plain": plain, "tree": tree})["tree"]["tokens_per_s"]
    ranks = rank_shares(every)
    expected = expected_rate(replayed, costs, "tree", remembers=remembers)
    limit = tree_limit(ranks, ring)
    return {
        "acceptance": ranks[0],
        "ranks": ranks,
        "acceptance_by_depth": acceptance_by_depth(every),
        "asked_share": len(every) / sum(len(answer.tokens) for answer in tree),
        "ring_ms": {
            "legs": 1000 * legs_s,
            "fixed": [1000 * each for each in ring.fixed_s],
            "row": [1000 * each for each in ring.row_s],
            "draft": 1000 * draft_s,
            "draft_path": 1000 * draft_path_s,
            "choose": 1000 * choose_s,
            "rest": 1000 * rest_s,
        },
        "plain_on_this_ring": plain_rate(ring),
        "tree_limit": limit,
        "measured_over_limit": rates / limit,
        "chain_limit": async_chain_limit(ranks[0], ring),
        "simulated": expected,
        "simulated_error": error_of(expected, rates),
    }


def in_words(label: str, cell: Cell) -> str:
    """A few lines."""
    data = cell.data
    noise = " NOISY" if data["is_noisy"] else ""
    planned_ms = float("nan") if data["planned_ms"] is None else data["planned_ms"]
    by_depth = "  ".join(
        f"{each['depth']}: {each['first']:.2f}/{each['any']:.2f}" for each in data["acceptance_by_depth"]
    )
    return "\n".join(
        (
            f"{label}, {data['numerics']}, RTT {cell.round_trip_ms} ms "
            f"(measured: {min(data['measured_round_trips_ms']):.1f}); "
            f"others used {data['other_cores']:.2f} cores{noise}",
            *(
                f"  {mode:6}{each['tokens_per_s']:7.2f} tokens/s {each['gain']:5.2f} x plain "
                f"{each['rows_per_token']:5.1f} rows/token {each['first_token_s']:6.2f} s to the first"
                for mode, each in cell.summary.items()
            ),
            f"  plain decode takes {data['plain_ms']:.1f} ms, planned {planned_ms:.1f}; the tree is "
            f"{data['measured_over_limit']:.2f} of its limit, simulated {data['simulated']:.2f} tokens/s",
            f"  {data['different']} answers are not plain decode's; of {data['looked_at']} tokens "
            f"{data['not_the_best']} are not the best of a prefill, the furthest by {data['worst_gap']:.3f} deviations",
            f"  tree, first guess/any of eight right, by depth where guessed: {by_depth}",
        )
    )


def model_checks(prefix: str, label: str, cells: Sequence[Cell]) -> list[Check]:
    """How far the planner and the simulation are off, at the round trips that are emulated; the furthest."""
    there = [cell for cell in cells if cell.round_trip_ms]
    return [
        Check(
            f"{prefix}-planned",
            f"{label}: plain decode, planned against measured ms per token, the furthest",
            max(math.inf if (error := cell.data["planned_error"]) is None else error for cell in there),
            "",
            MAX_MODEL_ERROR,
            "<=",
        ),
        Check(
            f"{prefix}-simulated",
            f"{label}: the tree, simulated with its measured acceptance against measured, the furthest",
            max(cell.data["simulated_error"] for cell in there),
            "",
            MAX_MODEL_ERROR,
            "<=",
        ),
    ]


def text_checks(prefix: str, label: str, cells: Sequence[Cell]) -> list[Check]:
    """Whether every token is the best one within its class's bound, and in fp32 every answer plain decode's."""
    numerics = cells[0].data["numerics"]
    worst = max(cell.data["worst_gap"] for cell in cells)
    what = f"{label}: the furthest a token is below the best, in {numerics}, in deviations"
    found = [Check(f"{prefix}-best", what, worst, "", BOUNDS[numerics], "<=")]
    if numerics != "fp32":
        return found
    different = sum(cell.data["different"] for cell in cells)
    what = f"{label}: answers whose tokens are not plain decode's"
    return [*found, Check(f"{prefix}-same", what, different, "", 0, "==")]
