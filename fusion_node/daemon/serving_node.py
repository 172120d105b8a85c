"""The part of a node that computes: its shard on the device, its sessions, its record. Imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

import fusion_node
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.server import NodeServer
from fusion_node.engine.device import choose_device, describe_device, free_memory_bytes, set_threads
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.errors import FusionError, ResourceExhausted
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from p2p.addresses import dialable_hosts, parse_announce
from p2p.discovery import DiscoveryService
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_record
from p2p.websocket import WebSocketNetwork, join_address
from scheduler.placement import choose_layers

RECORD_TTL_S = 60.0
ANNOUNCE_INTERVAL_S = 20.0
"""A third of the record's life: two announcements may be lost before the node is forgotten."""

RECORD_REUSE_S = 1.0

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


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers on the device, and how fast they are."""

    model: StoredModel
    stage: Stage
    seconds_per_layer: float


async def load_shard(config: NodeConfig, model: StoredModel, discovery: DiscoveryService) -> Shard:
    """Chooses the layers when the operator did not, and loads them.

    Raises:
        ConfigError: unknown numerics, device or architecture.
        ResourceExhausted: no room for the weights.
        StoreCorrupted: a weight does not match the manifest.
    """
    numerics, device = numerics_class(config.numerics), choose_device(config.device)
    threads = set_threads(config.threads)
    layers = config.layers
    if layers is None:
        per_layer_bytes = _layer_bytes(model, numerics.dtype.itemsize)
        layers = await _choose_layers(discovery, model, per_layer_bytes, free_memory_bytes(device), bool(config.peers))
    log.info("loading", model=model.name, layers=str(layers), device=describe_device(device), threads=threads)
    began = time.perf_counter()
    told = _Progress(_layer_bytes(model, numerics.dtype.itemsize) * len(layers))
    stage = await asyncio.to_thread(
        Stage.load, model, layers, numerics=numerics, device=device, on_tensor=told.on_tensor
    )
    seconds_per_layer = await asyncio.to_thread(stage.measure_seconds_per_layer)
    log.info(
        "loaded",
        seconds=round(time.perf_counter() - began, 2),
        mib=round(stage.num_weight_bytes / 2**20, 1),
        ms_per_layer=round(1000 * seconds_per_layer, 2),
    )
    return Shard(model, stage, seconds_per_layer)


class _Progress:
    """Logs every tenth of the weights, once loading takes longer than a person waits without wondering."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = max(total_bytes, 1)
        self._loaded_bytes = 0
        self._told_tenths = 0
        self._began = time.monotonic()

    def on_tensor(self, _: str, num_bytes: int) -> None:
        self._loaded_bytes += num_bytes
        tenths = 10 * self._loaded_bytes // self._total_bytes
        if tenths > self._told_tenths and time.monotonic() - self._began > 2.0:
            self._told_tenths = tenths
            log.info("loading", percent=min(10 * tenths, 100))


async def _choose_layers(
    discovery: DiscoveryService, model: StoredModel, per_layer_bytes: int, free_bytes: int, has_peers: bool
) -> LayerRange:
    capacity = int(free_bytes * _WEIGHTS_SHARE) // max(per_layer_bytes, 1)
    held: list[LayerRange] = []
    if capacity < model.num_layers and has_peers:
        with contextlib.suppress(FusionError):
            await discovery.wait_for_peer(LOOK_AROUND_S)
            records = await discovery.find(model.model_id, timeout_s=LOOK_AROUND_S)
            held = [LayerRange(s.start, s.stop) for r in records for s in r.shards if s.model_id == model.model_id]
    layers = choose_layers(held, num_layers=model.num_layers, capacity_layers=capacity)
    if layers is None:
        raise ResourceExhausted(
            f"not one layer of {model.name} ({per_layer_bytes / 2**20:.0f} MiB) fits into the memory that is free"
        )
    return layers


def _layer_bytes(model: StoredModel, itemsize: int) -> int:
    """Bytes that one layer takes on the device; layers are alike, so the first stands for all."""
    first = [tensor for tensor in model.manifest.tensors if ".layers.0." in tensor.name]
    return itemsize * sum(math.prod(tensor.shape) for tensor in first)


class ServingNode:
    """A node that has loaded its shard."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        shard: Shard,
        discovery: DiscoveryService,
    ) -> None:
        self._config = config
        self._identity = identity
        self._model = shard.model
        self._stage = stage = shard.stage
        self._seconds_per_layer = shard.seconds_per_layer
        self._discovery = discovery
        engine = ShardEngine(
            [stage],
            kv_budget_bytes=config.kv_memory_bytes or int(free_memory_bytes(stage.device) * _KV_SHARE),
        )
        self._admission = admission = Admission(
            peer=identity.peer_id,
            model_id=shard.model.model_id,
            layers=stage.layers,
            numerics=stage.numerics.name,
            blocks=engine.blocks,
        )
        self._device_name = describe_device(stage.device)
        self._data_addresses: tuple[str, ...] = ()
        self._last_sequence = 0
        self._record = b""
        self._record_made_at = -math.inf
        self._server = NodeServer(engine, admission, own_record=self._own_record)
        self._pool = LinkPool(
            WebSocketNetwork(identity),
            identity.peer_id,
            on_frame=self._server.on_frame,
            on_closed=self._server.on_closed,
            is_needed=lambda peer: bool(admission.touching(peer)),
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
        bound = await self._pool.listen(join_address(host, port))
        bound_port = int(bound.rpartition(":")[2])
        forwarded = [parse_announce(text) for text in self._config.announce]
        addresses = [join_address(name, bound_port) for name in dialable_hosts(host)]
        addresses += [join_address(name, port + 1) for name, port in forwarded]
        self._data_addresses = tuple(addresses[-8:])
        await self._announce()

    async def serve(self, stop: asyncio.Event) -> None:
        """Announces and expires until told to stop."""
        announcing: asyncio.Task[None] | None = None
        next_announce = time.monotonic() + ANNOUNCE_INTERVAL_S
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()
            self._server.expire()
            if time.monotonic() >= next_announce:
                next_announce = time.monotonic() + ANNOUNCE_INTERVAL_S
                # Beside the loop: a slow swarm must not keep leases from ending, nor the node from stopping.
                if announcing is None or announcing.done():
                    announcing = asyncio.create_task(self._announce())
        if announcing is not None:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

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

    def _own_record(self) -> bytes:
        """For whoever asks: made at most once a second, because strangers may ask as often as they like."""
        if time.monotonic() - self._record_made_at > RECORD_REUSE_S:
            self._record, self._record_made_at = self._signed_record(), time.monotonic()
        return self._record

    def _signed_record(self, *, leaving: bool = False) -> bytes:
        now = time.time()
        # Above the last one even when the clock was set back or a restart took less than a millisecond.
        self._last_sequence = max(self._last_sequence + 1, int(now * 1000))
        shard = ShardRecord(
            model_id=self._model.model_id,
            model_name=self._model.name[:96],
            start=self._stage.layers.start,
            stop=self._stage.layers.stop,
            num_layers=self._model.num_layers,
            numerics=self._stage.numerics.name,
            seconds_per_layer=self._seconds_per_layer,
            kv_free_tokens=min(self._admission.free_positions, _MAX_CLAIMED_BYTES),
            quantization=self._model.quantization,
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
