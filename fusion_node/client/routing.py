"""Who serves an answer: finds the nodes of a model, measures them, plans a route, and remembers who failed.

What is planned with: the user's own round trips and rates, what nodes say of the legs between them, and network
coordinates for the rest (fusion_node.client.topology); speeds as nodes claim them, corrected by what rounds really took
(scheduler.claims). A route never holds a node that was not measured: one that the planner chose by its coordinate is
measured, and then it is planned again.

Where the user wants fusion, nodes that hold slices form groups (scheduler.groups), which are planned with as nodes are.

Above 600 lines: routes, patches and alternates are planned with the same look at the swarm, which all answers share.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from fusion_node.client import claims_file, topology
from fusion_node.client.connection import MeasuredNode, SwarmConnection
from fusion_node.client.group_members import (
    kept_candidates,
    rejections_of_members,
    stage_candidate,
    with_members,
)
from fusion_node.client.route_problem import why_no_route
from fusion_node.client.topology import SwarmTopology
from fusion_node.client.user_rules import UserRules
from fusion_node.errors import NoRoute, PeerError
from fusion_node.slices import Dims
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId, UnixS, is_group, members_of
from p2p.first_answers import GRACE_S
from p2p.records import NodeRecord, ShardRecord
from scheduler.claims import ClaimBook, StageStep
from scheduler.cost_model import MESSAGE_OVERHEAD_S, Workload
from scheduler.groups import Formed, GroupLegs, SliceHolder, form_groups, plan_with
from scheduler.ownership import Ownership, OwnershipBreach
from scheduler.planner import plan_patch, plan_route
from scheduler.plans import Avoid, Objective, Reason, Rejection, Topology, Uncovered
from scheduler.plans import Planned as PlannedRoute
from scheduler.rules import Rules
from scheduler.topology import Candidate, Legs, RouteStage
from scheduler.vivaldi import Coordinate

ROUTE_PATIENCE_S = 8.0
"""How long layers may stay uncovered before that is an error: nodes that start together announce one by one."""

ROUTE_RETRY_S = 0.5

NODES_FRESH_S = 10.0
"""How long an answer may be planned with nodes that were found for an earlier one, while all their links hold: half of
what a record is old on average. A node that is full by now refuses, and the next plan looks anew."""

SHARED_LOOK_S = 5.0
"""For so long a look for the alternates of one answer is that of the others: half of what passes between two of one."""

NEWS_S = 1.0
"""How long those who have just told of themselves may all stay silent before it goes on without them, as with a look,
which waits for the same dials: whoever makes itself known at an address where nobody is must not hold patches up."""

AVOID_S = 30.0
"""How long a node that refused or could not be reached is left out of plans that can do without it."""

EXTRA_PINGS = 3
"""Of each node for a plan that is explained."""

MEASURING_PLANS = 4
"""Plans whose nodes are measured where they were not yet. The next one does with those that were."""

CANDIDATES_ON_LOOP = 48
"""From so many on, a plan takes more than about 20 ms, and is made in a thread."""

HOLDER_WEIGHT = 5
"""Of a node with a slice, beside one of whole layers: groups are weighed in many ways."""

CHUNKS_PER_PROMPT = 4
"""In which a prompt goes through a route of two stages (fusion_node.client.swarm), if none gets too long or short."""

MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 32, 256

MAX_USER_STEPS = 32
"""Of which the median counts."""

Placed: TypeAlias = tuple[MeasuredNode, LayerRange]
"""A node, and what it is to serve."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Nodes in order, and the layers that each of them is to serve.

    Attributes:
        plan: what the planner says of the route as it was made; None for one that was put together otherwise.
    """

    stages: tuple[Placed, ...] = ()
    plan: PlannedRoute | None = field(default=None, compare=False, repr=False)

    @property
    def places(self) -> tuple[tuple[PeerId, LayerRange], ...]:
        """Who serves what, for comparison with another route."""
        return tuple((node.peer, layers) for node, layers in self.stages)

    @property
    def expected_step_s(self) -> float | None:
        """Seconds that a decode step is expected to take, all legs and stages and the user's part; None if unknown."""
        return None if self.plan is None else self.plan.cost.seconds_per_step

    @property
    def expected_prefill_s(self) -> float | None:
        """Seconds from an open session to the first token, of the prompt that was planned for; None if unknown."""
        return None if self.plan is None else self.plan.cost.time_to_first_token_s


@dataclass(slots=True)
class Look:
    """The swarm as one look found it.

    Attributes:
        records: of all nodes of the model.
        nodes: those whose round trip was to be measured, reached or not.
        coordinate: of the user at that time.
    """

    records: dict[PeerId, NodeRecord] = field(default_factory=dict)
    nodes: dict[PeerId, MeasuredNode] = field(default_factory=dict)
    coordinate: Coordinate | None = None

    def add(self, nodes: Iterable[MeasuredNode]) -> None:
        """What was measured of nodes; of one that is measured twice at a time, the success counts."""
        for node in nodes:
            known = self.nodes.get(node.peer)
            if node.round_trip_s is not None or known is None or known.round_trip_s is None:
                self.nodes[node.peer] = node

    @property
    def reached(self) -> dict[PeerId, MeasuredNode]:
        return {peer: node for peer, node in self.nodes.items() if node.round_trip_s is not None}

    @property
    def unreachable(self) -> dict[PeerId, MeasuredNode]:
        return {peer: node for peer, node in self.nodes.items() if node.round_trip_s is None}


@dataclass(frozen=True, slots=True)
class Explained:
    """A plan with all that led to it.

    Attributes:
        found: the route, or what is missing.
        rejections: every candidate that does not serve and why; also those that could not be reached, and shards of the
            model that nobody can be planned with.
        problem: why there is no route, for people; empty when there is one.
        candidates, legs, workload: that it was planned with.
        measured_speeds: nodes whose claims were corrected by what rounds with them took.
        holders: of slices, among the candidates.
    """

    found: Planned | Uncovered
    look: Look
    candidates: tuple[Candidate, ...]
    legs: Legs
    workload: Workload
    rejections: tuple[Rejection, ...]
    measured_speeds: frozenset[PeerId] = frozenset()
    problem: str = ""
    holders: tuple[SliceHolder, ...] = ()


class Router:
    """Routes over the nodes of one model, and what may take the place of a part of one.

    Args:
        numerics: the class that nodes must serve.
        first_layers: at which a stage may begin; None: at any.
        row_bytes: of one hidden state on the wire.
        objective, rules: of the user.
        topology: what stages may be.
        num_members: of each group; None: any number.
        masks: sums of groups are masked.
        dims: sizes of the model's layers; needed where stages may be groups.
        claims_path: where measured speeds are kept for other processes; None: nowhere.

    Attributes:
        user_step_s: what the user's own part of a step takes: embedding, norm, head and sampling. 0 until it is known;
            then what it took of late, see ``observe_user_step``.
    """

    def __init__(
        self,
        connection: SwarmConnection,
        model: StoredModel,
        *,
        numerics: str,
        num_layers: int,
        first_layers: Collection[int] | None,
        row_bytes: int = 0,
        objective: Objective = Objective.LATENCY,
        rules: UserRules = UserRules(),  # noqa: B008 - frozen
        topology: Topology = Topology.PIPELINE,
        num_members: int | None = None,
        masks: bool = False,
        dims: Dims | None = None,
        claims_path: Path | None = None,
    ) -> None:
        self.topology = topology
        self.num_members = num_members
        self.masks = masks
        self.dims = None if topology is Topology.PIPELINE else dims
        self._connection = connection
        self._model = model
        self._numerics = numerics
        self._num_layers = num_layers
        self._first_layers = None if first_layers is None else frozenset(first_layers)
        self._row_bytes = row_bytes
        self.objective = objective
        self.rules = rules
        self.user_step_s = 0.0
        self._user_steps: deque[float] = deque(maxlen=MAX_USER_STEPS)
        self._claims = ClaimBook()
        self._claims_path = claims_path
        self._saved_at = time.monotonic()
        if claims_path is not None:
            claims_file.load(self._claims, claims_path, now=time.monotonic(), unix_now=UnixS(time.time()))
        self._has_news = False
        """Something was measured that is not in the file."""
        self._measured = {each.peer for each in self._claims.measurements(time.monotonic())}
        self._avoid: dict[PeerId, float] = {}
        self._silent: set[PeerId] = set()
        """Who was measured to the end of its time and did not answer, and has not since."""
        self._look = Look()
        self._look_until = 0.0
        self._looked_at = -math.inf
        """When the last look began."""
        self._refreshing = asyncio.Lock()
        self._legs: SwarmTopology | None = None

    def can_go_on(self, planned: Planned) -> bool:
        """Whether the nodes of an earlier answer are alive and have not refused lately."""
        now, links = time.monotonic(), self._connection.links
        peers = [each for peer, _ in planned.places for each in (peer, *members_of(peer))]
        return not (self.has_revoked(planned) or self.breaches(planned)) and all(
            (is_group(peer) or links.is_connected(peer)) and self._avoid.get(peer, 0.0) < now for peer in peers
        )

    def revoke(self, peer: PeerId) -> None:
        """No plan has that node any more, until ``allow_again``."""
        self.rules = replace(self.rules, revoked=self.rules.revoked | {peer})
        self._look_until = 0.0

    def allow_again(self, peer: PeerId) -> None:
        """Takes ``revoke`` back."""
        self.rules = replace(self.rules, revoked=self.rules.revoked - {peer})
        self._avoid.pop(peer, None)
        self._look_until = 0.0

    def is_revoked(self, peer: PeerId) -> bool:
        """Whether the user has revoked a node, or a member of a group."""
        return not self.rules.revoked.isdisjoint(members_of(peer))

    def has_revoked(self, planned: Planned) -> bool:
        """Whether a route has a node that was revoked since it was made."""
        return any(self.is_revoked(peer) for peer, _ in planned.places)

    def own(self, ownership: Ownership) -> None:
        """Other rules on who may own what, from the next plan on."""
        self.rules = replace(self.rules, ownership=ownership)
        self._look_until = 0.0

    def breaches(self, planned: Planned) -> tuple[OwnershipBreach, ...]:
        """Who is in a route against the rules on who may own what, as they are now."""
        if self.rules.ownership.allows_all:
            return ()
        stages = [stage_candidate(node, layers, self.dims) for node, layers in planned.stages]
        return self.rules.ownership.breaches(stages)

    def note_failure(self, error: PeerError) -> None:
        """The next plans do without that node if they can, and look around anew."""
        self._avoid[PeerId(error.peer)] = time.monotonic() + AVOID_S
        self._look_until = 0.0

    def observe_user_step(self, seconds: float) -> None:
        """The user's own part of a step, as it took place: beside the links' work, and other answers'."""
        self._user_steps.append(seconds)
        self.user_step_s = statistics.median(self._user_steps)

    def observe_round(
        self,
        places: Sequence[tuple[PeerId, LayerRange]],
        timings: Sequence[tuple[float, float]],
        *,
        num_rows: int,
        round_s: float,
    ) -> None:
        """Corrects what is believed of these nodes by a round that they served.

        Only of a step that was alone on its way: what waits behind others of this user is nobody's fault.

        Args:
            places: all stages of the route, in order.
            timings: seconds of compute and of queue of each, by its own word.
            num_rows: of the step, of which the last one came back.
            round_s: from the first byte that was sent to the last that came back, by our own clock.
        """
        peers = [peer for peer, _ in places]
        if self._legs is None or len(timings) != len(places):
            return
        steps = [
            StageStep(peer, len(layers), compute_s, queue_s)
            for (peer, layers), (compute_s, queue_s) in zip(places, timings, strict=True)
        ]
        groups = set(filter(is_group, peers))
        self._measured.update(set(peers) - groups)
        self._has_news = self._has_news or len(groups) < len(peers)
        if groups:
            now = time.monotonic()
            self._claims.observe_shared_round(steps, num_rows, unknown=groups, round_s=round_s, now=now)
            return
        legs_s = sum(
            self._legs.leg(sender, receiver).seconds(self._row_bytes * (1 if receiver is None else num_rows))
            + MESSAGE_OVERHEAD_S
            for sender, receiver in zip([None, *peers], [*peers, None], strict=True)
        )
        self._claims.observe_round(steps, num_rows, round_s=round_s, legs_s=legs_s, now=time.monotonic())

    def save(self, *, not_within_s: float = 0.0) -> None:
        """Writes what was measured, if that is kept, unless it was written a moment ago or nothing was measured."""
        now = time.monotonic()
        if self._claims_path is not None and self._has_news and now - self._saved_at >= not_within_s:
            self._saved_at, self._has_news = now, False
            claims_file.save(self._claims, self._claims_path, now=now, unix_now=UnixS(time.time()))

    async def route(
        self,
        num_positions: int,
        *,
        num_prompt: int = 0,
        avoid_peers: Collection[PeerId] = (),
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
        wait: bool = True,
    ) -> Planned:
        """The nodes that would serve a session now.

        Args:
            num_positions: that the session reserves.
            num_prompt: how many of them are the prompt's; 0 when that is not known.
            avoid_peers: planned with only where there is no other way, as with those of note_failure.
            avoid_pairs: of peers that had better not hand rows to one another.
            wait: whether to wait for layers that are not covered yet.

        Raises:
            NoPeers: nobody of the swarm can be reached.
            NoRoute: layers are covered by nobody, or by nobody with room or whom the user's rules allow, for longer
                than ROUTE_PATIENCE_S.
        """
        workload = self._workload(num_positions, num_prompt)
        avoid = Avoid(frozenset(avoid_peers), frozenset(avoid_pairs))
        explained = await self._search(workload, avoid, wait=wait, is_explained=False)
        if isinstance(explained.found, Uncovered):
            raise NoRoute(explained.problem)
        return explained.found

    async def explain(
        self,
        num_positions: int,
        *,
        num_prompt: int = 0,
        wait: bool = True,
    ) -> Explained:
        """As ``route``, with all that led to the route, or to there being none, and measured with more care.

        Raises:
            NoPeers: nobody of the swarm can be reached.
        """
        workload = self._workload(num_positions, num_prompt)
        look = await self._look_around(is_patient=True)
        await asyncio.gather(*(self._ping(peer) for peer in look.reached))
        return await self._search(workload, Avoid(), wait=wait, is_explained=True)

    async def patch(
        self,
        planned: Planned,
        lost: Collection[int],
        num_positions: int,
        *,
        num_rows: int = 0,
        num_generated: int = 0,
        avoid_peers: Collection[PeerId] = (),
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
    ) -> Planned | None:
        """The same route with other nodes in the place of some stages; all other stages keep peer and layers.

        Plans with the nodes that are known and connected, which takes milliseconds; if these do not do, with those that
        have told of themselves meanwhile; and only if that does not do either, it looks around once. Patience is the
        caller's.

        Args:
            lost: places of the stages to replace.
            num_positions: of the session.
            num_rows: of them that a node which comes into the route has to compute before it can go on.
            num_generated: tokens of the answer so far.
            avoid_peers: not planned with, whoever else there is. Those of the lost stages need not be named.
            avoid_pairs: of peers that must not hand rows to one another, in either direction.

        Returns:
            None when the layers cannot be covered by others.

        Raises:
            NoPeers: nobody of the swarm can be reached.
        """
        avoid = Avoid(frozenset(avoid_peers) | {planned.places[index][0] for index in lost}, frozenset(avoid_pairs))
        workload = self._workload(num_positions, 0).for_patch(num_rows, num_generated)
        failed = self._failed()
        kept = frozenset(peer for index, (peer, _) in enumerate(planned.places) if index not in lost)
        rather = Avoid(avoid.peers | (failed - kept), avoid.pairs)
        found = await self._patch(self._look, planned, lost, workload, rather)
        if found is None and await self.take_news(without=avoid.peers):
            found = await self._patch(self._look, planned, lost, workload, avoid)
        if found is None:
            look = await self._look_around(without=avoid.peers)
            found = await self._patch(look, planned, lost, workload, avoid)
        return found

    async def alternates(
        self,
        planned: Planned,
        num_positions: int,
        *,
        num_rows: int = 0,
        num_generated: int = 0,
        avoid_peers: Collection[PeerId] = (),
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
    ) -> tuple[tuple[Placed, ...], ...]:
        """For each stage what would take its place if it were lost now, connected already; empty where nothing would.

        Does not look around: see ``refresh``. Arguments are those of ``patch``.
        """
        workload, found = self._workload(num_positions, 0).for_patch(num_rows, num_generated), []
        for index, (peer, _) in enumerate(planned.places):
            avoid = Avoid(frozenset(avoid_peers) | {peer}, frozenset(avoid_pairs))
            patched = await self._patch(self._look, planned, [index], workload, avoid)
            kept = len(planned.stages) - 1
            found.append(() if patched is None else patched.stages[index : len(patched.stages) - kept + index])
        return tuple(found)

    async def refresh(self) -> None:
        """Looks around, and measures whom it finds, so that ``patch`` and ``alternates`` know the swarm as it is now.

        Where another answer did so a moment ago, or is about to, that does: many answers look no more often than one.

        Raises:
            NoPeers: nobody of the swarm can be reached.
        """
        async with self._refreshing:
            if time.monotonic() - self._looked_at >= SHARED_LOOK_S:
                await self._look_around()
                return
        await self.take_news()

    async def take_news(self, *, without: Collection[PeerId] = ()) -> bool:
        """Measures those of whom a record has come since the last look: nodes tell of themselves when they come.

        Returns:
            Whether there was anybody.
        """
        look, news = self._look, dict[PeerId, NodeRecord]()
        for record in self._connection.known(self._model.model_id):
            peer = PeerId(record.peer)
            seen = look.records.get(peer)
            is_back = seen is not None and peer in look.unreachable and record.issued_at > seen.issued_at
            if peer not in without and (seen is None or is_back):
                news[peer] = record
        look.records |= news
        wanted = self._wanted(look) & news.keys()
        records = [news[peer] for peer in wanted]
        on_late = partial(self._add_late, look)
        look.add(await self._connection.measure(records, doubtful=self._doubtful(), on_late=on_late, first_s=NEWS_S))
        return bool(wanted)

    # inside

    async def _ping(self, peer: PeerId) -> None:
        """One round trip is an accident; nobody waits for a plan that is only looked at."""
        with contextlib.suppress(PeerError):
            for _ in range(EXTRA_PINGS):
                await self._connection.links.round_trip(peer)

    async def _search(self, workload: Workload, avoid: Avoid, *, wait: bool, is_explained: bool) -> Explained:
        links = self._connection.links
        if time.monotonic() < self._look_until and all(links.is_connected(peer) for peer in self._look.reached):
            explained = await self._explain(self._look, workload, avoid, is_explained)
            if isinstance(explained.found, Planned):
                return explained
        deadline = time.monotonic() + ROUTE_PATIENCE_S
        while True:
            look = await self._look_around(is_patient=is_explained)
            explained = await self._explain(look, workload, avoid, is_explained)
            if isinstance(explained.found, Planned) or not wait or time.monotonic() >= deadline:
                return explained
            await asyncio.sleep(ROUTE_RETRY_S)

    def _workload(self, num_positions: int, num_prompt: int) -> Workload:
        chunk = min(max(-(-num_prompt // CHUNKS_PER_PROMPT), MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
        return Workload(
            num_positions=num_positions,
            prompt_tokens=num_prompt,
            row_bytes=self._row_bytes,
            prefill_chunk_rows=chunk,
            user_step_s=self.user_step_s,
            user_prefill_s=self.user_step_s,
            message_overhead_s=max(MESSAGE_OVERHEAD_S + self._claims.message_excess_s(time.monotonic()), 0.0),
        )

    async def _look_around(self, without: Collection[PeerId] = (), *, is_patient: bool = False) -> Look:
        """Finds the nodes, and measures those that may serve; of those in ``without`` what was measured before stays.

        The look is that of all answers: whom one of them avoids, the others may need.

        Args:
            is_patient: whether to wait also for who answers long after the others, or not at all.
        """
        began = time.monotonic()
        records = await self._connection.find(self._model.model_id)
        look = Look({PeerId(record.peer): record for record in records})
        look.add(
            replace(node, record=look.records[peer])
            for peer, node in self._look.nodes.items()
            if peer in without and peer in look.records
        )
        wanted = self._wanted(look) - set(without)
        look.add(
            await self._connection.measure(
                [record for peer, record in look.records.items() if peer in wanted],
                doubtful=self._doubtful(),
                on_late=None if is_patient else partial(self._add_late, look),
            )
        )
        look.coordinate = self._connection.coordinate
        self._look, self._look_until, self._looked_at = look, time.monotonic() + NODES_FRESH_S, began
        return look

    def _failed(self) -> frozenset[PeerId]:
        """Who refused, or could not be reached, a moment ago."""
        now = time.monotonic()
        return frozenset(peer for peer, until in self._avoid.items() if until > now)

    def _doubtful(self) -> frozenset[PeerId]:
        """For whose answer nobody waits if others answer."""
        links = self._connection.links
        self._silent = {peer for peer in self._silent & self._look.records.keys() if not links.is_connected(peer)}
        return self._failed() | self._silent

    def _add_late(self, look: Look, node: MeasuredNode) -> None:
        """What came of one that had not answered when the look was over."""
        look.add([node])
        if node.round_trip_s is None:
            self._silent.add(node.peer)

    def _wanted(self, look: Look) -> set[PeerId]:
        """Who may serve. Nobody else is dialled, and least of all whom the user's rules reject."""
        rules, records = self.rules.resolve(look.records.keys()), look.records.values()
        alone = {each.peer for each in self._candidates(records) if rules.rejects(each) is None}
        holders = self._holders(records)
        return alone | {each.peer for each in holders if rules.rejects(each.candidate, each.place) is None}

    def _topology(self, look: Look) -> SwarmTopology:
        links, reached = self._connection.links, look.reached
        now_s = {peer: links.round_trip_s(peer) for peer in reached}
        rates_Bps = {peer: links.delivery_rate_Bps(peer) for peer in reached}
        self._legs = SwarmTopology(
            look.records.values(),
            round_trips_s={peer: now_s[peer] or node.round_trip_s or 0.0 for peer, node in reached.items()},
            rates_Bps={peer: (rate, None) for peer, rate in rates_Bps.items() if rate},
            own=look.coordinate,
        )
        return self._legs

    def _candidates(self, records: Iterable[NodeRecord]) -> tuple[Candidate, ...]:
        """Nodes that may serve a stage alone."""
        if self.topology is Topology.FUSION:
            return ()
        return tuple(
            topology.candidates(
                records,
                self._claims,
                model_id=self._model.model_id,
                num_layers=self._num_layers,
                numerics=self._numerics,
                now=time.monotonic(),
            )
        )

    def _holders(self, records: Iterable[NodeRecord]) -> tuple[SliceHolder, ...]:
        """Nodes that may be members of groups."""
        if self.dims is None:
            return ()
        return tuple(
            topology.slice_holders(
                records,
                self._claims,
                model_id=self._model.model_id,
                num_layers=self._num_layers,
                numerics=self._numerics,
                now=time.monotonic(),
            )
        )

    def _with_groups(self, legs: SwarmTopology) -> Legs:
        return legs if self.dims is None else GroupLegs(legs)

    def _formed(
        self,
        holders: Sequence[SliceHolder],
        legs: Legs,
        workload: Workload,
        rules: Rules,
        avoid: Avoid,
        is_thorough: bool,
    ) -> Formed:
        if self.dims is None:
            return Formed()
        return form_groups(
            holders,
            legs,
            dims=self.dims,
            workload=workload,
            rules=rules,
            avoid=avoid,
            num_members=self.num_members,
            is_thorough=is_thorough,
            is_masked=self.masks,
        )

    async def _explain(self, look: Look, workload: Workload, avoid: Avoid, is_explained: bool) -> Explained:
        """Plans, measures whom the plan would have and was not measured, and plans again."""
        avoid = Avoid(avoid.peers | self._failed(), avoid.pairs)
        for attempt in range(MEASURING_PLANS):
            left_out = set(look.unreachable)
            if attempt == MEASURING_PLANS - 1:
                left_out |= self._wanted(look) - look.nodes.keys()
            records = [record for peer, record in look.records.items() if peer not in left_out]
            candidates, holders = self._candidates(records), self._holders(records)
            legs = self._with_groups(self._topology(look))
            answer, formed = await self._planned(candidates, holders, legs, workload, look, avoid, is_explained)
            if isinstance(answer, Uncovered):
                # Rather with a node that failed a moment ago than not at all: it may have been our link. And if there
                # is no route, it is to be known why. Two that cannot hand rows to one another come last.
                for rather in [Avoid(pairs=avoid.pairs)] * bool(avoid.pairs) + [Avoid()]:
                    answer, formed = await self._planned(candidates, holders, legs, workload, look, rather, True)
                    if isinstance(answer, PlannedRoute):
                        break
            found: Planned | Uncovered
            if isinstance(answer, Uncovered):
                found = answer
            else:
                serving = [peer for stage in answer.route for peer in members_of(stage.peer)]
                unmeasured = [peer for peer in serving if peer not in look.nodes]
                if unmeasured:
                    records = [look.records[peer] for peer in unmeasured]
                    on_late = None if is_explained else partial(self._add_late, look)
                    look.add(await self._connection.measure(records, on_late=on_late, first_s=GRACE_S))
                    continue
                found = Planned(with_members(answer.route, look.nodes, formed.weights), answer)
            rejections = (*rejections_of_members(answer, holders, formed), *self._beside(look))
            problem = ""
            if isinstance(answer, Uncovered):
                problem = why_no_route(
                    answer,
                    rejections,
                    candidates,
                    list(look.records.values()),
                    list(look.unreachable.values()),
                    model=self._model,
                    num_layers=self._num_layers,
                    numerics=self._numerics,
                    room=workload.num_positions,
                    rules=self.rules,
                    topology=self.topology,
                    num_members=self.num_members,
                    is_masked=self.masks,
                    missing=formed.missing,
                )
            everybody = (*candidates, *(holder.candidate for holder in holders))
            return Explained(
                found, look, everybody, legs, workload, rejections, frozenset(self._measured), problem, holders
            )
        raise AssertionError("the last plan is made of nodes that were measured")

    async def _planned(
        self,
        candidates: Sequence[Candidate],
        holders: Sequence[SliceHolder],
        legs: Legs,
        workload: Workload,
        look: Look,
        avoid: Avoid,
        is_explained: bool,
    ) -> tuple[PlannedRoute | Uncovered, Formed]:
        rules = self.rules.resolve(look.records.keys())

        def plan(formed: Formed) -> PlannedRoute | Uncovered:
            return plan_route(
                [*candidates, *formed.groups],
                legs,
                num_layers=self._num_layers,
                workload=workload,
                objective=self.objective,
                rules=rules,
                first_layers=self._first_layers,
                avoid=avoid,
                is_explained=is_explained,
            )

        def search() -> tuple[PlannedRoute | Uncovered, Formed]:
            return plan_with(partial(self._formed, holders, legs, workload, rules, avoid), plan)

        is_small = len(candidates) + HOLDER_WEIGHT * len(holders) < CANDIDATES_ON_LOOP
        return search() if is_small else await asyncio.to_thread(search)

    async def _patch(
        self, look: Look, planned: Planned, lost: Collection[int], workload: Workload, avoid: Avoid
    ) -> Planned | None:
        """With nodes that are connected: whoever waits for a patch does not wait for links that may never come."""
        kept = {node.peer: (node, layers) for i, (node, layers) in enumerate(planned.stages) if i not in lost}
        nodes = {peer: node for peer, node in look.reached.items() if self._connection.links.is_connected(peer)}
        nodes |= {each.peer: each for node, _ in kept.values() for each in node.members or (node,)}
        records = [look.records.get(peer, node.record) for peer, node in nodes.items()]
        candidates, holders = self._candidates(records), self._holders(records)
        legs = self._with_groups(self._topology(look))
        # A stage that stays may have announced meanwhile that it goes over to other layers.
        known = [
            *self._candidates(node.record for node, _ in kept.values() if not node.members),
            *kept_candidates(kept.values(), holders, self.dims),
        ]

        rules = self.rules.resolve(nodes.keys())

        def plan(formed: Formed) -> PlannedRoute | Uncovered:
            return plan_patch(
                [*candidates, *formed.groups],
                legs,
                [RouteStage(peer, layers) for peer, layers in planned.places],
                lost,
                num_layers=self._num_layers,
                workload=workload,
                objective=self.objective,
                rules=rules,
                first_layers=self._first_layers,
                known=known,
                avoid=avoid,
            )

        def search() -> tuple[PlannedRoute | Uncovered, Formed]:
            return plan_with(partial(self._formed, holders, legs, workload, rules, avoid), plan)

        is_small = len(candidates) + HOLDER_WEIGHT * len(holders) < CANDIDATES_ON_LOOP
        answer, formed = search() if is_small else await asyncio.to_thread(search)
        if isinstance(answer, Uncovered):
            return None
        weights = formed.weights | {peer: node.weights for peer, (node, _) in kept.items()}
        return Planned(with_members(answer.route, nodes, weights), answer)

    def _beside(self, look: Look) -> list[Rejection]:
        """Who is no candidate at all."""
        found = []
        for shard, record in self._shards(look):
            layers = LayerRange(shard.start, shard.stop)
            if why := self._why_not_wanted(shard):
                found.append(Rejection(PeerId(record.peer), layers, Reason.OUTSIDE, why))
                continue
            node = look.unreachable.get(PeerId(record.peer))
            if node is not None:
                found.append(Rejection(node.peer, layers, Reason.UNREACHABLE, f"cannot be reached: {node.problem}"))
                continue
            alone = [msgspec.structs.replace(record, shards=(shard,))]
            found += [
                Rejection(peer, layers, Reason.OUTSIDE, why)
                for peer, why in topology.unusable(
                    alone, model_id=self._model.model_id, num_layers=self._num_layers, numerics=self._numerics
                )
            ]
        return found

    def _why_not_wanted(self, shard: ShardRecord) -> str:
        if shard.slice and self.dims is None:
            return f"holds slice {shard.slice} of its layers: only a fusion group serves them"
        if not shard.slice and self.topology is Topology.FUSION:
            return "holds whole layers: you want fusion groups alone"
        return ""

    def _shards(self, look: Look) -> Iterator[tuple[ShardRecord, NodeRecord]]:
        """Of the model, with whose they are."""
        for record in look.records.values():
            for shard in record.shards:
                if shard.model_id == self._model.model_id:
                    yield shard, record
