"""``fusion-node audit``: who was sent which part of which state, decided from the logs of all parties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_node.cli.audit_view import as_html, counted
from fusion_node.cli.options import AsJson, Home
from fusion_node.errors import AuditFailed, ConfigError, UnknownModel
from fusion_node.grants import Grant, Release
from fusion_node.slices import Dims
from fusion_node.store import ModelStore
from fusion_node.types import UnixS
from fusion_node.wire import printable
from p2p.grants import open_grant, open_release
from p2p.identity import short
from p2p.records import Refusal
from verification.audit_core import audit as judge
from verification.audit_core import models_in
from verification.audit_file import NoAuditLog, Run, read_runs
from verification.audit_grants_core import Statements
from verification.audit_report import NodeShare, Report, SessionView

_SHOWN_FINDINGS = 12
"""Of all kinds, on a terminal; --json has more."""


def audit(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="Logs of all parties: `join --audit-log` and `generate --audit`.",
            show_default=False,
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Start a fusion group of three on this machine, ask it, and audit that.")
    ] = False,
    session: Annotated[
        str, typer.Option(metavar="NAME", help="Only the session whose name begins so, as the table names it.")
    ] = "",
    dims: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Sizes of the model where it is not in the store: HIDDEN:HEADS:KV_HEADS:HEAD_DIM:CHANNELS, with "
            "experts :EXPERTS:EXPERTS_PER_ROW behind them.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw there who held what when, as a page that needs no other.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Check from the logs of all parties that no node was sent more of a state than its slice, and all steps closed.

    The exit status is 0 only if every check passes.
    """
    if demo == bool(files):
        raise ConfigError("name the logs of all parties, or else say --demo")
    if demo:
        # It shows an answer as it comes, and imports this file for what is behind it.
        from fusion_node.cli.demo import audited_demo
        from fusion_node.cli.logs import LogFormat, configure_logs

        configure_logs(LogFormat.AUTO, quiet=True)
        report = audited_demo(home=home, console=Console(stderr=as_json))
    else:
        report = judge_files(files or (), session=session, dims=dims, home=home)
    finish(report, html=html, as_json=as_json)


def judge_files(
    files: Sequence[Path], *, session: str = "", dims: str | None = None, home: Path | None = None
) -> Report:
    """What the logs of all parties show.

    Raises:
        ConfigError: a file is no log, or no session is to be judged.
        UnknownModel: the sizes of a model are not known.
    """
    runs = [run for path in files for run in _read(path)]
    return judge(runs, _sizes(models_in(runs), dims, home), only=session, statements=STATEMENTS)


def finish(report: Report, *, html: Path | None, as_json: bool) -> None:
    """Shows a report, and ends as it is.

    Raises:
        ConfigError: the page cannot be written.
        AuditFailed: not all checks pass.
    """
    if html is not None:
        try:
            html.write_text(as_html(report), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{html} cannot be written: {error.strerror}") from error
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report)
    failed = [check for check in report.checks if not check.passed]
    if failed:
        raise AuditFailed(f"{len(failed)} of {len(report.checks)} checks failed, first of all that {failed[0].name}")


def _read(path: Path) -> list[Run]:
    try:
        with path.open("rb") as file:
            return read_runs(path.name, file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except NoAuditLog as error:
        raise ConfigError(str(error)) from error


def _grant(envelope: bytes, at: float) -> Grant | str:
    opened = open_grant(envelope, now=UnixS(at))
    return opened.value if isinstance(opened, Refusal) else opened


def _release(envelope: bytes) -> Release | str:
    # By its date nobody is judged: the clock of who has signed it may be wrong, and it holds from then on.
    opened = open_release(envelope, now=UnixS(math.inf))
    return opened.value if isinstance(opened, Refusal) else opened


STATEMENTS = Statements(_grant, _release)
"""What the auditor takes for signed."""


def _sizes(models: set[str], dims: str | None, home: Path | None) -> dict[str, Dims]:
    if dims is not None:
        return dict.fromkeys(models, parse_dims(dims))
    try:
        stored = {model_id: ModelStore(home).find(model_id) for model_id in sorted(models)}
    except UnknownModel as error:
        raise UnknownModel(f"{error}. Or say with --dims which sizes the model of these logs has") from error
    # Sizes alone come from there: what follows from them, the auditor reckons itself.
    from fusion_node.engine.architectures import load_config
    from fusion_node.engine.sliced_layer import fusion_dims

    found = {}
    for model_id, model in stored.items():
        config = load_config(model)
        try:
            found[model_id] = fusion_dims(config)
        except ConfigError:
            # No group can serve it: all that is to be known is how wide a whole state is.
            found[model_id] = Dims(config.hidden_size, 1, 1, config.hidden_size, config.hidden_size)
    return found


def parse_dims(text: str) -> Dims:
    """Reads ``HIDDEN:HEADS:KV_HEADS:HEAD_DIM:CHANNELS[:EXPERTS:EXPERTS_PER_ROW]``.

    Raises:
        ConfigError: it is not that.
    """
    parts = text.split(":")
    if len(parts) in (5, 7) and all(part.isascii() and part.isdecimal() and len(part) < 8 for part in parts):
        numbers = list(map(int, parts))
        if min(numbers) > 0:
            hidden, heads, kv_heads, head_dim, channels, num_experts, chosen = [*numbers, 0, 0][:7]
            if not heads % kv_heads:
                return Dims(hidden, heads, kv_heads, head_dim, channels, num_experts, experts_per_row=chosen)
    raise ConfigError(f"sizes {text!r} are none: write five or seven numbers, for example 576:9:3:64:1536")


def _print(report: Report) -> None:
    console = Console(highlight=False)
    for session in report.sessions:
        console.print(f"session {session.session} of user {short(session.user)}", style="bold", markup=False)
        model = f"model {session.model_id[:12]} {session.numerics}"
        console.print(f"{model}: {session.num_layers} layers, states of {session.hidden} columns", markup=False)
        console.print(node_table(session.nodes))
        console.print(closed_in_words(session), markup=False)
        console.print(f"{released_in_words(session)}\n", markup=False)
    for check in report.checks:
        mark = Text("ok    ", style="green") if check.passed else Text("FAILED", style="bold red")
        console.print(mark, Text(check.name + ("" if check.passed else f": {counted(check.num_findings, 'finding')}")))
    for finding in report.findings[:_SHOWN_FINDINGS]:
        where = f" ({', '.join(finding.records)})" if finding.records else ""
        console.print(f"  {finding.kind}: {printable(finding.what + where, limit=600)}", markup=False)
    hidden = sum(report.counts.values()) - min(len(report.findings), _SHOWN_FINDINGS)
    if hidden:
        console.print(f"  and {hidden} more")
    for source in report.unended:
        console.print(f"note: {printable(source)} has no end: the process was killed, or still runs", markup=False)
    if report.skipped:
        console.print(f"note: {counted(len(report.skipped), 'session')} of users without a log not judged")
    console.print(
        "Contributions are no states, but linear equations in them; 'solvable' is what part of the input of one linear "
        "they give away. What this proves, and what not: docs/audit.md."
    )


def node_table(nodes: Sequence[NodeShare]) -> Table:
    """One row per node: what it held, the most that it was sent of a state, and what contributions say beside."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True, header_style="bold")
    for name in ("node", "layers", "columns"):
        table.add_column(name, overflow="fold")
    for name in ("own", "sent", "contributions", "solvable"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for node in nodes:
        layers = dict.fromkeys(f"{place.start}:{place.stop}" for place in node.places)
        columns = dict.fromkeys(f"{place.first_column}:{place.stop_column}" for place in node.places)
        table.add_row(
            short(node.peer),
            "\n".join(layers) or "–",
            "\n".join(columns) or "–",
            percent(node.own_fraction),
            percent(node.largest_fraction),
            f"{node.num_partials:,}",
            percent(node.invertible_fraction) if node.num_partials else "–",
            _verdict(node),
        )
    return table


def _verdict(node: NodeShare) -> Text:
    if node.largest_fraction >= 1.0:
        return Text("whole state", style="bold red")
    if node.largest_fraction > node.own_fraction:
        return Text("too much", style="bold red")
    if not node.has_log:
        return Text("no log", style="bold red")
    return Text("own slice" if node.num_states else "nothing", style="green")


def percent(fraction: float) -> str:
    """A fraction as people read it; 100 % only if it is all."""
    rounded = f"{fraction * 100:.1f}"
    return f"{'99.9' if rounded == '100.0' and fraction < 1 else rounded}%"


def closed_in_words(session: SessionView) -> str:
    """How many steps of a session are closed, and what became of the others."""
    others = "".join(
        f", {what}"
        for number, what in (
            (session.num_given_up, f"{session.num_given_up} given up when a node was replaced"),
            (session.num_abandoned, f"{session.num_abandoned} under way at the end"),
            (session.num_replays, counted(session.num_replays, "replay")),
        )
        if number
    )
    share = "" if not session.num_steps else f" ({percent(session.num_closed / session.num_steps)})"
    return f"closed steps: {session.num_closed} of {session.num_steps}{share}{others}"


def released_in_words(session: SessionView) -> str:
    """Which members of groups have signed that they have deleted what they held, and which have not."""
    members = [node for node in session.nodes if node.is_member]
    if not members:
        return "released: nobody was granted a slice"
    done = [f"{short(node.peer)} ({node.released})" for node in members if node.released]
    others = [short(node.peer) for node in members if not node.released]
    return f"released: {', '.join(done) or 'nobody'}" + (f"; not by {', '.join(others)}" if others else "")


__all__ = ["audit", "finish", "judge_files", "parse_dims"]
