"""The composition root of a node: load, listen, announce, serve, leave."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import structlog

import fusion_node
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.server import NodeServer
from fusion_node.engine.device import choose_device, describe_device, free_memory_bytes, set_threads
from fusion_node.engine.numerics import NumericsClass, numerics_class
from fusion_node.engine.stage import Stage
from fusion_node.engine.weights import load_config
from fusion_node.errors import ConfigError, FusionError, ResourceExhausted
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange, PeerId
from p2p.addresses import dialable_hosts, parse_listen
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_record
from p2p.websocket import WebSocketNetwork
from scheduler.placement import choose_layers

RECORD_TTL_S = 60.0
ANNOUNCE_INTERVAL_S = 20.0
"""A third of the record's life: two announcements may be lost before the node is forgotten."""

DRAIN_S = 5.0
"""How long a node that is told to stop waits for the steps that are running."""

LOOK_AROUND_S = 5.0
"""How long a node that may choose its layers waits to hear what others hold."""

_WEIGHTS_SHARE = 0.7
"""Of free memory; the rest is for KV, activations and the user of the machine."""

_KV_SHARE = 0.25
_MAX_CLAIMED_BYTES = 2**53

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """What a node that serves can tell: who it is, what it holds, and where it can be reached."""

    peer: PeerId
    layers: LayerRange
    data_addresses: tuple[str, ...]
    addresses: tuple[str, ...]
    invite: str


async def run_node(
    config: NodeConfig,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[ReadyNode], None] | None = None,
) -> None:
    """Runs a node until SIGINT, SIGTERM or ``stop``.

    Raises:
        FusionError: whatever keeps the node from serving; its exit code says which.
    """
    if stop is None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
    node = await _Starter(config, stop).start()
    if node is None:
        return
    try:
        if on_ready is not None:
            on_ready(node.ready)
        await node.serve(stop)
    finally:
        await node.leave()


class _Starter:
    """Brings a node up, and takes it down again when it fails on the way or is told to stop."""

    def __init__(self, config: NodeConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop

    async def start(self) -> _Node | None:
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

    async def _start(self) -> _Node:
        config = self._config
        numerics, device = numerics_class(config.numerics), choose_device(config.device)
        threads = set_threads(config.threads)
        model = ModelStore(config.home).find(config.model)
        num_layers = int(load_config(model).num_hidden_layers)
        if config.layers is not None:
            config.layers.check_within(num_layers)
        host, port = parse_listen(config.listen)
        async with contextlib.AsyncExitStack() as stack:
            identity = stack.enter_context(_own_identity(config))
            discovery = Discovery(
                identity,
                DiscoveryConfig(listen=(config.listen,), bootstrap=config.peers, mdns=config.mdns, serve=True),
            )
            stack.push_async_callback(discovery.aclose)
            await discovery.start()
            log.info("listening", peer=identity.peer_id, addresses=discovery.addresses)
            layers = config.layers or await self._choose(
                discovery, model, num_layers, numerics, free_memory_bytes(device)
            )
            log.info("loading", model=model.name, layers=str(layers), device=describe_device(device), threads=threads)
            began = time.perf_counter()
            stage = await asyncio.to_thread(Stage.load, model, layers, numerics=numerics, device=device)
            seconds_per_layer = await asyncio.to_thread(stage.measure_seconds_per_layer)
            log.info(
                "loaded",
                seconds=round(time.perf_counter() - began, 2),
                mib=round(stage.num_weight_bytes / 2**20, 1),
                ms_per_layer=round(1000 * seconds_per_layer, 2),
            )
            free = free_memory_bytes(device)
            admission = Admission(
                peer=identity.peer_id,
                model_id=model.model_id,
                layers=layers,
                numerics=numerics.name,
                budget_bytes=config.kv_memory_bytes or int(free * _KV_SHARE),
                kv_bytes_per_position_layer=stage.kv_bytes_per_position // len(layers),
            )
            node = _Node(config, identity, model, num_layers, stage, seconds_per_layer, admission, discovery)
            stack.push_async_callback(node.close_links)
            await node.listen(host, port + 1 if port else 0)
            node.on_left = stack.pop_all().aclose
            return node

    async def _choose(
        self, discovery: Discovery, model: StoredModel, num_layers: int, numerics: NumericsClass, free_bytes: int
    ) -> LayerRange:
        per_layer = sum(t.num_bytes for t in model.manifest.tensors if ".layers.0." in t.name)
        stored_width = {"float32": 4}.get(str(model.config.get("dtype", model.config.get("torch_dtype"))), 2)
        per_layer = per_layer * numerics.dtype.itemsize // stored_width
        capacity = int(free_bytes * _WEIGHTS_SHARE) // max(per_layer, 1)
        held: list[LayerRange] = []
        if capacity < num_layers and self._config.peers:
            with contextlib.suppress(FusionError):
                await discovery.wait_for_peer(LOOK_AROUND_S)
            records = await discovery.find(model.model_id, timeout_s=LOOK_AROUND_S)
            held = [LayerRange(s.start, s.stop) for r in records for s in r.shards if s.model_id == model.model_id]
        layers = choose_layers(held, num_layers=num_layers, capacity_layers=capacity)
        if layers is None:
            raise ResourceExhausted(
                f"not one layer of {model.name} ({per_layer / 2**20:.0f} MiB) fits into the memory that is free"
            )
        return layers


class _Node:
    """A node that has loaded its shard."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        model: StoredModel,
        num_layers: int,
        stage: Stage,
        seconds_per_layer: float,
        admission: Admission,
        discovery: Discovery,
    ) -> None:
        self._config = config
        self._identity = identity
        self._model = model
        self._num_layers = num_layers
        self._stage = stage
        self._seconds_per_layer = seconds_per_layer
        self._admission = admission
        self._discovery = discovery
        self._device_name = describe_device(stage.device)
        self._data_addresses: tuple[str, ...] = ()
        self._last_sequence = 0
        self._server = NodeServer(stage, admission, own_record=self._signed_record)
        self._pool = LinkPool(
            WebSocketNetwork(identity),
            identity.peer_id,
            on_frame=self._server.on_frame,
            on_closed=self._server.on_closed,
        )
        self._server.attach(self._pool)
        self.on_left: Callable[[], Awaitable[None]] | None = None

    @property
    def ready(self) -> ReadyNode:
        return ReadyNode(
            self._identity.peer_id,
            self._stage.layers,
            self._data_addresses,
            tuple(self._discovery.addresses),
            self._discovery.invite,
        )

    async def listen(self, host: str, port: int) -> None:
        """Opens the data plane, then tells the swarm."""
        bound = await self._pool.listen(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        bound_port = bound.rpartition(":")[2]
        self._data_addresses = tuple(
            f"[{name}]:{bound_port}" if ":" in name else f"{name}:{bound_port}" for name in dialable_hosts(host)[:8]
        )
        await self._announce()

    async def serve(self, stop: asyncio.Event) -> None:
        """Announces and expires until told to stop."""
        next_announce = time.monotonic() + ANNOUNCE_INTERVAL_S
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()
            self._server.expire()
            if time.monotonic() >= next_announce:
                next_announce = time.monotonic() + ANNOUNCE_INTERVAL_S
                await self._announce()

    async def leave(self) -> None:
        """Withdraws the record, finishes or hands back what runs, closes everything."""
        log.info("leaving", sessions=len(self._admission.sessions))
        self._admission.draining = True
        withdrawn = asyncio.ensure_future(self._discovery.withdraw(self._signed_record(leaving=True)))
        await self._server.drain(timeout_s=DRAIN_S)
        await asyncio.wait((withdrawn,), timeout=DRAIN_S)
        if self.on_left is not None:
            await self.on_left()
        log.info("left")

    async def close_links(self) -> None:
        await self._pool.aclose("the node is shutting down")

    async def _announce(self) -> None:
        try:
            await self._discovery.announce(self._signed_record(), [self._model.model_id])
        except FusionError as error:
            # The next announcement is seconds away; sessions do not depend on this one.
            log.warning("announcement failed", reason=str(error))

    def _signed_record(self, *, leaving: bool = False) -> bytes:
        now = time.time()
        # Above the last one even when the clock was set back or a restart took less than a millisecond.
        self._last_sequence = max(self._last_sequence + 1, int(now * 1000))
        shard = ShardRecord(
            model_id=self._model.model_id,
            model_name=self._model.name[:96],
            start=self._stage.layers.start,
            stop=self._stage.layers.stop,
            num_layers=self._num_layers,
            numerics=self._stage.numerics.name,
            seconds_per_layer=self._seconds_per_layer,
            kv_free_tokens=min(self._admission.free_positions, _MAX_CLAIMED_BYTES),
        )
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=self._identity.peer_id,
            sequence=self._last_sequence,
            issued_at=now,
            expires_at=now + RECORD_TTL_S,
            data_addresses=self._data_addresses,
            libp2p_addresses=tuple(self._discovery.addresses[:8]),
            device=self._device_name[:96],
            memory_free_bytes=min(free_memory_bytes(self._stage.device), _MAX_CLAIMED_BYTES),
            shards=() if leaving else (shard,),
            num_sessions=len(self._admission.sessions),
            software=f"fusion-node {fusion_node.__version__}",
            operator=self._config.operator[:96],
        )
        return sign_record(record, self._identity)


@contextlib.contextmanager
def _own_identity(config: NodeConfig) -> Iterator[Identity]:
    path = config.identity_path or ModelStore(config.home).home / "identity.key"
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
