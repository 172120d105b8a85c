"""What the terminal shows of a swarm: a table of nodes and a picture of the layers that they cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from fusion_node.client.overview import ModelView, NodeView, SplitView
from fusion_node.daemon.control import NodeState, Phase
from fusion_node.wire import printable
from p2p.identity import short
from p2p.seam import PathKind
from scheduler.planner import as_ranges

MAX_CELLS = 64
"""Columns of the picture; a model with more layers shares cells, and a cell shows its worst layer."""

MAX_TAG = 32
"""Characters of an operator's or a region's name that are shown."""

_MARKS = (("·", "bold red"), ("▄", "yellow"), ("█", "green"))
"""No holder, one holder, two or more."""

_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("node", "left"),
    ("model", "left"),
    ("layers", "left"),
    ("type", "left"),
    ("device", "left"),
    ("rtt ms", "right"),
    ("ms/layer\n1/16/256", "right"),
    ("queue\nms", "right"),
    ("open", "right"),
    ("age", "right"),
)

_LOCAL_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("node", "left"),
    ("pid", "right"),
    ("model", "left"),
    ("layers", "left"),
    ("state", "left"),
    ("open", "right"),
    ("rows/s", "right"),
    ("memory", "right"),
    ("up", "right"),
)


def node_table(nodes: Sequence[NodeView]) -> Table:
    """One row per shard of a node. Everything a peer says of itself is made printable first.

    The column of queues is left out where nobody has one.
    """
    has_queue = any(shard.queue_ms >= 1.0 for node in nodes for shard in node.shards)
    shown = {"queue\nms": has_queue}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True, header_style="bold")
    for name, justify in _COLUMNS:
        if shown.get(name, True):
            # What is too long for the terminal wraps in the columns of free text, and nowhere else.
            table.add_column(name, justify=justify, no_wrap=name not in ("model", "device"), overflow="fold")
    for node in nodes:
        # A ghost is listed until its record expires, and by nothing but that: its age is how long it was not heard of.
        trip = Text("ghost", style="red") if node.round_trip_ms is None else Text(f"{node.round_trip_ms:.1f}")
        if node.path in (PathKind.RELAYED.value, PathKind.STREAM.value):  # the usual one goes without saying
            trip.append(f" {node.path}", style="yellow")
        style = "dim" if node.is_ghost else None
        for shard in node.shards:
            cells: tuple[str | Text, ...] = (
                short(node.peer),
                Text(printable(f"{shard.model} ({shard.quantization})" if shard.quantization else shard.model)),
                f"{shard.start}:{shard.stop} {printable(shard.slice)}".rstrip(),
                Text(printable(shard.numerics)),
                Text(printable(node.device)),
                trip,
                "/".join(map(_three_digits, shard.ms_per_layer_of_rows)) if shard.is_ready else "loading",
                f"{shard.queue_ms:.0f}",
                f"{node.counters.get('open_sessions', node.num_sessions):.0f}",
                f"{node.record_age_s:.0f} s",
            )
            row = (cell for cell, (name, _) in zip(cells, _COLUMNS, strict=True) if shown.get(name, True))
            table.add_row(*row, style=style)
    return table


def who(operator: str, region: str, price: float) -> str:
    """What an operator says of a node, printable and bounded, in a few words; empty when nothing."""
    told = [printable(text, limit=MAX_TAG) for text in (operator, region) if text]
    return ", ".join([*told, *([f"price {price:g}"] if price else [])])


def operators(nodes: Sequence[NodeView]) -> list[Text]:
    """One line per node whose operator says something of it."""
    told = [(node.peer, who(node.operator, node.region, node.price)) for node in nodes]
    return [Text(f"{short(peer)}  {text}") for peer, text in told if text]


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.5 else f"{number:.3g}"


def local_table(states: Sequence[NodeState]) -> Table:
    """One row per node of this machine, by its own word: it runs as the same user."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True, header_style="bold")
    for name, justify in _LOCAL_COLUMNS:
        table.add_column(name, justify=justify, no_wrap=name not in ("model", "state"), overflow="fold")
    for state in states:
        held = state.memory_bytes if state.device_memory_bytes is None else state.device_memory_bytes
        table.add_row(
            short(state.peer),
            str(state.pid),
            Text(printable(state.model)),
            f"{state.layers or '–'} {state.slice}".rstrip(),
            _local_state(state),
            str(state.num_sessions),
            f"{state.rows_per_s:.1f}",
            f"{held / 2**20:.0f} MiB",
            f"{state.uptime_s:.0f} s",
        )
    return table


def _local_state(state: NodeState) -> str:
    if state.phase is Phase.LOADING:
        return f"{state.phase.in_words} {state.loaded_percent or 0} %"
    if state.ends_in_s is not None and state.num_sessions:
        return f"{state.phase.in_words}, sessions end in {state.ends_in_s:.0f} s"
    return state.phase.in_words


def problems(nodes: Sequence[NodeView]) -> list[Text]:
    """One line per node that could not be reached or asked."""
    return [Text(f"{short(n.peer)}  {_ghost(n)}{printable(n.problem)}", style="red") for n in nodes if n.problem]


def _ghost(node: NodeView) -> str:
    if not node.is_ghost:
        return ""
    return f"ghost, last heard of {node.record_age_s:.0f} s ago and forgotten in {node.record_left_s:.0f} s: "


def coverage(model: ModelView) -> Text:
    """The layers of a model from first to last, marked by how many nodes hold each."""
    holders = model.holders_per_layer
    cells = min(len(holders), MAX_CELLS)
    text = Text(f"{printable(model.model)} {printable(model.numerics)}  0 ")
    for cell in range(cells):
        first, last = cell * len(holders) // cells, (cell + 1) * len(holders) // cells
        mark, style = _MARKS[min(min(holders[first:last]), 2)]
        text.append(mark, style=style)
    text.append(f" {len(holders)}  ")
    missing = uncovered(holders)
    if missing:
        text.append(f"layers {', '.join(missing)} not covered", style="bold red")
    else:
        text.append(f"all layers covered {_times(holders)}")
    return text


def slices(split: SplitView) -> Text:
    """Whether the slices of some layers make a fusion group."""
    text = Text(f"{printable(split.model)} {printable(split.numerics)}  {split.start}:{split.stop} in slices  ")
    missing = [each for each, count in zip(split.slices, split.holders_per_slice, strict=True) if not count]
    if missing:
        text.append(f"{', '.join(missing)} held by nobody", style="bold red")
    else:
        text.append(f"all {len(split.slices)} held {_times(split.holders_per_slice)}")
    return text


def _times(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}×" if least == most else f"{least}× to {most}×"


def uncovered(holders: Sequence[int]) -> list[str]:
    """Ranges ``START:STOP`` without a holder."""
    return [str(layers) for layers in as_ranges([layer for layer, count in enumerate(holders) if not count])]
