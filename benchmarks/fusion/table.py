"""The tables of "What it costs" in docs/fusion.md, from what was measured.

    python -m benchmarks.fusion.table RESULT.json [RESULT.json ...] [PAGE.md]

prints what ``python -m benchmarks.fusion --json RESULT.json`` has measured, of several results the last word on each of
its measurements; or writes it into the page, in place of the table that stands there between marks of the same name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fusion.rig import FUSION, PIPELINE


def wire_table(data: dict[str, Any]) -> str:
    """Bytes and messages."""
    rows: list[tuple[str, ...]] = [
        (
            "members",
            "sums",
            "rows",
            "bytes of a layer",
            "least",
            "ratio",
            "messages",
            "headers",
            "lengths, tags",
            "acks, pings, further segments",
        )
    ]
    for cell in data["cells"]:
        parts = cell["parts"]
        rows.append(
            (
                str(cell["members"]),
                "masked" if cell.get("masked") else "plain",
                str(cell["rows"]),
                f"{cell['bytes_per_layer']:,.0f}",
                f"{cell['least_bytes_per_layer']:,.0f}",
                f"{cell['ratio']:.4f}",
                f"{cell['messages_per_layer']:g}",
                f"{parts['headers']:,.0f}",
                f"{parts['lengths and tags']:,.0f}",
                f"{parts['acknowledgements, pings and further segments'] + parts['other messages']:,.0f}",
            )
        )
    return _table(rows)


def exchange_table(data: dict[str, Any]) -> str:
    """Beside gloo."""
    rows: list[tuple[str, ...]] = [
        (
            "members",
            "rows",
            "ours, ms per layer",
            "masked",
            "reduce_scatter",
            "all_to_all and a sum",
            "masked / ours",
            "reduce_scatter / ours",
            "all_to_all / ours",
            "CPU ms, ours",
            "masked",
            "reduce_scatter",
            "all_to_all",
        )
    ]
    for cell in data["cells"]:
        ms, cpu, ratios = cell["ms_per_layer"], cell["cpu_ms_per_layer"], cell["ratios"]
        names = ("ours", "ours-masked", "gloo", "gloo-all-to-all")
        rows.append(
            (
                str(cell["members"]),
                str(cell["rows"]),
                *(f"{ms[name]:.2f}" if name in ms else "" for name in names),
                *(f"{ratios[name]:.2f} x" if name in ratios else "" for name in names[1:]),
                *(f"{cpu[name]:.2f}" if name in cpu else "" for name in names),
            )
        )
    return _table(rows)


def answers_table(data: dict[str, Any]) -> str:
    """Beside a pipeline, and beside the plan."""
    rows: list[tuple[str, ...]] = [
        (
            "nodes",
            "RTT ms",
            "rows of a step",
            "fusion, rows/s",
            "pipeline, rows/s",
            "fusion / pipeline",
            "fusion, ms per layer",
            "CPU ms per token, fusion / pipeline",
            "planned ms per token, measured",
        )
    ]
    for cell in data["cells"]:
        cpu, plan = cell["cpu_ms_per_token"], cell["planned"][FUSION]
        for width, told in cell["widths"].items():
            is_token = width == "1"
            planned = "no plan" if plan["ms"] is None else f"{plan['ms']:.0f}"
            rows.append(
                (
                    str(cell["members"]),
                    str(cell["round_trip_ms"]),
                    width,
                    f"{told['rows_per_s'][FUSION]:.2f}",
                    f"{told['rows_per_s'][PIPELINE]:.2f}",
                    f"{told['rate_of_pipeline']:.3f} x",
                    f"{told['ms_per_layer']:.2f}",
                    f"{cpu[FUSION]:.0f} / {cpu[PIPELINE]:.0f}" if is_token else "",
                    f"{planned}, {plan['measured_ms']:.0f}" if is_token else "",
                )
            )
    return _table(rows)


TABLES = {"wire": wire_table, "exchange": exchange_table, "answers": answers_table}


def tables_of(documents: Sequence[dict[str, Any]]) -> dict[str, str]:
    """By measurement, of those that are in the documents."""
    found: dict[str, str] = {}
    for document in documents:
        for name, table in TABLES.items():
            if name in document["data"]:
                found[name] = f"{table(document['data'][name])}\n{_caption(document)}\n"
    return found


def _caption(document: dict[str, Any]) -> str:
    """How far the numbers can be trusted."""
    where, extent = document["machine"], "quick" if document["quick"] else "full"
    load = where["load_1min_at_start"]
    return f"(A {extent} run on {where['cores']} cores of {where['cpu']}; the load before it was {load:g}.)"


def replaced(page: str, tables: dict[str, str]) -> str:
    """The page with these tables.

    Raises:
        ValueError: it has no place for one.
    """
    for name, table in tables.items():
        first, last = f"<!-- {name}: measured -->\n", f"<!-- {name}: end -->"
        before, found, rest = page.partition(first)
        _, ends, after = rest.partition(last)
        if not found or not ends:
            raise ValueError(f"the page has no marks for {name}")
        page = f"{before}{first}{table}{last}{after}"
    return page


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{' ---: |' * len(rows[0])}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """The command line. Returns the exit status."""
    results = [Path(each) for each in arguments if not each.endswith(".md")]
    pages = [Path(each) for each in arguments if each.endswith(".md")]
    if not results or len(pages) > 1:
        print("usage: python -m benchmarks.fusion.table RESULT.json [RESULT.json ...] [PAGE.md]", file=sys.stderr)
        return 2
    tables = tables_of([json.loads(path.read_text()) for path in results])
    if pages:
        pages[0].write_text(replaced(pages[0].read_text(), tables))
    else:
        print("\n".join(tables.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
