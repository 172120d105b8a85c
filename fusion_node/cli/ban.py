"""``fusion-node ban``, ``unban`` and ``bans``: whom the nodes and the users of this home have nothing to do with."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_node.cli.control import matching
from fusion_node.cli.options import AsJson, Home
from fusion_node.daemon.control import BansReply, BansRequest, ask_bans, ask_peers, known_peers
from fusion_node.errors import ConfigError, PeerError
from fusion_node.store import ModelStore
from fusion_node.wire import printable
from p2p import bans as ban_file
from p2p.bans import FILE_NAME, MAX_REASON_CHARACTERS, Ban, canonical_target, parse_duration
from p2p.identity import short

_TARGET = typer.Argument(
    metavar="PEER|IP|PREFIX",
    help="A peer id, or the beginning or end of one that a node here knows; an IP address; or a prefix like "
    "203.0.113.0/24.",
)


def ban(
    target: Annotated[str | None, _TARGET] = None,
    length: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="90s, 10m, 1h, 2d or 1w. Without it, until unban.")
    ] = None,
    reason: Annotated[str, typer.Option(help="For yourself; nobody else is told.")] = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Have nothing to do with a peer or an address any more: its links are closed now. Alone, list the bans."""
    if target is None:
        if length is not None or reason:
            raise ConfigError("name whom to ban: a peer id, an IP address or a prefix")
        bans(home, as_json)
        return
    folder, now = ModelStore(home).home, time.time()
    until = None if length is None else now + parse_duration(length)
    made = Ban(_meant(folder, target), now, until, printable(reason, limit=MAX_REASON_CHARACTERS))
    reply = _change(folder, BansRequest(add=(made,)))
    if as_json:
        print(msgspec.json.encode(reply.bans).decode())
    else:
        print(f"banned {made.target} {'until it is lifted' if until is None else 'for ' + _left(made, now)}")


def unban(target: Annotated[str, _TARGET], home: Home = None, as_json: AsJson = False) -> None:
    """Lift a ban. The target is written as `bans` shows it."""
    folder = ModelStore(home).home
    reply = _change(folder, BansRequest(lift=(_banned(folder, target),)))
    if as_json:
        print(msgspec.json.encode(reply.bans).decode())
    else:
        print("lifted" if reply.num_lifted else f"{printable(target, limit=80)} is not banned")


def bans(home: Home = None, as_json: AsJson = False) -> None:
    """List who is banned, for how long still, by whom and why."""
    reply = _change(ModelStore(home).home, BansRequest())
    if as_json:
        print(msgspec.json.encode(reply.bans).decode())
    elif reply.bans:
        Console().print(table(reply.bans, now=time.time()))
    else:
        print("nobody is banned")


def table(listed: tuple[Ban, ...], *, now: float) -> Table:
    """Bans for a terminal. Reasons of automatic bans may quote a peer."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("target", overflow="fold")
    shown.add_column("left", justify="right", no_wrap=True)
    shown.add_column("by", no_wrap=True)
    shown.add_column("reason")
    for each in listed:
        by = "the node" if each.is_automatic else "you"
        shown.add_row(Text(each.target), _left(each, now), by, Text(printable(each.reason)))
    return shown


def _left(each: Ban, now: float) -> str:
    if each.until is None:
        return "for ever"
    seconds = max(0, round(each.until - now))
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        # Rounded, so that an hour is not 60 minutes as soon as a second of it is over.
        if seconds >= 1.95 * unit_s or abs(seconds - unit_s) <= 0.05 * unit_s:
            return f"{round(seconds / unit_s)} {unit}"
    return f"{seconds} s"


def _change(folder: Path, request: BansRequest) -> BansReply:
    """Through the nodes of this home, which act at once; on the file when none runs.

    Raises:
        ConfigError: the change cannot be written.
        PeerError: a node cannot be told.
    """
    run = folder / "run"
    answers = asyncio.run(ask_bans(run, known_peers(run), request))
    for answer in answers:
        if answer.reply is None:
            raise PeerError(answer.peer, f"node {short(answer.peer)} cannot be told: {answer.problem}")
        if answer.reply.problem:
            raise ConfigError(answer.reply.problem)
    replies = [answer.reply for answer in answers if answer.reply is not None]
    if replies:
        return max(replies, key=lambda reply: reply.num_lifted)
    path, now = folder / FILE_NAME, time.time()
    before = {each.target for each in ban_file.load(path) if not each.is_over(now)}
    if not request.add and not request.lift:
        listed = [each for each in ban_file.load(path) if not each.is_over(now)]
        return BansReply(tuple(sorted(listed, key=lambda each: -each.made_at)))
    after = ban_file.change(path, add=request.add, remove=request.lift, now=now)
    return BansReply(tuple(after), len(before & set(request.lift)))


def _meant(folder: Path, text: str) -> str:
    """The target in its canonical form; part of a peer id is completed from whom the nodes here know.

    Raises:
        ConfigError: it is no target, or several are meant.
    """
    try:
        return canonical_target(text)
    except ConfigError as error:
        run = folder / "run"
        answers = asyncio.run(ask_peers(run, known_peers(run)))
        known = {view.peer for answer in answers if answer.reply is not None for view in answer.reply.peers}
        found = matching(sorted(known), text)
        if not found:
            raise error
        return found[0]


def _banned(folder: Path, text: str) -> str:
    """As ``_meant``, but part of a peer id is completed from who is banned."""
    try:
        return canonical_target(text)
    except ConfigError as error:
        found = matching([each.target for each in _change(folder, BansRequest()).bans], text)
        if not found:
            raise error
        return found[0]
