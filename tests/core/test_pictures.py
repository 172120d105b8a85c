"""What the terminal shows of a swarm, also when a peer's claims are hostile."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from fusion_node.cli.local_swarm import split_evenly
from fusion_node.cli.pictures import coverage, node_table, operators, problems, uncovered
from fusion_node.client.overview import ModelView, NodeView, ShardView


def node(name: str = "smollm2-135m", device: str = "cpu", problem: str = "") -> NodeView:
    shard = ShardView(name, "a" * 64, 0, 10, 30, "fp32", 1.5, 4000, ms_per_layer_of_rows=(1.5, 3.0, 41.25))
    return NodeView("12D3KooW" + "x" * 44, "", device, "", ("127.0.0.1:1",), 3.0, 1.25, 2, 10**9, (shard,), {}, problem)


def printed(renderable: object, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


def test_uncovered_layers_are_named_as_ranges() -> None:
    assert uncovered([0, 0, 1, 2, 0, 1, 0]) == ["0:2", "4:5", "6:7"]
    assert uncovered([1, 2]) == []


def test_coverage_shows_one_mark_per_layer() -> None:
    text = coverage(ModelView("m", "a" * 64, "fp32", 6, (0, 0, 1, 1, 2, 3))).plain
    assert "··▄▄██" in text
    assert "layers 0:2 not covered" in text
    assert "all layers covered 1× to 2×" in coverage(ModelView("m", "a" * 64, "fp32", 2, (1, 2))).plain


def test_nodes_of_a_quantised_model_tell_how() -> None:
    plain = node()
    quantized = msgspec.structs.replace(
        plain, shards=(msgspec.structs.replace(plain.shards[0], quantization="bitsandbytes nf4\x1b[31m"),)
    )
    assert "smollm2-135m (bitsandbytes nf4" in printed(node_table([quantized]), width=200)
    assert "\x1b" not in printed(node_table([quantized]), width=200)
    assert "(" not in printed(node_table([plain]), width=200)


def test_coverage_of_a_deep_model_shows_the_worst_layer_of_each_cell() -> None:
    holders = [1] * 128
    holders[77] = 0
    text = coverage(ModelView("m", "a" * 64, "fp32", 128, tuple(holders))).plain
    assert text.count("·") == 1
    assert "layers 77:78 not covered" in text


def test_node_table_fits_eighty_columns() -> None:
    text = printed(node_table([node()]), width=80)
    assert "…xxxxxxxx" in text
    assert "0:10" in text
    assert max(map(len, text.splitlines())) <= 80


def test_node_table_of_queueing_nodes_fits_eighty_columns() -> None:
    queueing = msgspec.structs.replace(node(), shards=(msgspec.structs.replace(node().shards[0], queue_ms=12.3),))
    text = printed(node_table([queueing, node()]), width=80)
    assert "1.5/3/41.2" in text
    assert "queue" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "queue" not in printed(node_table([node()]))


def test_what_operators_say_of_their_nodes_is_printable_and_bounded() -> None:
    tagged = msgspec.structs.replace(node(), operator="anna\x1b" + "a" * 90, region="eu-west", price=0.25)
    (line,) = operators([tagged, node()])
    assert line.plain.startswith("…xxxxxxxx  anna?aaa")
    assert line.plain.endswith("aaa, eu-west, price 0.25")
    assert len(line) <= 80


def test_a_node_that_loads_its_layers_says_so_in_the_place_of_its_speed() -> None:
    loading = msgspec.structs.replace(node(), shards=(msgspec.structs.replace(node().shards[0], is_ready=False),))
    assert "loading" in printed(node_table([loading]))
    assert "1.5" not in printed(node_table([loading]))


def test_control_characters_and_markup_of_a_peer_are_shown_as_text() -> None:
    hostile = [node(name="[red]\x1b[31mboo", device="\x07bell\n", problem="[link=x]y\x1b[0m")]
    text = printed(node_table(hostile), width=200) + printed(problems(hostile)[0])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]?[31mboo" in text
    assert "[link=x]y" in text


def test_a_path_that_is_slower_than_usual_is_shown_with_the_round_trip() -> None:
    relayed, direct = (msgspec.structs.replace(node(), path=path) for path in ("relayed", "direct"))
    assert "1.2 relayed" in printed(node_table([relayed]))
    assert "direct" not in printed(node_table([direct]))


def test_a_node_that_does_not_answer_is_a_ghost_with_the_age_of_its_last_word() -> None:
    ghost = msgspec.structs.replace(
        node(problem="nobody answers"), round_trip_ms=None, record_age_s=43.0, record_left_s=17.0
    )
    row = printed(node_table([ghost])).splitlines()[-1]
    assert "ghost" in row
    assert row.split()[-2:] == ["43", "s"]
    assert "last heard of 43 s ago and forgotten in 17 s: nobody answers" in printed(problems([ghost])[0], width=200)
    assert "ghost" not in printed(node_table([node()])) + printed(problems([node(problem="odd")])[0])


def test_layers_are_split_evenly() -> None:
    assert [str(r) for r in split_evenly(30, 3)] == ["0:10", "10:20", "20:30"]
    assert [len(r) for r in split_evenly(30, 4)] == [7, 8, 7, 8]
