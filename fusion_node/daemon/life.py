"""A node from its start to its end, as its operator sees it: the phase that it is in, and how busy it is."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import psutil

from fusion_node.daemon.control import BansReply, BansRequest, NodeState, Phase
from fusion_node.daemon.manners import MannersShell
from fusion_node.daemon.manners_core import PAUSE_GRACE_S, PauseReason, Standing
from fusion_node.daemon.network_report import NetworkReport
from fusion_node.daemon.swarm_report import InviteReply, InviteRequest, PeersReply, Swarming
from p2p.bans import canonical_target
from p2p.gate import PeerGate

RATE_WINDOW_S = 10.0
"""Over which the rows per second are told."""


class Working(Protocol):
    """What a node that has loaded tells of itself."""

    @property
    def num_sessions(self) -> int: ...

    @property
    def num_rows(self) -> int:
        """Computed since the start."""
        ...

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Reserved, and the budget of all sessions together."""
        ...

    @property
    def device_memory_bytes(self) -> int | None:
        """What this process holds on a GPU; None on a CPU."""
        ...


class Examining(Protocol):
    """What tells of the network."""

    async def report(self, *, measure: bool) -> NetworkReport: ...


class RowRate:
    """Rows per second over the last window."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, num_rows: int, *, now: float) -> None:
        """A count that only grows, now and then."""
        self._samples.append((now, num_rows))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    @property
    def rows_per_s(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - begin) if end > begin else 0.0


class NodeLife:
    """One node; `fusion_node.daemon.control.Controllable`.

    Args:
        pause_grace_s: for running sessions when the operator pauses.
    """

    def __init__(
        self,
        peer: str,
        model: str,
        *,
        pause_grace_s: float = PAUSE_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manners = MannersShell(pause_grace_s=pause_grace_s, clock=clock)
        self._peer = peer
        self._model = model
        self._clock = clock
        self._began = clock()
        self._phase = Phase.STARTING
        self._layers = ""
        self._slice = ""
        self._device = ""
        self._loaded_percent: int | None = None
        self._working: Working | None = None
        self._rate = RowRate()
        self._examiner: Examining | None = None
        self._swarm: Swarming | None = None
        self._gate = PeerGate()

    def guarded_by(self, gate: PeerGate) -> None:
        """Who may connect; before the control socket listens."""
        self._gate = gate

    def in_the_network(self, examiner: Examining) -> None:
        """The control plane is up; this tells of it from now on."""
        self._examiner = examiner

    def in_the_swarm(self, view: Swarming) -> None:
        """The control plane is up; this tells of the peers from now on."""
        self._swarm = view

    def loading(self, layers: str, device: str, *, slice_: str = "") -> None:
        """Layers and device are chosen, and the weights are being read."""
        self._slice = slice_
        self._phase, self._layers, self._device, self._loaded_percent = Phase.LOADING, layers, device, 0

    def loaded(self, fraction: float) -> None:
        """How much of the weights is there, from 0 to 1. May be called in any thread."""
        self._loaded_percent = min(100, int(100 * fraction))

    def warming_up(self) -> None:
        """The weights are there, and the first steps are computed to nobody's use."""
        self._phase, self._loaded_percent = Phase.WARMING_UP, 100

    def ready(self, working: Working) -> None:
        """Sessions can be opened, unless the node is paused."""
        self._phase, self._working = Phase.READY, working

    def moved(self, layers: str) -> None:
        """Other layers are served from now on."""
        self._layers, self._loaded_percent = layers, 100

    def leaving(self) -> None:
        """Nothing is taken any more."""
        self._phase = Phase.LEAVING

    def tick(self) -> None:
        """To be called about once a second, for the rate."""
        if self._working is not None:
            self._rate.note(self._working.num_rows, now=self._clock())

    def pause(self, *, at_once: bool) -> None:
        self.manners.pause(at_once=at_once)

    def resume(self) -> None:
        self.manners.resume()

    async def network(self, *, measure: bool) -> NetworkReport | None:
        return None if self._examiner is None else await self._examiner.report(measure=measure)

    def invite(self, request: InviteRequest) -> InviteReply | None:
        return None if self._swarm is None else self._swarm.invite(request)

    async def peers(self) -> PeersReply | None:
        return None if self._swarm is None else await self._swarm.peers()

    async def change_bans(self, request: BansRequest) -> BansReply:
        added = [msgspec.structs.replace(ban, target=canonical_target(ban.target)) for ban in request.add]
        num_lifted = await self._gate.change(ban=added, lift=map(canonical_target, request.lift))
        return BansReply(tuple(self._gate.bans()), num_lifted)

    def state(self) -> NodeState:
        working = self._working
        reserved, budget = (0, 0) if working is None else working.kv_bytes
        is_stopping = self.manners.core.standing is Standing.STOPPING and self._phase is Phase.READY
        return NodeState(
            peer=self._peer,
            pid=os.getpid(),
            model=self._model,
            phase=self._told_phase(),
            device=self._device,
            layers=self._layers,
            loaded_percent=self._loaded_percent,
            ends_in_s=self.manners.ends_in_s if is_stopping else None,
            num_sessions=0 if working is None else working.num_sessions,
            num_rows=0 if working is None else working.num_rows,
            rows_per_s=round(self._rate.rows_per_s, 1),
            memory_bytes=psutil.Process().memory_info().rss,
            device_memory_bytes=None if working is None else working.device_memory_bytes,
            kv_reserved_bytes=reserved,
            kv_budget_bytes=budget,
            uptime_s=round(self._clock() - self._began, 1),
            slice=self._slice,
        )

    def _told_phase(self) -> Phase:
        if self._phase is not Phase.READY:
            return self._phase
        match self.manners.core.reason:
            case None:
                return Phase.READY
            case PauseReason.OPERATOR:
                return Phase.PAUSED
            case PauseReason.OTHER_PROGRAM:
                return Phase.BACKING_OFF
