"""Takes layers and goes over to others: the shell around placement_core, for a node that joins and one that serves."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from fusion_node.client.hosts import hosts_of
from fusion_node.client.topology import SwarmTopology
from fusion_node.daemon.placement_core import AssignmentDesk, Choice, Intend, may_drop, next_look_s
from fusion_node.errors import FusionError
from fusion_node.types import LayerRange, ModelId, PeerId, UnixS
from p2p.discovery import DiscoveryService
from p2p.identity import short
from p2p.messages import Assign, Assigned
from p2p.records import NodeRecord
from scheduler.placement import Decision, Move, Policy
from scheduler.swarm_rate import Host, Work, holders_per_layer

LOOK_AROUND_S = 5.0
"""How long a node that may choose its layers waits to hear what others hold."""

DROP_PATIENCE_S = 30.0
"""How long a node that has loaded other layers waits for others to be ready for those that it is to drop."""

DROP_RETRY_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class View:
    """The other nodes of the model, and the legs between all of them."""

    hosts: list[Host]
    legs: SwarmTopology


class Lookout:
    """Looks at the swarm for one node.

    Args:
        own_record: what the node last said of itself; None before it has.
    """

    def __init__(
        self,
        discovery: DiscoveryService,
        peer: PeerId,
        model_id: ModelId,
        numerics: str,
        work: Work,
        *,
        own_record: Callable[[], NodeRecord | None] = lambda: None,
    ) -> None:
        self._discovery = discovery
        self._peer = peer
        self._model_id = model_id
        self._numerics = numerics
        self._own_record = own_record
        self.work = work
        self.last_seen: list[Host] = []

    async def look(self) -> View:
        """What there is now; an empty swarm when nobody can be asked."""
        records: list[NodeRecord] = []
        with contextlib.suppress(FusionError):
            await self._discovery.wait_for_peer(LOOK_AROUND_S)
            records = await self._discovery.find(self._model_id, timeout_s=LOOK_AROUND_S)
        others = [record for record in records if record.peer != self._peer]
        own = self._own_record()
        self.last_seen = hosts_of(others, self._model_id, self._numerics, self.work.num_layers)
        legs = SwarmTopology([*others, *(() if own is None else (own,))], round_trips_s={})
        return View(self.last_seen, legs)

    async def choose(
        self, own: Host, intend: Callable[[LayerRange], Awaitable[None]], policy: Policy | None = None
    ) -> Decision:
        """What the node should hold, when all who choose at the same time have given way to one another.

        Args:
            intend: tells the swarm of it.
        """
        choice = Choice(own, self.work, policy or Policy())
        while True:
            view = await self.look()
            result = await asyncio.to_thread(choice.look, view.hosts, view.legs)
            if not isinstance(result, Intend):
                return result.decision
            await intend(result.move.layers)
            await asyncio.sleep(result.wait_s)


class Movable(Protocol):
    """A node that serves, and may serve other layers."""

    def as_host(self) -> Host:
        """What it holds now, and what fits."""
        ...

    @property
    def paused(self) -> str | None:
        """Why it serves nobody for now; None while it does."""
        ...

    @property
    def is_between(self) -> bool:
        """Whether it serves nothing, because the old layers had to go before the others could come."""
        ...

    async def intend(self, layers: LayerRange | None) -> None:
        """The swarm is told of layers that it loads beside those that it serves; None: of none any more."""
        ...

    async def go_over(self, layers: LayerRange, may_drop: Callable[[], Awaitable[bool]]) -> bool:
        """Loads what is missing, hands its sessions over, and serves these layers from then on.

        Args:
            may_drop: asked when the layers are there; when it says no, nothing has changed.

        Returns:
            Whether it has gone over.

        Raises:
            FusionError: a layer could not be loaded; nothing has changed, unless ``is_between``.
        """
        ...


class Mover:
    """Reconsiders now and then what a node serves, and obeys the scheduler that its operator has named.

    Args:
        may_reconsider: whether the node may choose for itself; one with a scheduler leaves it to that.
    """

    def __init__(
        self,
        node: Movable,
        lookout: Lookout,
        desk: AssignmentDesk,
        *,
        may_reconsider: bool,
        policy: Policy | None = None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._lookout = lookout
        self._desk = desk
        self._may_reconsider = may_reconsider
        self._policy = policy
        self._unix_clock = unix_clock
        self._rng = secrets.SystemRandom()
        self._ordered: asyncio.Queue[LayerRange] = asyncio.Queue(maxsize=1)
        self._going_to: LayerRange | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            are_missing = self._are_missing()
            timeout_s = next_look_s(self._rng, are_missing=are_missing) if self._may_reconsider else None
            try:
                async with asyncio.timeout(timeout_s):
                    layers = await self._ordered.get()
            except TimeoutError:
                await self.reconsider()
            else:
                await self._carry_out(layers, is_assigned=True)

    async def reconsider(self) -> Decision:
        """Looks whether other layers need this node more, and goes over to them if so."""
        decision = await self._lookout.choose(self._node.as_host(), self._node.intend, self._policy)
        if isinstance(decision, Move):
            log.info("goes over to other layers", layers=str(decision.layers), reason=decision.reason)
            await self._carry_out(decision.layers, is_assigned=False)
        else:
            await self._node.intend(None)
        return decision

    async def take(self, source: PeerId, message: Assign) -> Assigned:
        """An assignment has come: obeyed from now on, or refused with the reason.

        It counts instead of an earlier one that is not carried out yet, and after one that is being carried out.
        """
        view = await self._lookout.look()
        own = self._node.as_host()
        answer = self._desk.receive(
            message.assignment,
            source=source,
            own=own,
            others=view.hosts,
            now=UnixS(self._unix_clock()),
            paused=self._node.paused,
        )
        if isinstance(answer, str):
            log.info("assignment refused", scheduler=short(source), reason=answer)
            return Assigned(message.number, answer)
        log.info("assignment taken", scheduler=short(source), layers=str(answer))
        if self._ordered.full():
            self._ordered.get_nowait()
        if answer != (self._going_to or self._node.as_host().held):
            self._ordered.put_nowait(answer)
        return Assigned(message.number)

    async def _carry_out(self, layers: LayerRange, *, is_assigned: bool) -> None:
        own = self._node.as_host()
        if own.held == layers:
            return
        drop = () if own.held is None else tuple(own.held.without(layers))
        move = Move(own.peer, layers, (), drop, 0, 0.0, "")

        async def may() -> bool:
            deadline = time.monotonic() + DROP_PATIENCE_S
            while True:
                view = await self._lookout.look()
                if may_drop(own, move, view.hosts, self._lookout.work, is_assigned=is_assigned):
                    return True
                if time.monotonic() >= deadline:
                    return False
                await asyncio.sleep(DROP_RETRY_S)

        self._going_to = layers
        try:
            await self._node.intend(layers)
            if not await self._node.go_over(layers, may):
                log.warning("stays: nobody else serves what it would drop", layers=str(own.held), wanted=str(layers))
        except FusionError as error:
            if self._node.is_between:
                raise
            log.warning("stays: other layers could not be loaded", wanted=str(layers), reason=str(error))
        finally:
            self._going_to = None
            await self._node.intend(None)

    def _are_missing(self) -> bool:
        own = self._node.as_host().held
        return not all(
            holders_per_layer([own, *(h.held for h in self._lookout.last_seen)], self._lookout.work.num_layers)
        )
