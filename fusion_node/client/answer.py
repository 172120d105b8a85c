"""The shell around AnswerCore: its messages go to the links, its timer to the event loop, its questions to a router."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import structlog

from fusion_node.client.answer_core import (
    AnswerCore,
    AnswerEvent,
    Failed,
    PeerFailed,
    Place,
    Repaired,
    RowsWanted,
    SessionBegan,
    SessionEnded,
    StepDone,
    TreeRowsWanted,
    WantsAlternates,
    WantsConnection,
    WantsRoute,
)
from fusion_node.client.connection import SwarmConnection
from fusion_node.client.groups_core import Groups, Said
from fusion_node.client.session_core import Prefix
from fusion_node.errors import FusionError, PeerError, PeerRevoked, PeerUnreachable
from fusion_node.types import MonotonicS, PeerId, is_group, members_of
from p2p.compression import Packed, Packing
from p2p.identity import short
from p2p.messages import FUSION_FEATURE, MASKS_FEATURE, AnyMessage, CloseSession, StepResult, StepTaps, TensorMeta
from p2p.records import PlanMember, dialled_at
from scheduler.ownership import OwnershipBreach

CONNECT_S = 6.0
"""For a link to a node: as long as measuring one may take."""

log = structlog.get_logger(__name__)

EncodedRows = tuple[TensorMeta, memoryview]


@dataclass(eq=False, slots=True)
class Returned:
    """The rows of one message.

    Attributes:
        sender: who had sent it: of a result, the last stage then.
        plain: the payload without its compression; None until a row was asked for.
        logits: of rows that were multiplied by the head before their turn, by index.
    """

    tensor: TensorMeta
    payload: memoryview = field(repr=False)
    sender: PeerId
    plain: memoryview | None = field(default=None, repr=False)
    logits: dict[int, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Found:
    """A route for WantsRoute; see AnswerCore.routed."""

    places: tuple[Place, ...]
    prefix: Prefix | None = None
    expected_step_s: float | None = None
    expected_prefill_s: float | None = None


class Routes(Protocol):
    """Where routes come from."""

    async def find(self, wants: WantsRoute, present: tuple[Place, ...]) -> Found:
        """A whole route, or the present one patched.

        Raises:
            FusionError: there is none.
        """
        ...

    async def alternates(self, wants: WantsAlternates, present: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
        """For each stage what would take its place now."""
        ...

    def is_revoked(self, peer: PeerId) -> bool:
        """Whether the user has revoked a node, or a member of a group."""
        ...

    def breaches(self, places: Sequence[Place]) -> tuple[OwnershipBreach, ...]:
        """Who is in these places against the user's rules on who may own what, as they are now."""
        ...


class AnswerShell:
    """One answer. Use ``async with``; leaving it frees its session on every stage.

    Args:
        core: not started.
        embed: encodes the rows of positions ``[start, stop)``, which is the work of another thread.
        on_compute: runs a function on the thread for that.
        on_event: is told of every event, after it was followed. Of faults of groups, it is told of members'.
        groups: is told of every plan that the core makes, before its messages; None: no place is ever a group.
        on_time: is called whenever the core's timer runs, some seconds apart at most.

    Attributes:
        retain: set before leaving: the stages are to keep the KV for a later session with the same beginning.
        is_kept: after leaving: they were asked to, as a session that was open on all of them.
    """

    def __init__(
        self,
        connection: SwarmConnection,
        core: AnswerCore,
        routes: Routes,
        *,
        embed: Callable[[int, int], Awaitable[EncodedRows]],
        on_compute: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_event: Callable[[AnswerEvent], None],
        groups: Groups | None = None,
        on_time: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core
        self._on_time = on_time
        self._groups = groups or Groups(0, wire_dtype="", decompress=lambda payload, tensor: payload)
        self.retain = False
        self.is_kept = False
        self._connection = connection
        self._routes = routes
        self._embed = embed
        self._on_compute = on_compute
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        """Rows as they come, or what ends the answer."""
        self._incoming: EncodedRows | None = None
        """Of the message that the core is being handed."""
        self._wanted: deque[RowsWanted | TreeRowsWanted] = deque()
        self._is_sending = False
        self._newest: tuple[int, EncodedRows] | None = None
        """The rows of the last position that was appended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._routing: asyncio.Task[None] | None = None
        self._sessions: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_pumping = False
        self._is_over = False

    async def __aenter__(self) -> Self:
        self.core.start(now=self._now())
        self._pump()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self.is_kept = self.retain and self.core.is_open
            self.core.close(retain=self.retain, now=self._now())
            self._pump()
        finally:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()
            for session in self._sessions:
                self._connection.unregister(session)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next_row(self) -> EncodedRows:
        """The row of the last position, which may be compressed: choose a token, and then ``append``.

        Raises:
            FusionError: the answer cannot go on.
        """
        rows: EncodedRows = await self._next_result()
        return rows

    async def _next_result(self) -> Any:
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def append(self, position: int, rows: EncodedRows) -> None:
        """The token of the next position was chosen, and these are its rows."""
        self._newest = (position, rows)
        self.core.append(now=self._now())
        self._pump()

    def result_unfit(self, reason: str) -> None:
        """The row that came last cannot be used; there will be another, or an error."""
        self.core.result_unfit(reason, now=self._now())
        self._pump()

    # what the user withdraws

    def revoke(self, peer: PeerId) -> None:
        """Goes on without a node, or a member of a group, that is told to drop what it has of the answer."""
        self._guard(lambda: self._revoke(peer))

    def obey(self) -> None:
        """The rules on who may own what are others now: goes on without those who are where they may not be."""
        self._guard(self._obey)

    def _obey(self) -> None:
        for places in (self.core.places, self.core.next_places):
            for breach in self._routes.breaches(places):
                log.info("revoked by a rule", peer=short(breach.peer), reason=breach.why)
                self._revoke(breach.peer, breach.why)

    def _revoke(self, peer: PeerId, why: str = "") -> None:
        if any(peer in members_of(place.peer) for place in self.core.places) and self.core.session:
            self._send_to(peer, CloseSession(self.core.session, self.core.epoch))
        self._groups.lost(peer)
        told = f"node {short(peer)} is revoked: {why}" if why else f"you have revoked node {short(peer)}"
        for each in (peer, *self._groups.groups_of(peer)):
            self.core.revoke(each, PeerRevoked(each, told), now=self._now())

    # what comes from outside

    def _on_message(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if not self._groups.are_used:
            self._take(peer, message, payload)
            return
        found: list[Said] = []
        self._guard(lambda: found.extend(self._through_groups(peer, message, payload)))
        for said in found:
            self._take(said.source, said.message, said.payload)

    def _through_groups(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> list[Said]:
        said = self._groups.receive(peer, message, payload, now=self._now())
        for member, answer in self._groups.outbox():
            self._send_to(member, answer)
        return said

    def _expire_groups(self) -> None:
        found: list[Said] = []
        self._guard(lambda: found.extend(self._groups.handle_timer(now=self._now())))
        for said in found:
            self._take(said.source, said.message, said.payload)

    def _take(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        """What a stage says."""
        if isinstance(message, StepTaps):
            rows = Returned(message.tensor, payload, peer)
            self._guard(lambda: self.core.receive_taps(message, rows, source=peer, now=self._now()))
            return
        self._incoming = (message.tensor, payload) if isinstance(message, StepResult) else None
        self._guard(lambda: self.core.receive(message, source=peer, now=self._now()))
        self._incoming = None

    def _on_lost(self, peer: PeerId | None, error: FusionError) -> None:
        """``peer`` None: all of them, because the connection itself is closed."""
        self._guard(lambda: self._lost(peer or PeerId(""), error))

    def _lost(self, peer: PeerId, error: FusionError) -> None:
        self._groups.lost(peer)
        for each in (peer, *self._groups.groups_of(peer)):
            self.core.link_closed(each, error, now=self._now())

    def _on_timer(self) -> None:
        self._on_time()
        self._expire_groups()
        due = self.core.get_timer()
        if due is not None and due <= self._now():
            self._guard(lambda: self.core.handle_timer(now=self._now()))
        else:
            self._guard(lambda: None)

    def _guard(self, work: Callable[[], None]) -> None:
        """Hands something from elsewhere to the core. An error of ours is this answer's end, and not its caller's:
        neither the link that brought a message nor the event loop could tell whoever waits for a row."""
        if self._is_over:
            return
        try:
            work()
            self._pump()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for a row
            self._end(error)

    def _end(self, error: BaseException) -> None:
        # First of all, because closing may fail as well where the core is in a state that it should not be in.
        self._results.put_nowait(error)
        self.core.close(retain=False, now=self._now())
        self._pump()

    # what the core says

    def _pump(self) -> None:
        """Follows the core until it has nothing more to say."""
        if self._is_pumping or self._is_over:
            return
        self._is_pumping = True
        try:
            while True:
                while (event := self.core.next_event()) is not None:
                    self._follow(event)
                    for each in self._with_members(event):
                        self._on_event(each)
                messages = self.core.messages_to_send()
                for peer, message in messages:
                    for member, each_message in self._groups.outgoing(peer, message, now=self._now()):
                        self._send_to(member, each_message)
                if not messages and not self._send_rows():
                    break
        finally:
            self._is_pumping = False
        if self._timer is not None:
            self._timer.cancel()
        due = min((at for at in (self.core.get_timer(), self._groups.get_timer()) if at is not None), default=None)
        # The event loop's clock is the monotonic one that the core is handed.
        self._timer = None if due is None else self._loop.call_at(due, self._on_timer)

    def _send_to(self, peer: PeerId, message: AnyMessage, payload: memoryview | None = None) -> None:
        try:
            if payload is None:
                self._connection.links.send(peer, message)
            else:
                self._connection.links.send(peer, message, payload)
        except PeerError as error:
            self._lost(peer, error)

    def _with_members(self, event: AnswerEvent) -> Sequence[AnswerEvent]:
        """What is told of groups, of those of their members that are at fault."""
        match event:
            case PeerFailed(error) if is_group(PeerId(error.peer)):
                return [PeerFailed(each) for each in self._groups.named(error, now=self._now())]
            case Repaired(peer=peer) if is_group(peer):
                return [replace(event, peer=min(self._groups.at_fault(peer, now=self._now())))]
            case _:
                return (event,)

    def _at_fault(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        found = frozenset(each for peer in peers for each in self._groups.at_fault(peer, now=self._now()))
        return found | self._groups.convicted

    def _follow(self, event: AnswerEvent) -> None:
        match event:
            case WantsRoute():
                if self._routing is not None:
                    self._routing.cancel()
                # Of a group that is replaced, the others may come back.
                groups = [peer for i in event.lost if is_group(peer := self.core.places[i].peer)]
                avoided = self._at_fault([*event.avoid_peers, *groups])
                self._routing = self._spawn(self._find_route(replace(event, avoid_peers=avoided)))
            case WantsConnection(place):
                self._groups.know(place.peer)
                if all(self._is_linked(PeerId(each.peer), place.stage.is_group) for each in place.stage.places):
                    self.core.connected(place.peer, now=self._now())
                else:
                    self._spawn(self._connect(place))
            case WantsAlternates():
                self._spawn(self._find_alternates(replace(event, avoid_peers=self._at_fault(event.avoid_peers))))
            case SessionBegan(session):
                self._sessions.add(session)
                self._connection.register(session, self._on_message, self._on_lost)
            case SessionEnded(session):
                self._sessions.discard(session)
                self._connection.unregister(session)
            case RowsWanted() | TreeRowsWanted():
                self._wanted.append(event)
            case StepDone() if event.has_row and self._incoming is not None:
                self._results.put_nowait(self._incoming)
            case Failed(error):
                self._results.put_nowait(error)
            case _:
                pass

    async def _find_route(self, wants: WantsRoute) -> None:
        log.debug("looking for a route", kind=wants.kind.value, reason=wants.reason)
        try:
            found = await self._routes.find(wants, self.core.places)
        except FusionError as error:
            self.core.no_route(wants.number, error, now=self._now())
        else:
            self.core.routed(
                wants.number,
                found.places,
                now=self._now(),
                prefix=found.prefix,
                expected_step_s=found.expected_step_s,
                expected_prefill_s=found.expected_prefill_s,
            )
        self._pump()

    async def _find_alternates(self, wants: WantsAlternates) -> None:
        """Links them as well: what is not linked is no alternate."""
        present = self.core.places
        try:
            found = await self._routes.alternates(wants, present)
        except FusionError as error:
            log.debug("no alternates", reason=str(error))
            return
        linked = {}
        for place in {place for places in found for place in places}:
            try:
                linked[place] = await self._try_connect(place) is None
            except FusionError as error:  # of ours: a link too many
                log.debug("no link to an alternate", reason=str(error))
                linked[place] = False
        if self.core.places == present:
            kept = tuple(
                places if all(linked[place] and not self._routes.is_revoked(place.peer) for place in places) else ()
                for places in found
            )
            self.core.alternates(kept, now=self._now())

    async def _connect(self, place: Place) -> None:
        error = await self._try_connect(place)
        if error is None:
            self.core.connected(place.peer, now=self._now())
        else:
            self.core.unreachable(place.peer, error, now=self._now())
        self._pump()

    async def _try_connect(self, place: Place) -> PeerError | None:
        self._groups.know(place.peer)
        tried = await asyncio.gather(*(self._try_link(each, place.stage.is_group) for each in place.stage.places))
        return next((error for error in tried if error is not None), None)

    def _is_linked(self, peer: PeerId, is_member: bool) -> bool:
        links = self._connection.links
        return links.is_connected(peer) and not (is_member and self._lacking(links.features(peer)))

    def _lacking(self, features: frozenset[str]) -> str:
        """What the program of a member knows nothing of; empty when it knows all that it has to."""
        if FUSION_FEATURE not in features:
            return "groups"
        return "masked sums" if self._groups.are_masked and MASKS_FEATURE not in features else ""

    async def _try_link(self, node: PlanMember, is_member: bool) -> PeerError | None:
        peer, addresses, links = PeerId(node.peer), dialled_at(node), self._connection.links
        try:
            if not addresses and not links.is_connected(peer):
                raise PeerUnreachable(peer, f"node {short(peer)} can be dialled by nobody, and no relay leads to it")
            await links.connect(peer, addresses, timeout_s=CONNECT_S)
            if is_member and (what := self._lacking(links.features(peer))):
                raise PeerUnreachable(peer, f"the program of node {short(peer)} knows nothing of {what}")
        except PeerError as error:
            return error
        return None

    # rows

    def _send_rows(self) -> bool:
        """Those that are wanted, in order. Says whether the core was told of any."""
        told = False
        while self._wanted and not self._is_sending:
            wanted = self._wanted.popleft()
            rows = self._rows_at_hand(wanted)
            packings = [] if rows is None or self._is_much(rows) else self._packings(self._parts(rows))
            if rows is None or not packings or any(isinstance(each, Packing) and each.is_large for each in packings):
                # Those behind it wait, so that all stay in order.
                self._is_sending = True
                self._spawn(self._make_rows(wanted, rows))
            else:
                self._send(wanted, rows[0], list(map(_packed, packings)))
                told = True
        return told

    def _rows_at_hand(self, wanted: RowsWanted | TreeRowsWanted) -> EncodedRows | None:
        if isinstance(wanted, TreeRowsWanted) or self._newest is None:
            return None
        if (wanted.first_position, wanted.num_positions) != (self._newest[0], 1):
            return None
        return self._newest[1]

    async def _make_rows(self, wanted: RowsWanted | TreeRowsWanted, rows: EncodedRows | None) -> None:
        try:
            if rows is None and isinstance(wanted, RowsWanted):
                rows = await self._embed(wanted.first_position, wanted.first_position + wanted.num_positions)
            if rows is None or not self.core.places:
                return
            cut = partial(self._parts, rows)
            packings = self._packings(await self._on_compute(cut) if self._is_much(rows) else cut())
            packed = [
                await self._on_compute(each.run) if isinstance(each, Packing) and each.is_large else _packed(each)
                for each in packings
            ]
            self._send(wanted, rows[0], packed)
        finally:
            self._is_sending = False
        self._pump()

    def _is_much(self, rows: EncodedRows) -> bool:
        """Cutting the rows by columns is no work for an event loop."""
        return is_group(self.core.places[0].peer) and self._connection.compressor.is_large(rows[0])

    def _parts(self, rows: EncodedRows) -> list[EncodedRows]:
        """For each member of the first stage its columns."""
        return self._groups.cut(self.core.places[0].peer, *rows)

    def _packings(self, parts: Sequence[EncodedRows]) -> list[Packing | EncodedRows]:
        """How each part is to be compressed; the part itself, where it is not."""
        members = members_of(self.core.places[0].peer)
        if len(members) != len(parts):
            return []  # another plan has come in between
        choose = self._connection.compressor.choose
        return [choose(peer, *part) or part for peer, part in zip(members, parts, strict=True)]

    def _send(
        self, wanted: RowsWanted | TreeRowsWanted, tensor: TensorMeta, parts: Sequence[Packed | EncodedRows]
    ) -> None:
        """Rows, and as what they go to each member of the first stage."""
        rows = []
        for part in parts:
            if isinstance(part, Packed):
                self._connection.compressor.note(part)
                rows.append((part.tensor, memoryview(part.payload)))
            else:
                rows.append(part)
        step = self.core.rows_ready(wanted, rows[0][0] if len(rows) == 1 else tensor, now=self._now())
        if step is None:
            return
        if not self._groups.are_used:
            self._send_to(*step, rows[0][1])
            return
        for peer, message, payload in self._groups.steps(*step, rows):
            self._send_to(peer, message, payload)

    # tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """What goes wrong here that is nobody else's fault ends the answer as it is."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_over:
            self._end(error)

    def _now(self) -> MonotonicS:
        return MonotonicS(self._loop.time())


def _packed(packing: Packing | EncodedRows) -> Packed | EncodedRows:
    return packing.run() if isinstance(packing, Packing) else packing
