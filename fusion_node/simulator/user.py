"""A simulated user: asks, reads, thinks, and asks again, with the real core of an answer.

What a token of the answer has to be is computed beside it, without a network (fusion_node.simulator.arithmetic): one
that differs, comes twice or is left out is counted as wrong, whatever failed meanwhile.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fusion_node.client.answer_core import (
    ALTERNATES_EVERY_S,
    AnswerCore,
    Failed,
    Opened,
    PeerFailed,
    Place,
    Repaired,
    RouteKind,
    SessionBegan,
    SessionEnded,
    WantsAlternates,
    WantsConnection,
    WantsRoute,
)
from fusion_node.client.session_core import RowsWanted, StepDone
from fusion_node.errors import NoRoute, PeerError
from fusion_node.simulator import network, planning
from fusion_node.simulator.arithmetic import DTYPE, ROW_SIZE, Undisturbed, embed, is_garbage, meta, prompt_of, token_of
from fusion_node.simulator.leases import open_lease
from fusion_node.simulator.links import Host
from fusion_node.simulator.metrics import Answered
from fusion_node.simulator.planning import Known
from fusion_node.types import MonotonicS, PeerId, UnixS
from p2p.messages import AnyMessage, StageTiming, StepResult
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage
from scheduler.claims import ClaimBook, StageStep
from scheduler.cost_model import MESSAGE_OVERHEAD_S, Workload
from scheduler.topology import RouteStage

if TYPE_CHECKING:
    from fusion_node.simulator.world import World

MAX_TOKENS = 4096
"""Of a prompt, and of an answer."""

NODES_FRESH_S, AVOID_S = 10.0, 30.0
"""As of the client's router (fusion_node.client.routing)."""

STALE_AFTER_S = 30.0
"""Older than that, a patch is not made of nodes that were known when the answer began; the client looks around for
alternates more often."""

ALTERNATES_BEFORE_S = ALTERNATES_EVERY_S + 5.0
"""Before something befalls a node of an answer, from which alternates are looked for whenever the core wants them: time
enough to link them. Nobody would take those of a time in which nothing happens."""

MEASURED_STEPS = 3
"""Steps over a route that are taken one by one before several are taken at once: how long one takes is known then."""

OBSERVED_STEPS = 16
"""Of these, over one route, of which the times tell how fast its nodes are: the median of nine counts."""

PLANNING_S = 0.02
MEASURING_ROUND_TRIPS = 6
"""Of the slowest node that is waited for: a link, and three pings."""

MAX_MEASURING_S = 1.5


@dataclass(eq=False)
class Request:
    """One question and its answer.

    Attributes:
        results: rows that came back and are not looked at yet, by session and sequence.
        asked: number of the route that was asked for last; older questions need no answer.
        due_at: when the tokens that are under way would all be there, had they been asked for one by one.
        num_awaited: tokens under way.
        num_whole: tokens of the answer when its last row came.
        waits: whether ``due_at`` is waited for, all rows being there.
        num_steps, steps_s: that were taken one by one over the present route, and their seconds together.
        opened: the nodes of the route that was open last.
        errors: what was said against nodes.
    """

    core: AnswerCore
    began_s: float
    prompt: list[int]
    num_wanted: int
    seed: int
    expected: Undisturbed
    tokens: list[int] = field(default_factory=list)
    results: dict[tuple[bytes, int], bytes | memoryview] = field(default_factory=dict)
    first_s: float | None = None
    last_s: float = 0.0
    is_wrong: bool = False
    timer_at: float | None = None
    asked: int = -1
    due_at: float = 0.0
    num_awaited: int = 0
    num_whole: int = 0
    waits: bool = False
    num_steps: int = 0
    steps_s: float = 0.0
    is_over: bool = False
    opened: tuple[PeerId, ...] = ()
    errors: dict[PeerId, PeerError] = field(default_factory=dict)


class User(Host):
    """One user, who has one question at a time; ``chance`` is its own.

    Attributes:
        claims: what it believes of nodes' speeds.
    """

    def __init__(self, world: World, index: int, peer: PeerId, place: network.Place) -> None:
        super().__init__(index, peer, place)
        self._world = world
        self.chance = random.Random(f"{world.settings.seed}/user/{index}")
        self.claims = ClaimBook()
        self._sessions: dict[bytes, Request] = {}
        self._known: list[Known] = []
        self._known_until = self._measured_at = -math.inf
        self._avoid: dict[PeerId, float] = {}
        self._last_route: tuple[Place, ...] = ()
        self._last_step_s: float | None = None
        self.request: Request | None = None

    # questions

    def ask(self) -> None:
        """Begins a request."""
        world, chance = self._world, self.chance
        settings = world.settings
        mean = settings.prompt_tokens
        num_prompt = max(1, min(MAX_TOKENS, int(chance.lognormvariate(0.0, 0.7) * mean / 1.28)))  # e^(0.7² / 2) = 1.28
        num_wanted = max(1, min(MAX_TOKENS, int(chance.expovariate(1.0) * settings.answer_tokens) + 1))
        prompt = prompt_of(chance.getrandbits(64), num_prompt)
        seed = chance.getrandbits(32)
        core = AnswerCore(
            num_prompt=num_prompt,
            row_size=ROW_SIZE,
            wire_dtype=DTYPE,
            make_plan=lambda session, epoch, stages: self._plan(session, epoch, stages, num_prompt + num_wanted),
            new_session=lambda: chance.randbytes(16),
            open_lease=lambda envelope: open_lease(envelope, now=UnixS(world.unix_s)),
            backlog_s=lambda peer: world.links.backlog_s(self, peer),
        )
        expected = Undisturbed(world.weights, prompt, seed=seed)
        request = Request(core, world.heap.now, prompt, num_wanted, seed, expected)
        self.request = request
        core.start(now=self._now())
        self._pump(request)

    def _plan(
        self, session: bytes, epoch: int, stages: tuple[PlanStage, ...], num_positions: int
    ) -> tuple[Plan, bytes]:
        world = self._world
        now = world.unix_s
        plan = Plan(
            version=PROTOCOL_VERSION,
            user=self.peer,
            session=session,
            epoch=epoch,
            model_id=world.model_id,
            numerics=world.numerics,
            max_positions=num_positions,
            issued_at=now,
            expires_at=now + 3600.0,
            stages=stages,
            wire="",
        )
        return plan, world.sign_plan(plan)

    def _end(self, request: Request, error: str) -> None:
        world = self._world
        request.is_over = True
        self.request = None
        first_s = request.first_s
        world.metrics.requests.append(
            Answered(
                began_s=request.began_s,
                lasted_s=world.heap.now - request.began_s,
                wanted=request.num_wanted,
                tokens=len(request.tokens) if not error else request.num_whole,
                first_s=None if first_s is None else first_s - request.began_s,
                decode_s=0.0 if first_s is None else request.last_s - first_s,
                error=error,
                is_wrong=request.is_wrong,
            )
        )
        if world.settings.think_s < 1e6:
            world.heap.after(self.chance.expovariate(1.0) * world.settings.think_s + 0.1, self._ask_again)

    def _ask_again(self) -> None:
        if self.request is None and not self._world.is_closing:
            self.ask()

    # the network's side

    def on_message(self, source: PeerId, message: AnyMessage, payload: Any) -> None:
        session = getattr(message, "session", None)
        request = None if session is None else self._sessions.get(session)
        if request is None or request.is_over:
            return
        if isinstance(message, StepResult):
            request.results[message.session, message.sequence] = payload
        request.core.receive(message, source=source, now=self._now())
        self._pump(request)

    def on_link_closed(self, peer: PeerId, error: PeerError) -> None:
        self._known = [each for each in self._known if each.node.peer != peer]
        request = self.request
        if request is not None:
            request.core.link_closed(peer, error, now=self._now())
            self._pump(request)

    # the core's side

    def _now(self) -> MonotonicS:
        return MonotonicS(self._world.heap.now)

    def _pump(self, request: Request) -> None:
        core = request.core
        while not request.is_over:
            event = core.next_event()
            if event is None:
                messages = core.messages_to_send()
                if not messages:
                    break
                for peer, message in messages:
                    self._world.links.send(self, peer, message, num_bytes=self._extra_bytes(message))
                continue
            self._on_event(request, event)
        if request.is_over:
            for peer, message in core.messages_to_send():
                self._world.links.send(self, peer, message)
            for key in [key for key, each in self._sessions.items() if each is request]:
                self._session_ended(key)
            return
        timer = core.get_timer()
        if timer is not None and (request.timer_at is None or timer < request.timer_at):
            request.timer_at = timer
            self._world.heap.at(timer, self._on_timer, request, timer)

    def _on_timer(self, request: Request, at: float) -> None:
        if request.timer_at != at or request.is_over:
            return
        request.timer_at = None
        request.core.handle_timer(now=self._now())
        self._pump(request)

    @staticmethod
    def _extra_bytes(message: AnyMessage) -> float:
        plan = getattr(message, "plan", None)
        return 300.0 if plan is not None else 0.0

    def _on_event(self, request: Request, event: Any) -> None:
        world, core = self._world, request.core
        match event:
            case WantsRoute():
                request.asked = event.number
                request.num_steps, request.steps_s = 0, 0.0
                self._look(request, event, core.places)
                self._wake(request)
            case WantsConnection(place):
                world.links.connect(self, place.peer, lambda error: self._linked(request, place.peer, error))
                self._wake(request)
            case WantsAlternates():
                if world.settings.alternates:
                    self._put_off_alternates(request, event)
            case SessionBegan(session):
                self._sessions[session] = request
            case SessionEnded(session):
                self._session_ended(session)
            case Opened(places=places, epoch=epoch):
                peers = tuple(place.peer for place in places)
                # A new session is over a new route: of the nodes before, only who was named is one that was replaced.
                unnamed = () if epoch else (peer for peer in request.opened if peer not in request.errors)
                world.ejected(self, request.opened, {*peers, *unnamed}, request.errors)
                request.opened = peers
            case RowsWanted():
                self._send_rows(request, event)
            case StepDone():
                if event.has_row:
                    self._take_row(request, event)
            case Repaired():
                world.repaired(self, event)
            case PeerFailed(error):
                request.errors[PeerId(error.peer)] = error
                self._avoid[PeerId(error.peer)] = world.heap.now + AVOID_S
                self._known_until = -math.inf
            case Failed(error):
                self._end(request, type(error).__name__)

    def _session_ended(self, session: bytes) -> None:
        self._sessions.pop(session, None)
        self._world.session_ended(session)

    def _linked(self, request: Request, peer: PeerId, error: PeerError | None) -> None:
        if request.is_over:
            return
        if error is None:
            request.core.connected(peer, now=self._now())
        else:
            request.core.unreachable(peer, error, now=self._now())
        self._pump(request)

    def _send_rows(self, request: Request, wanted: RowsWanted) -> None:
        tokens = [*request.prompt, *request.tokens][wanted.first_position :][: wanted.num_positions]
        rows = embed(tokens)
        sending = request.core.rows_ready(wanted, meta(len(tokens)), now=self._now())
        if sending is None:
            return
        peer, step = sending
        self._world.links.send(self, peer, step, num_bytes=len(tokens) * self._world.model.row_bytes, payload=rows)

    def _take_row(self, request: Request, done: StepDone) -> None:
        world, core = self._world, request.core
        row = self._row_of(request, done)
        if row is None or is_garbage(row):
            core.result_unfit("the row is not finite", now=self._now())
            return
        token = token_of(row, seed=request.seed, position=len(request.prompt) + len(request.tokens))
        request.tokens.append(token)
        request.num_whole = len(request.tokens)
        if token != request.expected.next_token():
            request.is_wrong = True
            world.metrics.wrong_tokens += 1
        now = world.heap.now
        if request.first_s is None:
            request.first_s = now
        elif request.num_awaited == 1 and done.round_trip_s is not None:
            request.num_steps += 1
            request.steps_s += done.round_trip_s
            if request.num_steps <= OBSERVED_STEPS and not done.num_under_way:
                self._observe(core.places, done.timings, done.round_trip_s)
        if request.due_at > now:
            request.waits = True
            world.heap.at(request.due_at, self._on_due, request, len(request.tokens))
        else:
            self._go_on(request)

    def _observe(self, places: tuple[Place, ...], timings: Sequence[StageTiming], round_s: float) -> None:
        """Corrects what is believed of these nodes, as fusion_node.client.routing does."""
        if len(timings) != len(places):
            return
        legs, peers = self._legs(places), [place.peer for place in places]
        ways = itertools.pairwise([None, *peers, None])
        legs_s = sum(
            legs.leg(sender, receiver).seconds(self._world.model.row_bytes) + MESSAGE_OVERHEAD_S
            for sender, receiver in ways
        )
        steps = [
            StageStep(place.peer, len(place.layers), timing.compute_us / 1e6, timing.queue_us / 1e6)
            for place, timing in zip(places, timings, strict=True)
        ]
        self.claims.observe_round(steps, 1, round_s=round_s, legs_s=legs_s, now=self._world.heap.now)

    def _on_due(self, request: Request, num_tokens: int) -> None:
        if request.waits and len(request.tokens) == num_tokens:
            self._go_on(request)
            self._pump(request)

    def _wake(self, request: Request) -> None:
        """Something is wrong: what the tokens that came at once would still have taken is not waited for."""
        if request.waits:
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """The tokens so far are there, and time for them has passed."""
        world, core = self._world, request.core
        request.waits = False
        request.last_s = world.heap.now
        if len(request.tokens) >= request.num_wanted:
            self._last_route = core.places
            core.close(retain=False, now=self._now())
            self._end(request, "")
            return
        # As if a drafter had guessed them all: all but the first were never asked for one by one.
        request.num_awaited = num_tokens = self._num_at_once(request)
        request.tokens += request.expected.next_tokens(num_tokens - 1)
        request.due_at = request.last_s
        if num_tokens > 1:
            request.due_at += num_tokens * request.steps_s / request.num_steps
        core.append(num_tokens, now=self._now())

    def _num_at_once(self, request: Request) -> int:
        """Tokens to compute in one step: as many as fit before something happens to a node of the answer."""
        world = self._world
        most = min(world.settings.tokens_per_event, request.num_wanted - len(request.tokens))
        if most == 1 or request.num_steps < MEASURED_STEPS:
            return 1
        quiet_s = world.quiet_s(place.peer for place in request.core.places)
        return max(1, min(most, int(quiet_s * request.num_steps / request.steps_s)))

    @staticmethod
    def _row_of(request: Request, done: StepDone) -> bytes | memoryview | None:
        """The payload of the result that this event is about; older ones are not wanted any more."""
        found = [key for key in request.results if key[1] == done.sequence]
        rows = [request.results.pop(key) for key in found]
        return rows[-1] if rows else None

    # routes

    def _look(self, request: Request, wanted: WantsRoute, present: tuple[Place, ...]) -> None:
        """Plans; a whole route over nodes that were measured a moment ago, a patch over those that are known.

        Args:
            present: the route that a PATCH is part of.
        """
        delay_s = PLANNING_S
        if wanted.kind is RouteKind.WHOLE and self._goes_on():
            places, self._last_route = self._last_route, ()
            request.core.routed(wanted.number, places, now=self._now(), expected_step_s=self._last_step_s)
            return
        now = self._world.heap.now
        if now >= (self._known_until if wanted.kind is RouteKind.WHOLE else self._measured_at + STALE_AFTER_S):
            delay_s += self._measure()
        self._world.heap.after(delay_s, self._route, request, wanted, present, True)

    def _goes_on(self) -> bool:
        """Whether this question belongs to the conversation of the last one, whose route still holds."""
        now = self._world.heap.now
        if not self._last_route or self.chance.random() < 1 / self._world.settings.turns:
            return False
        peers = [place.peer for place in self._last_route]
        return all(peer in self.links and self._avoid.get(peer, 0.0) <= now for peer in peers)

    def _measure(self) -> float:
        """Looks around; seconds that it takes."""
        self._known = self._world.measure(self, self.chance)
        self._measured_at = self._world.heap.now
        self._known_until = self._measured_at + NODES_FRESH_S
        slowest_s = max((each.round_trip_s for each in self._known), default=0.1)
        return min(MAX_MEASURING_S, MEASURING_ROUND_TRIPS * slowest_s)

    def _route(self, request: Request, wanted: WantsRoute, present: tuple[Place, ...], may_look: bool) -> None:
        if request.is_over or request.asked != wanted.number:
            return
        is_whole = wanted.kind is RouteKind.WHOLE
        found = self._whole(request, wanted) if is_whole else self._patch(request, wanted, present)
        if found is not None:
            places, self._last_step_s = found
            request.core.routed(wanted.number, places, now=self._now(), expected_step_s=self._last_step_s)
        elif may_look and not is_whole:
            self._world.heap.after(PLANNING_S + self._measure(), self._route, request, wanted, present, False)
            return
        else:
            self._known_until = -math.inf
            request.core.no_route(wanted.number, NoRoute("no usable node serves some layers"), now=self._now())
        self._pump(request)

    def _whole(self, request: Request, wanted: WantsRoute) -> tuple[tuple[Place, ...], float | None] | None:
        """Rather over a node that failed a moment ago than not at all."""
        now = self._world.heap.now
        shunned = {*wanted.avoid_peers, *(peer for peer, until in self._avoid.items() if until > now)}
        trusted = [each for each in self._known if each.node.peer not in shunned]
        for known in (trusted, self._known) if len(trusted) < len(self._known) else (trusted,):
            legs, work = self._legs(), self._workload(request)
            planned = self._world.scheduler.plan(self._world, legs, known, work, avoid_pairs=wanted.avoid_pairs)
            if planned is not None:
                return self._places(planned.route), planned.seconds_per_step
        return None

    def _patch(
        self, request: Request, wanted: WantsRoute, present: tuple[Place, ...]
    ) -> tuple[tuple[Place, ...], float | None] | None:
        now = self._world.heap.now
        gone = {present[index].peer for index in wanted.lost}
        pinned = [
            RouteStage(place.peer, place.layers) for index, place in enumerate(present) if index not in wanted.lost
        ]
        usable = [
            each
            for each in self._known
            if each.node.peer not in gone
            and each.node.peer not in wanted.avoid_peers
            and self._avoid.get(each.node.peer, 0.0) <= now
        ]
        legs, work = self._legs(present), self._patch_workload(request)
        planned = self._world.scheduler.plan(
            self._world, legs, usable, work, avoid_pairs=wanted.avoid_pairs, pinned=pinned
        )
        if planned is None:
            return None
        return self._places(planned.route, present), planned.seconds_per_step

    def _workload(self, request: Request) -> Workload:
        return self._world.workload(len(request.prompt), len(request.prompt) + request.num_wanted)

    def _patch_workload(self, request: Request) -> Workload:
        """As the client's router has it: what a node has to compute again counts as well."""
        num_tokens = len(request.tokens)
        return self._workload(request).for_patch(len(request.prompt) + num_tokens, num_tokens)

    def _legs(self, present: tuple[Place, ...] = ()) -> planning.UserLegs:
        trips = {place.peer: place.round_trip_s for place in present}
        trips |= {each.node.peer: each.round_trip_s for each in self._known}
        return planning.UserLegs(self._world, self, trips)

    def _places(self, route: tuple[RouteStage, ...], before: tuple[Place, ...] = ()) -> tuple[Place, ...]:
        trips = {each.node.peer: each.round_trip_s for each in self._known}
        trips |= {place.peer: place.round_trip_s for place in before}
        return tuple(
            Place(PlanStage(stage.peer, stage.layers.start, stage.layers.stop, ("sim:1",)), trips.get(stage.peer, 0.0))
            for stage in route
        )

    def _put_off_alternates(self, request: Request, wanted: WantsAlternates) -> None:
        """Until somebody may need them: the core wants others some seconds later anyway."""
        delay_s = 0.0
        if self._world.settings.tokens_per_event > 1:
            quiet_s = self._world.quiet_s(place.peer for place in request.core.places)
            delay_s = max(0.0, quiet_s - ALTERNATES_BEFORE_S)
        if delay_s < ALTERNATES_EVERY_S:
            if self._world.heap.now + delay_s >= self._measured_at + STALE_AFTER_S:
                delay_s += self._measure()
            self._world.heap.after(delay_s + PLANNING_S, self._find_alternates, request, wanted)

    def _find_alternates(self, request: Request, wanted: WantsAlternates) -> None:
        """For each stage what would take its place; told once there are links to all of them."""
        if request.is_over:
            return
        world, route = self._world, request.core.places
        taken = {place.peer for place in route}
        usable = [
            each for each in self._known if each.node.peer not in taken and each.node.peer not in wanted.avoid_peers
        ]
        stages = [RouteStage(place.peer, place.layers) for place in route]
        legs, work = self._legs(route), self._patch_workload(request)
        planned = world.scheduler.alternates(world, legs, usable, work, stages, avoid_pairs=wanted.avoid_pairs)
        found = [self._places(each) for each in planned]
        waiting = dict.fromkeys(place.peer for places in found for place in places)
        failed: set[PeerId] = set()

        def linked(peer: PeerId, error: PeerError | None) -> None:
            waiting.pop(peer, None)
            if error is not None:
                failed.add(peer)
            if not waiting and not request.is_over and request.core.places == route:
                usable_now = tuple(() if any(p.peer in failed for p in places) else places for places in found)
                request.core.alternates(usable_now, now=self._now())
                self._pump(request)

        for peer in list(waiting):
            world.links.connect(self, peer, partial(linked, peer))
