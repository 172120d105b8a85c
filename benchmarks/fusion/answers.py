"""Whole answers of a fusion group beside those of a pipeline of as many nodes, and beside what was planned.

A token is a step of one row; a prompt of 16 or 64 tokens is a step of so many rows, as a chunk of a longer one or a
tree of guesses is. What is told of wide steps is the time from the step to its result, without opening a session.

The planner's error is of the milliseconds per token: of the plan that a user is told before the first answer, from what
nodes have measured of one another and announce, against the median of the answers.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fusion.rig import FUSION, MODEL, PIPELINE, TOPOLOGIES, Answered, swarm_of
from benchmarks.report import Check
from fusion_node import ModelStore

GROUPS = (2, 3)
ROUND_TRIPS_MS = (0, 1, 10, 50)
QUICK_GROUPS, QUICK_ROUND_TRIPS_MS = (2,), (0, 10)
WIDE_ROWS = (16, 64)
PROMPT_TOKENS = 8
"""Of the answers whose tokens are timed."""

TOKENS = {0: 24, 1: 24, 10: 8, 50: 4}
"""Of an answer, by round trip: four exchanges per layer make 3 s of a token at 50 ms."""

MAX_QUICK_TOKENS = 8

NUM_ROUNDS, NUM_QUICK_ROUNDS = 3, 2
MAX_MEDIAN_ERROR = 0.15


async def measure(num_nodes: int, round_trip_ms: int, max_tokens: int, num_rounds: int) -> dict[str, Any]:
    """One size of groups at one round trip; topologies in turn."""
    answers: dict[str, list[Answered]] = defaultdict(list)
    wide: dict[str, dict[int, list[Answered]]] = {topology: defaultdict(list) for topology in TOPOLOGIES}
    async with swarm_of(round_trip_ms, num_nodes, max_tokens) as swarm:
        prompts = {rows: await swarm.prompt_of(rows) for rows in (PROMPT_TOKENS, *WIDE_ROWS)}
        for number in range(num_rounds):
            order = TOPOLOGIES if number % 2 else TOPOLOGIES[::-1]
            for topology in order:
                answers[topology].append(await swarm.answer(topology, prompts[PROMPT_TOKENS], max_tokens))
            for rows in WIDE_ROWS:
                for topology in order:
                    wide[topology][rows].append(await swarm.answer(topology, prompts[rows], 1))
        plans = swarm.plans
    num_layers = ModelStore().pull(MODEL).num_layers
    return {
        "members": num_nodes,
        "round_trip_ms": round_trip_ms,
        "different": sum(
            mine.tokens != theirs.tokens for mine, theirs in zip(answers[FUSION], answers[PIPELINE], strict=True)
        ),
        "widths": {
            str(rows): widths_told(
                {topology: step_ms(rows, answers[topology], wide[topology]) for topology in TOPOLOGIES},
                rows,
                num_layers,
            )
            for rows in (1, *WIDE_ROWS)
        },
        "cpu_ms_per_token": {topology: cpu_ms_per_token(answers[topology]) for topology in TOPOLOGIES},
        "user_cpu_ms_per_token": {
            topology: round(1000 * statistics.median(each.user_cpu_s / len(each.tokens) for each in there), 1)
            for topology, there in answers.items()
        },
        "planned": {topology: planned(plans[topology], answers[topology]) for topology in TOPOLOGIES},
    }


def step_ms(rows: int, answers: Sequence[Answered], wide: Mapping[int, Sequence[Answered]]) -> list[float]:
    """Of steps of so many rows, by round."""
    if rows == 1:
        return [answer.ms_per_token for answer in answers]
    return [1000 * answer.rows_s for answer in wide[rows]]


def widths_told(ms: Mapping[str, Sequence[float]], rows: int, num_layers: int) -> dict[str, Any]:
    """Of steps of one width: medians, and what a group's rate is of a pipeline's, by the median of the rounds."""
    medians = {topology: statistics.median(each) for topology, each in ms.items()}
    return {
        "ms": {topology: round(each, 2) for topology, each in medians.items()},
        "ms_per_layer": round(medians[FUSION] / num_layers, 3),
        "rows_per_s": {topology: round(1000 * rows / each, 2) for topology, each in medians.items()},
        "rate_of_pipeline": statistics.median(
            theirs / mine for mine, theirs in zip(ms[FUSION], ms[PIPELINE], strict=True)
        ),
    }


def cpu_ms_per_token(answers: Sequence[Answered]) -> float:
    """Of all nodes together, the prompt's rows counted as tokens' steps are: one step each."""
    return round(1000 * statistics.median(each.cpu_s / len(each.tokens) for each in answers), 1)


def planned(plan: Any, answers: Sequence[Answered]) -> dict[str, Any]:
    """A plan beside what tokens took."""
    measured_ms = statistics.median(answer.ms_per_token for answer in answers)
    told = plan.ms_per_token
    return {
        "ms": None if told is None else round(told, 2),
        "measured_ms": round(measured_ms, 2),
        "error": float("inf") if told is None else abs(told - measured_ms) / measured_ms,
        "legs_ms": [(leg.source, round(leg.ms, 2)) for leg in plan.legs],
        "compute_ms": [round(stage.compute_ms + stage.queue_ms, 2) for stage in plan.stages],
        "exchange_ms": [round(stage.exchange_ms, 2) for stage in plan.stages],
        "user_ms": round(plan.user_ms, 2),
    }


def in_words(told: dict[str, Any]) -> str:
    """A few lines."""
    lines = [f"{told['members']} nodes, RTT {told['round_trip_ms']} ms:"]
    for rows, each in told["widths"].items():
        ms, rates = each["ms"], each["rows_per_s"]
        lines.append(
            f"  {rows:>2} rows: fusion {ms[FUSION]:.1f} ms ({rates[FUSION]:.2f} rows/s, {each['ms_per_layer']:.2f} ms "
            f"per layer), pipeline {ms[PIPELINE]:.1f} ms ({rates[PIPELINE]:.2f} rows/s): "
            f"{each['rate_of_pipeline']:.3f} x"
        )
    for topology in TOPOLOGIES:
        plan = told["planned"][topology]
        expected = "no plan" if plan["ms"] is None else f"planned {plan['ms']:.1f} ms ({100 * plan['error']:.1f} % off)"
        lines.append(
            f"  {topology}: {told['cpu_ms_per_token'][topology]:.1f} ms of nodes' CPU per token; {expected}, measured "
            f"{plan['measured_ms']:.1f}; compute {plan['compute_ms']}, exchange {plan['exchange_ms']}, "
            f"legs {plan['legs_ms']}, user {plan['user_ms']}"
        )
    return "\n".join(lines)


def checks_of(cells: Sequence[dict[str, Any]]) -> list[Check]:
    """Tokens are the same, and the plan foresees what they take."""
    errors = [each["planned"][FUSION]["error"] for each in cells]
    return [
        Check(
            "same-tokens",
            "answers of groups whose tokens are not the pipeline's",
            sum(each["different"] for each in cells),
            "",
            0,
            "==",
        ),
        Check(
            "planned",
            "fusion, planned against measured ms per token, median error",
            statistics.median(errors),
            "",
            MAX_MEDIAN_ERROR,
            "<=",
        ),
    ]


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """All cells; quick ones are two nodes at two round trips."""
    cells = []
    for num_nodes in QUICK_GROUPS if quick else GROUPS:
        for round_trip_ms in QUICK_ROUND_TRIPS_MS if quick else ROUND_TRIPS_MS:
            max_tokens = min(TOKENS[round_trip_ms], MAX_QUICK_TOKENS) if quick else TOKENS[round_trip_ms]
            num_rounds = NUM_QUICK_ROUNDS if quick else NUM_ROUNDS
            cells.append(asyncio.run(measure(num_nodes, round_trip_ms, max_tokens, num_rounds)))
            print(in_words(cells[-1]), file=sys.stderr, flush=True)
    return checks_of(cells), {"cells": cells}
