"""The pure parts of the benchmark of fusion groups: what must be carried, ratios, and what is told of answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fusion import answers, exchange, table
from benchmarks.fusion.rig import FUSION, PIPELINE, Answered
from benchmarks.fusion.sizes import Carried, least_bytes, least_messages, websocket_bytes, widths
from benchmarks.fusion.workers import Contributions
from fusion_node.client.plan_view import PlanView
from fusion_node.slices import Dims
from p2p.websocket_core import Opcode, encode

BUILT_IN = exchange.DIMS
EXPERTS = Dims(hidden=64, heads=4, kv_heads=2, head_dim=16, channels=32, num_experts=8, experts_per_row=2)


# what must be carried


@pytest.mark.parametrize("num_members", [1, 2, 3])
def test_every_output_of_every_linear_is_sent_once_by_each_other_member(num_members: int) -> None:
    outputs = (9 + 2 * 3) * 64 + 576 + 2 * 1536 + 576
    sums_of_squares = 2 * num_members
    values = (outputs + sums_of_squares) * (num_members - 1)
    assert least_bytes(BUILT_IN, (1,) * num_members, 5) == 4 * 5 * values


def test_a_kv_head_that_several_members_read_is_sent_to_each_of_them() -> None:
    by_owner = widths(BUILT_IN, (1, 1, 1, 1))[0]
    assert sum(by_owner) > (9 + 2 * 3) * 64 + 4


def test_as_many_messages_as_there_are_pairs_in_every_exchange() -> None:
    assert least_messages(BUILT_IN, (1, 2)) == 2 * 4
    assert least_messages(BUILT_IN, (1,) * 4) == 12 * 4
    assert least_messages(EXPERTS, (1,) * 3) == 6 * 5


@pytest.mark.parametrize("num_bytes", [1, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("masked", [True, False])
def test_websocket_puts_so_many_bytes_in_front(num_bytes: int, masked: bool) -> None:
    framed = encode(Opcode.BINARY, bytes(num_bytes), masked=masked)
    assert len(framed) == num_bytes + websocket_bytes(num_bytes, masked=masked)


def test_all_that_was_carried_is_for_something() -> None:
    carried = Carried(
        num_layers=10,
        sealed_bytes=2_000,
        payload_bytes=1_000,
        header_bytes=180,
        num_messages=20,
        other_bytes=50,
        num_others=1,
        least_bytes=1_000,
    )
    parts = carried.parts()
    assert carried.ratio == 2.0
    assert sum(parts.values()) == pytest.approx(200)
    assert parts["lengths and tags"] == pytest.approx(21 * 21 / 10)
    assert parts["acknowledgements, pings and further segments"] == pytest.approx((2_000 - 1_230 - 441) / 10)


# against gloo


def test_a_round_is_compared_with_its_own_round() -> None:
    assert exchange.median_ratio([2.0, 40.0, 3.0], [1.0, 20.0, 3.0]) == 2.0
    with pytest.raises(ValueError, match="zip"):
        exchange.median_ratio([1.0, 2.0], [1.0])


def test_a_wrong_sum_is_noticed() -> None:
    members = [Contributions(rank, 3, [[2, 2, 3]], rows=4) for rank in range(3)]
    sums = members[0].parts[0][1] + members[1].parts[0][1] + members[2].parts[0][1]
    assert sums.shape == (4, 2)
    assert members[0].is_sum(sums)
    sums[3, 1] += 1
    assert not members[0].is_sum(sums)


# answers


def answered(decode_s: float, *, rows_s: float = 0.1, cpu_s: float = 0.4, tokens: int = 5) -> Answered:
    return Answered(tuple(range(tokens)), 8, rows_s=rows_s, decode_s=decode_s, cpu_s=cpu_s, user_cpu_s=0.1)


def test_a_token_is_a_step_of_one_row_and_a_prompt_one_of_many() -> None:
    plain, wide = [answered(0.4), answered(0.8)], {16: [answered(0.0, rows_s=0.25, tokens=1)]}
    assert answers.step_ms(1, plain, wide) == pytest.approx([100.0, 200.0])
    assert answers.step_ms(16, plain, wide) == pytest.approx([250.0])


def test_rates_of_a_width_are_of_medians_and_their_ratio_of_rounds() -> None:
    told = answers.widths_told({FUSION: [100.0, 200.0, 400.0], PIPELINE: [50.0, 20.0, 400.0]}, 16, 20)
    assert told["ms"] == {FUSION: 200.0, PIPELINE: 50.0}
    assert told["rows_per_s"] == {FUSION: 80.0, PIPELINE: 320.0}
    assert told["ms_per_layer"] == 10.0
    assert told["rate_of_pipeline"] == 0.5


def test_cpu_is_that_of_each_step() -> None:
    assert answers.cpu_ms_per_token([answered(0.4, cpu_s=0.5), answered(0.4, cpu_s=1.0, tokens=2)]) == 300.0


def plan(ms: float | None) -> PlanView:
    return PlanView("m", "id", "fp32", 30, "latency", (), 8, 8, 4, 4, None, ms_per_token=ms)


@pytest.mark.parametrize(("told_ms", "error"), [(100.0, 0.0), (125.0, 0.25), (75.0, 0.25), (None, math.inf)])
def test_a_plan_is_off_by_a_share_of_what_was_measured(told_ms: float | None, error: float) -> None:
    assert answers.planned(plan(told_ms), [answered(0.4)])["error"] == pytest.approx(error)


def cell(error: float, different: int = 0) -> dict[str, Any]:
    return {"different": different, "planned": {FUSION: {"error": error}, PIPELINE: {"error": 0.0}}}


def test_one_answer_that_differs_is_a_miss() -> None:
    same, planned = answers.checks_of([cell(0.1), cell(0.2, different=1), cell(0.12)])
    assert (same.value, same.ok) == (1, False)
    assert (planned.value, planned.ok) == (0.12, True)


def test_every_round_trip_has_its_length_of_answers() -> None:
    assert set(answers.QUICK_ROUND_TRIPS_MS) <= set(answers.ROUND_TRIPS_MS) == set(answers.TOKENS)
    assert min(answers.TOKENS.values()) > 1


# tables


def document() -> dict[str, Any]:
    parts = {"headers": 144.0, "lengths and tags": 168.0, "other messages": 1.0}
    wire_cell = {
        "members": 2,
        "rows": 1,
        "bytes_per_layer": 21066.5,
        "least_bytes_per_layer": 20752.0,
        "ratio": 1.0152,
        "messages_per_layer": 8.0,
        "parts": {**parts, "acknowledgements, pings and further segments": 2.0},
    }
    told = answers.widths_told({FUSION: [100.0], PIPELINE: [50.0]}, 1, 30)
    answers_cell = {
        "members": 2,
        "round_trip_ms": 10,
        "widths": {"1": told, "16": told},
        "cpu_ms_per_token": {FUSION: 90.0, PIPELINE: 60.0},
        "planned": {FUSION: answers.planned(plan(None), [answered(0.4)])},
    }
    return {
        "quick": True,
        "machine": {"cores": 2, "cpu": "something", "load_1min_at_start": 0.25},
        "data": {"wire": {"cells": [wire_cell]}, "answers": {"cells": [answers_cell]}},
    }


def test_tables_say_what_was_measured() -> None:
    tables = table.tables_of([document()])
    assert list(tables) == ["wire", "answers"]
    assert "| 2 | plain | 1 | 21,066 | 20,752 | 1.0152 | 8 | 144 | 168 | 3 |" in tables["wire"].splitlines()
    assert "| 2 | 10 | 1 | 10.00 | 20.00 | 0.500 x | 3.33 | 90 / 60 | no plan, 100 |" in tables["answers"].splitlines()
    for text in tables.values():
        *lines, empty, caption = text.splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert (empty, caption) == ("", "(A quick run on 2 cores of something; the load before it was 0.25.)")


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = "# Head\n\n<!-- wire: measured -->\n| old |\n<!-- wire: end -->\n\nTail\n"
    new = table.replaced(page, {"wire": "| new |\n"})
    assert new == page.replace("old", "new")
    assert table.replaced(new, {"wire": "| new |\n"}) == new
    with pytest.raises(ValueError, match="marks for answers"):
        table.replaced(page, {"answers": "| new |\n"})


def test_the_page_has_a_place_for_every_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fusion.md").read_text()
    assert table.replaced(page, dict.fromkeys(table.TABLES, "")) != page
