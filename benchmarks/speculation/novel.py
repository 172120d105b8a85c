"""Group 2, *Real drafts*: the built-in model over three node processes and emulated links, asked for new text.

Shows that the whole path (drafters, trees on the wire, stages, the user's side) brings more tokens per second than
plain decode and than synchronous chains of the same drafters, by how much with the draft that a user can train in an
hour, what a guess is worth at which depth, and whether planner and simulation foresee the speeds.

Cannot show how fast speculation is on other machines. The model has 135M parameters: its own next token is seldom sure,
so no draft guesses it well. And stages are CPUs, two cores for all processes: a pass takes nearly as much longer as it
has more rows, where a GPU's hardly grows, so wide trees cost what they bring. What the loop makes of better drafts on
such stages is the engine group's, in a virtual clock. Copied text is another group's.

Prompts: novel.toml, about topics of which no prompt that heads are trained with is. All modes answer a prompt one after
the other, greedily, each mode beginning as often as any. Gains are medians over prompts of the ratio to plain decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Check
from benchmarks.speculation.cells import Cell, Prompt, measure, model_checks, read_prompts, text_checks
from benchmarks.speculation.rig import MODEL

LABEL = "real drafts, new text"
PROMPTS = Path(__file__).with_name("novel.toml")
MODES = ("plain", "chain", "tree", "auto")
ROUND_TRIPS_MS = (0, 20, 50, 100)
QUICK_ROUND_TRIPS_MS = (0, 50)
NUM_TOKENS = 36
NUM_QUICK_PROMPTS, NUM_QUICK_TOKENS = 4, 24

TARGETS = {50: 1.6, 100: 1.8}
"""Times plain decode, with a trained draft, by round trip in ms."""

MIN_ACCEPTANCE = 0.42
"""Of a trained draft's first guess, at depth 1."""

MIN_AUTO = 0.97
"""Of plain decode's speed, where speculation does not pay."""

CANNOT_SHOW = (
    "a model of 135M parameters on CPU stages that share two cores: not what speculation brings with larger models, "
    "GPUs or machines of their own"
)


def run(quick: bool, draft: Path | None = None, *, numerics: str = "fp32") -> tuple[list[Check], dict[str, Any]]:
    """
    Args:
        draft: folder of a trained head; None: what needs no model guesses, and nothing is said of trained drafts.
        numerics: class of nodes and users.
    """
    prompts = read_prompts(PROMPTS)
    round_trips: Sequence[int] = ROUND_TRIPS_MS
    num_tokens = NUM_TOKENS
    if quick:
        prompts, round_trips, num_tokens = prompts[:NUM_QUICK_PROMPTS], QUICK_ROUND_TRIPS_MS, NUM_QUICK_TOKENS
    of_head = None if draft is None else acceptance_of(draft, prompts, num_tokens, numerics)

    async def cells() -> list[Cell]:
        return [
            await measure(LABEL, round_trip_ms, MODES, prompts, max_tokens=num_tokens, draft=draft, numerics=numerics)
            for round_trip_ms in round_trips
        ]

    found = asyncio.run(cells())
    data: dict[str, Any] = {
        "label": LABEL,
        "cannot_show": CANNOT_SHOW,
        "numerics": numerics,
        "draft": "none: suffix and recycling" if draft is None else "trained head, suffix and recycling",
        "head_acceptance": of_head,
        "cells": [cell.data for cell in found],
        "skipped": skipped(found, has_draft=draft is not None),
    }
    return checks(found, of_head), data


def acceptance_of(draft: Path, prompts: Sequence[Prompt], num_tokens: int, numerics: str) -> dict[str, Any]:
    """How often a head's guess is the model's, by depth, at every place of the answers to these prompts.

    As ``fusion-node draft eval`` measures it.
    """
    from fusion_node.client.tokenizer import Tokenizer
    from fusion_node.engine.device import choose_device, set_threads
    from fusion_node.engine.draft_acceptance import measure as measure_head
    from fusion_node.engine.draft_data import DraftTarget, Job, record
    from fusion_node.engine.numerics import numerics_class
    from fusion_node.engine.trained_head import TrainedHead
    from fusion_node.store import ModelStore

    set_threads(1)
    stored = ModelStore().pull(MODEL)
    tokenizer = Tokenizer(stored.path)
    head = TrainedHead.load(draft)
    target = DraftTarget.load(
        stored,
        numerics=numerics_class(numerics),
        device=choose_device("cpu"),
        feature_layers=list(head.config.feature_layers),
    )
    asked = [tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.text}])) for prompt in prompts]
    jobs = [Job(number, ids, num_tokens) for number, ids in enumerate(asked)]
    longest = max(map(len, asked)) + num_tokens
    found = measure_head(head, target.boundary, list(record(target, jobs, batch_size=len(jobs), max_tokens=longest)))
    return {"first": found.top1, "first_8": found.top8, "of_a_chain": found.chain_length}


def skipped(cells: Sequence[Cell], *, has_draft: bool) -> dict[str, str]:
    """What was not measured, and why."""
    found: dict[str, str] = {}
    if not has_draft:
        names = (*(f"real-rtt{round_trip_ms}" for round_trip_ms in TARGETS), "real-acceptance")
        found |= dict.fromkeys(names, "not run: about a trained draft, and there was none")
    there = {cell.round_trip_ms for cell in cells}
    for round_trip_ms in TARGETS:
        if has_draft and round_trip_ms not in there:
            found[f"real-rtt{round_trip_ms}"] = "not run: only in full"
    return found


def checks(cells: Sequence[Cell], of_head: dict[str, Any] | None) -> list[Check]:
    """Targets for a trained draft are left out where there is none (``skipped``)."""
    at_least = partial(Check, comparison=">=")
    by_trip = {cell.round_trip_ms: cell for cell in cells}
    found: list[Check] = []
    for round_trip_ms, target in TARGETS.items() if of_head is not None else ():
        if round_trip_ms in by_trip:
            gain = by_trip[round_trip_ms].summary["tree"]["gain"]
            what = f"{LABEL}: tree over plain decode, RTT {round_trip_ms} ms, trained draft"
            found.append(at_least(f"real-rtt{round_trip_ms}", what, gain, "x", target))
    if of_head is not None:
        what = f"{LABEL}: the trained draft's first guess at depth 1, unseen topics"
        found.append(at_least("real-acceptance", what, float(of_head["first"][0]), "", MIN_ACCEPTANCE))
    if 0 in by_trip:
        gain = by_trip[0].summary["auto"]["gain"]
        found.append(at_least("real-rtt0-auto", f"{LABEL}: auto over plain decode, RTT 0 ms", gain, "x", MIN_AUTO))
    over_chain = [
        cell.summary["tree"]["total_gain"] / cell.summary["chain"]["total_gain"] for cell in cells if cell.round_trip_ms
    ]
    what = f"{LABEL}: tree over synchronous chain, emulated round trips, the least"
    found.append(at_least("real-chain", what, min(over_chain), "x", 1.0))
    return [*found, *model_checks("real", LABEL, cells), *text_checks("real", LABEL, cells)]
