"""``fusion-node pause`` and ``fusion-node resume``: have your machine to yourself for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from fusion_node.cli.options import AsJson, Home
from fusion_node.daemon.control import Answer, PauseRequest, Phase, Reply, ask_nodes, known_peers
from fusion_node.errors import ConfigError, NodeNotRunning, PeerError
from fusion_node.store import ModelStore
from p2p.identity import short

Node = Annotated[
    str | None,
    typer.Argument(metavar="NODE", help="Beginning or end of the node's peer id; all nodes of this home if not given."),
]

_NOT_READY = (Phase.STARTING, Phase.LOADING, Phase.WARMING_UP)


def pause(
    node: Node = None,
    now: Annotated[
        bool, typer.Option("--now", help="End running sessions at once, instead of giving them a minute.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Stop the nodes of this machine from serving, without ending them. They stay paused until resumed."""
    _command(node, home, "pause", PauseRequest(at_once=now), as_json)


def resume(node: Node = None, home: Home = None, as_json: AsJson = False) -> None:
    """Let paused nodes of this machine serve again."""
    _command(node, home, "resume", None, as_json)


def ask_local_nodes(
    home: Home, command: str, *, node: str | None = None, request: PauseRequest | None = None
) -> list[Answer[Reply]]:
    """Sends a command to the nodes of a home, or to the one that is named.

    Raises:
        NodeNotRunning: there is none.
        ConfigError: several are meant by that name.
    """
    folder = ModelStore(home).home / "run"
    peers = known_peers(folder)
    answers = asyncio.run(ask_nodes(folder, peers if node is None else matching(peers, node), command, request))
    if not answers:
        which = "no node of this home" if node is None else f"no node {node!r} of this home"
        raise NodeNotRunning(f"{which} runs on this machine ({folder}): start one with `fusion-node join MODEL`")
    return answers


def matching(peers: Sequence[str], text: str) -> list[str]:
    """The one peer id that begins or ends as told, as in `…K6Hc3dkM`; empty when there is none.

    Raises:
        ConfigError: there are several.
    """
    part = text.strip("….")
    found = [peer for peer in peers if part and (peer.startswith(part) or peer.endswith(part))]
    if len(found) > 1:
        raise ConfigError(f"{text!r} may be any of {', '.join(short(peer) for peer in found)}: write more of it")
    return found


def _command(node: str | None, home: Home, command: str, request: PauseRequest | None, as_json: bool) -> None:
    answers = ask_local_nodes(home, command, node=node, request=request)
    replies = [answer.reply for answer in answers if answer.reply is not None]
    if as_json:
        print(msgspec.json.encode(replies).decode())
    else:
        for reply in replies:
            print(f"{short(reply.state.peer)} {in_words(command, reply)}")
    for answer in answers:
        if answer.reply is None:
            raise PeerError(answer.peer, f"node {short(answer.peer)} cannot be told: {answer.problem}")


def in_words(command: str, reply: Reply) -> str:
    """What a command changed."""
    phase, state = reply.state.phase, reply.state
    if phase is Phase.LEAVING:
        return "is leaving"
    if command == "pause":
        if phase in _NOT_READY:
            return f"is {phase.in_words}, and will not serve until it is resumed"
        did = "was paused already" if reply.before is Phase.PAUSED else "paused"
        if not state.num_sessions:
            return did
        return f"{did}; {_sessions(state.num_sessions)} may go on for {state.ends_in_s or 0.0:.0f} s"
    if phase in _NOT_READY:
        return f"is {phase.in_words}, and will serve when it is ready"
    if phase is Phase.BACKING_OFF:
        return "will serve when no other program uses the device"
    return "was not paused" if reply.before is Phase.READY else "serves again"


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"
