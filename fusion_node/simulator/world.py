"""A simulated swarm: hosts, links, faults and users on one heap, and what is measured of them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from fusion_node.client.answer_core import Repaired, RepairKind
from fusion_node.daemon.placement_core import Choice, Intend
from fusion_node.errors import ConfigError, PeerError, PeerRefused
from fusion_node.simulator import placing
from fusion_node.simulator.arithmetic import Weights
from fusion_node.simulator.churn import Churn
from fusion_node.simulator.devices import DEVICES
from fusion_node.simulator.heap import EventHeap
from fusion_node.simulator.links import Host, Links
from fusion_node.simulator.membership_world import ANNOUNCE_S, EPOCH_S
from fusion_node.simulator.metrics import Ejection, Metrics, Sample, Stall, Standing
from fusion_node.simulator.network import REGION_SHARES, REGIONS, Network, Way
from fusion_node.simulator.node import FINE_AFTER_S, Character, Node
from fusion_node.simulator.planning import Known, OwnScheduler, Scheduler, believed
from fusion_node.simulator.settings import Settings
from fusion_node.simulator.user import User
from fusion_node.simulator.views import ModelledViews, RealViews, Views
from fusion_node.types import LayerRange, ModelId, PeerId
from p2p.records import Plan, Refusal
from scheduler import swarm_rate
from scheduler.cost_model import Workload

SAMPLE_EVERY_S = 10.0
GRACE_S = 30.0
"""That a node which was told to stop serves on, at most."""

HANG_S = 20.0
"""On average, of a process that is stopped."""

GARBAGE_STEPS_SHARE = 0.02
"""Of the steps of a node that answers garbage now and then."""

LIE = 5.0
"""Times as fast and as large a liar claims to be."""

LOAD_S = 20.0
"""From joining until its layers are there and served; weights come from its own disk."""

NOTICE_S = 60.0
"""By which the world decides before it happens whom a fault will befall: no step of the simulation is longer."""

FINE_BEFORE_S = 1.0
"""Before something befalls a node, from which steps over it are taken one by one, so that it may hit them anywhere."""

FAULT_REMEMBERED_S = 30.0
"""For which what has befallen a node is why it is replaced: the longest stall is about as long."""

PLACED_BY = 24
"""Nodes that a newcomer knows when it chooses its layers, at most: a real one looks at the nearest 96, which takes some
times as long as everything else that a node does here."""

MAX_LAYERS_SHARE = 1 / 3
"""Of a model, that one node serves at most: who holds a small model whole would leave nothing to simulate."""


class World:
    """A world that is ready to run.

    Args:
        scheduler: by which users choose routes.
        placer: by which nodes get their layers; None: each chooses for itself, as the product's do.

    Attributes:
        chance: of who comes, when and for how long. What nodes and users do draws from other streams, so that all
            worlds of a seed have the same hosts, whatever they are compared for.
        first_layers: at which a stage may begin; None: at any.
        is_closing: no more questions are asked.
    """

    def __init__(
        self, settings: Settings, *, scheduler: Scheduler | None = None, placer: placing.Placer | None = None
    ) -> None:
        settings.check()
        self.settings = settings
        self.scheduler = scheduler or OwnScheduler()
        self._placer = placer
        self.model = settings.shape
        self.model_id = ModelId("ab" * 32)
        self.numerics = "f16r32"
        self.heap = EventHeap()
        self.chance = random.Random(f"{settings.seed}/world")
        self._faults_chance = random.Random(f"{settings.seed}/faults")
        self._placing_chance = random.Random(f"{settings.seed}/placing")
        self.rows_chance = random.Random(f"{settings.seed}/rows")
        self.network = Network(settings.seed, random.Random(f"{settings.seed}/network"))
        self.links = Links(self.heap, self.network, self._find)
        self.weights = Weights(self.model.num_layers)
        self.churn = Churn(settings.mean_lifetime_s, settings.day_share)
        self.metrics = Metrics()
        self.nodes: dict[PeerId, Node] = {}
        self.users: dict[PeerId, User] = {}
        self.live: list[Node] = []
        self.parted_at = self.healed_at = -math.inf
        self.is_closing = False
        self.loading: dict[PeerId, Node] = {}
        self._place_in_live: dict[PeerId, int] = {}
        self._holders = [0] * self.model.num_layers
        self._plans: dict[bytes, Plan] = {}
        every = settings.stage_layers
        self.first_layers = None if every == 1 else frozenset(range(0, self.model.num_layers, every))
        self.work = swarm_rate.Work(
            self.model.num_layers, int(self.model.layer_bytes), self.model.row_bytes, self.first_layers
        )
        self._devices = [d for d in DEVICES if d.num_layers(self.model) >= every]
        self._num_hosts = 0
        self.views: Views = RealViews(self) if settings.is_membership_real else ModelledViews(self)
        self._populate()

    @property
    def unix_s(self) -> float:
        return EPOCH_S + self.heap.now

    # running

    def run(self) -> None:
        """Lets the whole time pass, and then lets the questions that are open come to their ends."""
        self.heap.run(self.settings.duration_s)
        self.is_closing = True
        limit_s = self.settings.duration_s + 3600.0
        while self.heap.now < limit_s and any(user.request is not None for user in self.users.values()):
            self.heap.run(self.heap.now + 5.0)
        for node in self.nodes.values():
            node.check_leases()
        self.metrics.bytes_sent += sum(host.bytes_sent for host in (*self.nodes.values(), *self.users.values()))

    def _populate(self) -> None:
        settings, chance = self.settings, self.chance
        first = [self._join(remaining_s=self.churn.remaining_s(chance), is_first=True) for _ in range(settings.nodes)]
        if self._placer is not None:
            for node, layers in zip(first, self._placer.first(self, first), strict=True):
                node.hold(layers)
                self._serve(node)
        for number in range(settings.users):
            index = self._next_index()
            user = User(self, index, PeerId(f"12D3KooW{index:044d}"), self.network.place(chance, is_home=True))
            self.users[user.peer] = user
            self.views.user_joined(user)
            first_s = chance.uniform(0.0, max(1.0, min(settings.think_s, settings.duration_s / 2)))
            self.heap.after(first_s + 0.001 * number, user.ask)
        for region in range(len(REGIONS)):
            self._plan_arrival(region)
        for kind, rate in (("hang", settings.hangs_per_hour), ("reset", settings.resets_per_hour)):
            self._plan_fault(kind, rate, 0.0)
        for each in settings.partitions:
            self.heap.at(each.start_s, self._part, each.share)
            self.heap.at(each.stop_s, self._heal)
        self.heap.after(0.0, self._sample)

    def _next_index(self) -> int:
        self._num_hosts += 1
        return self._num_hosts

    def _find(self, peer: PeerId) -> Host | None:
        return self.nodes.get(peer) or self.users.get(peer)

    def host(self, peer: PeerId) -> Host:
        """A host that there is or was."""
        found = self._find(peer) or self.loading.get(peer)
        if found is None:
            raise KeyError(peer)
        return found

    # nodes that come and go

    def join(self) -> Node:
        """One more node comes, and stays."""
        return self._join(remaining_s=math.inf)

    def _join(self, *, remaining_s: float, is_first: bool = False, region: int | None = None) -> Node:
        chance, settings = self.chance, self.settings
        index = self._next_index()
        place = self.network.place(chance)
        if region is not None:
            place.region = region
        device = chance.choices(self._devices, [each.share for each in self._devices])[0]
        kind = chance.random()
        character = Character()
        if kind < settings.garbage_share:
            character = Character(garbage_share=GARBAGE_STEPS_SHARE)
        elif kind < settings.garbage_share + settings.liars_share:
            character = Character(claim=LIE)
        node = Node(self, index, PeerId(f"12D3KooW{index:044d}"), place, device, character)
        node.stays_s = remaining_s
        node.leaves_by = chance.random()
        self.loading[node.peer] = node
        if self._placer is not None:
            if not is_first:
                node.hold(self._placer.newcomer(self, node))
                self.heap.after(LOAD_S, self._serve, node)
            return node
        choice = Choice(placing.host_of(node, self.capacity_layers(node)), self.work)
        if is_first:
            # They have joined one after another, long before the beginning.
            result = choice.look(self.seen_by(node, []), placing.NodeLegs(self))
            node.hold(self._settled(result.move.layers if isinstance(result, Intend) else result.decision.layers))
            self._serve(node)
        else:
            self._choose(node, choice, [])
        return node

    def capacity_layers(self, node: Node) -> int:
        """That a node serves at most: who holds a small model whole would leave nothing to simulate."""
        least = self.settings.stage_layers
        return min(node.device.num_layers(self.model), max(least, math.ceil(self.model.num_layers * MAX_LAYERS_SHARE)))

    def _choose(self, node: Node, choice: Choice, known: list[Node]) -> None:
        """As fusion_node.daemon.mover does it: looks, tells what it intends, waits, and looks again.

        Args:
            known: nodes that it has looked at before.
        """
        result = choice.look(self.seen_by(node, known), placing.NodeLegs(self))
        if isinstance(result, Intend):
            node.hold(result.move.layers)
            self.heap.after(result.wait_s, self._choose, node, choice, known)
        else:
            node.hold(self._settled(result.decision.layers))
            self.heap.after(LOAD_S, self._serve, node)

    def _settled(self, layers: LayerRange | None) -> LayerRange:
        if layers is None:
            raise ConfigError(
                f"no range of {self.model.name} that begins every {self.settings.stage_layers} layers fits on a device"
            )
        return layers

    def seen_by(self, node: Node, known: list[Node]) -> list[swarm_rate.Host]:
        """Nodes that a newcomer knows: some of those that serve, and of those that load.

        Args:
            known: those that it has looked at before, whom it still knows if they are there; brought up to date.
        """
        known[:] = [each for each in known if each.is_up]
        seen = {each.peer for each in known}
        num_serving = sum(each.is_serving for each in known)
        loading = [each for each in self.loading.values() if each.holds and each is not node]
        for group, room in ((self.live, PLACED_BY - num_serving), (loading, PLACED_BY - len(known) + num_serving)):
            if room > 0:
                drawn = group if len(group) <= PLACED_BY else self._placing_chance.sample(group, PLACED_BY)
                known += [each for each in drawn if each.peer not in seen][:room]
        return [each.placed or self._placed(each) for each in known]

    def _placed(self, node: Node) -> swarm_rate.Host:
        node.placed = placing.host_of(node, self.capacity_layers(node))
        return node.placed

    def _serve(self, node: Node) -> None:
        self.loading.pop(node.peer, None)
        node.joined_at = self.heap.now
        node.is_serving = True
        node.placed = None
        if math.isfinite(node.stays_s):
            heapq.heappush(node.due, self.heap.now + node.stays_s)
            self.heap.after(node.stays_s, self._leave, node)
        self.nodes[node.peer] = node
        self._place_in_live[node.peer] = len(self.live)
        self.live.append(node)
        self.metrics.joined += 1
        self._count(node, 1)
        self.views.joined(node)

    def _leave(self, node: Node) -> None:
        kind = node.leaves_by
        if kind < self.settings.power_share:
            node.has_power = False
            self._end_node(node, "power")
        elif kind < self.settings.power_share + self.settings.drain_share:
            node.befallen("drain")
            node.drain(GRACE_S)
            self._drained(node, self.heap.now + GRACE_S)
        else:
            self._end_node(node, "kill")

    def _drained(self, node: Node, until: float) -> None:
        if node.num_sessions and self.heap.now < until and not node.is_frozen:
            self.heap.after(1.0, self._drained, node, until)
        else:
            self._end_node(node, "drain")

    def _end_node(self, node: Node, fault: str) -> None:
        if not node.is_up:
            return
        node.befallen(fault)
        self.metrics.faults[fault] += 1
        node.is_up = False
        node.left_at = self.heap.now
        self.metrics.left += 1
        if not node.is_frozen:
            self._count(node, -1)
        self.links.died(node)
        node.ended()
        self.views.left(node, silently=fault == "power")
        place = self._place_in_live.pop(node.peer)
        last = self.live.pop()
        if last is not node:
            self.live[place] = last
            self._place_in_live[last.peer] = place
        # Forgotten when nobody speaks of it any more, so that a day of churn fits into memory.
        self.heap.after(3600.0, self._bury, node)

    def _bury(self, node: Node) -> None:
        self.metrics.bytes_sent += node.bytes_sent
        self.nodes.pop(node.peer, None)

    def _count(self, node: Node, change: int) -> None:
        holders = self._holders
        for layer in range(node.layers.start, node.layers.stop):
            holders[layer] += change

    def _plan_arrival(self, region: int) -> None:
        after_s = self.churn.arrival_after_s(
            self.settings.nodes, region, REGION_SHARES[region], self.heap.now, self.chance
        )
        if math.isfinite(after_s):
            self.heap.after(after_s, self._arrive, region)

    def _arrive(self, region: int) -> None:
        self._join(remaining_s=self.churn.lifetime_s(self.chance), region=region)
        self._plan_arrival(region)

    # faults

    def _plan_fault(self, kind: str, per_hour: float, after_s: float) -> None:
        """Args:
        after_s: the last one of this kind.
        """
        rate = per_hour / 3600.0 * self.settings.nodes
        if rate > 0.0:
            at = after_s + self._faults_chance.expovariate(rate)
            self.heap.at(at - NOTICE_S, self._draw_victim, kind, per_hour, at)

    def _draw_victim(self, kind: str, per_hour: float, at: float) -> None:
        self._plan_fault(kind, per_hour, at)
        if self.live:
            node = self._faults_chance.choice(self.live)
            heapq.heappush(node.due, at)
            self.heap.at(at, self._fault, kind, node)

    def _fault(self, kind: str, node: Node) -> None:
        if not node.is_up:
            return
        if kind == "hang":
            self.freeze(node, self._faults_chance.expovariate(1.0) * HANG_S + 0.2)
        else:
            self.reset(node)

    def freeze(self, node: Node, seconds: float) -> None:
        """Stops a node for a while."""
        if node.is_frozen or not node.is_up:
            return
        node.befallen("hang")
        self.metrics.faults["hang"] += 1
        node.is_frozen = True
        self._count(node, -1)
        self.links.froze(node)
        self.heap.after(seconds, self._thaw, node)

    def _thaw(self, node: Node) -> None:
        if node.is_up:
            node.is_frozen = False
            self._count(node, 1)
            node.befallen("hang")
            self.links.thawed(node)

    def reset(self, node: Node) -> None:
        """Resets all links of a node."""
        self.metrics.faults["reset"] += 1
        node.befallen("reset")
        for link in list(node.links.values()):
            self.links.reset(link)

    def kill(self, node: Node) -> None:
        """Ends a node's process."""
        self._end_node(node, "kill")

    def _part(self, share: float) -> None:
        self.parted_at = self.heap.now
        hosts: list[Host] = [*self.nodes.values(), *self.users.values()]
        apart = self._faults_chance.sample(hosts, max(1, round(share * len(hosts))))
        for host in apart:
            host.place.part = 1
        self.metrics.faults["partition"] += 1
        self.links.parted(apart)

    def _heal(self) -> None:
        self.healed_at = self.heap.now
        hosts = [host for host in (*self.nodes.values(), *self.users.values()) if host.place.part]
        for host in hosts:
            host.place.part = 0
        self.links.parted(hosts)

    # what nodes and users share

    def open_plan(self, envelope: bytes) -> Plan | Refusal:
        """The plan behind an envelope: nothing is signed here."""
        return self._plans.get(envelope, Refusal.WRONG_KEY)

    def sign_plan(self, plan: Plan) -> bytes:
        """An envelope that stands for a plan."""
        envelope = b"%b/%d" % (plan.session, plan.epoch)
        self._plans[envelope] = plan
        return envelope

    def session_ended(self, session: bytes) -> None:
        """It is forgotten once nothing of it can be under way any more."""
        self.heap.after(300.0, self._forget_session, session)

    def _forget_session(self, session: bytes) -> None:
        epoch = 0
        while self._plans.pop(b"%b/%d" % (session, epoch), None) is not None:
            epoch += 1

    def quiet_s(self, peers: Iterable[PeerId]) -> float:
        """How long nothing will befall any of these nodes, nor the network as a whole; 0 when something does now.

        For the simulation itself, which takes large steps meanwhile: nobody in it can know.
        """
        now = self.heap.now
        until = now + NOTICE_S
        for part in self.settings.partitions:
            for at in (part.start_s, part.stop_s):
                if at - FINE_BEFORE_S < now < at + FINE_AFTER_S:
                    return 0.0
                until = min(until, at) if at > now else until
        for peer in peers:
            node = self.nodes.get(peer)
            until = min(until, now if node is None else node.quiet_until(now))
        return max(0.0, until - FINE_BEFORE_S - now)

    def measure(self, user: User, chance: random.Random) -> list[Known]:
        """Of the nodes whose records a user has, those that answer it now: at most ``candidates``."""
        known = []
        for node in self.views.known_to(user, self.settings.candidates, chance):
            node.refresh_record(ANNOUNCE_S)
            if not node.is_up or node.is_frozen or node.is_draining or node.place.part != user.place.part:
                continue
            path = self.network.path(user.place, node.place)
            if path.way is not Way.NONE:
                known.append(Known(node, 2 * path.one_way_s, believed(node, user.claims, self.heap.now)))
        return known

    def workload(self, num_prompt: int, num_positions: int) -> Workload:
        """What a route is wanted for."""
        return Workload(num_positions, num_prompt, row_bytes=self.model.row_bytes)

    # what is measured

    def repaired(self, user: User, event: Repaired) -> None:
        """An answer went on after a repair."""
        metrics, now = self.metrics, self.heap.now
        node = self.nodes.get(event.peer)
        fault = "none"
        if node is None:
            fault = "kill"
        elif node.fault and (not node.is_up or node.is_frozen or now - node.fault_at < FAULT_REMEMBERED_S):
            fault = node.fault
        elif self._was_parted(user, node):
            fault = "partition"
        metrics.stalls.append(Stall(now, event.stall_s, fault, event.cause, event.kind.value))
        num_bytes = event.replayed_positions * self.model.row_bytes
        metrics.replayed_bytes += num_bytes
        if event.kind is RepairKind.PREFILLED:
            metrics.prefilled_bytes += num_bytes
        if fault == "none" and event.kind is RepairKind.PATCHED and event.cause not in ("refused", "draining"):
            metrics.false_ejections += 1

    def ejected(
        self, user: User, route: Sequence[PeerId], kept: Collection[PeerId], errors: Mapping[PeerId, PeerError]
    ) -> None:
        """An answer goes on over another route.

        Args:
            route, kept: its nodes before, in order; and those that still are.
            errors: what the user has said against some of them.
        """
        standings = [self._standing(user, peer, errors.get(peer)) for peer in route]
        for place, peer in enumerate(route):
            if peer in kept:
                continue
            standing, beside = standings[place], standings[max(0, place - 1) : place] + standings[place + 1 : place + 2]
            if standing is Standing.WELL and any(not each.is_wrong for each in beside):
                standing = Standing.BESIDE
            others = tuple(each.value for index, each in enumerate(standings) if index != place)
            error = str(errors.get(peer, ""))
            self.metrics.ejections.append(Ejection(self.heap.now, peer, standing, error, others))

    def _standing(self, user: User, peer: PeerId, error: PeerError | None) -> Standing:
        node, now = self.nodes.get(peer), self.heap.now
        if node is None or not node.is_up:
            return Standing.GONE
        if node.is_draining:
            return Standing.LEAVING
        if node.is_frozen or (node.fault and now - node.fault_at < FAULT_REMEMBERED_S):
            return Standing.HANG if node.is_frozen else Standing(node.fault)
        if self._was_parted(user, node):
            return Standing.PARTITION
        if isinstance(error, PeerRefused):
            return Standing.REFUSED
        return Standing.WELL if node.character.claim == 1.0 else Standing.LIES

    def _was_parted(self, user: User, node: Node) -> bool:
        now = self.heap.now
        lately = now - self.healed_at < FAULT_REMEMBERED_S or self.parted_at > self.healed_at
        return lately or user.place.part != node.place.part

    def _sample(self) -> None:
        covered = sum(1 for count in self._holders if count > 0) / len(self._holders)
        active = sum(1 for user in self.users.values() if user.request is not None)
        self.metrics.samples.append(Sample(self.heap.now, len(self.live), covered, active))
        if self.heap.now < self.settings.duration_s:
            self.heap.after(SAMPLE_EVERY_S, self._sample)
