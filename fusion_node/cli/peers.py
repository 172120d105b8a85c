"""``fusion-node peers``: with whom the nodes of this machine are in touch, and whom they know of."""

from __future__ import annotations

import asyncio

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fusion_node.cli.control import Node, matching
from fusion_node.cli.options import AsJson, Home
from fusion_node.daemon.control import ask_peers, known_peers
from fusion_node.daemon.swarm_report import ConnectionView, PeersReply, PeerView
from fusion_node.errors import NodeNotRunning, PeerError
from fusion_node.store import ModelStore
from fusion_node.wire import printable
from p2p.identity import short
from p2p.swarm_key import PUBLIC_TAG

_CONNECTIONS = ("peer", "connection", "address", "rtt ms", "open", "heard", "in/out")
_PEERS = ("peer", "operator", "serves", "record", "last met", "")
_RIGHT = {"rtt ms", "open", "heard", "in/out", "record", "last met"}
_WRAPPED = {"operator", "address", "serves"}

NONE = "–"


def peers(node: Node = None, home: Home = None, as_json: AsJson = False) -> None:
    """Show the connections of the nodes that run here, and the peers that they know of.

    An arrow shows who dialled. Ages are those of the facts: open is how long there is the connection, heard is how long
    ago the peer last said something on it, record is how old the newest is that the node has said of itself.
    """
    folder = ModelStore(home).home / "run"
    here = known_peers(folder)
    answers = asyncio.run(ask_peers(folder, here if node is None else matching(here, node)))
    if not answers:
        which = "no node of this home" if node is None else f"no node {node!r} of this home"
        raise NodeNotRunning(f"{which} runs on this machine ({folder}): start one with `fusion-node join MODEL`")
    replies = [answer.reply for answer in answers if answer.reply is not None]
    if as_json:
        print(msgspec.json.encode(replies).decode())
    else:
        console = Console()
        for reply in replies:
            console.print(picture(reply))
    for answer in answers:
        if answer.reply is None:
            raise PeerError(answer.peer, f"node {short(answer.peer)} cannot be asked: {answer.problem}")


def picture(reply: PeersReply) -> Group:
    """One node's view, for a terminal: its connections, then who is there. What peers say is made printable first."""
    num_connected = sum(bool(peer.connections) for peer in reply.peers)
    swarm = "" if reply.swarm == PUBLIC_TAG else f" in the private swarm {reply.swarm}"
    counts = f"{num_connected} connected, {len(reply.peers) - num_connected} only known"
    parts: list[Text | Table] = [Text(f"{short(reply.peer)}{swarm}: {counts}", style="bold")]
    if num_connected:
        connections = _table(_CONNECTIONS)
        for peer in reply.peers:
            for connection in peer.connections:
                connections.add_row(short(peer.peer), *_connection(connection))
        parts += [connections, Text()]
    if reply.peers:
        known = _table(_PEERS)
        for peer in reply.peers:
            record, met = (NONE if s is None else age(s) for s in (peer.record_age_s, peer.met_s))
            serves = Text(printable(", ".join(peer.serves)) or NONE)
            known.add_row(short(peer.peer), Text(printable(peer.operator)), serves, record, met, _standing(peer))
        parts.append(known)
    return Group(*parts)


def age(seconds: float) -> str:
    """``8 s``, ``3 min``, ``2 h``, ``5 d``: rounded down, so that nothing looks older than it is by much."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds)} s"


def size(num_bytes: int) -> str:
    """``312 B``, ``4.1 kB``, ``12 MB``."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "B" and value < 10 else f"{value:.0f} {unit}"


def _connection(connection: ConnectionView) -> tuple[str | Text, ...]:
    direction = {None: "", True: "→ ", False: "← "}[connection.we_dialled]
    carried = connection.bytes_in or connection.bytes_out
    return (
        f"{connection.plane} {connection.path}".strip(),
        Text(direction + (printable(connection.address) or NONE)),
        NONE if connection.round_trip_ms is None else f"{connection.round_trip_ms:.1f}",
        age(connection.age_s),
        NONE if connection.heard_s is None else age(connection.heard_s),
        f"{size(connection.bytes_in)}/{size(connection.bytes_out)}" if carried else NONE,
    )


def _standing(peer: PeerView) -> Text:
    if peer.standing:
        return Text(printable(peer.standing), style="yellow" if peer.standing == "suspect" else "red")
    return Text("" if peer.connections else "not connected", style="dim")


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True, header_style="bold")
    for name in columns:
        table.add_column(
            name, justify="right" if name in _RIGHT else "left", no_wrap=name not in _WRAPPED, overflow="fold"
        )
    return table
