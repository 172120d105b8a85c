"""``fusion-node doctor``: what is wrong with this machine's place in the network, and what to do about it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import AsJson, Home, Mdns, Peers, SwarmKeyFile, read_swarm_key
from fusion_node.daemon.control import ask_network, known_peers
from fusion_node.daemon.diagnosis_core import Finding, Level, diagnose
from fusion_node.daemon.network_report import NetworkReport
from fusion_node.errors import PeerError, ProblemsFound
from fusion_node.store import ModelStore
from p2p.identity import short

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red", Level.UNKNOWN: "dim"}


class Examined(msgspec.Struct, frozen=True):
    """One process: what it knows, and what follows."""

    report: NetworkReport
    findings: tuple[Finding, ...]


def doctor(
    peer: Peers = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Examine what a node that listens there would meet, as 0.0.0.0:4600."),
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="Where others would reach it, as told to `join`.")
    ] = None,
    swarm_key: SwarmKeyFile = None,
    mdns: Mdns = True,
    measure: Annotated[
        bool, typer.Option("--bandwidth/--no-bandwidth", help="Measure the bandwidth with two peers: 5 MB each.")
    ] = True,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Look for what keeps others from reaching this machine, and say how to mend it.

    The nodes of this home are asked if any run and neither --peer nor --listen is given. Else the swarm is entered for
    half a minute. The exit status is 0 unless a problem is found; warnings are none.
    """
    configure_logs(LogFormat.AUTO, quiet=True)
    folder = ModelStore(home).home / "run"
    reports = [] if peer or listen or announce else _ask_nodes(folder, measure=measure)
    if not reports:
        from fusion_node.daemon.network_examiner import Visit, visit  # libp2p takes a second to import

        key = read_swarm_key(swarm_key)
        wish = Visit(tuple(peer or ()), listen, tuple(announce or ()), mdns, ModelStore(home).home, measure, key)
        reports = [asyncio.run(visit(wish))]
    examined = [Examined(report, tuple(diagnose(report))) for report in reports]
    if as_json:
        print(msgspec.json.encode(examined).decode())
    else:
        for each in examined:
            _print(each)
    problems = [finding for each in examined for finding in each.findings if finding.level is Level.PROBLEM]
    if problems:
        raise ProblemsFound(f"{_counted(len(problems), 'problem')} found: {problems[0].what}")


def _ask_nodes(folder: Path, *, measure: bool) -> list[NetworkReport]:
    answers = asyncio.run(ask_network(folder, known_peers(folder), measure=measure))
    for answer in answers:
        if answer.reply is None:
            raise PeerError(answer.peer, f"node {short(answer.peer)} cannot be asked: {answer.problem}")
    return [answer.reply for answer in answers if answer.reply is not None]


def _print(examined: Examined) -> None:
    console = Console()
    report = examined.report
    kind = "node" if report.is_node else "this machine, for as long as this command ran, as"
    console.print(f"{kind} {short(report.peer)}", style="bold", markup=False)
    console.print(findings_table(examined.findings))
    levels = Counter(finding.level for finding in examined.findings)
    console.print(
        f"{levels[Level.OK]} in order, {_counted(levels[Level.WARNING], 'warning')}, "
        f"{_counted(levels[Level.PROBLEM], 'problem')}, {levels[Level.UNKNOWN]} unknown\n"
    )


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row per finding, and one more where there is something to do that was not said before."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    said: set[str] = set()
    for finding in findings:
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, Text(finding.what))
        if finding.fix and finding.fix not in said:
            said.add(finding.fix)
            table.add_row("", "", Text(f"→ {finding.fix}"))
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
