"""Bytes and messages of the exchange, counted on sealed links between real members of the built-in model.

The members of a group are the servers of nodes, with their slices of all layers, in this process; between them are
WebSockets over loopback. A user sends steps of one, 16 and 64 rows. What the links between members carry is all that
members have sent less what the user got: segments with their tags, acknowledgements and pings included. WebSocket's own
framing is beside it, and not of it: a libp2p stream has another.

Nothing is timed here, so that it does not matter what else the machine does.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.fusion.sizes import Carried, least_bytes, least_messages, websocket_bytes
from benchmarks.report import Check
from fusion_node import ModelStore
from fusion_node.audit_records import name_of
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.server import NodeServer
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.tensor_codec import encode_rows
from fusion_node.errors import FusionError
from fusion_node.grants import GRANT_ID_BYTES, Grant
from fusion_node.mask_keys import SECRET_BYTES, mask_keys
from fusion_node.slices import Dims, ModelSlice
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from p2p.compression import FEATURE
from p2p.connection import Payload
from p2p.grants import sign_grant
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.messages import (
    FUSION_FEATURE,
    MASKS_FEATURE,
    AnyMessage,
    CloseSession,
    OpenSession,
    Partials,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    Step,
    StepResult,
    encode_message,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanMember, PlanStage, sign_lease, sign_plan
from p2p.websocket import WebSocketNetwork

MODEL = "smollm2-135m"
GROUPS = (2, 3, 4)
MASKED_GROUPS = (3, 4)
ROWS = (1, 16, 64)
NUM_STEPS, NUM_QUICK_STEPS = 8, 1
MAX_RATIO = 1.05
PATIENCE_S = 120.0
KV_BYTES = 1 << 28


class _Recorder:
    """Counts the frames between members, at the seam that the audit records at."""

    def __init__(self) -> None:
        self.members: set[PeerId] = set()
        self.counts: Counter[str] = Counter()
        self.by_type: Counter[str] = Counter()

    def sent(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        if peer not in self.members:
            return
        header = len(encode_message(message))
        self.by_type[type(message).__name__] += 1
        if isinstance(message, Partials):
            self.counts["messages"] += 1
            self.counts["payload"] += len(payload)
            self.counts["headers"] += header
        else:
            self.counts["others"] += 1
            self.counts["other_bytes"] += header + len(payload)

    def received(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """Counted where it was sent."""

    def gone(self, peer: PeerId) -> None:
        """Nobody goes before the end."""


@dataclass
class _Member:
    identity: Identity
    engine: SliceEngine
    server: NodeServer
    pool: LinkPool
    address: str = ""


@dataclass
class _User:
    """Sends steps to all members, and joins nothing of what comes back: it only waits for all of it."""

    identity: Identity = field(default_factory=Identity.generate)
    frames: asyncio.Queue[AnyMessage] = field(default_factory=asyncio.Queue)
    pool: LinkPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = LinkPool(
            WebSocketNetwork(self.identity),
            self.identity.peer_id,
            on_frame=lambda peer, message, payload: self.frames.put_nowait(message),
            on_closed=self._on_closed,
        )

    def _on_closed(self, peer: PeerId, error: FusionError) -> None:
        print(f"a link was lost: {error}", file=sys.stderr, flush=True)

    async def wait_for(self, kind: type[AnyMessage], num: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while num:
                message = await self.frames.get()
                if isinstance(message, SessionFailed | SessionRefused):
                    raise RuntimeError(f"{message.code}: {message.reason}")
                num -= isinstance(message, kind)


class Group:
    """Members with links between all of them, and a user."""

    def __init__(self, members: list[_Member], user: _User, recorder: _Recorder, model: StoredModel) -> None:
        self._members = members
        self._user = user
        self._recorder = recorder
        self._model = model

    @property
    def dims(self) -> Dims:
        return self._members[0].engine.dims

    async def carry(self, num_rows: int, num_steps: int, *, is_masked: bool = False) -> tuple[Carried, dict[str, int]]:
        """Passes steps of so many rows through all layers, one after another; also returns messages by their type."""
        user, recorder = self._user, self._recorder
        layers, weights = self._members[0].engine.layers, self._members[0].engine.member.weights
        members = tuple(PlanMember(each.identity.peer_id, (each.address,)) for each in self._members)
        stage = PlanStage(members[0].peer, layers.start, layers.stop, (), members=members, weights=weights)
        now = time.time()
        plan = Plan(
            PROTOCOL_VERSION, user.identity.peer_id, secrets.token_bytes(16), 0, self._model.model_id, "fp32",
            num_rows * (num_steps + 1), now, now + 600.0, (stage,), masks=is_masked,
        )  # fmt: skip
        signed, secret, num_members = sign_plan(plan, user.identity), secrets.token_bytes(SECRET_BYTES), len(members)
        for index, each in enumerate(self._members):
            await user.pool.connect(PeerId(each.identity.peer_id), [each.address])
            grant = Grant(
                PROTOCOL_VERSION, secrets.token_bytes(GRANT_ID_BYTES), plan.user, each.identity.peer_id,
                name_of(plan.session), plan.model_id, stage.start, stage.stop, index, weights, now, now + 600.0,
            )  # fmt: skip
            keys = mask_keys(
                secret, session=plan.session, epoch=0, opening=0, stage=0, num_members=num_members, member=index
            )
            opening = OpenSession(
                plan.session,
                plan.epoch,
                0,
                signed,
                member=index,
                grant=sign_grant(grant, user.identity),
                mask_keys=keys if is_masked else b"",
            )
            user.pool.send(each.identity.peer_id, opening)
        await user.wait_for(SessionOpened, len(members))
        await self._step(plan, num_rows, 0)  # what comes first pays for links and memory
        sealed_before, counts_before = self._sealed_bytes(), Counter(recorder.counts)
        types_before = Counter(recorder.by_type)
        for sequence in range(1, num_steps + 1):
            await self._step(plan, num_rows, sequence)
        counts = recorder.counts - counts_before
        carried = Carried(
            num_layers=num_steps * len(layers),
            sealed_bytes=self._sealed_bytes() - sealed_before,
            payload_bytes=counts["payload"],
            header_bytes=counts["headers"],
            num_messages=counts["messages"],
            other_bytes=counts["other_bytes"],
            num_others=counts["others"],
            least_bytes=num_steps * len(layers) * least_bytes(self.dims, weights, num_rows, is_masked=is_masked),
        )
        types = dict(recorder.by_type - types_before)
        for each in self._members:
            user.pool.send(each.identity.peer_id, CloseSession(plan.session, plan.epoch))
        return carried, types

    async def _step(self, plan: Plan, num_rows: int, sequence: int) -> None:
        generator = torch.Generator().manual_seed(sequence)
        first = 1 + sequence * num_rows
        last = first + num_rows - 1
        for each in self._members:
            rows_TD = torch.randn(num_rows, len(each.engine.columns), generator=generator)
            tensor, payload = encode_rows(rows_TD, "f32")
            step = Step(
                plan.session, plan.epoch, sequence, first, first - 1, (), last, (last,), tensor, (),
            )  # fmt: skip
            self._user.pool.send(each.identity.peer_id, step, payload)
        await self._user.wait_for(StepResult, len(self._members))

    def _sealed_bytes(self) -> int:
        """That members have sent one another, with what of it is still under way."""
        sent = sum(each.pool.counters["bytes_out"] for each in self._members)
        return sent - self._user.pool.counters["bytes_in"]


@asynccontextmanager
async def group_of(model: StoredModel, layers: LayerRange, num_members: int) -> AsyncIterator[Group]:
    """Members of equal weights, and a user."""
    recorder = _Recorder()
    async with AsyncExitStack() as stack:
        members = []
        for index in range(num_members):
            members.append(await _member(stack, model, layers, ModelSlice(index, (1,) * num_members), recorder))
        recorder.members = {each.identity.peer_id for each in members}
        user = _User()
        stack.push_async_callback(user.pool.aclose)
        yield Group(members, user, recorder, model)


async def _member(
    stack: AsyncExitStack, model: StoredModel, layers: LayerRange, place: ModelSlice, recorder: _Recorder
) -> _Member:
    identity = Identity.generate()
    stage = SlicedStage.load(model, layers, place, numerics=numerics_class("fp32"), device=torch.device("cpu"))
    engine = SliceEngine(stage, kv_budget_bytes=KV_BYTES)
    admission = Admission(
        peer=identity.peer_id,
        model_id=model.model_id,
        layers=layers,
        numerics=engine.numerics,
        blocks=engine.blocks,
        first_layers=engine.first_layers,
        slice=place,
    )
    server = NodeServer(engine, admission, own_record=lambda: b"", sign_lease=lambda lease: sign_lease(lease, identity))
    pool = LinkPool(
        WebSocketNetwork(identity),
        identity.peer_id,
        on_frame=server.on_frame,
        on_closed=server.on_closed,
        features=(FEATURE, FUSION_FEATURE, MASKS_FEATURE),
        recorder=recorder,
    )
    server.attach(pool)
    made = _Member(identity, engine, server, pool, await pool.listen("127.0.0.1:0"))

    async def close() -> None:
        await server.drain(timeout_s=5.0)
        await pool.aclose()

    stack.push_async_callback(close)
    return made


async def measure(rows: Sequence[int], num_steps: int) -> list[dict[str, Any]]:
    """All sizes of groups and steps."""
    model = ModelStore().pull(MODEL)
    layers, found = LayerRange(0, model.num_layers), []
    for num_members in GROUPS:
        async with group_of(model, layers, num_members) as group:
            for is_masked in (False, True) if num_members in MASKED_GROUPS else (False,):
                for num_rows in rows:
                    carried, types = await group.carry(num_rows, num_steps, is_masked=is_masked)
                    found.append(_told(group.dims, num_members, num_rows, carried, types) | {"masked": is_masked})
                    print(in_words(found[-1]), file=sys.stderr, flush=True)
    return found


def _told(dims: Dims, num_members: int, num_rows: int, carried: Carried, types: dict[str, int]) -> dict[str, Any]:
    per_layer = carried.num_messages / carried.num_layers
    # Of two members, one has dialled the other, and masks what it sends.
    mean = carried.sealed_bytes / (carried.num_messages + carried.num_others)
    framing = sum(websocket_bytes(round(mean), masked=masked) for masked in (True, False)) / 2
    return {
        "members": num_members,
        "rows": num_rows,
        "layers": carried.num_layers,
        "bytes_per_layer": round(carried.sealed_bytes / carried.num_layers, 1),
        "least_bytes_per_layer": round(carried.least_bytes / carried.num_layers, 1),
        "bytes_per_layer_and_row": round(carried.sealed_bytes / carried.num_layers / num_rows, 1),
        "ratio": carried.ratio,
        "ratio_with_websocket": (carried.sealed_bytes + framing * carried.num_messages) / carried.least_bytes,
        "messages_per_layer": round(per_layer, 3),
        "least_messages_per_layer": least_messages(dims, (1,) * num_members),
        "parts": {name: round(num_bytes, 2) for name, num_bytes in carried.parts().items()},
        "types": types,
    }


def in_words(told: dict[str, Any]) -> str:
    """One line."""
    parts = ", ".join(f"{name} {num_bytes:g}" for name, num_bytes in told["parts"].items())
    form = ", masked" if told["masked"] else ""
    return (
        f"{told['members']} members{form}, {told['rows']} rows: {told['ratio']:.4f} x the least of "
        f"{told['least_bytes_per_layer']:g} bytes per layer in {told['messages_per_layer']:g} messages; {parts}"
    )


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """All cells; quick ones with fewer steps."""
    found = asyncio.run(measure(ROWS, NUM_QUICK_STEPS if quick else NUM_STEPS))
    by_rows = {rows: [each for each in found if each["rows"] == rows] for rows in ROWS}
    checks = [
        Check(
            f"bytes-{rows}",
            f"sealed bytes of the exchange / least, {rows} row{'s' * (rows > 1)}, worst of {GROUPS[0]} to {GROUPS[-1]} "
            "members",
            max(each["ratio"] for each in cells),
            "x",
            MAX_RATIO,
            "<=",
        )
        for rows, cells in by_rows.items()
    ]
    checks.append(
        Check(
            "messages",
            "messages of the exchange / least, the most of all",
            max(each["messages_per_layer"] / each["least_messages_per_layer"] for each in found),
            "x",
            1.0,
            "<=",
        )
    )
    return checks, {"model": MODEL, "cells": found}


__all__ = ["GROUPS", "ROWS", "Group", "group_of", "in_words", "run"]
