"""The part of a node that computes: its shard on the device, its sessions, its record. Imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

import fusion_node
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.device_usage import open_watch
from fusion_node.daemon.life import NodeLife
from fusion_node.daemon.manners_core import PauseReason
from fusion_node.daemon.memory_plan import MIN_KV_POSITIONS, Bound, MemoryPlan, place_layers, retain_budget
from fusion_node.daemon.network_examiner import NetworkExaminer
from fusion_node.daemon.pace_core import Pace, PacedBatching
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
from fusion_node.engine.stage import Stage
from fusion_node.errors import FusionError, LocalProtocolError, ResourceExhausted
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from p2p.compression import FEATURE
from p2p.discovery import Discovery, DiscoveryService
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.reachability_verdict import Plane
from p2p.records import PROTOCOL_VERSION, SPEED_ROWS, NodeRecord, ShardRecord, sign_lease, sign_record
from p2p.seam import Network, PathKind
from p2p.websocket import join_address
from scheduler.placement import choose_layers

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

LOOK_AROUND_S = 5.0
"""How long a node that may choose its layers waits to hear what others hold."""

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
    """Layers on their devices, and how fast they are.

    Attributes:
        forwards: measured ones, as (rows, seconds) with all layers.
    """

    model: StoredModel
    stages: tuple[Stage, ...]
    forwards: tuple[tuple[int, float], ...]
    kv_budget_bytes: int

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.stages[0].layers.start, self.stages[-1].layers.stop)

    @property
    def seconds_per_layer(self) -> tuple[float, float, float]:
        """Of a forward of 1, 16 and 256 rows; where one was not measured, as much per row as in the widest that was."""
        return tuple(self._per_layer(rows) for rows in SPEED_ROWS)  # type: ignore[return-value]

    def _per_layer(self, num_rows: int) -> float:
        measured = dict(self.forwards)
        widest = max(measured)
        seconds = measured.get(num_rows, measured[widest] * num_rows / widest)
        return seconds / len(self.layers)


async def load_shard(config: NodeConfig, model: StoredModel, discovery: DiscoveryService, life: NodeLife) -> Shard:
    """Chooses the layers when the operator did not, and loads them.

    Raises:
        ConfigError: unknown numerics, device or architecture.
        ResourceExhausted: no room for the weights, or for the KV of one session beside them.
        StoreCorrupted: a weight does not match the manifest.
    """
    numerics, devices = numerics_class(config.numerics), choose_devices(config.device)
    threads = set_threads(config.threads)
    begins = first_layers(load_config(model))
    layers, layer_bytes = config.layers, _layer_bytes(model, numerics.weight_dtype(devices[0]).itemsize)
    memory = [_memory_plan(config, device, len(devices)) for device in devices]
    capacities = [plan.num_layers(layer_bytes) for plan in memory]
    if layers is None:
        why_none = memory[0].why_no_layer(model.name, layer_bytes)
        layers = await _choose_layers(discovery, model, sum(capacities), begins, why_none, bool(config.peers))
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
    return Shard(model, tuple(stages), tuple(forwards), _kv_budget(config, stages))


def _warm_up_rows(device: Device) -> tuple[int, ...]:
    """Forwards to run before the node is announced: kernels are chosen, caches filled, and the batching core learns.

    The widest forward comes last on a GPU: what it takes is then known when the KV budget is cut from what is free. Not
    on a CPU, where it would keep a large shard from serving for minutes, and three quarters of what is free are left.
    """
    return (1, 16, MAX_DECODE_ROWS) if device.type == "cpu" else (1, 16, MAX_DECODE_ROWS, MAX_ROWS)


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is open any more
        loop.call_soon_threadsafe(function)


def _measure(stages: Sequence[Stage], num_rows: int) -> float:
    return sum(stage.measure_seconds(num_rows) for stage in stages)


def _kv_budget(config: NodeConfig, stages: Sequence[Stage]) -> int:
    """KV memory on all devices together: the same positions on each, as many as the scarcest can hold."""
    num_positions = min(
        _memory_plan(config, stage.device, len(stages)).kv_budget(
            least_kv_bytes=MIN_KV_POSITIONS * stage.kv_bytes_per_position
        )
        // stage.kv_bytes_per_position
        for stage in stages
    )
    return num_positions * sum(stage.kv_bytes_per_position for stage in stages)


def _memory_plan(config: NodeConfig, device: Device, num_devices: int) -> MemoryPlan:
    kv_bytes = None if config.kv_memory_bytes is None else config.kv_memory_bytes // num_devices
    free_bytes = free_memory_bytes(device)
    if device.type == "cpu":
        free_bytes //= num_devices  # it is one memory, however many parts are computed side by side
    retain_bytes = _retain_bytes(config) // num_devices if device.type == "cpu" else 0
    return MemoryPlan(free_bytes, kv_bytes, _bound(config, device), retain_bytes)


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
    discovery: DiscoveryService,
    model: StoredModel,
    capacity: int,
    begins: frozenset[int] | None,
    why_none: str,
    has_peers: bool,
) -> LayerRange:
    held: list[LayerRange] = []
    if capacity < model.num_layers and has_peers:
        with contextlib.suppress(FusionError):
            await discovery.wait_for_peer(LOOK_AROUND_S)
            records = await discovery.find(model.model_id, timeout_s=LOOK_AROUND_S)
            held = [LayerRange(s.start, s.stop) for r in records for s in r.shards if s.model_id == model.model_id]
    layers = choose_layers(held, num_layers=model.num_layers, capacity_layers=capacity, first_layers=begins)
    if layers is None and capacity >= 1:
        raise ResourceExhausted(
            f"{capacity} layers of {model.name} fit, which are fewer than those that use one layer's choice and have "
            f"to be together: choose them with --layers"
        )
    if layers is None:
        raise ResourceExhausted(why_none)
    return layers


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


class ServingNode:
    """A node that has loaded its shard."""

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
    ) -> None:
        self._gate = gate
        self._puzzle = puzzle
        self._saving: asyncio.Task[None] | None = None
        self._config = config
        self._identity = identity
        self._model = shard.model
        self._pace = Pace(shard.seconds_per_layer)
        self._discovery = discovery
        self._life = life
        self._kv_budget_bytes = shard.kv_budget_bytes
        self._is_above_bound = False
        self._releasing: asyncio.Future[None] | None = None
        self._engine = engine = ShardEngine(shard.stages, kv_budget_bytes=shard.kv_budget_bytes)
        self._devices = [stage.device for stage in shard.stages]
        batching = PacedBatching(self._pace)
        for num_rows, seconds in shard.forwards:
            batching.learn(engine.layers, num_rows, seconds)
        self._admission = admission = Admission(
            peer=identity.peer_id,
            model_id=shard.model.model_id,
            layers=engine.layers,
            numerics=engine.numerics,
            blocks=engine.blocks,
            first_layers=engine.first_layers,
        )
        self._device_name = describe_devices(self._devices)
        self._reachability = discovery.reachability
        self._addresses_changed = asyncio.Event()
        self._data_listen: tuple[str, ...] = ()
        self._told_addresses: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._last_sequence = 0
        self._record = b""
        self._record_made_at = -math.inf
        self._server = NodeServer(
            engine,
            admission,
            own_record=self._own_record,
            sign_lease=lambda lease: sign_lease(lease, identity),
            batching=batching,
            retain_bytes=_retain_bytes(config),
        )
        self._pool = LinkPool(
            network,
            identity.peer_id,
            on_frame=self._server.on_frame,
            on_closed=self._server.on_closed,
            gate=gate,
            is_needed=lambda peer: bool(admission.touching(peer)),
            max_upload_Bps=config.max_upload_Bps,
            features=(FEATURE,),
        )
        self._server.attach(self._pool)
        if self._server.bandwidth is None:
            raise LocalProtocolError("the server has links, and so measures bandwidth")
        self._surveyor = Surveyor(
            identity.peer_id,
            self._pool,
            self._server.bandwidth,
            discovery.table,
            model_id=self._model.model_id,
            own=lambda: None if self._admission.paused is not None else self._engine.layers,
            is_idle=lambda: not self._admission.sessions and self._admission.paused is None,
            is_needed=lambda peer: bool(self._admission.touching(peer)),
        )
        discovery.on_path.append(self._path_changed)
        loop = asyncio.get_running_loop()
        # Not from within what the pool is doing when it reports a breach.
        gate.on_change(lambda: _post(loop, self._pool.drop_refused))
        self.on_left: Callable[[], Awaitable[None]] | None = None
        life.manners.attach(self)

    @property
    def ready(self) -> ReadyNode:
        return ReadyNode(
            self._identity.peer_id,
            self._engine.layers,
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
        examiner.has_links(self._pool, self._server.bandwidth, self._data_listen)

    async def serve(self, stop: asyncio.Event) -> None:
        """Announces and expires until told to stop; pauses and resumes meanwhile."""
        device = self._devices[0]
        watch = await asyncio.to_thread(open_watch, device.type, uuid=device_uuid(device), wanted=self._config.back_off)
        manners = asyncio.create_task(self._life.manners.run(watch))
        surveying = asyncio.create_task(self._surveyor.run())
        addresses = asyncio.create_task(self._announce_changed_addresses())
        try:
            await self._serve(stop, (manners, surveying))
        finally:
            for task in (manners, surveying, addresses):
                task.cancel()
            await asyncio.gather(manners, surveying, addresses, return_exceptions=True)

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
        if self.on_left is not None:
            await self.on_left()
        log.info("left")

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
        self._server.hand_over(grace_s=grace_s, reason=reason.in_words, code=reason.value)

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
            shards=() if leaving or self._admission.paused is not None else (shard,),
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
        return sign_record(record, self._identity)
