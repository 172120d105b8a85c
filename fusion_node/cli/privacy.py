"""``fusion-node privacy-report``: what one node can read of a prompt, shown by doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_node.cli.options import Home, Model, Threads
from fusion_node.errors import ConfigError
from fusion_node.slices import ModelSlice
from fusion_node.wire import harmless

if TYPE_CHECKING:
    from fusion_node.privacy.findings import Read, Report, Solved

_SOLVED_WELL = 1e-2
"""Relative error of what counts as solved for: far above any rounding on the way, and far below a wrong solution's."""

_MUCH = 0.9
"""Of the tokens: from here on a view counts as the text."""


def privacy_report(
    model: Model,
    topology: Annotated[
        str, typer.Option(metavar="fusion|pipeline", help="Members of a fusion group, or stages one after the other.")
    ] = "fusion",
    members: Annotated[int, typer.Option(metavar="N", help="Members, or stages, with equal parts.")] = 3,
    weights: Annotated[
        str | None, typer.Option(metavar="W0:W1:…", help="Parts of the members, or stages, in place of equal ones.")
    ] = None,
    member: Annotated[
        int | None,
        typer.Option(metavar="K", help="The member that attacks, counted from 0; the one with the least if not given."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="To be attacked in place of the three invented ones.")
    ] = None,
    received: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Attack real answers: what a member's `join --record-received` wrote.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="To look at; the first two, the middle and the last if not given."),
    ] = None,
    candidates: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens among which matching looks at a position.")
    ] = 256,
    positions: Annotated[int, typer.Option(min=1, metavar="N", help="Of each prompt, for matching.")] = 8,
    numerics: Annotated[str, typer.Option(help="Numerics class: fp32 or f16r32.")] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="Of candidates and controls.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there, the prompts' text included.")
    ] = None,
    threads: Threads = None,
    home: Home = None,
) -> None:
    """Attack a prompt with what one node is sent of it, and show what was read.

    The nodes run in this process, or have run and kept what came (--received); nothing is sent anywhere.
    What follows from the numbers: docs/privacy.md.
    """
    from fusion_node.client.tokenizer import Tokenizer
    from fusion_node.engine.device import set_threads
    from fusion_node.engine.received_views import read_sessions
    from fusion_node.privacy.prompts import PROMPTS
    from fusion_node.privacy.report import FUSION, Settings, make_received_report, make_report
    from fusion_node.store import ModelStore

    parts = ModelSlice.parse(f"0/{weights if weights is not None else members}").weights
    settings = Settings(
        topology=topology,
        weights=parts,
        member=member,
        layers=_numbers(layers),
        num_candidates=candidates,
        num_positions=positions,
        numerics=numerics,
        seed=seed,
    )
    if received is not None and (prompt is not None or member is not None or topology != FUSION):
        raise ConfigError("--received says who attacks what: leave out --prompt, --member and --topology")
    sessions = None if received is None else read_sessions(received)
    stored = ModelStore(home).find(model)
    tokenizer = Tokenizer(stored.path)
    set_threads(threads)
    texts = PROMPTS if prompt is None else (prompt,)
    token_ids = [tokenizer.encode(text) for text in texts]
    with Console(stderr=True, highlight=False).status("reading the model") as status:

        def on_progress(what: str) -> None:
            status.update(f"{what} …")

        if sessions is None:
            report = make_report(stored, token_ids, settings, decode=tokenizer.decode, on_progress=on_progress)
        else:
            report = make_received_report(
                stored, sessions, settings, model_id=stored.model_id, decode=tokenizer.decode, on_progress=on_progress
            )
    if json_file is not None:
        try:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{json_file} cannot be written: {error.strerror}") from error
    print_report(report, Console(highlight=False))


def print_report(report: Report, console: Console) -> None:
    """For a person: who attacked, what was solved for, what was read, the texts, and what follows."""
    console.print(_who(report), markup=False)
    if report.solved:
        console.print("\nEquations: what was sent, solved for what was not (relative error by layer)", style="bold")
        console.print(solved_table(report.solved))
    console.print("\nTokens: found of those tried, by layer", style="bold")
    console.print(read_table(report))
    chance = 100 / report.candidates
    console.print(
        f"Matching is told the tokens before. By chance it finds {chance:.2g} %, and the language model alone, without "
        f"any view, {report.prior_found} of {report.positions}.",
        markup=False,
    )
    for text in report.prompts:
        console.print(f"\nread  {text.num_recovered} of {text.num_tokens} tokens", style="bold")
        # Of real answers nobody says what was asked: what the own columns tell stands beside what was solved for.
        console.print(
            f"  {'own columns' if report.is_received else 'prompt':<12}{_one_line(text.prompt)}", markup=False
        )
        console.print(f"  {'recovered':<12}{_one_line(text.recovered)}", markup=False)
    console.print(f"\n{report.conclusion}", markup=False)


def solved_table(solved: Sequence[Solved]) -> Table:
    """One row per kind of contribution."""
    layers = sorted({found.layer for found in solved})
    table = _table(["what it was sent", "says", "equations", "unknowns"], layers)
    by_kind: dict[tuple[str, str], list[Solved]] = {}
    for found in solved:
        by_kind.setdefault((found.sent, found.state), []).append(found)
    for (sent, state), of_kind in sorted(by_kind.items(), key=lambda item: item[1][0].is_control):
        first = of_kind[0]
        cells = _cells(layers, of_kind, _error)
        table.add_row(sent, state, str(first.equations), str(first.unknowns), *cells)
    return table


def read_table(report: Report) -> Table:
    """One row per view and attack, with how many tokens it told, by layer."""
    layers = sorted({found.layer for found in report.read})
    table = _table(["what it has", "attack", "among"], layers)
    by_kind: dict[tuple[str, str], list[Read]] = {}
    for found in report.read:
        by_kind.setdefault((found.seen, found.attack), []).append(found)
    for (seen, attack), of_kind in sorted(by_kind.items(), key=lambda item: item[1][0].is_control):
        table.add_row(seen, attack, f"{of_kind[0].candidates:,}", *_cells(layers, of_kind, _share))
    return table


def _table(columns: Sequence[str], layers: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in ("equations", "unknowns", "among") else "left")
    for layer in layers:
        table.add_column(f"{'layer ' if layer == layers[0] else ''}{layer}", justify="right", no_wrap=True)
    return table


def _cells(layers: Sequence[int], found: Sequence[Solved] | Sequence[Read], show: Callable[..., Text]) -> list[Text]:
    by_layer = {each.layer: each for each in found}
    return [show(by_layer[layer]) if layer in by_layer else Text("–", style="dim") for layer in layers]


def _error(found: Solved) -> Text:
    return Text(f"{found.error:.0e}", style="bold red" if found.error < _SOLVED_WELL else "green")


def _share(found: Read) -> Text:
    return Text(f"{found.found}/{found.tried}", style="bold red" if found.found >= _MUCH * found.tried else "green")


def _who(report: Report) -> str:
    what = (
        f"{report.model} in {report.numerics}, {len(report.prompts)} {'answers' if report.is_received else 'prompts'}"
    )
    size = f"{report.sent_bytes / 2**20:.1f} MiB"
    if report.member is None:
        return f"{what}: {len(report.weights)} stages one after the other, which were sent {size}"
    held = f"{report.columns} of the {report.hidden} columns of every hidden state"
    return f"{what}: member {report.member} of {len(report.weights)}, which holds {held} and was sent {size}"


def _one_line(text: str) -> str:
    return harmless(text).replace("\n", "⏎")


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 6 for part in parts):
        raise ConfigError(f"layers {text!r} are none: write them with commas between, for example 0,1,15")
    return tuple(int(part) for part in parts)


__all__ = ["print_report", "privacy_report", "read_table", "solved_table"]
