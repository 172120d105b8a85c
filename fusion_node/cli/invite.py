"""``fusion-node invite``: one short string, and a QR code, by which others enter the swarm of a running node."""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
import time
from typing import Annotated

import msgspec
import segno
import typer
from rich.console import Console
from rich.text import Text

from fusion_node.cli.control import Node, matching
from fusion_node.cli.options import AsJson, Home
from fusion_node.daemon.control import ask_invites, known_peers
from fusion_node.daemon.swarm_report import InviteReply, InviteRequest
from fusion_node.errors import ConfigError, NodeNotRunning, PeerError
from fusion_node.store import ModelStore
from p2p.bans import parse_duration
from p2p.identity import short

QUIET_ZONE = 4
"""Modules of margin around the code: ISO/IEC 18004 §6.3.8."""

_BLOCKS = {(0, 0): "█", (0, 1): "▀", (1, 0): "▄", (1, 1): " "}
"""Two modules above each other, 1 being dark; light is what is drawn, as most terminals have a dark background."""


def invite(
    node: Node = None,
    expires: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Until when it can be used, from now: 90m, 12h, 7d.")
    ] = None,
    key: Annotated[
        bool, typer.Option("--key/--no-key", help="Put the key of a private swarm in, for who does not have it.")
    ] = True,
    qr: Annotated[
        bool | None,
        typer.Option("--qr/--no-qr", help="Draw a QR code as well. If neither is given: on a terminal."),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Print an invite to the swarm of the node that runs here, for others to give to --peer."""
    request = InviteRequest(None if expires is None else parse_duration(expires), key)
    reply = _ask(node, home, request)
    if as_json:
        print(msgspec.json.encode(reply).decode())
    else:
        print(reply.invite)
    for line in warnings(reply, now=time.time()):
        print(line, file=sys.stderr)
    if not as_json and (sys.stdout.isatty() if qr is None else qr):
        drawn, why_not = qr_code(reply.invite, columns=shutil.get_terminal_size().columns)
        if drawn:
            # With both colours said, so that it is no negative in a terminal that is light.
            Console().print(Text(drawn, style="bright_white on black"), soft_wrap=True)
        else:
            print(f"no QR code: {why_not}", file=sys.stderr)


def warnings(reply: InviteReply, *, now: float) -> list[str]:
    """What its owner should know of an invite."""
    lines = []
    if reply.has_key:
        lines.append(
            "this invite holds the key of a private swarm: whoever reads it is a member, for as long as the key"
        )
        lines.append("is in use. Give it over a channel that you trust, and to nobody else.")
    if reply.expires_at is not None:
        left_h = (reply.expires_at - now) / 3600
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(reply.expires_at))
        lines.append(f"it can be used until {until} ({left_h:.1f} h from now)")
    if reply.is_local:
        lines.append("it works on this machine only, because the node listens on loopback: see `join --listen`")
    elif reply.names_others:
        lines.append("not everybody can dial this node, so it leads to others that it knows: see `fusion-node doctor`")
    elif reply.is_unconfirmed:
        lines.append("no other node has confirmed yet that this one can be dialled: see `fusion-node doctor`")
    return lines


def qr_code(text: str, *, columns: int) -> tuple[str, str]:
    """A QR code out of half blocks, light on dark, and empty; or empty, and why there is none.

    The lowest error correction, because a screen has no dirt: the code is smaller, and so are the modules of a phone.
    """
    code = segno.make(text, error="l", micro=False, boost_error=False)
    width = int(code.symbol_size(border=QUIET_ZONE)[0])
    if width > columns:
        return "", f"it takes {width} columns, and the terminal has {columns}: widen it"
    rows = [list(row) for row in code.matrix_iter(border=QUIET_ZONE)]
    if len(rows) % 2:
        rows.append([0] * width)
    drawn = io.StringIO()
    for above, below in zip(rows[::2], rows[1::2], strict=True):
        drawn.write("".join(_BLOCKS[upper, lower] for upper, lower in zip(above, below, strict=True)) + "\n")
    return drawn.getvalue().removesuffix("\n"), ""


def _ask(node: str | None, home: Home, request: InviteRequest) -> InviteReply:
    """The invite of the node that is meant.

    Raises:
        NodeNotRunning: there is none.
        ConfigError: there are several, or it has no address to invite to.
        PeerError: it does not answer.
    """
    folder = ModelStore(home).home / "run"
    peers = known_peers(folder)
    chosen = peers if node is None else matching(peers, node)
    answers = asyncio.run(ask_invites(folder, chosen, request))
    if not answers:
        which = "no node of this home" if node is None else f"no node {node!r} of this home"
        raise NodeNotRunning(f"{which} runs on this machine ({folder}): start one with `fusion-node join MODEL`")
    replies = [answer.reply for answer in answers if answer.reply is not None]
    if not replies:
        raise PeerError(answers[0].peer, f"node {short(answers[0].peer)} cannot be asked: {answers[0].problem}")
    if len({reply.swarm for reply in replies}) > 1:
        nodes = ", ".join(f"{short(reply.peer)} ({reply.swarm})" for reply in replies)
        raise ConfigError(f"the nodes of this home are in different swarms: name one of {nodes}")
    reply = best_of(replies)
    if not reply.invite:
        raise ConfigError(reply.problem or "the node has no address to invite to")
    return reply


def best_of(replies: list[InviteReply]) -> InviteReply:
    """Of the nodes of one swarm, the one that most others can dial; the first of equals."""
    return min(replies, key=lambda reply: (not reply.invite, reply.is_local, reply.is_unconfirmed, reply.names_others))
