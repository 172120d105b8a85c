"""``fusion-node place``: which layers the nodes of a swarm should hold, and telling them so."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import msgspec
import typer

from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import (
    AsJson,
    Home,
    Mdns,
    Model,
    Numerics,
    Peers,
    PuzzleBits,
    SwarmKeyFile,
    UserIdentity,
    read_identity,
    read_swarm_key,
)
from fusion_node.client.connection import MeasuredNode, SwarmConnection, ways_in
from fusion_node.errors import NoRoute, PeerError
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange, PeerId
from fusion_node.wire import printable
from p2p.identity import Identity, short
from p2p.records import PROTOCOL_VERSION, Assignment, sign_assignment
from scheduler.placement import Move, Placement, place_all

ASSIGNMENT_TTL_S = 120.0

KEY_FILE_NAME = "scheduler.key"
"""In the home folder: the identity of whoever assigns, unless another one is named."""


class NodePlacement(msgspec.Struct, frozen=True):
    """What one node should hold.

    Attributes:
        outcome: of telling it: ``accepted``, or why not; empty when it was not told.
    """

    peer: str
    current: str
    proposed: str
    reason: str
    load_bytes: int
    load_s: float
    outcome: str = ""


class PlacementView(msgspec.Struct, frozen=True):
    """Of a whole swarm.

    Attributes:
        deferred: peers that move once others serve what they hold: run the command again then.
    """

    model: str
    num_layers: int
    num_covered_before: int
    num_covered_after: int
    tokens_per_s_before: float
    tokens_per_s_after: float
    load_bytes: int
    scheduler: str
    deferred: tuple[str, ...]
    nodes: tuple[NodePlacement, ...]


def place(
    model: Model,
    peer: Peers = None,
    swarm_key: SwarmKeyFile = None,
    identity: UserIdentity = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Tell the nodes; those obey that were started with --scheduler.")
    ] = False,
    numerics: Numerics = "fp32",
    puzzle_bits: PuzzleBits = None,
    mdns: Mdns = True,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers of MODEL the nodes of a swarm should hold, and assign them with --apply."""
    configure_logs(LogFormat.AUTO, quiet=True)
    store = ModelStore(home)
    stored = store.find(model)
    own = read_identity(identity) or Identity.load_or_create(store.home / KEY_FILE_NAME)
    key = read_swarm_key(swarm_key)

    async def run() -> PlacementView:
        peers = ways_in(peer or (), mdns=mdns, home=store.home, swarm_key=key)
        async with SwarmConnection(
            peers, identity=own, mdns=mdns, home=store.home, swarm_key=key, puzzle_bits=puzzle_bits
        ) as connection:
            return await _place(connection, stored, numerics, own, apply=apply)

    view = asyncio.run(run())
    if as_json:
        print(msgspec.json.encode(view).decode())
    else:
        _print(view, applied=apply)


async def _place(
    connection: SwarmConnection, model: StoredModel, numerics: str, own: Identity, *, apply: bool
) -> PlacementView:
    from fusion_node.client.hosts import hosts_of, work_of
    from fusion_node.client.topology import SwarmTopology

    nodes = await connection.measure(await connection.find(model.model_id))
    reached = {node.peer: node for node in nodes if node.round_trip_s is not None}
    records = [node.record for node in reached.values()]
    hosts = hosts_of(records, model.model_id, numerics, model.num_layers)
    if not hosts:
        raise NoRoute(f"no node that answers holds layers of {model.name} in {numerics}: start one with --max-layers")
    legs = SwarmTopology(
        records, round_trips_s={p: node.round_trip_s for p, node in reached.items() if node.round_trip_s is not None}
    )
    placed = await asyncio.to_thread(place_all, hosts, work_of(model, numerics), legs)
    outcomes: dict[PeerId, str] = {}
    if apply:
        moves = [decision for decision in placed.decisions if isinstance(decision, Move)]
        told = await asyncio.gather(*(_tell(connection, reached[m.peer], m.layers, model, own) for m in moves))
        outcomes = {move.peer: outcome for move, outcome in zip(moves, told, strict=True)}
    current = {host.peer: host.held for host in hosts}
    return _view(placed, model, current, own.peer_id, outcomes)


async def _tell(
    connection: SwarmConnection, node: MeasuredNode, layers: LayerRange, model: StoredModel, own: Identity
) -> str:
    now = time.time()
    assignment = Assignment(
        version=PROTOCOL_VERSION,
        scheduler=own.peer_id,
        node=node.peer,
        sequence=int(now * 1000),
        model_id=model.model_id,
        start=layers.start,
        stop=layers.stop,
        issued_at=now,
        expires_at=now + ASSIGNMENT_TTL_S,
    )
    try:
        return printable(await connection.assign(node, sign_assignment(assignment, own))) or "accepted"
    except PeerError as error:
        return str(error)


def _view(
    placed: Placement,
    model: StoredModel,
    current: dict[PeerId, LayerRange | None],
    scheduler: PeerId,
    outcomes: dict[PeerId, str],
) -> PlacementView:
    return PlacementView(
        model=model.name,
        num_layers=model.num_layers,
        num_covered_before=placed.before.num_covered,
        num_covered_after=placed.after.num_covered,
        tokens_per_s_before=round(placed.before.tokens_per_s, 4),
        tokens_per_s_after=round(placed.after.tokens_per_s, 4),
        load_bytes=placed.load_bytes,
        scheduler=scheduler,
        deferred=tuple(move.peer for move in placed.deferred),
        nodes=tuple(
            NodePlacement(
                peer=decision.peer,
                current=str(current[decision.peer] or ""),
                proposed=str(decision.layers or ""),
                reason=decision.reason,
                load_bytes=decision.load_bytes if isinstance(decision, Move) else 0,
                load_s=round(decision.load_s, 1) if isinstance(decision, Move) else 0.0,
                outcome=outcomes.get(decision.peer, ""),
            )
            for decision in placed.decisions
        ),
    )


def _print(view: PlacementView, *, applied: bool) -> None:
    print(
        f"{printable(view.model)}: {view.num_covered_before} of {view.num_layers} layers are held, "
        f"{view.num_covered_after} would be; {view.tokens_per_s_before:.3g} -> {view.tokens_per_s_after:.3g} "
        f"tokens/s; {view.load_bytes / 2**20:.0f} MiB to load"
    )
    for node in view.nodes:
        change = (
            f"{node.current or '-'} -> {node.proposed}" if node.current != node.proposed else f"{node.current} stays"
        )
        print(f"{short(node.peer)}  {change}")
        cost = f"; {node.load_bytes / 2**20:.0f} MiB, {node.load_s:.0f} s" if node.load_bytes else ""
        print(f"  {node.reason}{cost}")
        if node.outcome:
            print(f"  {node.outcome}")
    if view.deferred:
        print("Some wait until others serve what they hold: run this again when those are ready.")
    if not applied and any(node.current != node.proposed for node in view.nodes):
        print(f"Nodes started with --scheduler {view.scheduler} do so with --apply.")
