"""A whole swarm in one process: real servers, links and engine over the in-memory network, with a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fusion_node.client.connection import MeasuredNode, SwarmConnection
from fusion_node.client.session_core import SessionCore
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.server import NodeServer
from fusion_node.daemon.standstill_core import LOOK_S
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import NumericsClass, numerics_class
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.stage import Stage
from fusion_node.engine.tensor_codec import decode_rows, encode_rows
from fusion_node.errors import FusionError
from fusion_node.types import LayerRange, ModelId, PeerId
from p2p.audit_log import AuditLog
from p2p.compression import FEATURE
from p2p.discovery import DiscoveryConfig
from p2p.grants import sign_release
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.memory_discovery import MemoryDiscovery, World
from p2p.messages import FUSION_FEATURE, MASKS_FEATURE, AnyMessage, OpenSession, SessionOpened, Step, TensorMeta
from p2p.records import PROTOCOL_VERSION, NodeRecord, Plan, PlanStage, ShardRecord, sign_lease, sign_plan, sign_record
from p2p.tensor_wire import decompress
from tests.engine.tiny import TinyModel
from tests.scenarios.session import Session

MODEL = ModelId("ab" * 32)
CPU = torch.device("cpu")
PATIENCE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; fails the test when it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - any of many events of the nodes under test, and of their threads
            await asyncio.sleep(0)


@dataclass
class Clock:
    """Runs as the monotonic one does, and can be put forward."""

    ahead_s: float = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() + self.ahead_s

    @now.setter
    def now(self, value: float) -> None:
        self.ahead_s = value - time.monotonic()

    def __call__(self) -> float:
        return self.now


@dataclass
class Node:
    """One node: what `fusion-node join` wires, without libp2p and sockets."""

    host: str
    identity: Identity
    engine: ShardEngine | SliceEngine
    admission: Admission
    server: NodeServer
    pool: LinkPool
    discovery: MemoryDiscovery
    clock: Clock
    address: str = ""

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def num_sessions(self) -> int:
        return len(self.admission.sessions)

    def run_for(self, seconds: int) -> None:
        """So much time passes for this node, which looks at its clock as often as one that runs."""
        for _ in range(seconds):
            self.clock.now += LOOK_S
            self.server.expire()

    def record(self) -> bytes:
        layers, now = self.engine.layers, time.time()
        shard = ShardRecord(
            MODEL,
            "tiny",
            layers.start,
            layers.stop,
            7,
            self.engine.numerics,
            (1e-3, 1e-3, 1e-3),
            self.admission.free_positions,
            slice="" if self.admission.slice is None else str(self.admission.slice),
        )
        return sign_record(
            NodeRecord(
                version=PROTOCOL_VERSION,
                peer=self.peer,
                sequence=int(now * 1000),
                issued_at=now,
                expires_at=now + 60.0,
                data_addresses=(self.address,),
                libp2p_addresses=(),
                device="cpu",
                memory_free_bytes=1 << 30,
                shards=(shard,),
                num_sessions=self.num_sessions,
                software="test",
            ),
            self.identity,
        )


class Raw:
    """A peer with a pool of links and no manners: sends whatever it is told, and keeps what it gets."""

    def __init__(
        self, world: MemoryWorld, host: str, identity: Identity | None = None, recorder: AuditLog | None = None
    ) -> None:
        self.identity = identity or Identity.generate()
        self.host = host
        self.frames: list[tuple[PeerId, AnyMessage, bytes]] = []
        self.lost: list[tuple[PeerId, FusionError]] = []
        self.pool = LinkPool(
            MemoryNetwork(world, self.identity, host),
            self.peer,
            on_frame=lambda peer, message, payload: self.frames.append((peer, message, bytes(payload))),
            on_closed=lambda peer, error: self.lost.append((peer, error)),
            recorder=recorder,
        )

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def get(self, kind: type[AnyMessage]) -> AnyMessage:
        """The next message of that type, from anybody."""
        await until(lambda: any(isinstance(m, kind) for _, m, _ in self.frames))
        index = next(i for i, (_, m, _) in enumerate(self.frames) if isinstance(m, kind))
        return self.frames.pop(index)[1]

    async def open(self, plan: Plan, nodes: Sequence[Node], *, signed: bytes | None = None, stage: int = 0) -> None:
        """Dials the nodes and asks each to open the plan."""
        for index, node in enumerate(nodes, stage):
            await self.pool.connect(node.peer, [node.address])
            self.pool.send(
                node.peer, OpenSession(plan.session, plan.epoch, index, signed or sign_plan(plan, self.identity))
            )


class MemorySwarm:
    """Nodes, users and strangers of one test."""

    def __init__(self, stack: AsyncExitStack, model: TinyModel, boundary: Boundary) -> None:
        self.world = MemoryWorld()
        self.discoveries = World()
        self.model = model
        self.boundary = boundary
        self.nodes: list[Node] = []
        self.audit_folder: Path | None = None
        """Where nodes and users that are made from now on record what they are sent and send; None: nowhere."""
        self._stack = stack
        self._numbers = itertools.count()

    async def node(
        self,
        layers: LayerRange,
        *,
        budget_bytes: int = 1 << 24,
        numerics: NumericsClass | None = None,
        stage: Stage | SlicedStage | None = None,
        stages: Sequence[Stage] = (),
        cuts: tuple[int, ...] = (),
        max_links: int = 512,
    ) -> Node:
        host, identity, clock = f"host{next(self._numbers)}", Identity.generate(), Clock()
        numerics = numerics or numerics_class("fp32")
        ends = (layers.start, *cuts, layers.stop)
        engine: ShardEngine | SliceEngine
        if isinstance(stage, SlicedStage):
            engine = SliceEngine(stage, kv_budget_bytes=budget_bytes)
        else:
            stages = stages or (
                [stage]
                if stage
                else [
                    Stage.load(self.model, LayerRange(a, b), numerics=numerics, device=CPU)
                    for a, b in itertools.pairwise(ends)
                ]
            )
            engine = ShardEngine(stages, kv_budget_bytes=budget_bytes)
        admission = Admission(
            peer=identity.peer_id,
            model_id=MODEL,
            layers=layers,
            numerics=numerics.name,
            blocks=engine.blocks,
            first_layers=engine.first_layers,
            slice=engine.member if isinstance(engine, SliceEngine) else None,
        )
        server = NodeServer(
            engine,
            admission,
            own_record=lambda: made.record(),
            sign_lease=lambda lease: sign_lease(lease, identity),
            sign_release=lambda release: sign_release(release, identity),
            clock=clock,
        )
        pool = LinkPool(
            MemoryNetwork(self.world, identity, host),
            identity.peer_id,
            on_frame=server.on_frame,
            on_closed=server.on_closed,
            max_links=max_links,
            features=(FEATURE, FUSION_FEATURE, MASKS_FEATURE) if isinstance(engine, SliceEngine) else (FEATURE,),
            recorder=self.recorder(host, identity),
        )
        server.attach(pool)
        discovery = MemoryDiscovery(
            identity, DiscoveryConfig(("127.0.0.1:0",), (), True, True), self.discoveries, clock=time.time
        )
        made = Node(host, identity, engine, admission, server, pool, discovery, clock)
        made.address = await pool.listen(f"{host}:0")
        await discovery.start()
        await discovery.announce(made.record(), [MODEL])

        async def close() -> None:
            await server.drain(timeout_s=5.0)
            await pool.aclose()
            await discovery.aclose()

        self._stack.push_async_callback(close)
        self.nodes.append(made)
        return made

    def recorder(self, host: str, identity: Identity) -> AuditLog | None:
        """Of a process that is made now, until the test is over."""
        if self.audit_folder is None:
            return None
        log = AuditLog(self.audit_folder / f"{host}.log", identity.peer_id)
        self._stack.callback(log.close)
        return log

    def at_end(self, work: Callable[[], Awaitable[None]]) -> None:
        """To be awaited when the test is over; what was named last comes first."""
        self._stack.push_async_callback(work)

    async def pipeline(self) -> list[Node]:
        """Three nodes over the seven layers."""
        return [await self.node(LayerRange(a, b)) for a, b in ((0, 3), (3, 5), (5, 7))]

    async def user(self) -> SwarmConnection:
        host, identity = f"host{next(self._numbers)}", Identity.generate()
        discovery = MemoryDiscovery(identity, DiscoveryConfig((), (), True, False), self.discoveries, clock=time.time)
        connection = SwarmConnection(
            identity=identity,
            discovery=discovery,
            network=MemoryNetwork(self.world, identity, host),
            audit=None if self.audit_folder is None else self.audit_folder / f"{host}.log",
        )
        await self._stack.enter_async_context(connection)
        return connection

    def stranger(self, identity: Identity | None = None) -> Raw:
        host, identity = f"host{next(self._numbers)}", identity or Identity.generate()
        raw = Raw(self.world, host, identity, self.recorder(host, identity))
        self._stack.push_async_callback(raw.pool.aclose)
        return raw

    async def with_session(self, nodes: Sequence[Node]) -> tuple[Raw, Plan]:
        """A stranger whose session is open on all of them."""
        raw = self.stranger()
        plan = self.plan(raw.peer, nodes)
        await raw.open(plan, nodes)
        for _ in nodes:
            await raw.get(SessionOpened)
        return raw, plan

    def plan(self, user: PeerId, nodes: Sequence[Node], **changes: object) -> Plan:
        now = time.time()
        fields: dict[str, object] = {
            "version": PROTOCOL_VERSION,
            "user": user,
            "session": secrets.token_bytes(16),
            "epoch": 0,
            "model_id": MODEL,
            "numerics": nodes[0].engine.numerics,
            "max_positions": 64,
            "issued_at": now,
            "expires_at": now + 60.0,
            "stages": tuple(
                PlanStage(n.peer, n.engine.layers.start, n.engine.layers.stop, (n.address,)) for n in nodes
            ),
        }
        return Plan(**(fields | changes))  # type: ignore[arg-type]

    async def measured(self, connection: SwarmConnection) -> dict[PeerId, MeasuredNode]:
        """Every node, found and connected."""
        nodes = await connection.measure(await connection.find(MODEL))
        assert all(node.round_trip_s is not None for node in nodes)
        return {node.peer: node for node in nodes}

    async def session(self, connection: SwarmConnection, nodes: Sequence[Node], **changes: object) -> Session:
        """A session that is not open yet; use it with `async with`."""
        await self.measured(connection)
        plan = self.plan(connection.identity.peer_id, nodes, **changes)
        core = SessionCore(
            plan,
            sign_plan(plan, connection.identity),
            row_size=nodes[0].engine.hidden_size,
            wire_dtype=plan.wire or nodes[0].engine.wire_dtype,
        )
        return Session(connection, core)

    async def answer(
        self, connection: SwarmConnection, nodes: Sequence[Node], prompt: list[int], *, wire: str = ""
    ) -> Answer:
        """Eight greedy tokens, with the bytes of every row that came back."""
        async with await self.session(connection, nodes, wire=wire) as session:
            return await self.decode(session, prompt, dtype=wire or "f32")

    async def decode(
        self,
        session: Session,
        prompt: list[int],
        *,
        between: Callable[[], None] | None = None,
        dtype: str = "f32",
    ) -> Answer:
        answer = Answer()
        ids = prompt
        for _ in range(8):
            tensor, payload = self.rows(ids, dtype)
            packing = session.packing(tensor, payload)
            if packing is None:
                session.send(tensor, payload, want_last=True)
            else:
                session.send_packed(packing.run(), want_last=True)
            if between is not None:
                between()
            _, meta, row = await session.next_done()
            answer.rows.append(bytes(decompress(row, meta)) if meta.codec else bytes(row))
            token = int(self.boundary.logits(decode_rows(meta, row))[0].argmax())
            answer.tokens.append(token)
            ids = [token]
        return answer

    def rows(self, ids: Sequence[int], dtype: str = "f32") -> tuple[TensorMeta, memoryview]:
        return encode_rows(self.boundary.embed(ids), dtype)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)


def step(plan: Plan, tensor: TensorMeta, sequence: int = 0, **changes: object) -> Step:
    """A well-formed step that appends rows to the empty session, with changes."""
    first = int(changes.pop("first_node", 1))  # type: ignore[call-overload]
    fields: dict[str, object] = {
        "session": plan.session,
        "epoch": plan.epoch,
        "sequence": sequence,
        "first_node": first,
        "parent": first - 1,
        "parents": (),
        "advance": first + tensor.num_rows - 1,
        "want": (first + tensor.num_rows - 1,),
        "tensor": tensor,
        "timings": (),
    }
    return Step(**(fields | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def memory_swarm(model: TinyModel, boundary: Boundary) -> AsyncIterator[MemorySwarm]:
    async with AsyncExitStack() as stack:
        yield MemorySwarm(stack, model, boundary)
