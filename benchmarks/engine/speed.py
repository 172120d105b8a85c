"""How fast: decoding alone and together, steps of many rows, trees, prefill. Each against what it is compared with."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.engine.node import Node
from benchmarks.engine.rig import Rig, Transformers, gaps, interleaved, median_ms, median_ratio
from benchmarks.report import Check

DECODE_CONTEXT = 100
"""Positions in front of each of the sequences that decode together."""

STEP_CONTEXT = 256
"""The same for steps of many rows."""

NUM_TOGETHER = 16
CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TREE_NODES = 32

Result = tuple[list[Check], dict[str, Any]]


def decode(
    rig: Rig, partner: Transformers, prompts: Sequence[Sequence[int]], *, rounds: int, num_tokens: int
) -> Result:
    """One sequence, greedy, from the ids of the prompt to the ids of the answer, against ``generate``.

    The first token comes out of the prompt's forward and is not timed.
    """
    answers = {"engine": rig.greedy, "transformers": partner.greedy}
    for answer in answers.values():
        answer(prompts[0], 3)
    medians: dict[str, list[float]] = {name: [] for name in answers}
    num_equal, differ_at = 0, list[int | None]()
    for number in range(rounds):
        prompt, tokens = prompts[number % len(prompts)], dict[str, list[int]]()
        for name in answers if number % 2 else list(answers)[::-1]:
            tokens[name], times = answers[name](prompt, num_tokens + 1)
            medians[name].append(statistics.median(gaps(times)))
        pairs = enumerate(zip(tokens["engine"], tokens["transformers"], strict=True))
        differ_at.append(next((index for index, (ours, theirs) in pairs if ours != theirs), None))
        num_equal += differ_at[-1] is None
    speedup = median_ratio(medians["transformers"], medians["engine"])
    checks = [
        Check("decode", "decode tokens/s, one sequence / transformers generate", speedup, "x", 1.25, ">="),
        Check("decode-equal", "of its answers, equal to transformers'", num_equal / rounds, "", 1.0, "=="),
    ]
    data = {
        "tokens_per_round": num_tokens,
        "round_ms_per_token": {name: [round(s * 1e3, 3) for s in values] for name, values in medians.items()},
        "ms_per_token": {name: median_ms(values) for name, values in medians.items()},
        "first_difference": differ_at,
    }
    return checks, data


def together(rig: Rig, text: Sequence[int], *, rounds: int) -> Result:
    """Sixteen sequences in one forward against one, embedding and head included."""
    max_positions = DECODE_CONTEXT + rounds + 2
    sessions, tokens = [], []
    for number in range(NUM_TOGETHER + 1):
        session, token = rig.begin(text[number * DECODE_CONTEXT :][:DECODE_CONTEXT], max_positions)
        sessions.append(session)
        tokens.append(token)
    alone, others = sessions[:1], sessions[1:]
    forwards: dict[str, list[float]] = {"one": [], "all": []}

    def decode_of(name: str, members: list[Any], tokens: list[int]) -> Callable[[], None]:
        def step() -> None:
            before_s = rig.forward_s
            tokens[:] = rig.decode(members, tokens)
            forwards[name].append(rig.forward_s - before_s)

        return step

    seconds = interleaved(
        {"one": decode_of("one", alone, tokens[:1]), "all": decode_of("all", others, tokens[1:])}, rounds
    )
    for session in sessions:
        rig.close(session)
    gain = NUM_TOGETHER * median_ratio(seconds["one"], seconds["all"])
    checks = [Check("decode-16", "decode tokens/s, 16 sequences in one forward / one", gain, "x", 5.0, ">=")]
    data = {
        "context": DECODE_CONTEXT,
        "ms_per_step": {"one": median_ms(seconds["one"]), "sixteen": median_ms(seconds["all"])},
        "tokens_per_s": {
            "one": round(1 / statistics.median(seconds["one"]), 2),
            "sixteen": round(NUM_TOGETHER / statistics.median(seconds["all"]), 2),
        },
        "forward_only_gain": round(NUM_TOGETHER * median_ratio(forwards["one"], forwards["all"]), 3),
    }
    return checks, data


def steps(rig: Rig, text: Sequence[int], *, rounds: int, curve_rounds: int, curve: Sequence[int]) -> Result:
    """Steps of many rows behind one context; forwards only."""
    tree = random_tree(TREE_NODES)
    contenders = {
        "1 row": repeated_step(rig, text, 1),
        "16 rows": repeated_step(rig, text, 16),
        "tree": repeated_step(rig, text, TREE_NODES, tree),
        "chunk": repeated_step(rig, text, TREE_NODES),
    }
    seconds = interleaved(contenders, rounds)
    by_rows = interleaved({str(rows): repeated_step(rig, text, rows) for rows in curve}, curve_rounds)
    step_16, tree_32 = (
        median_ratio(seconds["16 rows"], seconds["1 row"]),
        median_ratio(seconds["tree"], seconds["chunk"]),
    )
    checks = [
        Check("step-16", f"forward of 16 rows / of 1, context {STEP_CONTEXT}", step_16, "x", 1.8, "<="),
        Check("tree-32", f"forward of a tree of {TREE_NODES} / a chunk of {TREE_NODES}", tree_32, "x", 1.3, "<="),
    ]
    data = {
        "context": STEP_CONTEXT,
        "ms": {name: median_ms(values) for name, values in seconds.items()},
        "tree_parents": tree,
        "ms_by_rows": {rows: median_ms(values) for rows, values in by_rows.items()},
    }
    return checks, data


def prefill(rig: Rig, partner: Transformers, text: Sequence[int], *, rounds: int, num_tokens: int) -> Result:
    """A prompt from ids to the first token, in the chunks that the batching core takes, against one forward."""
    node, ids = Node(rig), text[:num_tokens]
    chunks: list[int] = []
    first_tokens: dict[str, int] = {}

    def engine() -> None:
        session = rig.open(num_tokens)
        node.forwards.clear()
        hidden_TD = node.answer(session, "user", session.step(num_tokens), rig.boundary.embed(ids))
        first_tokens["engine"] = int(rig.boundary.logits(hidden_TD[-1:])[0].argmax())
        node.forget(session)
        rig.close(session)
        chunks[:] = [num_rows for num_rows, _ in node.forwards]

    def transformers() -> None:
        first_tokens["transformers"] = partner.prefill(ids)

    seconds = interleaved({"engine": engine, "transformers": transformers}, rounds)
    speedup = median_ratio(seconds["transformers"], seconds["engine"])
    checks = [
        Check(f"prefill-{num_tokens}", f"prefill of {num_tokens:,}, tokens/s / transformers", speedup, "x", 0.95, ">=")
    ]
    data = {
        "num_tokens": num_tokens,
        "chunks": chunks,
        "ms": {name: median_ms(values) for name, values in seconds.items()},
        "tokens_per_s": {name: round(num_tokens / statistics.median(values), 1) for name, values in seconds.items()},
        "first_token_equal": first_tokens["engine"] == first_tokens["transformers"],
    }
    return checks, data


def repeated_step(rig: Rig, text: Sequence[int], num_rows: int, parents: Sequence[int] = ()) -> Callable[[], object]:
    """A step behind STEP_CONTEXT that can be run again and again: it overwrites what it wrote before."""
    session, _ = rig.begin(text[:STEP_CONTEXT], STEP_CONTEXT + num_rows)
    step, rows_TD = session.step(num_rows, parents), rig.boundary.embed(text[STEP_CONTEXT:][:num_rows])
    return lambda: rig.forward([(session, step, rows_TD)])


def random_tree(num_nodes: int) -> list[int]:
    """A seeded tree whose nodes hang on any of the eight before: neither a chain nor all siblings."""
    draw = random.Random(32)
    return [row - draw.randint(1, min(8, row + 1)) for row in range(num_nodes)]
