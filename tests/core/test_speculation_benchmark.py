"""The pure parts of the benchmark of real drafts and copied text: prompts, acceptance, ratios, limits, expectations."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import Check
from benchmarks.speculation import copied, novel, teacher
from benchmarks.speculation.__main__ import main
from benchmarks.speculation.cells import Cell, Prompt, read_prompts
from benchmarks.speculation.measured import (
    Answered,
    Asked,
    Guess,
    acceptance_by_depth,
    by_prompt_in_turns,
    error_of,
    guesses_of,
    line_through,
    median_gain,
    num_different,
    rank_shares,
    summary_of,
    total_rate,
    tree_limit,
)
from benchmarks.speculation.replay import Replayed, expected_rate
from benchmarks.speculation.ring import Costs
from fusion_node.engine.draft_data import DraftTarget, Job, record
from fusion_node.engine.draft_prompts import training_prompts
from fusion_node.engine.numerics import numerics_class
from scheduler.speculation import Ring, plain_rate
from tests.engine.tiny import tiny_model


def answered(prompt: int, num_tokens: int, decode_s: float, **more: Any) -> Answered:
    return Answered(prompt, tuple(range(num_tokens)), decode_s=decode_s, first_token_s=0.5, **more)


# prompts


@pytest.mark.parametrize(("path", "kinds"), [(novel.PROMPTS, {"novel"}), (copied.PROMPTS, None)])
def test_enough_prompts_are_shipped_and_none_twice(path: Path, kinds: set[str] | None) -> None:
    prompts = read_prompts(path)
    assert len(prompts) >= 16
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert {prompt.kind for prompt in prompts} == (kinds or {"copy", "edit", "quote", "extract"})


def test_new_text_is_asked_about_no_topic_that_heads_are_trained_with() -> None:
    topics = {prompt.topic.lower() for prompt in training_prompts()}
    for prompt in read_prompts(novel.PROMPTS):
        assert prompt.topic not in topics
        # From the beginning of a word on: there is no rice in prices.
        found = [topic for topic in topics if re.search(rf"\b{re.escape(topic)}", prompt.text.lower())]
        assert found == [], prompt.text


def test_copied_text_stands_at_the_end_of_its_prompt() -> None:
    prompts = read_prompts(copied.PROMPTS)
    for prompt in prompts:
        question, _, text = prompt.text.partition("\n\n")
        assert question.endswith(":")
        assert 25 <= len(text.split()) <= 100, "80 tokens of code are some 30 words, 200 of prose some 150"
    quick = prompts[:: len(prompts) // copied.NUM_QUICK_PROMPTS][: copied.NUM_QUICK_PROMPTS]
    assert len({prompt.topic for prompt in quick}) == copied.NUM_QUICK_PROMPTS


# what drafters said


ANSWER = (7, 8, 9, 10)


def test_guesses_count_where_the_path_was_right_and_the_first_time() -> None:
    asked = [
        Asked(0, (), ((7, 0.5), (1, 0.2))),
        Asked(0, (7,), ((1, 0.4), (8, 0.3))),
        Asked(0, (1,), ((8, 0.9),)),  # off the text
        Asked(1, (), ((8, 0.9),)),  # the same place again
        Asked(1, (8, 9), ((3, 0.1),)),
        Asked(2, (9, 10), ((3, 0.1),)),  # beyond the end
    ]
    assert guesses_of(ANSWER, asked) == {
        0: Guess(1, (0.5, 0.2), 0),
        1: Guess(2, (0.4, 0.3), 1),
        3: Guess(3, (0.1,), None),
    }


def test_acceptance_is_told_by_rank_and_by_depth() -> None:
    guesses = [Guess(1, (0.5,), 0), Guess(1, (0.5, 0.1), 1), Guess(1, (), None), Guess(3, (0.9,), 0)]
    assert rank_shares(guesses) == (0.5, 0.25, 0, 0, 0, 0, 0, 0)
    assert acceptance_by_depth(guesses) == [
        {"depth": 1, "num": 3, "first": 1 / 3, "any": 2 / 3},
        {"depth": 3, "num": 1, "first": 1.0, "any": 1.0},
    ]
    assert rank_shares([]) == (0.0,) * 8


# speeds


def test_speeds_are_of_all_tokens_but_first_ones_and_gains_of_neighbours() -> None:
    plain = [answered(0, 11, 10.0), answered(1, 21, 5.0), answered(2, 11, 10.0)]
    tree = [answered(2, 11, 2.5), answered(0, 11, 5.0), answered(1, 21, 5.0)]
    assert total_rate(plain) == 40 / 25
    assert median_gain(tree, plain) == 2.0
    assert num_different(tree, plain) == 0
    assert num_different([replace(tree[0], tokens=(1,)), *tree[1:]], plain) == 1
    told = summary_of({"plain": plain, "tree": tree})
    assert told["plain"]["gain"] == 1.0
    assert told["tree"]["total_gain"] == 25 / 12.5


def test_every_mode_begins_as_often_as_any() -> None:
    modes = ("plain", "chain", "tree")
    orders = [by_prompt_in_turns(modes, number) for number in range(6)]
    assert [order[0] for order in orders] == [*modes, *modes]
    assert all(sorted(order) == sorted(modes) for order in orders)


def test_a_pass_that_was_disturbed_does_not_bend_the_line() -> None:
    points = [(rows, 0.01 + 0.003 * rows) for rows in (1, 4, 16) for _ in range(5)] + [(4, 0.9), (16, 0.9)]
    fixed_s, row_s = line_through(points)
    assert math.isclose(fixed_s, 0.01)
    assert math.isclose(row_s, 0.003)
    assert line_through([(1, 0.02), (1, 0.04)]) == (0.03, 0.0)
    assert line_through([(1, 0.04), (9, 0.02)]) == (0.03, 0.0)
    assert line_through([(2, 0.001), (10, 0.1)])[0] == 0.0
    with pytest.raises(ValueError, match="nothing was measured"):
        line_through([])


RING = Ring(legs_s=0.1, fixed_s=(0.01,) * 3, row_s=(0.003,) * 3, user_s=0.01)


def test_the_limit_of_a_tree_is_plain_decode_with_no_guess_right_and_grows_with_them() -> None:
    assert math.isclose(tree_limit((0.0,) * 8, RING), plain_rate(RING))
    limits = [tree_limit((first, 0.1, 0.05), RING) for first in (0.2, 0.5, 0.8)]
    assert limits == sorted(limits)
    assert limits[-1] > 2 * plain_rate(RING)


# what the simulation expects

COSTS = Costs(3, 0.05, fixed_s=0.01, row_s=0.001, wire_row_s=0.0, draft_s=0.002, user_s=0.004, choose_s=0.006)
PLAIN_S = 4 * 0.025 + 3 * 0.011 + 0.01


def replayed(ranks: Sequence[int | None], confidence: float) -> Replayed:
    return Replayed(20, len(ranks), {place: Guess(1, (confidence,), rank) for place, rank in enumerate(ranks)})


def test_answers_without_a_right_guess_are_expected_at_the_speed_of_plain_decode() -> None:
    rate = expected_rate([replayed([None] * 40, 0.001)], COSTS, "tree")
    assert error_of(rate, 1 / PLAIN_S) < 0.05


def test_answers_that_were_guessed_are_expected_sooner_the_better_the_guesses() -> None:
    chance = random.Random(4)
    half = replayed([0 if chance.random() < 0.5 else None for _ in range(60)], 0.5)
    rates = [expected_rate([each], COSTS, "tree") for each in (half, replayed([0] * 60, 0.95))]
    assert 1.2 / PLAIN_S < rates[0] < 2.5 / PLAIN_S
    assert rates[1] > 4 / PLAIN_S
    assert rates[1] < 1 / COSTS.choose_s


# checks and the command line


def cell(round_trip_ms: int, gains: dict[str, float], *, numerics: str = "fp32", worst_gap: float = 0.0) -> Cell:
    modes = {mode: {"gain": gain, "total_gain": gain, "tokens_per_s": 5 * gain} for mode, gain in gains.items()}
    data = {
        "round_trip_ms": round_trip_ms,
        "modes": modes,
        "numerics": numerics,
        "different": 0,
        "worst_gap": worst_gap,
        "planned_error": 0.1,
        "simulated_error": 0.05,
    }
    return Cell(round_trip_ms, {}, data)


CELLS = [
    cell(0, {"plain": 1.0, "chain": 0.9, "tree": 0.8, "auto": 0.98}),
    cell(50, {"plain": 1.0, "chain": 1.3, "tree": 1.7, "auto": 1.6}),
    cell(100, {"plain": 1.0, "chain": 1.4, "tree": 1.7, "auto": 1.7}),
]


def by_id(checks: Sequence[Check]) -> dict[str, bool]:
    return {check.id: check.ok for check in checks}


def test_targets_of_a_trained_draft_are_checked_with_one_and_skipped_without() -> None:
    with_draft = by_id(novel.checks(CELLS, {"first": (0.45, 0.4)}))
    assert with_draft == {
        "real-rtt50": True,
        "real-rtt100": False,
        "real-acceptance": True,
        "real-rtt0-auto": True,
        "real-chain": True,
        "real-planned": True,
        "real-simulated": True,
        "real-best": True,
        "real-same": True,
    }
    without = by_id(novel.checks(CELLS, None))
    names = {"real-rtt50", "real-rtt100", "real-acceptance"}
    assert set(with_draft) - set(without) == names
    assert set(novel.skipped(CELLS, has_draft=False)) == names
    assert set(novel.skipped(CELLS[:2], has_draft=True)) == {"real-rtt100"}


def test_in_16_bits_every_token_is_held_to_the_bound_of_its_class_and_texts_may_differ() -> None:
    gains = {"plain": 1.0, "tree": 3.2}
    for numerics, worst_gap, is_ok in (("fp32", 0.02, False), ("bf16", 0.02, True), ("bf16", 0.3, False)):
        found = by_id(copied.checks(cell(50, gains, numerics=numerics, worst_gap=worst_gap)))
        assert found["copied-best"] is is_ok
        assert ("copied-same" in found) is (numerics == "fp32")


def test_a_token_that_is_not_the_best_one_is_found() -> None:
    source = tiny_model("llama", num_hidden_layers=2, vocab_size=128)
    target = DraftTarget.load(source, numerics=numerics_class("fp32"), device=torch.device("cpu"))
    prompt = (5, 6, 7)
    (recorded,) = record(target, [Job(0, prompt, 6)], batch_size=1, max_tokens=64)
    answer = recorded.tokens_T[len(prompt) :].tolist()
    good = teacher.gaps_of(target, [(prompt, answer), (prompt, answer)])
    assert (good.num_other, good.num_tokens) == (0, len(answer)), "an answer that came twice counts once"
    assert good.worst < teacher.BOUNDS["fp32"]
    other = [*answer[:2], (answer[2] + 1) % 128, *answer[3:]]
    bad = teacher.gaps_of(target, [(prompt, answer), (prompt, other)])
    assert bad.num_other >= 1
    assert bad.worst > teacher.BOUNDS["bf16"]


def test_copied_text_has_labels_and_checks_of_its_own() -> None:
    checks = copied.checks(cell(50, {"plain": 1.0, "tree": 3.2}))
    assert by_id(checks)["copied-rtt50"]
    assert all(check.what.startswith("copied text: ") for check in checks)
    assert all(check.what.startswith("real drafts, new text: ") for check in novel.checks(CELLS, None))


def test_groups_are_measured_drawn_and_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    given: list[tuple[Path | None, str]] = []

    def run(quick: bool, draft: Path | None = None, *, numerics: str = "fp32") -> tuple[list[Check], dict[str, Any]]:
        given.append((draft, numerics))
        cells = [each.data for each in CELLS]
        return novel.checks(CELLS, None), {"cells": cells, "draft": "none", "skipped": {"real-rtt50": "not run"}}

    monkeypatch.setattr(novel, "run", run)
    told, picture = tmp_path / "told.json", tmp_path / "picture.svg"
    line = [
        "--quick",
        "--only",
        "novel",
        "--draft",
        str(head),
        "--json",
        str(told),
        "--plot",
        str(picture),
        "--numerics",
        "bf16",
    ]
    assert main(line) == 0
    assert given == [(head, "bf16")]
    document = json.loads(told.read_text())
    assert document["data"]["skipped"] == {"real-rtt50": "not run"}
    assert "MEASURED: real drafts, new text" in picture.read_text()


def test_a_folder_without_a_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--draft", str(tmp_path)])
    assert "there is no draft head" in capsys.readouterr().err


def test_a_prompt_without_texts_is_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "prompts.toml"
    path.write_text('[[prompt]]\ntopic = "a"\ntext = "What?"\n')
    assert read_prompts(path) == [Prompt("a", "What?")]
