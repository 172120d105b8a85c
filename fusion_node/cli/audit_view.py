"""An audit as a page: who held what when. One file that loads nothing, for any browser, light or dark.

Two pictures for each session. The first has a row for each peer and a place for each state, from the embedding to the
last layer; a place is as high as the state has columns, and filled where the peer has them. The second has the steps
of the answer from left to right, and how much of one state each brought to each node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from p2p.identity import short
from verification.audit_report import Band, How, NodeShare, Report, SessionView, Status, StepView

MAX_PLANS = 6
"""Of a session that are drawn; a session with more repairs tells the first and the last ones."""

MAX_BARS = 400
"""Steps that are drawn one by one; more of them share bars, and a bar shows its worst."""

LABEL_PX, WIDTH_PX, ROW_PX, GAP_PX = 215, 890, 64, 14

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5b6676; --line: #d5dbe3; --empty: #eef1f5;
  --sent: #2563eb; --made: #86b8f5; --user: #64748b; --bad: #dc2626; --good: #15803d; --late: #d97706; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #11161d; --ink: #e6eaf0; --soft: #9aa7b8; --line: #303a47; --empty: #1c242e; --sent: #60a5fa;
    --made: #2f5687; --user: #94a3b8; --bad: #f87171; --good: #4ade80; --late: #fbbf24; }
}
body { margin: 2rem auto; max-width: 1140px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .2rem; }
p { margin: .2rem 0 .8rem; max-width: 80ch; }
.soft { color: var(--soft); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: 1rem; color: var(--paper); font-size: 1.1rem;
  vertical-align: 2px; }
.verdict.good { background: var(--good); }
.verdict.bad { background: var(--bad); }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td.n, th.n { text-align: right; }
td.what { min-width: 26rem; }
code { font-size: .9em; }
ul.checks { list-style: none; padding: 0; }
ul.checks b { display: inline-block; min-width: 4.4rem; }
.legend { max-width: none; }
.legend span { margin-right: 1.3rem; white-space: nowrap; }
.legend i { display: inline-block; width: .9em; height: .9em; border-radius: 2px; margin-right: .4em;
  vertical-align: -1px; }
.scroll { overflow-x: auto; }
svg { display: block; }
svg text { fill: var(--ink); font-size: 13px; }
svg text.soft { fill: var(--soft); font-size: 11px; }
.empty { fill: var(--empty); }
.sent, .closed { fill: var(--sent); }
.made, .replay { fill: var(--made); }
.user { fill: var(--user); }
.foreign, .open { fill: var(--bad); }
.given-up, .abandoned { fill: var(--late); }
.own { stroke: var(--ink); stroke-dasharray: 2 4; }
.plan { stroke: var(--late); stroke-dasharray: 4 3; }
"""


@dataclass(frozen=True, slots=True)
class _Row:
    """One peer's row of a picture."""

    peer: str
    label: str
    note: str


def as_html(report: Report) -> str:
    """The whole page. Everything that comes from a log is escaped."""
    word, style = ("passed", "good") if report.passed else ("failed", "bad")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Who held what</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f'<h1>Who held what <span class="verdict {style}">audit {word}</span></h1>',
        f'<p class="soft">Decided from {report.num_records:,} records of all parties. Records hold no values.</p>',
        _checks(report),
        *itertools.chain.from_iterable(map(_session, report.sessions)),
        _findings(report),
        "</body></html>",
    ]
    return "\n".join(parts)


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _checks(report: Report) -> str:
    items = [
        f'<li><b class="{"good" if check.passed else "bad"}">{"ok" if check.passed else "FAILED"}</b> '
        f"{escape(check.name)}{'' if check.passed else ': ' + counted(check.num_findings, 'finding')}</li>"
        for check in report.checks
    ]
    return f'<ul class="checks">{"".join(items)}</ul>'


def _findings(report: Report) -> str:
    if not report.findings:
        return ""
    rows = [
        f'<tr><td>{escape(finding.kind)}</td><td class="what">{escape(finding.what)}</td>'
        f"<td><code>{escape(', '.join(finding.records)) or '–'}</code></td></tr>"
        for finding in report.findings
    ]
    more = sum(report.counts.values()) - len(report.findings)
    after = f'<p class="soft">and {more} more</p>' if more else ""
    head = "<tr><th>finding</th><th>what was found</th><th>records</th></tr>"
    return f'<h2>Findings</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div>{after}'


def _session(session: SessionView) -> Iterable[str]:
    yield f"<h2>Session <code>{escape(session.session)}</code></h2>"
    share = session.num_closed / session.num_steps if session.num_steps else 1.0
    yield (
        f"<p>User <code>{escape(short(session.user))}</code>, model <code>{escape(session.model_id[:12])}</code> "
        f"{escape(session.numerics)}: {session.num_layers} layers, states of {session.hidden} columns. "
        f"<b>{session.num_closed} of {session.num_steps} steps closed</b> ({share:.1%})"
        f"{f', {session.num_given_up} given up when a node was replaced' if session.num_given_up else ''}"
        f"{f', {session.num_abandoned} under way at the end' if session.num_abandoned else ''}"
        f"{', ' + counted(session.num_replays, 'replay') if session.num_replays else ''}.</p>"
    )
    yield _table(session.nodes)
    yield (
        '<p class="soft">Contributions are what members of a group send one another within a layer. They are no state, '
        "but linear equations in states: the last column says how much of the input of one linear a node could have "
        "solved them for. Owning a slice is no secrecy.</p>"
    )
    yield "<h3>What each peer has of the hidden state, layer by layer</h3>"
    yield (
        '<p class="soft">A row is a peer, and its height all columns of the state, the first at the top. From left to '
        "right: the state after so many layers. Where a node’s row is full, it has a whole state.</p>"
    )
    yield _legend(
        ("user", "the user’s own"),
        ("sent", "was sent these columns"),
        ("made", "computed them from contributions, or alone"),
        *([("foreign", "was sent what is not its own")] if any(b.how is How.FOREIGN for b in session.bands) else []),
    )
    drawn = (
        session.epochs if len(session.epochs) <= MAX_PLANS else (*session.epochs[: MAX_PLANS - 1], session.epochs[-1])
    )
    for epoch in drawn:
        if len(session.epochs) > 1:
            yield f"<h3>Plan {epoch}{' (the first)' if epoch == session.epochs[0] else ''}</h3>"
        yield _layers(session, epoch)
    if len(drawn) < len(session.epochs):
        yield f'<p class="soft">{len(session.epochs) - len(drawn)} plans between them are not drawn.</p>'
    yield "<h3>What each step brought</h3>"
    yield (
        '<p class="soft">From left to right the steps of the answer. The height of a bar is the largest part of one '
        "state that the step brought to the node, and a full row a whole state. The line is the node’s own part.</p>"
    )
    statuses = {step.status for step in session.steps}
    yield _legend(
        ("closed", "closed"),
        *([("replay", "replay")] if session.num_replays else []),
        *(
            [("given-up", "given up, or under way at the end")]
            if statuses & {Status.GIVEN_UP, Status.ABANDONED}
            else []
        ),
        *([("open", "not closed, or more than its own")] if not _is_clean(session) else []),
    )
    yield _steps(session)


def _is_clean(session: SessionView) -> bool:
    return session.num_closed == session.num_steps and all(
        node.largest_fraction <= node.own_fraction for node in session.nodes
    )


def _table(nodes: Sequence[NodeShare]) -> str:
    head = (
        "<tr><th>node</th><th>layers</th><th>columns</th><th class=n>own part</th><th class=n>sent at most</th>"
        "<th class=n>contributions</th><th class=n>could be solved from them</th>"
        "<th>has released</th></tr>"
    )
    rows = []
    for node in nodes:
        is_bad = node.largest_fraction > node.own_fraction or node.largest_fraction >= 1.0
        layers = ", ".join(dict.fromkeys(f"{place.start}:{place.stop}" for place in node.places)) or "in no plan"
        columns = ", ".join(dict.fromkeys(f"{place.first_column}:{place.stop_column}" for place in node.places)) or "–"
        rows.append(
            f"<tr><td><code>{escape(short(node.peer))}</code></td><td>{layers}</td><td>{columns}</td>"
            f"<td class=n>{node.own_fraction:.1%}</td>"
            f'<td class="n {"bad" if is_bad else "good"}">{node.largest_fraction:.1%}</td>'
            f"<td class=n>{node.num_partials:,}</td>"
            f"<td class=n>{f'{node.invertible_fraction:.1%}' if node.num_partials else '–'}</td>"
            f"<td>{escape(node.released or 'no') if node.is_member else '–'}</td></tr>"
        )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _legend(*entries: tuple[str, str]) -> str:
    variables = {"user": "user", "sent": "sent", "made": "made", "foreign": "bad", "closed": "sent", "replay": "made"}
    spans = [
        f'<span><i style="background: var(--{variables.get(name, "late" if name == "given-up" else "bad")})"></i>'
        f"{escape(words)}</span>"
        for name, words in entries
    ]
    return f'<p class="legend">{"".join(spans)}</p>'


def _layers(session: SessionView, epoch: int) -> str:
    """Peers as rows, states as places, columns as bands."""
    places = {node.peer: [place for place in node.places if place.epoch == epoch] for node in session.nodes}
    bands = [band for band in session.bands if band.epoch == epoch]
    rows = [_Row(session.user, f"{short(session.user)}, user", "embedding, and result")]
    for node in session.nodes:
        own = places[node.peer]
        if own:
            part = (own[0].stop_column - own[0].first_column) / session.hidden
            member = f"member {own[0].member + 1} of {own[0].num_members}" if own[0].num_members > 1 else "alone"
            rows.append(_Row(node.peer, short(node.peer), f"{member}, layers {own[0].start}:{own[0].stop}, {part:.1%}"))
        elif any(band.peer == node.peer for band in bands):
            rows.append(_Row(node.peer, short(node.peer), "in no plan"))
    num_states = session.num_layers + 1
    place_px = WIDTH_PX / num_states
    shapes = [
        Band(epoch, session.user, 0, 0, session.hidden, How.SENT),
        Band(epoch, session.user, session.num_layers, 0, session.hidden, How.SENT),
        *bands,
    ]
    parts = []
    for index, row in enumerate(rows):
        top = index * (ROW_PX + GAP_PX)
        parts.append(_label(row, top))
        parts.append(f'<rect class="empty" x="{LABEL_PX}" y="{top}" width="{WIDTH_PX}" height="{ROW_PX}"/>')
        for band, last in _runs([band for band in shapes if band.peer == row.peer]):
            x = LABEL_PX + band.layer * place_px
            y = top + ROW_PX * band.start / session.hidden
            width = (last - band.layer + 1) * place_px - (0.8 if place_px > 4 else 0)
            height = ROW_PX * (band.stop - band.start) / session.hidden
            style = "user" if row.peer == session.user else band.how.value
            states = (
                f"state after layer {band.layer}"
                if last == band.layer
                else f"states after layers {band.layer} to {last}"
            )
            parts.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
                f"<title>{escape(row.label)}: columns {band.start}:{band.stop} of the {states}</title></rect>"
            )
    bottom = len(rows) * (ROW_PX + GAP_PX)
    step = max(1, -(-num_states // 16))
    for layer in range(0, num_states, step):
        x = LABEL_PX + (layer + 0.5) * place_px
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 4}" text-anchor="middle">{layer}</text>')
    parts.append(
        f'<text class="soft" x="{LABEL_PX + WIDTH_PX / 2}" y="{bottom + 22}" text-anchor="middle">state after layer '
        "(0: the embedding)</text>"
    )
    return _svg(parts, bottom + 30, f"columns of the hidden state by peer and layer, plan {epoch}")


def _runs(bands: Sequence[Band]) -> Iterable[tuple[Band, int]]:
    """Bands of the same columns in states one after another, as one, with the last of its layers."""
    ordered = sorted(bands, key=lambda band: (band.how, band.start, band.stop, band.layer))
    for _, alike in itertools.groupby(ordered, key=lambda band: (band.how, band.start, band.stop)):
        first, last = None, 0
        for band in alike:
            if first is not None and band.layer == last + 1:
                last = band.layer
                continue
            if first is not None:
                yield first, last
            first, last = band, band.layer
        if first is not None:
            yield first, last


def _steps(session: SessionView) -> str:
    """Nodes as rows, steps as bars."""
    if not session.steps:
        return '<p class="soft">None.</p>'
    per_bar = -(-len(session.steps) // MAX_BARS)
    bars = [session.steps[at : at + per_bar] for at in range(0, len(session.steps), per_bar)]
    bar_px = min(24.0, WIDTH_PX / len(bars))
    parts = []
    for index, node in enumerate(session.nodes):
        top = index * (ROW_PX + GAP_PX)
        parts.append(_label(_Row(node.peer, short(node.peer), f"at most {node.largest_fraction:.1%}"), top))
        parts.append(
            f'<rect class="empty" x="{LABEL_PX}" y="{top}" width="{bar_px * len(bars):.1f}" height="{ROW_PX}"/>'
        )
        for number, bar in enumerate(bars):
            height = ROW_PX * max(step.fractions.get(node.peer, 0.0) for step in bar)
            if not height:
                continue
            style = _worst(bar, node)
            x, gap = LABEL_PX + number * bar_px, 0.8 if bar_px > 4 else 0
            parts.append(
                f'<rect class="{style}" x="{x:.1f}" y="{top + ROW_PX - height:.1f}" width="{bar_px - gap:.1f}" '
                f'height="{height:.1f}"><title>{escape(_named(bar))}</title></rect>'
            )
        line = top + ROW_PX * (1 - node.own_fraction)
        parts.append(
            f'<line class="own" x1="{LABEL_PX}" x2="{LABEL_PX + bar_px * len(bars):.1f}" '
            f'y1="{line:.1f}" y2="{line:.1f}"/>'
        )
    bottom = len(session.nodes) * (ROW_PX + GAP_PX)
    for number, (before, after) in enumerate(itertools.pairwise(bars), start=1):
        if before[-1].epoch != after[-1].epoch:
            x = LABEL_PX + number * bar_px
            parts.append(f'<line class="plan" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom - GAP_PX}"/>')
            parts.append(f'<text class="soft" x="{x + 3:.1f}" y="{bottom + 2}">plan {after[-1].epoch}</text>')
    words = f"{len(session.steps)} steps" + (f", {per_bar} to a bar" if per_bar > 1 else "")
    parts.append(f'<text class="soft" x="{LABEL_PX}" y="{bottom + 18}">{words}, in their order</text>')
    return _svg(parts, bottom + 26, "largest part of one state that each step brought to each node")


def _worst(bar: Sequence[StepView], node: NodeShare) -> str:
    if any(step.fractions.get(node.peer, 0.0) > node.own_fraction for step in bar):
        return "foreign"
    for status in (Status.OPEN, Status.GIVEN_UP, Status.ABANDONED):
        if any(step.status is status and not step.is_replay for step in bar):
            return status.value
    return "replay" if all(step.is_replay for step in bar) else "closed"


def _named(bar: Sequence[StepView]) -> str:
    first, last = bar[0], bar[-1]
    rows = sum(step.num_rows for step in bar)
    which = f"step {first.sequence}" if len(bar) == 1 else f"steps {first.sequence} to {last.sequence}"
    what = "replay, " if len(bar) == 1 and first.is_replay else ""
    return f"{which} of plan {first.epoch}: {what}{rows} rows, {', '.join(dict.fromkeys(step.status for step in bar))}"


def _label(row: _Row, top: int) -> str:
    middle = top + ROW_PX / 2
    return (
        f'<text x="0" y="{middle - 3:.0f}">{escape(row.label)}</text>'
        f'<text class="soft" x="0" y="{middle + 14:.0f}">{escape(row.note)}</text>'
    )


def _svg(parts: Sequence[str], height: float, words: str) -> str:
    width = LABEL_PX + WIDTH_PX
    return (
        f'<div class="scroll"><svg role="img" aria-label="{escape(words)}" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}">{"".join(parts)}</svg></div>'
    )


__all__ = ["as_html", "counted"]
