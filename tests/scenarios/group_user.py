"""A user of fusion groups that speaks raw messages: plans with groups, rows cut for their members, results joined."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from fusion_node.audit_records import name_of
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.tensor_codec import decode_rows, encode_rows
from fusion_node.errors import PeerUnreachable
from fusion_node.grants import Grant
from fusion_node.slices import ModelSlice, split_columns
from fusion_node.types import LayerRange, PeerId
from p2p.grants import sign_grant
from p2p.messages import (
    AnyMessage,
    CloseSession,
    OpenSession,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanMember, PlanStage, sign_plan
from tests.scenarios.swarm import CPU, MemorySwarm, Node, Raw, until


async def group(swarm: MemorySwarm, layers: LayerRange, weights: Sequence[int]) -> list[Node]:
    """Nodes that hold the slices of a layer range."""
    return [await member(swarm, layers, ModelSlice(index, tuple(weights))) for index in range(len(weights))]


async def member(swarm: MemorySwarm, layers: LayerRange, slice_: ModelSlice) -> Node:
    stage = SlicedStage.load(swarm.model, layers, slice_, numerics=numerics_class("fp32"), device=CPU)
    return await swarm.node(layers, stage=stage)


def stage_of(nodes: Sequence[Node]) -> PlanStage:
    """A stage of one node of whole layers, or of the members of a group."""
    first = nodes[0]
    layers, slice_ = first.engine.layers, first.admission.slice
    if slice_ is None:
        return PlanStage(first.peer, layers.start, layers.stop, (first.address,))
    members = tuple(PlanMember(node.peer, (node.address,)) for node in nodes)
    return PlanStage(first.peer, layers.start, layers.stop, (), members=members, weights=slice_.weights)


@dataclass
class GroupUser:
    """One session over stages of one or several nodes.

    Attributes:
        opened: answers of this epoch, by who gave them.
        results: rows that have come, by sequence and who sent them.
    """

    swarm: MemorySwarm
    raw: Raw
    stages: list[list[Node]]
    plan: Plan
    opened: dict[PeerId, SessionOpened] = field(default_factory=dict)
    failed: list[tuple[PeerId, SessionFailed]] = field(default_factory=list)
    refused: list[tuple[PeerId, SessionRefused]] = field(default_factory=list)
    others: list[tuple[PeerId, AnyMessage]] = field(default_factory=list)
    results: dict[int, dict[PeerId, tuple[StepResult, bytes]]] = field(default_factory=dict)
    sequence: int = 0
    last_node: int = 0

    @classmethod
    def of(cls, swarm: MemorySwarm, stages: Sequence[Sequence[Node]], **changes: object) -> GroupUser:
        raw = swarm.stranger()
        listed = [list(nodes) for nodes in stages]
        return cls(swarm, raw, listed, cls.planned(swarm, raw, listed, **changes))

    @staticmethod
    def planned(swarm: MemorySwarm, raw: Raw, stages: Sequence[Sequence[Node]], /, **changes: object) -> Plan:
        fields = {"stages": tuple(map(stage_of, stages)), "max_positions": 512}
        return swarm.plan(raw.peer, stages[0], **(fields | changes))

    async def open(self, **changes: object) -> None:
        """Asks everybody to open the plan, and waits for their answers."""
        await self.ask(**changes)
        asked = [node for nodes in self.stages for node in nodes]
        await until(lambda: self.pump() or all(node.peer in self.opened for node in asked))

    async def ask(self, *, swap: bool = False, keys: Sequence[bytes] = (), **changes: object) -> None:
        """Asks everybody to open the plan; with ``swap`` the members are told each other's places.

        Args:
            keys: of masks, for each member of a stage.
        """
        signed = sign_plan(self.plan, self.raw.identity)
        self.opened.clear()
        for index, nodes in enumerate(self.stages):
            for place, node in enumerate(nodes[::-1] if swap else nodes):
                await self.raw.pool.connect(node.peer, [node.address])
                message = OpenSession(
                    self.plan.session, self.plan.epoch, index, signed, member=place, grant=self.granted(index, node)
                )
                if keys:
                    message = msgspec.structs.replace(message, mask_keys=keys[place])
                self.raw.pool.send(node.peer, msgspec.structs.replace(message, **changes))

    def granted(self, stage: int, node: Node, /, **changes: object) -> bytes:
        """A new grant for a member, signed; empty for a node of whole layers."""
        place, slice_ = self.plan.stages[stage], node.admission.slice
        if slice_ is None:
            return b""
        now = time.time()
        fields: dict[str, object] = {
            "version": PROTOCOL_VERSION,
            "grant": secrets.token_bytes(16),
            "user": self.raw.peer,
            "node": node.peer,
            "session": name_of(self.plan.session),
            "model_id": self.plan.model_id,
            "start": place.start,
            "stop": place.stop,
            "member": slice_.index,
            "weights": slice_.weights,
            "issued_at": now,
            "expires_at": now + 600.0,
        }
        return sign_grant(Grant(**(fields | changes)), self.raw.identity)  # type: ignore[arg-type]

    def replan(self, **changes: object) -> None:
        """A plan of the next epoch, with the stages as they are now."""
        epoch = self.plan.epoch + 1
        self.plan = self.planned(self.swarm, self.raw, self.stages, session=self.plan.session, epoch=epoch, **changes)

    def send(self, rows_TD: torch.Tensor, **changes: object) -> int:
        """Sends the next entry: a chain that commits all of itself if nothing else is said. Returns its sequence."""
        num_rows, first = len(rows_TD), self.last_node + 1
        last = first + num_rows - 1
        fields: dict[str, object] = {
            "session": self.plan.session,
            "epoch": self.plan.epoch,
            "sequence": self.sequence,
            "first_node": first,
            "parent": first - 1,
            "parents": (),
            "advance": last,
            "want": tuple(range(first, last + 1)),
            "timings": (),
        }
        fields |= changes
        # Members that are not among the nodes are not sent theirs.
        for node, columns in zip(self.stages[0], self._columns(0, rows_TD.shape[1]), strict=False):
            tensor, payload = encode_rows(rows_TD[:, columns.start : columns.stop], "f32")
            self.raw.pool.send(node.peer, Step(tensor=tensor, **fields), payload)  # type: ignore[arg-type]
        self.last_node = last
        self.sequence += 1
        return self.sequence - 1

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.swarm.boundary.embed(list(ids))

    async def result(self, sequence: int) -> torch.Tensor:
        """The rows that an entry gives back, joined."""
        nodes = self.stages[-1]
        await until(lambda: self.pump() or len(self.results.get(sequence, {})) == len(nodes) or bool(self.failed))
        assert not self.failed, self.failed
        parts = [self.results[sequence][node.peer] for node in nodes]
        assert len({message.nodes for message, _ in parts}) == 1
        rows = [decode_rows(message.tensor, memoryview(payload)) for message, payload in parts]
        widths = [len(c) for c in self._columns(-1, sum(part.shape[1] for part in rows))]
        assert [part.shape[1] for part in rows] == widths
        return torch.cat(rows, dim=1)

    async def step(self, rows_TD: torch.Tensor, **changes: object) -> torch.Tensor:
        """Sends an entry and waits for what it gives back."""
        return await self.result(self.send(rows_TD, **changes))

    def close(self) -> None:
        for nodes in self.stages:
            for node in nodes:
                with contextlib.suppress(PeerUnreachable):
                    self.raw.pool.send(node.peer, CloseSession(self.plan.session, self.plan.epoch))

    async def failure(self) -> tuple[PeerId, SessionFailed]:
        """The next one."""
        await until(lambda: self.pump() or bool(self.failed))
        return self.failed.pop(0)

    async def refusal(self) -> tuple[PeerId, SessionRefused]:
        """The next one."""
        await until(lambda: self.pump() or bool(self.refused))
        return self.refused.pop(0)

    def pump(self) -> bool:
        """Looks at what has come. Always false, so that it can stand in a condition."""
        while self.raw.frames:
            peer, message, payload = self.raw.frames.pop(0)
            match message:
                case SessionOpened() if message.epoch == self.plan.epoch:
                    self.opened[peer] = message
                case StepResult():
                    self.results.setdefault(message.sequence, {})[peer] = (message, payload)
                case SessionFailed():
                    self.failed.append((peer, message))
                case SessionRefused():
                    self.refused.append((peer, message))
                case _:
                    self.others.append((peer, message))
        return False

    def _columns(self, stage: int, size: int) -> tuple[range, ...]:
        slice_ = self.stages[stage][0].admission.slice
        return (range(size),) if slice_ is None else split_columns(size, slice_.weights)


__all__ = ["GroupUser", "TensorMeta", "group", "member", "stage_of"]
