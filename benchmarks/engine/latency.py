"""What a long prompt of one user does to the answers of the others."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.engine.node import Node
from benchmarks.engine.rig import Rig, Session, median_ratio
from benchmarks.report import Check

NUM_DECODERS = 4
ROUND_TRIP_S = 0.02
"""From a token to the user's next step, as across a region; what the network adds to each token in both cases."""

CONTEXT = 100

MIN_PREFILL_SHARE = 0.25
"""Protecting the others must not starve the prompt: its user waits no more than four times as long."""


class _Decoders:
    """Users who answer each token with the next step, for ever.

    Their steps overwrite one another: the context stays as long as it is, however long this goes on.
    """

    def __init__(self, node: Node, rig: Rig, text: Sequence[int]) -> None:
        self.ended_at: dict[str, list[float]] = defaultdict(list)
        for number in range(NUM_DECODERS):
            session, _ = rig.begin(text[number * CONTEXT :][:CONTEXT], CONTEXT + 1)
            self._start(node, f"decoder {number}", session, rig.boundary.embed(text[number : number + 1]))

    def _start(self, node: Node, user: str, session: Session, rows_TD: torch.Tensor) -> None:
        step = session.step(1)

        def send() -> None:
            node.send(session, user, step, rows_TD, lambda _: end())

        def end() -> None:
            now = time.monotonic()
            self.ended_at[user].append(now)
            node.at(now + ROUND_TRIP_S, send)

        node.at(time.monotonic(), send)

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds from token to token of all users, of the tokens that came in this time."""
        return [
            after - before
            for times in self.ended_at.values()
            for before, after in itertools.pairwise(times)
            if since <= after <= until
        ]


def measure(
    rig: Rig, text: Sequence[int], *, pairs: int, num_prefill: int, alone_s: float
) -> tuple[list[Check], dict[str, Any]]:
    """Four users decode; in turns they are by themselves, and beside a fifth user's prompt.

    The value is the median over the turns of the ratio of 95th percentiles.
    """
    node, empty = Node(rig), Node(rig)
    node.warm_up()
    decoders = _Decoders(node, rig, text)
    embedded_TD = rig.boundary.embed(text[:num_prefill])
    alone, beside = list[list[float]](), list[list[float]]()
    prefill_s: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(pairs):
        _, seconds = _prefill(empty, rig, embedded_TD)
        prefill_s["alone"].append(seconds)
        # A second first: for so long it is remembered who decoded lately, and the decoders have just been kept waiting.
        _run_for(node, 1.0)
        alone.append(decoders.gaps(*_run_for(node, alone_s)))
        node.forwards.clear()
        since, seconds = _prefill(node, rig, embedded_TD)
        prefill_s["beside"].append(seconds)
        beside.append(decoders.gaps(since, since + seconds))
    ratios = {
        q: [float(np.percentile(b, q) / np.percentile(a, q)) for a, b in zip(alone, beside, strict=True)]
        for q in (50, 95, 100)
    }
    kept = median_ratio(prefill_s["alone"], prefill_s["beside"])
    what = f"time from token to token of others beside a prompt of {num_prefill:,} / without, p95"
    checks = [
        Check("latency", what, statistics.median(ratios[95]), "x", 2.0, "<="),
        Check("latency-prefill", "that prompt's tokens/s / without the others", kept, "x", MIN_PREFILL_SHARE, ">="),
    ]
    rows = [num_rows for num_rows, _ in node.forwards]
    data = {
        "round_trip_s": ROUND_TRIP_S,
        "num_decoders": NUM_DECODERS,
        "num_prefill": num_prefill,
        "ratios": {f"p{q}": [round(r, 3) for r in values] for q, values in ratios.items()},
        "alone_ms": [_percentiles(values) for values in alone],
        "beside_ms": [_percentiles(values) for values in beside],
        "prefill_tokens_per_s": {
            name: [round(num_prefill / s, 1) for s in values] for name, values in prefill_s.items()
        },
        "rows_per_forward": {"median": statistics.median(rows), "max": max(rows)},
    }
    return checks, data


def _prefill(node: Node, rig: Rig, rows_TD: torch.Tensor) -> tuple[float, float]:
    """Another user's prompt, to its end: when it came, and how long it took."""
    session, since = rig.open(len(rows_TD)), time.monotonic()
    node.answer(session, "prefill", session.step(len(rows_TD)), rows_TD)
    seconds = time.monotonic() - since
    node.forget(session)
    rig.close(session)
    return since, seconds


def _run_for(node: Node, seconds: float) -> tuple[float, float]:
    since = time.monotonic()
    node.run(lambda: time.monotonic() >= since + seconds)
    return since, time.monotonic()


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 95, 99, 100)}
    return {**{name: round(v * 1e3, 2) for name, v in values.items()}, "num_tokens": len(seconds)}
