"""Hundreds to ten thousand hosts in one process: the real membership core and record exchange on an event heap.

What is simulated: the network of fusion_node.simulator.network, dials of four round trips, requests and answers with
their true bytes, hosts that die with or without closing their connections, partitions, clocks that are wrong. What is
not: the DHT (joining it and publishing succeed after a second and cost nothing here), CPU. Signatures are not made: the
opener knows what each host has said.

Everything is drawn from one seed. Nothing here needs libp2p.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fusion_node.simulator.heap import EventHeap
from fusion_node.simulator.network import SETUP_ROUND_TRIPS, Nat, Network, Place
from fusion_node.types import ModelId, MonotonicS, PeerId, UnixS
from fusion_node.wire import SignedEnvelope
from p2p.membership_core import (
    FULL_VIEW,
    Ask,
    Dial,
    Disconnect,
    JoinDht,
    Membership,
    Moment,
    Silence,
    WayIn,
)
from p2p.peer_book import PeerBook
from p2p.publication_core import Publish
from p2p.record_exchange import RecordExchange
from p2p.records import PROTOCOL_VERSION, NodeRecord, RecordTable, Refusal, ShardRecord

MODEL = ModelId("ab" * 32)
SHARD = ShardRecord(MODEL, "some-model-instruct", 0, 10, 30, "f16r32", (0.003, 0.004, 0.03), 4096)
EPOCH_S = 1_800_000_000.0
TTL_S = 60.0
ANNOUNCE_S = 25.0
"""A quarter more or less."""

TIMEOUT_S = 5.0
"""Of an answer, and of a dial."""

OVERHEAD_BYTES = 250
"""Per message: IP, TCP, Noise and yamux headers, and half of a stream's negotiation (measured: 230 to 270 bytes)."""

MAX_CONNECTIONS = 256


@dataclass(eq=False)
class Host:
    """One process; ``place.part`` is the part of the network that it is in.

    Attributes:
        shards: what it announces; none for a user.
    """

    index: int
    id: PeerId
    core: Membership
    place: Place
    shards: tuple[ShardRecord, ...]
    skew_s: float = 0.0
    is_up: bool = True
    connections: set[PeerId] = field(default_factory=set)
    timer_at: float = math.inf
    num_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    sequence: int = 0

    @property
    def address(self) -> str:
        # Every second host in a /16 of its own, the others in a few.
        i = self.index
        first, second = (11 + i // 250 % 80, i % 250) if i % 2 else (100, i // 2 % 16)
        return f"/ip4/{first}.{second}.{i // 250 % 250}.{i % 250 + 1}/tcp/4600/p2p/{self.id}"


class _Table(RecordTable):
    """Keeps one copy of what a host has said for all hosts together: the tables of 10,000 would take 20 GiB."""

    def __init__(self, said: dict[bytes, tuple[bytes, NodeRecord]], opener: Any) -> None:
        super().__init__(opener=opener)
        self._said = said

    def receive(self, envelope: bytes, *, now: UnixS, introducer: PeerId | None = None) -> NodeRecord | Refusal:
        known = self._said.get(envelope)
        return super().receive(envelope if known is None else known[0], now=now, introducer=introducer)


class MembershipWorld:
    """All hosts, on one heap.

    Args:
        heap, network: of a larger world that this is a part of; its own if not given.
    """

    def __init__(
        self,
        seed: int,
        *,
        full_view: int = FULL_VIEW,
        heap: EventHeap | None = None,
        network: Network | None = None,
    ) -> None:
        self.seed = seed
        self.full_view = full_view
        self.heap = EventHeap() if heap is None else heap
        self.chance = random.Random(seed)
        self.network = network or Network(seed, random.Random(f"{seed}/network"))
        self.hosts: dict[PeerId, Host] = {}
        self._said: dict[bytes, tuple[bytes, NodeRecord]] = {}

    # Driving it.

    @property
    def now(self) -> float:
        return self.heap.now

    def run(self, seconds: float) -> None:
        """Lets simulated time pass."""
        self.heap.run(self.heap.now + seconds)

    def run_until(self, condition: Callable[[], bool], limit_s: float, step_s: float = 0.25) -> float:
        """Lets time pass until the condition holds, and returns how long that took; infinity when it never did."""
        return self.heap.run_until(condition, limit_s=limit_s, step_s=step_s)

    def add(
        self,
        *,
        named: Iterable[Host] = (),
        book: PeerBook | None = None,
        shards: tuple[ShardRecord, ...] = (SHARD,),
        skew_s: float = 0.0,
        peer: PeerId | None = None,
        place: Place | None = None,
    ) -> Host:
        """A new host, which enters by the named ones. Without a shard it is a user.

        Args:
            place: in the network; one where it can be dialled if not given.
        """
        index = len(self.hosts)
        peer = peer or PeerId(f"12D3KooW{index:044d}")
        if place is None:
            place = self.network.place(self.chance)
            place.nat = Nat.OPEN
        table = _Table(self._said, self._open)
        core = Membership(
            peer,
            serve=bool(shards),
            named=[WayIn(host.id, (host.address,)) for host in named],
            book=book or PeerBook(),
            exchange=RecordExchange(table, random.Random(f"{self.seed}/{index}/x")),
            chance=random.Random(f"{self.seed}/{index}"),
            full_view=self.full_view,
        )
        host = self.hosts[peer] = Host(index, peer, core, place, shards, skew_s)
        core.start(self.moment(host))
        self._pump(host)
        if shards:
            self._announce(host)
        return host

    def kill(self, host: Host, *, silently: bool = True) -> None:
        """Ends a host; silently, as a lost line or power does, or closing its connections, as a killed process does."""
        host.is_up = False
        if not silently:
            for peer in sorted(host.connections):
                self._after(self._latency(host, self.hosts[peer]), self._close, self.hosts[peer], host)

    def up(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.is_up]

    def view(self, host: Host) -> set[PeerId]:
        """The nodes that a host believes to live, without itself."""
        records = host.core.exchange.serving(None, now=self.moment(host).unix_s)
        return {PeerId(record.peer) for record in records} - {host.id}

    def knows(self, host: Host, other: Host) -> bool:
        """Whether a host believes that another one lives; itself it knows."""
        record = host.core.exchange.table.record_of(other.id, now=self.moment(host).unix_s)
        return host is other or (record is not None and bool(record.shards))

    # Events.

    def moment(self, host: Host) -> Moment:
        """What its clocks show."""
        return Moment(MonotonicS(self.now), UnixS(EPOCH_S + self.now + host.skew_s))

    def _after(self, delay_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        self.heap.after(delay_s, happen, *arguments)

    def _pump(self, host: Host) -> None:
        for command in host.core.commands():
            match command:
                case Ask():
                    self._ask(host, command)
                case Dial():
                    self._dial(host, command)
                case Disconnect():
                    self._after(0.0, self._disconnect, host, self.hosts[command.peer])
                case JoinDht():
                    self._after(1.0, self._end, host, host.core.joined_dht)
                case Publish():
                    self._after(1.0, self._end, host, host.core.published)
                case _:
                    pass
        at = host.core.get_timer()
        if at is not None and at < host.timer_at:
            host.timer_at = at
            self.heap.at(at, self._on_timer, host, at)

    def _on_timer(self, host: Host, at: float) -> None:
        if host.timer_at != at or not host.is_up:
            return
        host.timer_at = math.inf
        host.core.handle_timer(self.moment(host))
        self._pump(host)

    def _end(self, host: Host, report: Callable[..., None]) -> None:
        if host.is_up:
            report(self.moment(host), is_done=True)
            self._pump(host)

    def _announce(self, host: Host) -> None:
        if not host.is_up:
            return
        models = dict.fromkeys(ModelId(shard.model_id) for shard in host.shards)
        host.core.announce(self._record(host), list(models), self.moment(host))
        self._pump(host)
        self._after(ANNOUNCE_S * self.chance.uniform(0.75, 1.25), self._announce, host)

    def _dial(self, host: Host, dial: Dial) -> None:
        other = self.hosts[dial.peer]
        if self._can_talk(host, other):
            self._count(host, 4, 1200)
            self._after(SETUP_ROUND_TRIPS * 2 * self._latency(host, other), self._connect, host, other)
        else:
            self._after(TIMEOUT_S, self._fail_dial, host, other)

    def _connect(self, host: Host, other: Host) -> None:
        if not self._can_talk(host, other) or len(other.connections) >= MAX_CONNECTIONS:
            self._fail_dial(host, other)
            return
        if not host.is_up:
            return
        if other.id not in host.connections:
            self._count(other, 4, 1200)
            for one, two in ((host, other), (other, host)):
                one.connections.add(two.id)
                one.core.connection_opened(two.id, self.moment(one))
        host.core.dialled(other.id, self.moment(host))
        self._pump(host)
        self._pump(other)

    def _fail_dial(self, host: Host, other: Host) -> None:
        if host.is_up:
            host.core.dialled(other.id, self.moment(host), error="nobody answers")
            self._pump(host)

    def _disconnect(self, host: Host, other: Host) -> None:
        if host.is_up:
            self._close(host, other)
            if self._can_talk(host, other):
                self._after(self._latency(host, other), self._close, other, host)

    def _close(self, host: Host, other: Host) -> None:
        if host.is_up and other.id in host.connections:
            host.connections.discard(other.id)
            host.core.connection_closed(other.id, self.moment(host))
            self._pump(host)

    def _ask(self, host: Host, ask: Ask) -> None:
        other = self.hosts[ask.peer]
        self._count(host, 1, len(ask.request))
        self._after(self._latency(host, other, len(ask.request)), self._serve, host, other, ask)
        self._after(TIMEOUT_S, self._give_up, host, ask)

    def _serve(self, host: Host, other: Host, ask: Ask) -> None:
        if not self._can_talk(host, other) or host.id not in other.connections:
            return
        other.bytes_received += len(ask.request) + OVERHEAD_BYTES
        answer = other.core.asked(host.id, ask.request, self.moment(other))
        self._count(other, 1, len(answer))
        self._after(self._latency(other, host, len(answer)) + 0.005, self._deliver, host, other, ask, answer)
        self._pump(other)

    def _deliver(self, host: Host, other: Host, ask: Ask, answer: bytes) -> None:
        if self._can_talk(host, other) and other.id in host.connections:
            host.bytes_received += len(answer) + OVERHEAD_BYTES
            host.core.answered(ask.token, answer, self.moment(host))
            self._pump(host)

    def _give_up(self, host: Host, ask: Ask) -> None:
        if host.is_up:  # of no effect when the answer has come
            host.core.not_answered(ask.token, Silence.TIMEOUT, "silent", self.moment(host))
            self._pump(host)

    def _can_talk(self, host: Host, other: Host) -> bool:
        return host.is_up and other.is_up and self.network.can_talk(host.place, other.place)

    def _latency(self, sender: Host, receiver: Host, num_bytes: int = 100) -> float:
        path = self.network.path(sender.place, receiver.place)
        return self.network.delay(sender.place, receiver.place, path, num_bytes + OVERHEAD_BYTES, self.now)

    def _count(self, host: Host, num: int, size: int) -> None:
        host.num_sent += num
        host.bytes_sent += size + OVERHEAD_BYTES * num

    # Records.

    def _record(self, host: Host) -> bytes:
        host.sequence += 1
        issued_at = self.moment(host).unix_s
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=host.id,
            sequence=int(issued_at * 1000),
            issued_at=issued_at,
            expires_at=issued_at + TTL_S,
            data_addresses=("203.0.113.77:4601", "[2001:db8:1234:5678::77]:4601"),
            libp2p_addresses=(host.address, host.address.replace("4600", "4602")),
            device="NVIDIA GeForce RTX 4090",
            memory_free_bytes=1 << 34,
            shards=host.shards,
            num_sessions=1,
            software="fusion-node 0.1.0",
        )
        envelope = msgspec.msgpack.encode(SignedEnvelope(body=msgspec.msgpack.encode(record), signature=bytes(64)))
        self._said[envelope] = envelope, record
        self._after(2 * TTL_S, self._forget, envelope)
        return envelope

    def _forget(self, envelope: bytes) -> None:
        del self._said[envelope]

    def _open(self, envelope: bytes, now: UnixS) -> NodeRecord | Refusal:
        if envelope not in self._said:
            return Refusal.WRONG_KEY
        _, record = self._said[envelope]
        if record.issued_at > now + 30.0:
            return Refusal.FUTURE_DATED
        return Refusal.EXPIRED if record.expires_at <= now else record


@dataclass(frozen=True)
class IdleCost:
    """Of one node of a swarm that nobody uses, per second. DHT traffic is not in it."""

    num_hosts: int
    sent_Bps_mean: float
    sent_Bps_p99: float
    received_Bps_mean: float
    messages_per_s_mean: float
    messages_per_s_p99: float
    connections_mean: float
    connections_max: int
    records_mean: float
    estimated_hosts_median: float


def grown(seed: int, num_hosts: int, *, over_s: float, num_bootstraps: int = 3) -> MembershipWorld:
    """A swarm that has grown evenly over some time; newcomers name some of the first hosts."""
    world = MembershipWorld(seed)
    first = [world.add()]
    first += [world.add(named=first[:1]) for _ in range(num_bootstraps - 1)]
    for _ in range(num_hosts - num_bootstraps):
        world.run(over_s / num_hosts)
        world.add(named=first)
    return world


def started_at_once(seed: int, num_hosts: int, *, over_s: float = 10.0, full_view: int = FULL_VIEW) -> MembershipWorld:
    """A swarm whose hosts start within some seconds, each naming a few of those that are there already, by chance."""
    world = MembershipWorld(seed, full_view=full_view)
    for number in range(num_hosts):
        world.run(over_s / num_hosts)
        world.add(named=world.chance.sample(world.up(), min(number, 4)))
    return world


def idle_cost(
    num_hosts: int, *, seed: int = 1, settle_s: float = 80.0, measure_s: float = 40.0, full_view: int = FULL_VIEW
) -> IdleCost:
    """Starts a swarm, lets it settle, and measures what an idle node costs.

    10,000 hosts take some twenty minutes of CPU.
    """
    world = started_at_once(seed, num_hosts, full_view=full_view)
    world.run(settle_s)
    for host in world.up():
        host.num_sent = host.bytes_sent = host.bytes_received = 0
    world.run(measure_s)
    hosts = world.up()
    sent = sorted(host.bytes_sent / measure_s for host in hosts)
    messages = sorted(host.num_sent / measure_s for host in hosts)
    estimates = [host.core.num_nodes_estimated(world.moment(host)) for host in hosts[:: max(1, len(hosts) // 100)]]
    return IdleCost(
        num_hosts=num_hosts,
        sent_Bps_mean=statistics.fmean(sent),
        sent_Bps_p99=sent[int(0.99 * len(sent))],
        received_Bps_mean=statistics.fmean(host.bytes_received / measure_s for host in hosts),
        messages_per_s_mean=statistics.fmean(messages),
        messages_per_s_p99=messages[int(0.99 * len(messages))],
        connections_mean=statistics.fmean(len(host.connections) for host in hosts),
        connections_max=max(len(host.connections) for host in hosts),
        records_mean=statistics.fmean(len(world.view(host)) for host in hosts[:: max(1, len(hosts) // 100)]),
        estimated_hosts_median=statistics.median(estimates),
    )
