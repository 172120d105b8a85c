"""One answer as SwarmClient sees it: what others may begin like, where its routes come from, and what is told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog

from fusion_node.client.answer import Found
from fusion_node.client.answer_core import (
    ALTERNATES_EVERY_S,
    AnswerCore,
    AnswerEvent,
    Opened,
    PeerFailed,
    Place,
    Repaired,
    RouteKind,
    StepDone,
    TreeStepDone,
    WantsAlternates,
    WantsRoute,
)
from fusion_node.client.connection import MeasuredNode
from fusion_node.client.generation import GenerationStats, RepairReport, StageReport
from fusion_node.client.prefix_cache_core import PrefixCache, Remembered
from fusion_node.client.routing import Planned, Router
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.session_core import Prefix
from fusion_node.errors import NoRoute
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.identity import short
from p2p.messages import StageTiming
from p2p.records import PlanMember, PlanStage
from scheduler.ownership import OwnershipBreach

LOOK_EVERY_S = 30.0
"""Between two looks at the swarm for alternates while an answer is under way: half of what a record is valid for. Once
a stage has none, there is a look when they are asked for next."""

MAX_LOOK_EVERY_S = 320.0
"""While a stage has none and looks find none, each is twice as long after the last, up to this: whoever comes tells of
itself, and where a stage is lost there is a look at once."""

MAX_FINDS = 4
"""Of one route, where nodes of it are revoked while it is being planned."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(Remembered):
    """The session of one answer, as long as another may begin like it."""

    all_ids: list[int] = field(repr=False)
    """``ids``, to be appended to."""
    epoch: int = 0
    """Of the plan under which the session ended."""
    planned: Planned = field(default_factory=Planned)
    is_kept: bool = False
    """Its nodes were asked to keep it."""
    prefilled: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Or it has come to its end."""


@dataclass(slots=True)
class Work:
    """What one answer carries from step to step."""

    answer: Answer
    params: SamplingParams
    stats: GenerationStats

    def begin_stages(self) -> None:
        """The report of each stage of a route: of those that go on, what they have done stays."""
        before = {(stage.peer, stage.layers): stage for stage in self.stats.stages}
        self.stats.stages = tuple(
            before.get(
                (node.peer, layers),
                StageReport(node.peer, layers, node.record.device, node.round_trip_s or 0.0, 0, 0.0, 0.0),
            )
            for node, layers in self.answer.planned.stages
        )

    def note(self, timings: Sequence[StageTiming]) -> None:
        """Adds a step's timings to the report of each stage."""
        reports = []
        for index, stage in enumerate(self.stats.stages):
            timing = timings[index] if index < len(timings) else StageTiming(0, 0)
            compute_s, queue_s = stage.compute_s + timing.compute_us / 1e6, stage.queue_s + timing.queue_us / 1e6
            reports.append(replace(stage, steps=stage.steps + 1, compute_s=compute_s, queue_s=queue_s))
        self.stats.stages = tuple(reports)


class AnswerRoutes:
    """Routes for one answer: where a beginning of its prompt is known, over the nodes that know it, at first.

    Args:
        num_positions: of prompt and answer.
        num_reserved: that its sessions had better reserve, for what may be guessed as well; None: no more than those.

    Attributes:
        num_reserved: for how many the last whole route has room. Where nobody has room for guesses, those that the
            answer needs.
    """

    def __init__(
        self,
        router: Router,
        prefixes: PrefixCache[Answer] | None,
        work: Work,
        num_positions: int,
        *,
        num_reserved: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._router = router
        self._prefixes = prefixes
        self._work = work
        self._answer = work.answer
        self._num_positions = num_positions
        self._num_wanted = self.num_reserved = num_positions if num_reserved is None else num_reserved
        self._nodes: dict[PeerId, MeasuredNode] = {}
        self._known: Answer | None = None
        """Whose beginning was asked for."""
        self._was_known_tried = False
        self._looked_at = self._clock()
        self._look_every_s = LOOK_EVERY_S
        self._lacking: frozenset[tuple[PeerId, LayerRange]] = frozenset()
        """Stages without an alternate when they were looked for last."""

    def note(self, core: AnswerCore, event: AnswerEvent) -> None:
        """What others want to know of an answer on its way."""
        work, answer, stats = self._work, self._answer, self._work.stats
        match event:
            case Opened():
                if not answer.session:
                    stats.cached_tokens = event.reused_positions
                    self._opened(event.reused_positions)
                answer.session, answer.epoch = event.session, event.epoch
                answer.planned = self._planned(event.places)
                answer.stages = answer.planned.places
                answer.num_computed = core.num_computed
                work.begin_stages()
                log.debug("session open", session=event.session.hex()[:8], epoch=event.epoch)
            case StepDone():
                num_rows = event.num_computed - answer.num_computed
                self._computed(event, is_single=event.has_row and num_rows == 1)
            case TreeStepDone():
                self._computed(event, is_single=event.num_sent == 1)
            case Repaired():
                log.info("answer repaired", kind=event.kind.value, cause=event.cause, stall_s=round(event.stall_s, 3))
                stats.repairs += (
                    RepairReport(
                        event.kind.value,
                        event.stage,
                        event.peer,
                        event.cause,
                        event.stall_s,
                        event.replayed_positions,
                        event.replayed_bytes,
                    ),
                )
            case PeerFailed(error):
                log.info("planning without a node", peer=short(error.peer), reason=str(error))
                self._router.note_failure(error)
            case _:
                pass

    def _computed(self, event: StepDone | TreeStepDone, *, is_single: bool) -> None:
        self._answer.num_computed = event.num_computed
        self._work.note(event.timings)
        if is_single and event.round_trip_s is not None and not event.num_under_way:
            # Of a prompt, chunks wait behind one another, and that is nobody's fault.
            timings = [(each.compute_us / 1e6, each.queue_us / 1e6) for each in event.timings]
            places = self._answer.planned.places
            self._router.observe_round(places, timings, num_rows=1, round_s=event.round_trip_s)

    @property
    def _num_generated(self) -> int:
        return len(self._answer.all_ids) - self._answer.num_prompt

    def _planned(self, places: Sequence[Place]) -> Planned:
        """The route over these places, all of whose nodes were found here."""
        return Planned(tuple((self._nodes[place.peer], place.layers) for place in places))

    def _opened(self, reused_positions: int) -> None:
        """A session has begun with so many positions."""
        if self._known is not None and not reused_positions and self._prefixes is not None:
            # At least one of its nodes has dropped it, so it is no reason to prefer them any more.
            self._prefixes.forget(self._known)
        self._known = None

    async def find(self, wants: WantsRoute, present: tuple[Place, ...]) -> Found:
        """See Routes."""
        for _ in range(MAX_FINDS):
            found = await self._find(wants, present)
            if not any(self.is_revoked(place.peer) for place in found.places) and not self.breaches(found.places):
                return found
        raise NoRoute("nodes were revoked while a route over them was planned: ask again")

    async def _find(self, wants: WantsRoute, present: tuple[Place, ...]) -> Found:
        if wants.kind is RouteKind.PATCH:
            patched = await self._router.patch(
                self._planned(present),
                wants.lost,
                self.num_reserved,
                num_rows=len(self._answer.all_ids),
                num_generated=self._num_generated,
                avoid_peers=wants.avoid_peers,
                avoid_pairs=wants.avoid_pairs,
            )
            if patched is None:
                raise NoRoute(f"nobody else serves these layers: {wants.reason}")
            return Found(self._places(patched), expected_step_s=patched.expected_step_s)
        found = None
        if self._prefixes is not None and not self._answer.session:
            found = self._prefixes.find(self._answer.ids, now=MonotonicS(time.monotonic()))
        if found is not None and not self._was_known_tried and self._router.can_go_on(found[0].planned):
            self._was_known_tried = True
            planned = found[0].planned
        else:
            planned = await self._whole(wants)
        prefix = None
        if found is not None and found[0].stages == planned.places:
            self._known, num_known = found
            prefix = Prefix(found[0].session, num_known)
        return Found(self._places(planned), prefix, planned.expected_step_s, planned.expected_prefill_s)

    async def _whole(self, wants: WantsRoute) -> Planned:
        """With room for guesses if there is such a route now. Without it they have the room of what is to come yet,
        which is enough but for the answer's last tokens, so that nobody waits for more."""

        async def route(num_positions: int, *, wait: bool) -> Planned:
            planned = await self._router.route(
                num_positions,
                num_prompt=self._answer.num_prompt,
                avoid_peers=wants.avoid_peers,
                avoid_pairs=wants.avoid_pairs,
                wait=wait,
            )
            self.num_reserved = num_positions
            return planned

        if self._num_wanted > self._num_positions:
            with suppress(NoRoute):
                return await route(self._num_wanted, wait=False)
        return await route(self._num_positions, wait=wants.wait)

    async def alternates(self, wants: WantsAlternates, present: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
        """See Routes."""
        has_looked = self._clock() - self._looked_at >= self._look_every_s
        if has_looked:
            self._looked_at = self._clock()
            await self._router.refresh()
        else:
            await self._router.take_news()
        found = await self._router.alternates(
            self._planned(present),
            self.num_reserved,
            num_rows=len(self._answer.all_ids),
            num_generated=self._num_generated,
            avoid_peers=wants.avoid_peers,
            avoid_pairs=wants.avoid_pairs,
        )
        self._note_lacking(
            frozenset((place.peer, place.layers) for place, each in zip(present, found, strict=True) if not each),
            has_looked=has_looked,
        )
        # Of a group, whom to replace shows only when one of its members fails: it is planned again then.
        groups = {index for index, place in enumerate(present) if place.stage.is_group}
        return tuple(() if i in groups else self._places(Planned(stages)) for i, stages in enumerate(found))

    def is_revoked(self, peer: PeerId) -> bool:
        """See Routes."""
        return self._router.is_revoked(peer)

    def _note_lacking(self, lacking: frozenset[tuple[PeerId, LayerRange]], *, has_looked: bool) -> None:
        """When to look next."""
        if not lacking:
            self._look_every_s = LOOK_EVERY_S
        elif not lacking <= self._lacking:
            self._look_every_s = 0.0
        elif has_looked:
            self._look_every_s = min(max(2 * self._look_every_s, ALTERNATES_EVERY_S), MAX_LOOK_EVERY_S)
        self._lacking = lacking

    def breaches(self, places: Sequence[Place]) -> tuple[OwnershipBreach, ...]:
        """See Routes."""
        return self._router.breaches(self._planned(places))

    def _places(self, planned: Planned) -> tuple[Place, ...]:
        places = []
        for node, layers in planned.stages:
            self._nodes[node.peer] = node
            record = node.record
            stage = PlanStage(node.peer, layers.start, layers.stop, record.data_addresses, record.libp2p_addresses)
            if node.members:
                members = [each.record for each in node.members]
                stage = PlanStage(
                    node.peer,
                    layers.start,
                    layers.stop,
                    (),
                    (),
                    tuple(PlanMember(each.peer, each.data_addresses, each.libp2p_addresses) for each in members),
                    node.weights,
                )
            places.append(Place(stage, node.round_trip_s or 0.0))
        return tuple(places)
