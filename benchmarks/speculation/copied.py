"""Group 3, *Copied, quoted and edited text*: the same processes and links, asked for what stands in the question.

Shows what the suffix drafter brings where answers repeat a given text: with a rename, a sentence less or a line break
more, or word for word. Such tasks are common (code edits, quotations, extracts), need no trained draft, and guesses are
nearly always right.

Cannot show anything about new text: its guesses are others (the group of real drafts), and nobody may quote these gains
for it. The model and the stages are as small and slow as there.

Prompts: copied.toml, of which a model of this size copies most of what it is asked to (it does not follow every
instruction); that is what they were chosen for. How much of an answer stands in its prompt is told.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.report import Check
from benchmarks.speculation.cells import Cell, measure, model_checks, read_prompts, text_checks

LABEL = "copied text"
PROMPTS = Path(__file__).with_name("copied.toml")
MODES = ("plain", "chain", "tree")
ROUND_TRIP_MS = 50
NUM_TOKENS = 64
NUM_QUICK_PROMPTS, NUM_QUICK_TOKENS = 4, 48

TARGET = 3.0
"""Times plain decode."""

CANNOT_SHOW = "answers that repeat a text of the question: says nothing about new text"


def run(quick: bool, *, numerics: str = "fp32") -> tuple[list[Check], dict[str, Any]]:
    prompts = read_prompts(PROMPTS)
    num_tokens = NUM_TOKENS
    if quick:
        # One of each kind first.
        prompts = prompts[:: len(prompts) // NUM_QUICK_PROMPTS][:NUM_QUICK_PROMPTS]
        num_tokens = NUM_QUICK_TOKENS
    cell = asyncio.run(
        # Several prompts have one text: none is to learn from the answer to another.
        measure(LABEL, ROUND_TRIP_MS, MODES, prompts, max_tokens=num_tokens, remembers=False, numerics=numerics)
    )
    data: dict[str, Any] = {
        "label": LABEL,
        "cannot_show": CANNOT_SHOW,
        "numerics": numerics,
        "draft": "suffix and recycling",
        "kinds": Counter(prompt.kind for prompt in prompts),
        "cells": [cell.data],
    }
    return checks(cell), data


def checks(cell: Cell) -> list[Check]:
    gain = cell.summary["tree"]["gain"]
    what = f"{LABEL}: tree over plain decode, RTT {cell.round_trip_ms} ms"
    return [
        Check(f"copied-rtt{cell.round_trip_ms}", what, gain, "x", TARGET, ">="),
        *model_checks("copied", LABEL, [cell]),
        *text_checks("copied", LABEL, [cell]),
    ]
