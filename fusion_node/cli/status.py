"""``fusion-node status``: the swarm at a glance."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from fusion_node.cli.control import ask_local_nodes
from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import (
    AsJson,
    Home,
    Mdns,
    Peers,
    PuzzleBits,
    SwarmKeyFile,
    UserIdentity,
    read_identity,
    read_swarm_key,
)
from fusion_node.cli.pictures import coverage, local_table, node_table, operators, problems, slices
from fusion_node.client.connection import SwarmConnection, ways_in
from fusion_node.client.overview import Overview, look_around
from fusion_node.store import ModelStore
from p2p.bans import FILE_NAME
from p2p.identity import short


def status(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Only nodes that serve this model.")] = None,
    peer: Peers = None,
    swarm_key: SwarmKeyFile = None,
    identity: UserIdentity = None,
    puzzle_bits: PuzzleBits = None,
    mdns: Mdns = True,
    home: Home = None,
    local: Annotated[
        bool, typer.Option("--local", help="The nodes of this machine instead, also those that still load or pause.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the nodes of a swarm, what they hold, their round trips, and which layers are covered."""
    configure_logs(LogFormat.AUTO, quiet=True)
    model_id = None if model is None else ModelStore(home).find(model).model_id
    if local:
        _show_local(home, None if model is None else ModelStore(home).find(model).name, as_json)
        return

    async def run() -> Overview:
        key = read_swarm_key(swarm_key)
        known = ways_in(peer or (), mdns=mdns, home=ModelStore(home).home, swarm_key=key)
        who = read_identity(identity)
        async with SwarmConnection(
            known,
            identity=who,
            mdns=mdns,
            home=ModelStore(home).home,
            swarm_key=key,
            bans=ModelStore(home).home / FILE_NAME,
            puzzle_bits=puzzle_bits,
        ) as connection:
            return await look_around(connection, model_id)

    overview = asyncio.run(run())
    if as_json:
        print(msgspec.json.encode(overview).decode())
        return
    console = Console()
    console.print(node_table(overview.nodes) if overview.nodes else "no node serves a model here")
    for line in (*operators(overview.nodes), *problems(overview.nodes)):
        console.print(line)
    for view in overview.models:
        console.print()
        console.print(coverage(view))
    for split in overview.splits:
        console.print()
        console.print(slices(split))


def _show_local(home: Home, model: str | None, as_json: bool) -> None:
    answers = ask_local_nodes(home, "state")
    states = [a.reply.state for a in answers if a.reply is not None and model in (None, a.reply.state.model)]
    if as_json:
        print(msgspec.json.encode(states).decode())
        return
    console = Console()
    console.print(local_table(states))
    for answer in answers:
        if answer.problem:
            console.print(f"{short(answer.peer)}  {answer.problem}", style="red", markup=False)
