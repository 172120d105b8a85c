"""A simulated node: the real cores that decide about sessions, and a device that takes time instead of computing.

The device makes one forward of whatever waits when it is free, up to MAX_BATCH_ROWS, as the real batching does in the
large. Its rows are those of fusion_node.simulator.arithmetic. What a node that serves nobody costs here is its place
in two tables: the cores are made when the first session comes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusion_node.daemon.admission_core import Admission, Session
from fusion_node.daemon.output_log_core import OutputLog
from fusion_node.daemon.serving_core import Connect, Forget, Send, SendRows, ServedStep, Serving, Take
from fusion_node.engine.block_manager_core import BlockManager
from fusion_node.errors import PeerError
from fusion_node.simulator.arithmetic import DTYPE, ROW_BYTES, ROW_SIZE, Chain, garbage, is_garbage
from fusion_node.simulator.devices import DeviceProfile
from fusion_node.simulator.leases import LeaseBook, encode_lease
from fusion_node.simulator.links import Host
from fusion_node.simulator.network import Place
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.messages import AnyMessage, CloseSession, StageTiming
from scheduler import swarm_rate
from scheduler.topology import Speed

if TYPE_CHECKING:
    from fusion_node.simulator.world import World

MAX_BATCH_ROWS = 256
BLOCK_SLOTS = 16
FINE_AFTER_S = 3.0
"""After something has befallen a node, in which steps over it are taken one by one: longer than suspicion takes."""

OUTPUTS_BYTES = 64 * 2**20
"""Retained rows of one node, in the simulator's own bytes: never the limit here."""


@dataclass(frozen=True, slots=True)
class Character:
    """How a node differs from what it says.

    Attributes:
        claim: times as fast as it is, and times as much KV as it has, that it claims.
        garbage_share: of its steps, whose rows are none.
    """

    claim: float = 1.0
    garbage_share: float = 0.0


class Node(Host):
    """One node.

    Attributes:
        joined_at, left_at: seconds of the world; ``left_at`` once it is gone.
        holds, is_serving: whether it has chosen its layers, and whether they are there.
        stays_s: from when it serves until it leaves.
        leaves_by: which of the ways to leave it will take, 0 to 1 over the shares of Settings.
        fault, fault_at: the last thing that befell it, for the reports.
        due: when something will befall it, as far as the world has decided, the next first. No core sees it.
        placed: as those see it who choose layers; kept by the world.
    """

    def __init__(
        self,
        world: World,
        index: int,
        peer: PeerId,
        place: Place,
        device: DeviceProfile,
        character: Character,
    ) -> None:
        super().__init__(index, peer, place)
        self.device = device
        self.layers = LayerRange(0, 1)
        self.holds = self.is_serving = False
        self.stays_s = math.inf
        self.leaves_by = 0.0
        self.character = character
        self.joined_at = world.heap.now
        self.left_at: float | None = None
        self.seen_until = float("inf")
        self.fault, self.fault_at = "", float("-inf")
        self.due: list[float] = []
        self.placed: swarm_rate.Host | None = None
        self.is_draining = False
        self.speed: Speed = device.speed(world.model)
        self.kv_positions = 1
        self.serving: Serving | None = None
        self.announced_at = world.heap.now
        self.announced_speed = self.claimed_speed
        self.announced_queue_s = 0.0
        self._world = world
        self._chains: dict[Session, Chain] = {}
        self._queue: deque[tuple[ServedStep, Any, float]] = deque()
        self._busy_until: float | None = None
        self._timer_at: float | None = None

    def hold(self, layers: LayerRange) -> None:
        """These are its layers, or will be: before it serves."""
        self.layers = layers
        self.holds = True
        self.placed = None
        self.kv_positions = max(1, self.device.kv_positions(self._world.model, len(layers)))
        self.announced_kv = int(self.kv_positions * self.character.claim)
        self._leases = LeaseBook(self.num_blocks * BLOCK_SLOTS, block_slots=BLOCK_SLOTS)

    # what others believe of it

    @property
    def claimed_speed(self) -> Speed:
        """Seconds per layer by its own word."""
        if self.character.claim == 1.0:
            return self.speed
        by, real = self.character.claim, self.speed
        return Speed(real.rows_1_s / by, real.rows_16_s / by, real.rows_256_s / by)

    @property
    def claimed_kv(self) -> int:
        """Positions that a new session could have, by its own word."""
        free = self.kv_positions if self.serving is None else self.serving.admission.free_positions
        return int(free * self.character.claim)

    def quiet_until(self, now: float) -> float:
        """When something befalls it next, as far as is decided; ``now`` when something does, or did a moment ago."""
        is_disturbed = self.is_frozen or self.is_draining or not self.is_up or self.character.garbage_share > 0.0
        if is_disturbed or now - self.fault_at < FINE_AFTER_S:
            return now
        while self.due and self.due[0] < now:
            heapq.heappop(self.due)
        return self.due[0] if self.due else math.inf

    def refresh_record(self, every_s: float) -> None:
        """Announces itself anew if its record is older than that. Asked by whoever reads it: idleness is free."""
        now = self._world.heap.now
        if now - self.announced_at > every_s and self.is_up and not self.is_frozen:
            self.announced_at = now
            self.announced_kv = self.claimed_kv
            self.announced_queue_s = self.queue_s()

    def queue_s(self) -> float:
        """What a step waits for the device."""
        waiting = sum(self._seconds([step]) for step, _, _ in self._queue)
        return waiting + max(0.0, (self._busy_until or 0.0) - self._world.heap.now)

    # the network's side

    def on_message(self, source: PeerId, message: AnyMessage, payload: Any) -> None:
        serving = self._serving()
        if isinstance(message, CloseSession):
            self._leases.closed(message.session, source)
        serving.receive(source, message, payload, now=self._now())
        self.pump()

    def on_link_closed(self, peer: PeerId, error: PeerError) -> None:
        if self.serving is not None:
            self._leases.user_gone(peer)
            self.serving.peer_lost(peer, str(error), now=self._now())
            self.pump()

    def drain(self, grace_s: float) -> None:
        """It was told to stop: sessions are to go elsewhere, and it serves them until they have."""
        self.is_draining = True
        if self.serving is not None:
            self.serving.admission.draining = True
            self.serving.drain(now=self._now(), grace_s=grace_s, reason="the node is shutting down")
            self.pump()

    @property
    def num_blocks(self) -> int:
        """Of KV."""
        return max(1, self.kv_positions // BLOCK_SLOTS)

    @property
    def num_sessions(self) -> int:
        return 0 if self.serving is None else len(self.serving.admission.sessions)

    def ended(self) -> None:
        """Its process is gone."""
        self.check_leases()
        self.serving = None
        self._queue.clear()
        self._chains.clear()

    def check_leases(self) -> None:
        """Counts what was wrong with its leases so far, once."""
        metrics, leases = self._world.metrics, self._leases
        metrics.lease_overlaps += leases.overlaps
        metrics.broken_leases += leases.broken
        leases.overlaps = leases.broken = 0
        if self.serving is not None:
            self.serving.admission.blocks.check_integrity()

    # inside

    def _now(self) -> MonotonicS:
        return MonotonicS(self._world.heap.now)

    def _serving(self) -> Serving:
        if self.serving is None:
            world = self._world
            admission = Admission(
                self.peer,
                world.model_id,
                self.layers,
                world.numerics,
                BlockManager(self.num_blocks, block_slots=BLOCK_SLOTS),
            )
            admission.draining = self.is_draining
            self.serving = Serving(
                admission,
                OutputLog(max_bytes=OUTPUTS_BYTES),
                row_size=ROW_SIZE,
                wire_dtype=DTYPE,
                open_plan=world.open_plan,
                sign_lease=self._sign_lease,
                wait_s=self.queue_s,
                backlog_s=lambda peer: world.links.backlog_s(self, peer),
            )
        return self.serving

    def _sign_lease(self, session: Session, lease_s: float) -> bytes:
        lease = session.lease(self.peer, issued_at=self._world.unix_s, lease_s=lease_s)
        self._leases.promised(lease, MonotonicS(self._world.heap.now + lease_s), now=self._now())
        return encode_lease(lease)

    def pump(self) -> None:
        """Carries out what the core has decided."""
        serving, links = self._serving(), self._world.links
        while (command := serving.next_command()) is not None:
            match command:
                case Send():
                    links.send(self, command.peer, command.message)
                case SendRows():
                    self._send_rows(serving, command)
                case Connect():
                    self._connect(command)
                case Take():
                    self._take(serving, command)
                case Forget():
                    self._chains.pop(command.session, None)
                    self._leases.forgotten(command.session.key, now=self._now())
                    if any(step.session is command.session for step, _, _ in self._queue):
                        self._queue = deque(each for each in self._queue if each[0].session is not command.session)
        timer = serving.get_timer()
        if timer is not None and (self._timer_at is None or timer < self._timer_at):
            self._timer_at = timer
            self._world.heap.at(timer, self._on_timer, timer)

    def _on_timer(self, at: float) -> None:
        if self._timer_at != at or self.serving is None:
            return
        self._timer_at = None
        if self.is_frozen:
            self.inbox.append(self._catch_up)
        else:
            self._catch_up()

    def _catch_up(self) -> None:
        if self.serving is not None:
            self.serving.handle_timer(now=self._now())
            self.pump()

    def _connect(self, command: Connect) -> None:
        def then(error: PeerError | None) -> None:
            if self.serving is None:
                return
            if error is None:
                self.serving.successor_connected(command.session, command.epoch, now=self._now())
            else:
                self.serving.successor_unreachable(command.session, command.epoch, now=self._now())
            self.pump()

        self._world.links.connect(self, command.peer, then)

    def _send_rows(self, serving: Serving, command: SendRows) -> None:
        num_bytes = command.message.tensor.num_rows * self._world.model.row_bytes
        is_sent = self._world.links.send(
            self, command.peer, command.message, num_bytes=num_bytes, payload=command.payload
        )
        serving.rows_left(command)
        if not is_sent:
            serving.send_failed(command.session, command.peer, "there is no link to it", now=self._now())

    def _take(self, serving: Serving, command: Take) -> None:
        if is_garbage(command.payload):
            serving.rows_unfit(command.session, command.message, "a row is not finite", now=self._now())
            return
        step = serving.take_step(command.session, command.message, now=self._now())
        if step is not None:
            self._queue.append((step, command.payload, self._world.heap.now))
            self._begin()

    def _begin(self) -> None:
        """Starts a forward of what waits, if the device is free."""
        if self._busy_until is not None or not self._queue:
            return
        batch: list[tuple[ServedStep, Any, float]] = []
        num_rows = 0
        while self._queue and (not batch or num_rows + self._queue[0][0].message.tensor.num_rows <= MAX_BATCH_ROWS):
            entry = self._queue.popleft()
            num_rows += entry[0].message.tensor.num_rows
            batch.append(entry)
        seconds = self._seconds([step for step, _, _ in batch])
        self._busy_until = self._world.heap.now + seconds
        self._world.heap.after(seconds, self._computed, batch, self._world.heap.now)

    def _seconds(self, steps: list[ServedStep]) -> float:
        """Of one forward of these steps: those over equal layers share the weights."""
        rows_of: dict[int, int] = {}
        for step in steps:
            num_layers = len(step.session.layers)
            rows_of[num_layers] = rows_of.get(num_layers, 0) + step.message.tensor.num_rows
        return sum(num_layers * self.speed.seconds_per_layer(rows) for num_layers, rows in rows_of.items())

    def _computed(self, batch: list[tuple[ServedStep, Any, float]], began: float) -> None:
        if not self.is_up:
            return
        if self.is_frozen:
            self.inbox.append(lambda: self._computed(batch, began))
            return
        self._busy_until = None
        serving, now = self._serving(), self._world.heap.now
        for step, rows, came in batch:
            if not serving.admission.holds(step.session):
                continue
            out = self._forward(step, rows)
            if self.character.garbage_share and self._world.rows_chance.random() < self.character.garbage_share:
                out = garbage(len(out) // ROW_BYTES)
                self.befallen("garbage")
            timing = StageTiming(int((began - came) * 1e6), int((now - began) * 1e6))
            serving.step_computed(step, out, timing, now=self._now())
        self._begin()
        self.pump()

    def _forward(self, step: ServedStep, rows: bytes | memoryview) -> bytes:
        session, message = step.session, step.message
        chain = self._chains.get(session)
        position = message.first_node - 1
        if chain is None or position == 0:
            chain = self._chains[session] = Chain()
        if len(chain) != position:
            raise AssertionError(f"position {position} comes after {len(chain)}")
        out = chain.forward(rows, self._world.weights.of(session.layers.start, session.layers.stop))
        if step.out is None:
            return out
        return b"".join(out[row * ROW_BYTES : (row + 1) * ROW_BYTES] for row in step.out)

    def befallen(self, fault: str) -> None:
        """Something has befallen it."""
        self.fault, self.fault_at = fault, self._world.heap.now
