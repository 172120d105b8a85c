"""The part of a node that computes: its shard on the device, its sessions, its record. Imports torch.

Above 600 lines: serving a shard, going over to another and leaving change the same shard, server and record; a third is
what is reckoned and said of a shard while it loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

import fusion_node
from fusion_node.client.hosts import work_of
from fusion_node.client.topology import SwarmTopology
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.device_usage import open_watch
from fusion_node.daemon.life import NodeLife
from fusion_node.daemon.manners_core import PauseReason
from fusion_node.daemon.memory_plan import MIN_KV_POSITIONS, Bound, MemoryPlan, place_layers, retain_budget
from fusion_node.daemon.mover import Lookout, Mover
from fusion_node.daemon.network_examiner import NetworkExaminer
from fusion_node.daemon.pace_core import Pace, PacedBatching
from fusion_node.daemon.placement_core import AssignmentDesk
from fusion_node.daemon.server import NodeServer
from fusion_node.daemon.surveyor import Surveyor
from fusion_node.daemon.swarm_view import SwarmView
from fusion_node.engine.architectures import first_layers, load_config
from fusion_node.engine.batching_core import MAX_DECODE_ROWS, MAX_ROWS
from fusion_node.engine.device import (
    Device,
    choose_devices,
    describe_device,
    describe_devices,
    device_uuid,
    free_memory_bytes,
    limit_device_memory,
    process_memory_bytes,
    release_cached_memory,
    set_threads,
)
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.quantized import expected_bytes
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_layer import fusion_dims
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.stage import Stage
from fusion_node.errors import FusionError, PeerError, ResourceExhausted
from fusion_node.slices import ModelSlice, split
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from p2p.bandwidth import BandwidthMeter
from p2p.compression import FEATURE
from p2p.connection import Recorder
from p2p.discovery import Discovery, DiscoveryService
from p2p.gate import PeerGate
from p2p.grants import sign_release
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.messages import FUSION_FEATURE, MASKS_FEATURE, AnyMessage, Assign, Assigned
from p2p.reachability_verdict import Plane
from p2p.records import PROTOCOL_VERSION, SPEED_ROWS, NodeRecord, ShardRecord, sign_lease, sign_record
from p2p.seam import Network, PathKind
from p2p.websocket import join_address
from scheduler.placement import choose_range
from scheduler.swarm_rate import Host, windows

RECORD_TTL_S = 60.0
ANNOUNCE_INTERVAL_S = 20.0
"""A third of the record's life: two announcements may be lost before the node is forgotten."""

SETTLE_S = 2.0
"""How long a node that has just loaded waits for its peers to dial back before it is announced: without an address of
its data plane, whoever hears of it could do nothing with it. It takes them 0.3 s on one network."""

COALESCE_S = 0.05
"""Between a change of what can be dialled and the announcement: both planes change at about the same time."""

MAX_ADDRESSES = 8
"""Of the data plane in a record."""

RECORD_REUSE_S = 1.0

DRAIN_S = 5.0
"""How long a node that is told to stop waits for the steps that are running."""

MOVES_REASON = "the node goes over to other layers"
"""For users whose sessions it hands over."""

MAX_ASSIGNMENTS = 4
"""That are looked at at once: each looks at the swarm."""

_MAX_CLAIMED_BYTES = 2**53

FreeBytes = Callable[[Device], int]
"""Bytes that can still be allocated on a device."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """What a node that serves can tell: who it is, what it holds, and where it can be reached."""

    peer: PeerId
    layers: LayerRange
    slice: ModelSlice | None
    data_addresses: tuple[str, ...]
    addresses: tuple[str, ...]
    invite: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers on their devices, and how fast they are.

    Attributes:
        stages: one per device; none where it is a slice.
        forwards: measured ones, as (rows, seconds) with all layers.
        capacity_layers: that would fit; 0 when the operator has chosen these.
        sliced: a slice of the layers, in the place of stages.
    """

    model: StoredModel
    stages: tuple[Stage, ...]
    forwards: tuple[tuple[int, float], ...]
    kv_budget_bytes: int
    capacity_layers: int = 0
    sliced: SlicedStage | None = None

    @property
    def parts(self) -> tuple[Stage | SlicedStage, ...]:
        """What is on each of the devices."""
        return self.stages if self.sliced is None else (self.sliced,)

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.parts[0].layers.start, self.parts[-1].layers.stop)

    @property
    def seconds_per_layer(self) -> tuple[float, float, float]:
        """Of a forward of 1, 16 and 256 rows; where one was not measured, as much per row as in the widest that was."""
        return tuple(self._per_layer(rows) for rows in SPEED_ROWS)  # type: ignore[return-value]

    def _per_layer(self, num_rows: int) -> float:
        measured = dict(self.forwards)
        widest = max(measured)
        seconds = measured.get(num_rows, measured[widest] * num_rows / widest)
        return seconds / len(self.layers)


async def load_shard(
    config: NodeConfig,
    model: StoredModel,
    discovery: DiscoveryService,
    life: NodeLife,
    *,
    peer: PeerId,
    announce: Callable[[ShardRecord], Awaitable[None]],
) -> Shard:
    """Chooses the layers when the operator did not, and loads them.

    Args:
        announce: tells the swarm of layers that are being loaded; to be repeated while they are.

    Raises:
        ConfigError: unknown numerics, device or architecture.
        ResourceExhausted: no room for the weights, or for the KV of one session beside them.
        StoreCorrupted: a weight does not match the manifest.
    """
    if config.slice is not None:
        return await _load_slice(config, model, life, config.slice)
    numerics, devices = numerics_class(config.numerics), choose_devices(config.device)
    layers, layer_bytes = config.layers, _layer_bytes(model, numerics.weight_dtype(devices[0]).itemsize)
    memory = [_memory_plan(config, device, len(devices)) for device in devices]
    capacities = [plan.num_layers(layer_bytes) for plan in memory]
    capacity = 0
    if layers is None:
        capacity = min(sum(capacities), model.num_layers if config.max_layers is None else config.max_layers)
        why_none = memory[0].why_no_layer(model.name, layer_bytes)
        lookout = Lookout(discovery, peer, model.model_id, numerics.name, work_of(model, numerics.name))

        async def intend(layers: LayerRange) -> None:
            await announce(loading_record(model, layers, numerics=numerics.name, capacity_layers=capacity))

        layers = await _choose_layers(lookout, model, capacity, why_none, bool(config.peers), peer, intend)
        telling = asyncio.create_task(_tell_of_loading(layers, intend))
    else:
        telling = None
    try:
        return await _load(config, model, life, layers, capacity)
    finally:
        if telling is not None:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


async def _tell_of_loading(layers: LayerRange, intend: Callable[[LayerRange], Awaitable[None]]) -> None:
    while True:
        await intend(layers)
        await asyncio.sleep(ANNOUNCE_INTERVAL_S)


async def _load(config: NodeConfig, model: StoredModel, life: NodeLife, layers: LayerRange, capacity: int) -> Shard:
    numerics, devices = numerics_class(config.numerics), choose_devices(config.device)
    threads = set_threads(config.threads)
    begins = first_layers(load_config(model))
    layer_bytes = _layer_bytes(model, numerics.weight_dtype(devices[0]).itemsize)
    memory = [_memory_plan(config, device, len(devices)) for device in devices]
    capacities = [plan.num_layers(layer_bytes) for plan in memory]
    places = [
        (device, plan, place)
        for device, plan, place in zip(
            devices, memory, place_layers(layers, capacities, first_layers=begins), strict=True
        )
        if place is not None
    ]
    for device, plan, place in places:
        if config.layers is not None:
            plan.check_layers(
                str(place),
                weights_bytes=len(place) * layer_bytes,
                least_kv_bytes=len(place) * MIN_KV_POSITIONS * _kv_layer_bytes(model, numerics.kv_dtype.itemsize),
            )
        if plan.bound is not None:
            limit_device_memory(device, plan.bound.max_bytes)
    _tell_bounds_without_effect(config, devices[0])
    names = describe_devices([device for device, _, _ in places])
    life.loading(str(layers), names)
    log.info("loading", model=model.name, layers=str(layers), device=names, threads=threads)
    began = time.perf_counter()
    told = _Progress(layer_bytes * len(layers), life)
    stages = [
        await asyncio.to_thread(Stage.load, model, place, numerics=numerics, device=device, on_tensor=told.on_tensor)
        for device, _, place in places
    ]
    life.warming_up()
    forwards = [(rows, await asyncio.to_thread(_measure, stages, rows)) for rows in _warm_up_rows(devices[0])]
    log.info(
        "loaded",
        seconds=round(time.perf_counter() - began, 2),
        mib=round(sum(stage.num_weight_bytes for stage in stages) / 2**20, 1),
        ms_per_layer=round(1000 * forwards[0][1] / len(layers), 2),
    )
    if devices[0].type == "cpu":
        # What the allocator keeps of the warm-up would count as used; on a GPU the next wide forward takes it again.
        await asyncio.to_thread(release_cached_memory, devices[0])
    return Shard(model, tuple(stages), tuple(forwards), _kv_budget(config, stages), capacity)


async def _load_slice(config: NodeConfig, model: StoredModel, life: NodeLife, member: ModelSlice) -> Shard:
    """A member's part of the layers that the operator named, or of all, on the first device."""
    numerics, (device, *others) = numerics_class(config.numerics), choose_devices(config.device)
    layers = config.layers or LayerRange(0, model.num_layers)
    dims = fusion_dims(load_config(model))
    own = split(dims, member.weights)[member.index]
    share = max(len(own.columns) / dims.hidden, len(own.heads) / dims.heads, len(own.channels) / dims.channels)
    weights_bytes = int(share * len(layers) * _layer_bytes(model, numerics.weight_dtype(device).itemsize))
    kv_bytes = 2 * len(own.kv_heads) * dims.head_dim * numerics.kv_dtype.itemsize * len(layers)
    plan = _memory_plan(config, device, 1)
    plan.check_layers(
        f"{layers}, slice {member},", weights_bytes=weights_bytes, least_kv_bytes=MIN_KV_POSITIONS * kv_bytes
    )
    if plan.bound is not None:
        limit_device_memory(device, plan.bound.max_bytes)
    _tell_bounds_without_effect(config, device)
    threads, name = set_threads(config.threads), describe_device(device)
    if others:
        log.info("a slice is on one device, and the others are left to other nodes", device=name)
    life.loading(str(layers), name, slice_=str(member))
    log.info("loading", model=model.name, layers=str(layers), slice=str(member), device=name, threads=threads)
    began, told = time.perf_counter(), _Progress(weights_bytes, life)
    load = functools.partial(SlicedStage.load, numerics=numerics, device=device, on_tensor=told.on_tensor)
    stage = await asyncio.to_thread(load, model, layers, member)
    life.warming_up()
    forwards = [(rows, await asyncio.to_thread(_measure, [stage], rows)) for rows in _warm_up_rows(device)]
    log.info(
        "loaded",
        seconds=round(time.perf_counter() - began, 2),
        mib=round(stage.num_weight_bytes / 2**20, 1),
        ms_per_layer=round(1000 * forwards[0][1] / len(layers), 2),
    )
    if device.type == "cpu":
        await asyncio.to_thread(release_cached_memory, device)
    return Shard(model, (), tuple(forwards), _kv_budget(config, [stage]), sliced=stage)


def _warm_up_rows(device: Device) -> tuple[int, ...]:
    """Forwards to run before the node is announced: kernels are chosen, caches filled, and the batching core learns.

    The widest forward comes last on a GPU: what it takes is then known when the KV budget is cut from what is free. Not
    on a CPU, where it would keep a large shard from serving for minutes, and three quarters of what is free are left.
    """
    return (1, 16, MAX_DECODE_ROWS) if device.type == "cpu" else (1, 16, MAX_DECODE_ROWS, MAX_ROWS)


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is open any more
        loop.call_soon_threadsafe(function)


def _measure(stages: Sequence[Stage | SlicedStage], num_rows: int) -> float:
    return sum(stage.measure_seconds(num_rows) for stage in stages)


def _kv_budget(
    config: NodeConfig, stages: Sequence[Stage | SlicedStage], free_bytes: FreeBytes = free_memory_bytes
) -> int:
    """KV memory on all devices together: the same positions on each, as many as the scarcest can hold."""
    num_positions = min(
        _memory_plan(config, stage.device, len(stages), free_bytes).kv_budget(
            least_kv_bytes=MIN_KV_POSITIONS * stage.kv_bytes_per_position
        )
        // stage.kv_bytes_per_position
        for stage in stages
    )
    return num_positions * sum(stage.kv_bytes_per_position for stage in stages)


def _memory_plan(
    config: NodeConfig, device: Device, num_devices: int, free_bytes: FreeBytes = free_memory_bytes
) -> MemoryPlan:
    kv_bytes = None if config.kv_memory_bytes is None else config.kv_memory_bytes // num_devices
    num_free = free_bytes(device)
    if device.type == "cpu":
        num_free //= num_devices  # it is one memory, however many parts are computed side by side
    retain_bytes = _retain_bytes(config) // num_devices if device.type == "cpu" else 0
    return MemoryPlan(num_free, kv_bytes, _bound(config, device), retain_bytes)


def _bound(config: NodeConfig, device: Device) -> Bound | None:
    """The bound that the operator set on the memory of this kind of device, and what is used of it now."""
    on_cpu = device.type == "cpu"
    max_bytes = config.max_ram_bytes if on_cpu else config.max_vram_bytes
    if max_bytes is None:
        return None
    return Bound("--max-ram" if on_cpu else "--max-vram", max_bytes, process_memory_bytes(device))


def _retain_bytes(config: NodeConfig) -> int:
    """For rows that were handed on, which lie in the machine's memory whatever computes."""
    if config.retain_memory_bytes is not None:
        return config.retain_memory_bytes
    cpu = choose_devices("cpu")[0]
    return retain_budget(free_memory_bytes(cpu), _bound(config, cpu))


def _tell_bounds_without_effect(config: NodeConfig, device: Device) -> None:
    on_cpu = device.type == "cpu"
    if (config.max_vram_bytes if on_cpu else config.max_ram_bytes) is not None:
        flag = "--max-vram" if on_cpu else "--max-ram"
        log.warning("a flag has no effect on this device", flag=flag, device=describe_device(device))


class _Progress:
    """Tells how much of the weights is there; logs every tenth once that takes longer than a person waits in peace."""

    def __init__(self, total_bytes: int, life: NodeLife) -> None:
        self._life = life
        self._total_bytes = max(total_bytes, 1)
        self._loaded_bytes = 0
        self._told_tenths = 0
        self._began = time.monotonic()

    def on_tensor(self, _: str, num_bytes: int) -> None:
        self._loaded_bytes += num_bytes
        self._life.loaded(self._loaded_bytes / self._total_bytes)
        tenths = 10 * self._loaded_bytes // self._total_bytes
        if tenths > self._told_tenths and time.monotonic() - self._began > 2.0:
            self._told_tenths = tenths
            log.info("loading", percent=min(10 * tenths, 100))


async def _choose_layers(
    lookout: Lookout,
    model: StoredModel,
    capacity: int,
    why_none: str,
    has_peers: bool,
    peer: PeerId,
    intend: Callable[[LayerRange], Awaitable[None]],
) -> LayerRange:
    own = Host(peer, capacity, math.nan)
    if has_peers and windows(capacity, lookout.work) and capacity < model.num_layers:
        decision = await lookout.choose(own, intend)
    else:
        decision = choose_range(own, (), lookout.work, SwarmTopology((), round_trips_s={}))
    if decision.layers is None and capacity >= 1:
        raise ResourceExhausted(
            f"{capacity} layers of {model.name} fit, which are fewer than those that use one layer's choice and have "
            f"to be together: choose them with --layers"
        )
    if decision.layers is None:
        raise ResourceExhausted(why_none)
    log.info("chosen", layers=str(decision.layers), reason=decision.reason)
    return decision.layers


def loading_record(model: StoredModel, layers: LayerRange, *, numerics: str, capacity_layers: int) -> ShardRecord:
    """Of layers that are not there yet."""
    return ShardRecord(
        model_id=model.model_id,
        model_name=model.name[:96],
        start=layers.start,
        stop=layers.stop,
        num_layers=model.num_layers,
        numerics=numerics,
        seconds_per_layer=(0.0, 0.0, 0.0),
        kv_free_tokens=0,
        quantization=model.quantization,
        is_ready=False,
        capacity_layers=capacity_layers,
    )


def _layer_bytes(model: StoredModel, itemsize: int) -> int:
    """Bytes that one layer takes on the device; layers are alike, so the first stands for all."""
    first = [tensor for tensor in model.manifest.tensors if ".layers.0." in tensor.name]
    return expected_bytes(model.config, first, itemsize=itemsize)


def _kv_layer_bytes(model: StoredModel, itemsize: int) -> int:
    """About the KV of one position in one layer, before any layer is there to ask."""
    config = model.config.get("text_config", model.config)
    num_heads = config.get("num_attention_heads", 1)
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // num_heads
    return int(2 * (config.get("num_key_value_heads") or num_heads) * head_dim * itemsize)


def loading_node(peer: PeerId, loading: ShardRecord, *, puzzle: bytes, config: NodeConfig) -> NodeRecord:
    """What a node says of itself before it serves anything: only what it is about to."""
    now = time.time()
    return NodeRecord(
        version=PROTOCOL_VERSION,
        peer=peer,
        sequence=int(now * 1000),
        issued_at=now,
        expires_at=now + RECORD_TTL_S,
        data_addresses=(),
        libp2p_addresses=(),
        device="",
        memory_free_bytes=0,
        shards=(loading,),
        num_sessions=0,
        software=f"fusion-node {fusion_node.__version__}",
        operator=config.operator[:96],
        puzzle=puzzle,
        region=config.region[:96],
        price=config.price,
    )


class ServingNode:
    """A node that has loaded its shard, and may go over to another one.

    Args:
        free_bytes: tells what it may still take of a device.
        recorder: who is told of every frame on the data plane; None: nobody.
    """

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        shard: Shard,
        discovery: Discovery,
        life: NodeLife,
        network: Network,
        *,
        gate: PeerGate,
        puzzle: bytes = b"",
        free_bytes: FreeBytes = free_memory_bytes,
        recorder: Recorder | None = None,
    ) -> None:
        self._free_bytes = free_bytes
        self._gate = gate
        self._puzzle = puzzle
        self._saving: asyncio.Task[None] | None = None
        self._config = config
        self._identity = identity
        self._model = shard.model
        self._discovery = discovery
        self._life = life
        self._is_above_bound = False
        self._releasing: asyncio.Future[None] | None = None
        self._use(shard)
        self._device_name = describe_devices(self._devices)
        self._reachability = discovery.reachability
        self._addresses_changed = asyncio.Event()
        self._data_listen: tuple[str, ...] = ()
        self._told_addresses: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._last_sequence = 0
        self._record = b""
        self._record_made_at = -math.inf
        self._server = self._new_server(shard)
        self._pool = LinkPool(
            network,
            identity.peer_id,
            on_frame=self._on_frame,
            on_closed=lambda peer, error: self._server.on_closed(peer, error),
            gate=gate,
            is_needed=lambda peer: bool(self._admission.touching(peer)),
            max_upload_Bps=config.max_upload_Bps,
            features=(FEATURE, FUSION_FEATURE, MASKS_FEATURE),
            recorder=recorder,
        )
        # What it knows of peers outlives the server, and others hold it; so it must not hold the first server's shard.
        self._bandwidth = BandwidthMeter(self._pool, is_busy=lambda: self._server.is_busy)
        self._server.attach(self._pool, bandwidth=self._bandwidth)
        self._surveyor = Surveyor(
            identity.peer_id,
            self._pool,
            self._bandwidth,
            discovery.table,
            model_id=self._model.model_id,
            own=lambda: None if self._admission.paused is not None else self._engine.layers,
            is_member=self._slice is not None,
            is_idle=lambda: not self._admission.sessions and self._admission.paused is None,
            is_needed=lambda peer: bool(self._admission.touching(peer)),
        )
        self._intended: LayerRange | None = None
        self._held_since = time.monotonic()
        self._is_between = False
        self._said: NodeRecord | None = None
        self._answering: set[asyncio.Task[None]] = set()
        work = work_of(self._model, config.numerics)
        self._mover = Mover(
            self,
            Lookout(
                discovery,
                identity.peer_id,
                self._model.model_id,
                config.numerics,
                work,
                own_record=lambda: self._said,
            ),
            AssignmentDesk(identity.peer_id, config.scheduler, self._model.model_id, work),
            may_reconsider=shard.capacity_layers > 0 and config.scheduler is None,
        )
        discovery.on_path.append(self._path_changed)
        loop = asyncio.get_running_loop()
        # Not from within what the pool is doing when it reports a breach.
        gate.on_change(lambda: _post(loop, self._pool.drop_refused))
        self.on_left: Callable[[], Awaitable[None]] | None = None
        life.manners.attach(self)

    def _use(self, shard: Shard) -> None:
        """This shard is what is served, by a server that is made next."""
        # First: when there is no room for the KV, all else is as it was.
        engine: ShardEngine | SliceEngine
        if shard.sliced is None:
            engine = ShardEngine(shard.stages, kv_budget_bytes=shard.kv_budget_bytes)
        else:
            engine = SliceEngine(shard.sliced, kv_budget_bytes=shard.kv_budget_bytes)
        self._engine = engine
        self._slice = None if shard.sliced is None else shard.sliced.member
        self._shard = shard
        self._pace = Pace(shard.seconds_per_layer)
        self._kv_budget_bytes = shard.kv_budget_bytes
        self._devices = [stage.device for stage in shard.parts]
        self._admission = Admission(
            peer=self._identity.peer_id,
            model_id=shard.model.model_id,
            layers=engine.layers,
            numerics=engine.numerics,
            blocks=engine.blocks,
            first_layers=engine.first_layers,
            slice=self._slice,
        )

    def _new_server(self, shard: Shard) -> NodeServer:
        batching = PacedBatching(self._pace)
        for num_rows, seconds in shard.forwards:
            batching.learn(self._engine.layers, num_rows, seconds)
        return NodeServer(
            self._engine,
            self._admission,
            own_record=self._own_record,
            sign_lease=lambda lease: sign_lease(lease, self._identity),
            sign_release=lambda release: sign_release(release, self._identity),
            batching=batching,
            pace=self._pace,
            retain_bytes=_retain_bytes(self._config),
        )

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, Assign):
            self._answer(peer, message)
        else:
            self._server.on_frame(peer, message, payload)

    @property
    def ready(self) -> ReadyNode:
        return ReadyNode(
            self._identity.peer_id,
            self._engine.layers,
            self._slice,
            tuple(join_address(*each) for each in self._reachability.best_known(Plane.DATA)),
            tuple(self._discovery.addresses),
            self._discovery.invite,
        )

    async def listen(self, host: str, port: int) -> None:
        """Opens the data plane, then tells the swarm, unless the node was paused while it loaded."""
        bound = await self._pool.listen(join_address(host, port))
        self._data_listen = (bound,)
        await self._pool.listen(f"/p2p/{self._identity.peer_id}")
        self._reachability.bound(Plane.DATA, [(host, int(bound.rpartition(":")[2]))])
        await self._reachability.settled(Plane.DATA, timeout_s=SETTLE_S)
        self._told_addresses = self._announced_addresses()
        if self._admission.paused is None:
            await self._announce()
        self._reachability.on_change.append(self._addresses_changed.set)
        self._life.ready(self)

    def tell_links(self, examiner: NetworkExaminer, view: SwarmView) -> None:
        """Lets the examiner and the view see the data plane, which listens now."""
        view.has_links(self._pool.links)
        examiner.has_links(self._pool, self._bandwidth, self._data_listen)

    async def serve(self, stop: asyncio.Event) -> None:
        """Announces and expires until told to stop; pauses and resumes meanwhile."""
        device = self._devices[0]
        watch = await asyncio.to_thread(open_watch, device.type, uuid=device_uuid(device), wanted=self._config.back_off)
        manners = asyncio.create_task(self._life.manners.run(watch))
        surveying = asyncio.create_task(self._surveyor.run())
        moving = asyncio.create_task(self._mover.run())
        addresses = asyncio.create_task(self._announce_changed_addresses())
        try:
            await self._serve(stop, (manners, surveying, moving))
        finally:
            beside = (manners, surveying, moving, addresses, *self._answering)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _serve(self, stop: asyncio.Event, beside: Sequence[asyncio.Task[None]]) -> None:
        announcing: asyncio.Task[None] | None = None
        next_announce = time.monotonic() + ANNOUNCE_INTERVAL_S
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()
            self._server.expire()
            self._life.tick()
            self._gate.refresh()
            if self._saving is None or self._saving.done():
                self._saving = asyncio.create_task(self._gate.save())
            self._mind_bound()
            for task in beside:
                if task.done():
                    task.result()  # raises: it never ends by itself
            if time.monotonic() >= next_announce and self._admission.paused is None:
                next_announce = time.monotonic() + ANNOUNCE_INTERVAL_S
                # Beside the loop: a slow swarm must not keep leases from ending, nor the node from stopping.
                if announcing is None or announcing.done():
                    announcing = asyncio.create_task(self._announce())
        if announcing is not None:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    async def _announce_changed_addresses(self) -> None:
        """The swarm is told at once of what can be dialled now, and of what cannot any more."""
        while True:
            await self._addresses_changed.wait()
            await asyncio.sleep(COALESCE_S)
            self._addresses_changed.clear()
            found = self._announced_addresses()
            if found != self._told_addresses:
                log.info("can be dialled at", data=found[0], control=found[1])
                self._told_addresses = found
                self._record_made_at = -math.inf
                if self._admission.paused is None:
                    await self._announce()

    def _announced_addresses(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        data = self._reachability.announced(Plane.DATA)[:MAX_ADDRESSES]
        return tuple(join_address(*each) for each in data), tuple(self._discovery.announced_addresses)

    def _path_changed(self, peer: PeerId, path: PathKind) -> None:
        """A hole was punched, so links through a relay go over to the direct connection."""
        if path is PathKind.STREAM:
            self._pool.reconsider(peer, [f"/p2p/{peer}"])

    async def leave(self, hurry: asyncio.Event | None = None) -> None:
        """Withdraws the record, serves until users have gone elsewhere or the grace is over, closes everything.

        Args:
            hurry: ends the grace when it is set.
        """
        log.info("leaving", sessions=len(self._admission.sessions))
        self._life.leaving()
        self._admission.draining = True
        withdrawn = asyncio.ensure_future(self._discovery.withdraw(self._signed_record(leaving=True)))
        await self._server.drain(timeout_s=DRAIN_S, grace_s=self._config.drain_grace_s, hurry=hurry)
        await asyncio.wait((withdrawn,), timeout=DRAIN_S)
        withdrawn.cancel()
        (error,) = await asyncio.gather(withdrawn, return_exceptions=True)
        if isinstance(error, BaseException):
            # It is forgotten when its record runs out.
            log.warning("withdrawing the record failed", reason=str(error) or type(error).__name__)
        if self.on_left is not None:
            await self.on_left()
        log.info("left")

    # going over to other layers: mover.Movable

    def _answer(self, peer: PeerId, message: Assign) -> None:
        if self._slice is not None:
            self._tell(peer, Assigned(message.number, f"slice {self._slice} stays: its group holds the other parts"))
            return
        if len(self._answering) >= MAX_ASSIGNMENTS:
            self._tell(peer, Assigned(message.number, "too many assignments are looked at"))
            return

        async def answer() -> None:
            self._tell(peer, await self._mover.take(peer, message))

        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _tell(self, peer: PeerId, message: AnyMessage) -> None:
        with contextlib.suppress(PeerError):  # whoever is gone cannot be told
            self._pool.send(peer, message)

    @property
    def paused(self) -> str | None:
        return self._admission.paused

    def as_host(self) -> Host:
        own_s = self._pace.seconds_per_layer(time.monotonic())[0]
        return Host(
            peer=self._identity.peer_id,
            capacity_layers=self._shard.capacity_layers or len(self._engine.layers),
            seconds_per_layer=own_s,
            held=self._engine.layers,
            is_pinned=not self._shard.capacity_layers or self._admission.paused is not None,
            held_for_s=time.monotonic() - self._held_since,
        )

    async def intend(self, layers: LayerRange | None) -> None:
        if layers != self._intended:
            self._intended = layers
            self._record_made_at = -math.inf
            if self._admission.paused is None:
                await self._announce()

    async def go_over(self, layers: LayerRange, may_drop: Callable[[], Awaitable[bool]]) -> bool:
        places, fits_beside = self._places_of(layers)
        stages = await self._moved(self._resident(), places) if fits_beside else []
        if not await may_drop():
            return False
        old = str(self._engine.layers)
        await self._stop_serving()
        try:
            if not fits_beside:
                # What is dropped has to be gone before what is missing can come.
                kept = self._kept(places)
                self._shrink(kept)
                await asyncio.to_thread(self._free_what_is_dropped)
                stages = await self._moved(kept, places)
            await self._begin_to_serve(stages)
        except FusionError:
            if not self._is_between:
                self._serve_again()
            raise
        self._is_between = False
        self._held_since = time.monotonic()
        self._intended = None
        self._record_made_at = -math.inf
        self._life.moved(str(layers))
        log.info("serves other layers", layers=str(layers), before=old)
        await asyncio.to_thread(self._free_what_is_dropped)
        if self._admission.paused is None:
            await self._announce()
        return True

    async def _begin_to_serve(self, stages: Sequence[Stage]) -> None:
        """Measures stages and serves them, with what memory is left for KV.

        Raises:
            ResourceExhausted: too little is left, and what was served before is still what there is.
        """
        forwards = [(rows, await asyncio.to_thread(_measure, stages, rows)) for rows in _warm_up_rows(stages[0].device)]
        await asyncio.to_thread(self._release_cached)
        budget = _kv_budget(self._config, stages, self._free_bytes)
        self._exchange(Shard(self._model, tuple(stages), tuple(forwards), budget, self._shard.capacity_layers))

    def _serve_again(self) -> None:
        """Takes sessions for the layers that are still there: going over has failed when all sessions were gone."""
        try:
            self._exchange(self._shard)
        except FusionError:
            self._is_between = True
            raise

    def _resident(self) -> list[Stage | None]:
        """What each of the devices holds; a device that is named twice holds two stages."""
        left, resident = list(self._shard.stages), list[Stage | None]()
        for device in choose_devices(self._config.device):
            resident.append(left.pop(0) if left and left[0].device == device else None)
        return resident

    def _places_of(self, layers: LayerRange) -> tuple[list[LayerRange | None], bool]:
        """Where other layers are to go, and whether every device has room for them beside what it holds."""
        resident, room = self._resident(), self._room()
        capacities = [
            max(1, num + (0 if stage is None else len(stage.layers))) for num, stage in zip(room, resident, strict=True)
        ]
        places = place_layers(layers, capacities, first_layers=first_layers(load_config(self._model)))
        missing = [
            0 if place is None else sum(map(len, place.without(None if stage is None else stage.layers)))
            for place, stage in zip(places, resident, strict=True)
        ]
        return places, all(num <= most for num, most in zip(missing, room, strict=True))

    async def _moved(self, resident: Sequence[Stage | None], places: Sequence[LayerRange | None]) -> list[Stage]:
        """Stages of other layers, which share what is resident on their device and read the rest."""
        numerics, stages = numerics_class(self._config.numerics), []
        for device, before, place in zip(choose_devices(self._config.device), resident, places, strict=True):
            if place is None:
                continue
            if before is None:
                bound = _bound(self._config, device)
                if bound is not None:  # it may hold nothing yet
                    limit_device_memory(device, bound.max_bytes)
                load = functools.partial(Stage.load, self._model, place, numerics=numerics, device=device)
            else:
                load = functools.partial(before.moved, self._model, place)
            stages.append(await asyncio.to_thread(load))
        return stages

    def _room(self) -> list[int]:
        """How many more layers fit on each device now."""
        devices = choose_devices(self._config.device)
        itemsize = numerics_class(self._config.numerics).weight_dtype(devices[0]).itemsize
        layer_bytes = _layer_bytes(self._model, itemsize)
        return [
            _memory_plan(self._config, device, len(devices), self._free_bytes).num_layers(layer_bytes)
            for device in devices
        ]

    def _kept(self, places: Sequence[LayerRange | None]) -> list[Stage | None]:
        """What each device holds of the layers that it is to have; all else can go."""
        kept = list[Stage | None]()
        for stage, place in zip(self._resident(), places, strict=True):
            part = None
            if stage is not None and place is not None:
                start, stop = max(stage.layers.start, place.start), min(stage.layers.stop, place.stop)
                begins = stage.first_layers
                if start < stop and (begins is None or start in begins):
                    part = stage.part(LayerRange(start, stop))
            kept.append(part)
        return kept

    def _shrink(self, kept: Sequence[Stage | None]) -> None:
        """Holds no more than these: one of them, or as little as can be where there are none. No session is opened."""
        shard = self._shard
        first = shard.stages[0]
        begins = sorted(begin for begin in first.first_layers or () if begin > first.layers.start)
        stop = begins[0] if begins else first.layers.stop if first.first_layers else first.layers.start + 1
        least = LayerRange(first.layers.start, min(stop, first.layers.stop))
        # Parts on several devices need not follow one another, as the layers of an engine do.
        stage = next((part for part in kept if part is not None), None) or first.part(least)
        kv_bytes = MIN_KV_POSITIONS * stage.kv_bytes_per_position
        self._is_between = True
        self._exchange(dataclasses.replace(shard, stages=(stage,), kv_budget_bytes=kv_bytes))
        self._admission.draining, self._admission.draining_reason = True, MOVES_REASON

    def _free_what_is_dropped(self) -> None:
        """A server and its forwards refer to one another, and so to the old layers: only a collection frees those."""
        gc.collect()
        self._release_cached()

    def _exchange(self, shard: Shard) -> None:
        """Serves another shard, by a new server; the old one has been drained."""
        old, paused = self._server, self._admission.paused
        self._use(shard)
        self._admission.paused = paused
        self._server = self._new_server(shard)
        self._server.attach(self._pool, bandwidth=self._bandwidth)
        self._server.counters.update(old.counters)

    @property
    def is_between(self) -> bool:
        return self._is_between

    async def _stop_serving(self) -> None:
        """Hands all sessions over, and gives the KV back."""
        self._admission.draining, self._admission.draining_reason = True, MOVES_REASON
        if self._admission.paused is None:
            await self._announce()
        await self._server.drain(timeout_s=DRAIN_S, grace_s=self._config.drain_grace_s, reason=MOVES_REASON)
        self._engine.release_kv()

    # what its operator sees and orders: life.Working and manners.Host

    @property
    def num_sessions(self) -> int:
        return len(self._admission.sessions)

    @property
    def num_rows(self) -> int:
        return self._server.counters["rows"]

    @property
    def busy_s(self) -> float:
        return self._server.counters["compute_us"] / 1e6

    @property
    def kv_bytes(self) -> tuple[int, int]:
        num_positions = sum(session.plan.max_positions for session in self._admission.sessions)
        return num_positions * self._engine.kv_bytes_per_position, self._kv_budget_bytes

    @property
    def device_memory_bytes(self) -> int | None:
        if self._devices[0].type == "cpu":
            return None
        return sum(map(process_memory_bytes, self._devices))

    def refuse(self, reason: str | None) -> None:
        self._admission.paused = reason
        self._record_made_at = -math.inf  # whoever asks for the record is told at once

    def hand_over(self, reason: PauseReason, grace_s: float) -> None:
        self._server.hand_over(grace_s=grace_s, reason=reason.in_words, code=reason.value, may_stay=True)

    def stay(self) -> None:
        self._server.stay()

    def end_sessions(self, reason: PauseReason) -> None:
        self._server.end_all(reason.value, reason.in_words)

    def release_memory(self) -> bool:
        is_released = self._server.release_kv()
        if is_released:
            self._release_caches()
        return is_released

    def _release_caches(self) -> None:
        # Beside the loop: allocators take their time.
        self._releasing = asyncio.get_running_loop().run_in_executor(None, self._release_cached)

    def _release_cached(self) -> None:
        for device in self._devices:
            release_cached_memory(device)

    async def publish(self) -> None:
        if self._admission.paused is None:
            await self._announce()
            return
        try:
            await self._discovery.withdraw(self._signed_record())
        except FusionError as error:
            log.warning("withdrawing the record failed", reason=str(error))

    def _mind_bound(self) -> None:
        bound = _bound(self._config, self._devices[0])
        is_above = bound is not None and bound.used_bytes > bound.max_bytes
        if bound is not None and is_above and not self._is_above_bound:
            log.warning("more memory is used than allowed", flag=bound.flag, mib=round(bound.used_bytes / 2**20))
            self._release_caches()
        self._is_above_bound = is_above

    async def close_links(self) -> None:
        await self._pool.aclose("the node is shutting down")
        await self._gate.save()

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
        now, measured_at = time.time(), time.monotonic()
        # Above the last one even when the clock was set back or a restart took less than a millisecond.
        self._last_sequence = max(self._last_sequence + 1, int(now * 1000))
        shard = ShardRecord(
            model_id=self._model.model_id,
            model_name=self._model.name[:96],
            start=self._engine.layers.start,
            stop=self._engine.layers.stop,
            num_layers=self._model.num_layers,
            numerics=self._engine.numerics,
            seconds_per_layer=self._pace.seconds_per_layer(measured_at),
            kv_free_tokens=min(self._admission.free_positions, _MAX_CLAIMED_BYTES),
            quantization=self._model.quantization,
            queue_s=self._pace.queue_s(measured_at),
            is_ready=not self._admission.draining,
            capacity_layers=self._shard.capacity_layers,
            slice="" if self._slice is None else str(self._slice),
        )
        shards: tuple[ShardRecord, ...] = () if self._is_between else (shard,)
        if self._intended is not None and self._intended != self._engine.layers:
            capacity = self._shard.capacity_layers
            shards += (
                loading_record(self._model, self._intended, numerics=self._engine.numerics, capacity_layers=capacity),
            )
        up_Bps, down_Bps = self._surveyor.rates_Bps(self._config.max_upload_Bps)
        data_addresses, libp2p_addresses = self._announced_addresses()
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=self._identity.peer_id,
            sequence=self._last_sequence,
            issued_at=now,
            expires_at=now + RECORD_TTL_S,
            data_addresses=data_addresses,
            libp2p_addresses=libp2p_addresses,
            device=self._device_name[:96],
            memory_free_bytes=min(sum(map(free_memory_bytes, self._devices)), _MAX_CLAIMED_BYTES),
            shards=() if leaving or self._admission.paused is not None else shards,
            num_sessions=len(self._admission.sessions),
            software=f"fusion-node {fusion_node.__version__}",
            operator=self._config.operator[:96],
            puzzle=self._puzzle,
            is_relay=self._config.relay,
            round_trips=self._surveyor.round_trips(),
            coordinate=self._surveyor.coordinate(),
            up_Bps=up_Bps,
            down_Bps=down_Bps,
            region=self._config.region[:96],
            price=self._config.price,
        )
        self._said = record
        return sign_record(record, self._identity)
