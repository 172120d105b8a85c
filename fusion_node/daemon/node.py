"""The composition root of a node: listen first, then load, announce, serve, leave.

torch and transformers take seconds to import. The control plane is up before that, so that others can already join
through this node, and so that a wrong flag is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import structlog

import fusion_node
from fusion_node.daemon.config import NodeConfig, check_ports, check_slice
from fusion_node.daemon.control import control_socket
from fusion_node.daemon.life import NodeLife
from fusion_node.daemon.network_examiner import NetworkExaminer
from fusion_node.daemon.swarm_view import SwarmView, control_connections
from fusion_node.errors import ConfigError, FusionError
from fusion_node.slices import ModelSlice, split
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import PeerId, UnixS
from p2p.addresses import check_bindable, parse_listen
from p2p.allow_list import AllowList
from p2p.audit_log import AuditLog
from p2p.bans import FILE_NAME as BAN_FILE_NAME
from p2p.connection import Recorder
from p2p.control import RelayLimits
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.invite import swarm_key_of
from p2p.libp2p_network import Libp2pNetwork
from p2p.link_emulation import EmulatedLine
from p2p.local_nodes import registered, running
from p2p.paths import RoutedNetwork
from p2p.peer_book import path_of
from p2p.puzzle import PuzzleChecker, check_bits, default_bits, solution_for
from p2p.reachability_verdict import Overall, Plane
from p2p.received_frames import FrameFile, Recorders
from p2p.records import ShardRecord, sign_record
from p2p.relays import Relays
from p2p.swarm_key import FILE_NAME as KEY_FILE_NAME
from p2p.swarm_key import SwarmKey, swarm_tag
from p2p.websocket import WebSocketNetwork

if TYPE_CHECKING:
    from fusion_node.daemon.serving_node import ReadyNode, ServingNode

log = structlog.get_logger(__name__)


async def run_node(
    config: NodeConfig,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[ReadyNode], None] | None = None,
    until_stdin_ends: bool = False,
) -> None:
    """Runs a node until SIGINT, SIGTERM, ``stop``, or the end of standard input if so wished.

    Sessions that are open then have the grace of the config to go elsewhere; a second signal takes it from them.

    Raises:
        FusionError: whatever keeps the node from serving; its exit code says which.
    """
    hurry = asyncio.Event()
    if stop is None:
        stop = told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, lambda: (hurry if told.is_set() else told).set())
    if until_stdin_ends:
        _stop_at_end_of_stdin(stop)
    node = await _Starter(config, stop).start()
    if node is None:
        return
    try:
        if on_ready is not None:
            on_ready(node.ready)
        await node.serve(stop)
    finally:
        await node.leave(hurry)


def _stop_at_end_of_stdin(stop: asyncio.Event) -> None:
    """A pipe from the starter ends with it, however it ends: a starter that is killed leaves no nodes behind."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop.set()

    try:
        loop.add_reader(stdin, readable)
    except PermissionError as error:
        raise ConfigError("--until-stdin-ends needs a pipe or a terminal as standard input, not a file") from error


class _Starter:
    """Brings a node up, and takes it down again when it fails on the way or is told to stop."""

    def __init__(self, config: NodeConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop

    async def start(self) -> ServingNode | None:
        starting = asyncio.ensure_future(self._start())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            return starting.result()
        log.info("stopping while starting")
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return None

    async def _start(self) -> ServingNode:
        config = self._config
        check_slice(config)
        store = ModelStore(config.home)
        run = store.home / "run"
        model = store.find(config.model)
        if config.slice is not None:
            # Takes the seconds that torch takes: but who cannot serve is not in the swarm for a moment.
            await asyncio.to_thread(_check_fuses, model, config.slice)
        if config.layers is not None:
            config.layers.check_within(model.num_layers)
        host, port = parse_listen(config.listen)
        check_ports(config.listen, config.announce)
        if port:
            # Before seconds go into loading: the data plane binds it only after that.
            check_bindable(host, port + 1)
        swarm_key = own_swarm_key(config, store.home)
        allow_list = None if config.allow_path is None else AllowList(config.allow_path)
        async with contextlib.AsyncExitStack() as stack:
            identity = stack.enter_context(_own_identity(config))
            recorder = _recorder_of(config, identity.peer_id, stack)
            gate = PeerGate(store.home / BAN_FILE_NAME, allow_list=allow_list)
            life = NodeLife(identity.peer_id, model.name, pause_grace_s=config.drain_grace_s)
            life.guarded_by(gate)
            bits = default_bits([host], is_private=swarm_key is not None)
            bits = bits if config.puzzle_bits is None else check_bits(config.puzzle_bits)
            solving = asyncio.create_task(solution_for(identity.peer_id, bits, _puzzle_path(config)))
            stack.callback(solving.cancel)
            await stack.enter_async_context(control_socket(run, identity.peer_id, life))
            discovery = Discovery(
                identity,
                DiscoveryConfig(
                    listen=(config.listen,),
                    bootstrap=config.peers or (running(run, swarm_tag(swarm_key)) if config.mdns else ()),
                    mdns=config.mdns,
                    serve=True,
                    announce=config.announce,
                    upnp=config.upnp,
                    peer_book=path_of(store.home, swarm_tag(swarm_key)),
                ),
                swarm_key=swarm_key,
                relay=RelayLimits(rate_Bps=config.relay_rate_Bps) if config.relay else None,
                gate=gate,
                price=PuzzleChecker(bits, own=identity.peer_id, is_exempt=gate.is_neighbour),
            )
            stack.push_async_callback(discovery.aclose)
            await discovery.start()
            relays = relays_for(identity.peer_id, discovery)
            stack.push_async_callback(relays.aclose)
            examiner = NetworkExaminer(
                identity.peer_id,
                discovery,
                is_node=True,
                swarm_key=swarm_key,
                gate=gate,
                allow_list=allow_list,
                relays=relays,
                is_relay=config.relay,
            )
            life.in_the_network(examiner)
            view = _swarm_view(identity.peer_id, discovery, swarm_key, gate)
            life.in_the_swarm(view)
            log.info("listening", peer=identity.peer_id, addresses=discovery.addresses)
            if config.mdns:
                rewrite = registered(run, identity.peer_id, lambda: discovery.local_addresses, swarm_tag(swarm_key))
                discovery.reachability.on_change.append(stack.enter_context(rewrite))
            await asyncio.to_thread(importlib.import_module, "fusion_node.daemon.serving_node")
            from fusion_node.daemon.serving_node import ServingNode, load_shard, loading_node

            async def announce(loading: ShardRecord) -> None:
                record = loading_node(identity.peer_id, loading, puzzle=await asyncio.shield(solving), config=config)
                with contextlib.suppress(FusionError):
                    await discovery.announce(sign_record(record, identity), [model.model_id])

            shard = await load_shard(config, model, discovery, life, peer=identity.peer_id, announce=announce)
            psk = None if swarm_key is None else swarm_key.noise_psk
            line = None if config.emulated_line is None else EmulatedLine(config.emulated_line)
            websocket = WebSocketNetwork(identity, psk=psk, gate=gate, line=line)
            websocket.on_nonce = lambda nonce, at: discovery.reachability.reached(Plane.DATA, nonce, at)
            network = RoutedNetwork(websocket, Libp2pNetwork(identity, discovery, psk=psk, gate=gate, line=line))
            if not solving.done():
                log.info("solving the puzzle of this identity, once: nobody would heed it before", bits=bits)
            node = ServingNode(
                config, identity, shard, discovery, life, network, gate=gate, puzzle=await solving, recorder=recorder
            )
            stack.push_async_callback(node.close_links)
            await node.listen(host, port + 1 if port else 0)
            node.tell_links(examiner, view)
            node.on_left = stack.pop_all().aclose
            return node


def _recorder_of(config: NodeConfig, peer: PeerId, stack: contextlib.AsyncExitStack) -> Recorder | None:
    """Who is told of all frames on the data plane; closed with the stack.

    Raises:
        ConfigError: a file cannot be written.
    """
    recorders: list[AuditLog | FrameFile] = []
    if config.audit_path is not None:
        recorders.append(AuditLog(config.audit_path, peer, software=f"fusion-node {fusion_node.__version__}"))
        stack.callback(recorders[-1].close)
    if config.received_path is not None:
        recorders.append(FrameFile(config.received_path, peer))
        stack.callback(recorders[-1].close)
    return Recorders(recorders) if len(recorders) > 1 else next(iter(recorders), None)


def relays_for(own: PeerId, discovery: Discovery) -> Relays:
    """Lets this node be reached through relays for as long as nobody can dial it."""
    reachability = discovery.reachability
    relays = Relays(
        own,
        discovery,
        records=lambda: discovery.table.live(now=UnixS(time.time())),
        on_change=reachability.addresses_changed,
    )

    def judge() -> None:
        relays.want(reachability.verdict().overall is Overall.BEHIND_NAT)

    discovery.extra_addresses.append(relays.circuit_addresses)
    reachability.on_change.append(judge)
    judge()
    return relays


def own_swarm_key(config: NodeConfig, home: Path) -> SwarmKey | None:
    """The key of the private swarm that a node is to be in; None for the public one.

    Raises:
        ConfigError: the keys of two swarms are named, or one cannot be read.
    """
    given = None if config.swarm_key_path is None else SwarmKey.load(config.swarm_key_path)
    key, origin = swarm_key_of(config.peers, given, now=UnixS(time.time())), "invite"
    if config.swarm_key_path is not None:
        origin = str(config.swarm_key_path)
    if config.is_private:
        path = home / KEY_FILE_NAME
        own, was_made = SwarmKey.load_or_create(path, key)
        if key not in (None, own):
            raise ConfigError(
                f"--private is the swarm of {path}, and another private swarm is named beside it: leave out one of them"
            )
        if was_made:
            log.info("made a swarm key" if key is None else "saved the swarm key of the invite", file=str(path))
        key, origin = own, str(path)
    if key is not None:
        log.info("private swarm: nobody without its key gets an answer", swarm=key.tag, key=origin)
    return key


def _check_fuses(model: StoredModel, member: ModelSlice) -> None:
    from fusion_node.engine.architectures import load_config
    from fusion_node.engine.sliced_layer import fusion_dims

    split(fusion_dims(load_config(model)), member.weights)


def _swarm_view(peer: PeerId, discovery: Discovery, swarm_key: SwarmKey | None, gate: PeerGate) -> SwarmView:
    return SwarmView(
        peer,
        swarm_key=swarm_key,
        addresses=lambda: discovery.addresses,
        announced=lambda: discovery.announced_addresses,
        records=lambda: discovery.table.live(now=UnixS(time.time())),
        connections=[lambda: control_connections(discovery)],
        standing_of=lambda peer: gate.reason_against(peer) or "",
        met_at=lambda: ((known.peer, known.last_seen) for known in discovery.known_peers),
        clock=time.time,
    )


def _identity_path(config: NodeConfig) -> Path:
    return config.identity_path or ModelStore(config.home).home / "identity.key"


def _puzzle_path(config: NodeConfig) -> Path:
    return Path(f"{_identity_path(config)}.puzzle")


@contextlib.contextmanager
def _own_identity(config: NodeConfig) -> Iterator[Identity]:
    path = _identity_path(config)
    identity = Identity.load_or_create(path)
    lock = filelock.FileLock(Path(f"{path}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise ConfigError(
            f"another node runs with the identity {path}: give this one its own with --identity FILE"
        ) from error
    try:
        yield identity
    finally:
        lock.release()
