"""Discovery over a host that is not there: what it makes of connections that come and go."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest

from fusion_node.errors import NoPeers, PeerError, PeerUnreachable
from fusion_node.types import ModelId, PeerId, UnixS
from p2p.addresses import PeerAddress
from p2p.bridge import Runner
from p2p.control import SENDER, ControlNode, ControlPlaneDown, FoundPeer, HostHooks
from p2p.discovery import Discovery, DiscoveryConfig, record_key
from p2p.identity import Identity
from p2p.puzzle import NONCE_BYTES, OF_A_STRANGER, PuzzleChecker
from p2p.record_exchange import RecordExchange
from p2p.records import PROTOCOL_VERSION, NodeRecord, RecordTable, ShardRecord, sign_record

US, FIRST, SECOND = (Identity.from_seed(seed * 32) for seed in (b"u", b"a", b"b"))
PATIENCE_S = 10.0


class World:
    """The peers that can be reached, and what became of the thread."""

    def __init__(self) -> None:
        self.reachable: dict[PeerId, RecordExchange] = {}
        self.refusal: PeerError | None = None
        self.silent: set[PeerId] = set()
        """Who never answers, though its connection holds."""
        self.num_given_up = 0
        """Requests that were no longer waited for."""
        self.connected_at_start: list[PeerId] = []
        self.disconnected: list[PeerId] = []
        self.runners: list[FakeRunner] = []

    def add(self, identity: Identity, *envelopes: bytes) -> None:
        exchange = RecordExchange(RecordTable(), Random(1))
        for envelope in envelopes:
            exchange.table.receive(envelope, now=UnixS(time.time()))
        self.reachable[identity.peer_id] = exchange

    def lose(self, identity: Identity) -> None:
        del self.reachable[identity.peer_id]
        self.runners[-1].hooks.on_connection(identity.peer_id, False)


class Never:
    """To be awaited for ever."""

    def __await__(self) -> Iterator[None]:
        yield


class FakeHost:
    """A ControlNode that never has to wait."""

    def __init__(self, world: World, hooks: HostHooks) -> None:
        self._world = world
        self._hooks = hooks

    async def listening(self) -> list[tuple[str, int]]:
        return []

    async def connect(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        if peer not in self._world.reachable:
            raise PeerUnreachable(peer, f"cannot reach {peer}")
        self._hooks.on_connection(peer, True)

    async def disconnect(self, peer: PeerId, *, if_spare: bool = False) -> bool:
        self._world.disconnected.append(peer)
        return not if_spare

    async def request(self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int) -> bytes:
        if self._world.refusal is not None:
            raise self._world.refusal
        if peer in self._world.silent:
            await Never()
        return self._world.reachable[peer].answer(request, source=US.peer_id, now=UnixS(time.time()))

    async def join_dht(self, peer: PeerId) -> None: ...

    async def put_value(self, key: str, value: bytes) -> None: ...

    async def get_value(self, key: str) -> bytes | None:
        return None

    async def provide(self, key: bytes) -> None: ...

    async def gossip(self, record: bytes) -> None: ...

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        return []


class FakeRunner:
    """A thread that waits, and dies when it is told to."""

    def __init__(self, world: World, hooks: HostHooks) -> None:
        self._world = world
        self.hooks = hooks
        self.node: ControlNode = FakeHost(world, hooks)
        self._over = threading.Event()
        self._failure: Exception | None = None
        world.runners.append(self)

    def run(self, on_ready: Callable[[], None]) -> None:
        on_ready()
        for peer in self._world.connected_at_start:
            self.hooks.on_connection(peer, True)
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def submit(
        self, call: Callable[[], Awaitable[Any]], on_done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        running = call().__await__()
        try:
            next(running)
        except StopIteration as done:
            on_done(done.value, None)
        except Exception as error:
            on_done(None, error)
        else:
            return partial(self._give_up, running)
        return lambda: None

    def _give_up(self, running: Generator[Any, Any, Any]) -> None:
        running.close()
        self._world.num_given_up += 1

    def stop(self) -> None:
        self._over.set()

    def crash(self) -> None:
        self._failure = RuntimeError("a task of the library has died")
        self._over.set()


class DiscoveryInWorld(Discovery):
    def __init__(self, world: World, config: DiscoveryConfig, price: PuzzleChecker | None = None) -> None:
        super().__init__(US, config, price=price)
        self._world = world

    def _make_runner(self) -> Runner[ControlNode]:
        return FakeRunner(self._world, HostHooks(self._sequence_of, self._on_request, self._on_connection))


def address_of(identity: Identity) -> str:
    return f"/ip4/127.0.0.1/tcp/4600/p2p/{identity.peer_id}"


def record_of(identity: Identity, *, sequence: int = 1) -> bytes:
    now = time.time()
    shard = ShardRecord("ab" * 32, "tiny", 0, 10, 30, "f16r32", (0.001, 0.001, 0.001), 4096)
    return sign_record(
        NodeRecord(
            PROTOCOL_VERSION,
            identity.peer_id,
            sequence,
            now,
            now + 60,
            (),
            (address_of(identity),),
            "cpu",
            0,
            (shard,),
            0,
            "test",
        ),
        identity,
    )


@asynccontextmanager
async def user_of(world: World, price: PuzzleChecker | None = None) -> AsyncIterator[Discovery]:
    user = DiscoveryInWorld(world, DiscoveryConfig((), (address_of(FIRST),), mdns=False, serve=False), price)
    await user.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield user
    finally:
        await user.aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # another thread's doing
        await asyncio.sleep(0)


async def test_user_that_has_lost_its_peers_says_so_and_waits_for_one() -> None:
    world = World()
    world.add(FIRST)
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        world.lose(FIRST)
        await until(lambda: user.num_peers == 0)
        with pytest.raises(NoPeers, match=FIRST.peer_id):
            await user.wait_for_peer(0.0)
        world.add(FIRST)
        await user.wait_for_peer(PATIENCE_S)


async def test_a_named_peer_is_told_of_with_why_it_does_not_answer() -> None:
    world = World()
    async with user_of(world) as user:
        await until(lambda: bool(user.named_peers[0].problem))
        (named,) = user.named_peers
        assert (named.peer, named.addresses, named.is_connected) == (FIRST.peer_id, (address_of(FIRST),), False)
        assert "cannot reach" in named.problem
        world.add(FIRST)
        await user.wait_for_peer(PATIENCE_S)
        assert user.named_peers[0].is_connected


async def test_user_that_has_lost_its_only_peer_enters_through_a_node_that_it_knows() -> None:
    world = World()
    world.add(FIRST, record_of(SECOND))
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        world.add(SECOND)
        world.lose(FIRST)
        await until(lambda: SECOND.peer_id in user.connected)
        await user.wait_for_peer(PATIENCE_S)


async def test_user_that_is_cut_off_is_told_at_once_what_it_still_knows() -> None:
    world = World()
    world.add(FIRST, record_of(SECOND))
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        world.lose(FIRST)
        await until(lambda: user.num_peers == 0)
        assert [r.peer for r in await user.find(None, timeout_s=2 * PATIENCE_S)] == [SECOND.peer_id]


async def test_look_up_waits_for_those_who_answer_and_not_for_one_that_has_frozen() -> None:
    world = World()
    world.add(FIRST)
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        world.add(SECOND)
        world.silent.add(SECOND.peer_id)
        user._on_connection(SECOND.peer_id, True)
        await until(lambda: user.num_peers == 2)
        world.add(FIRST, record_of(SECOND))
        (found,) = await user.find(None, timeout_s=PATIENCE_S)
        assert found.peer == SECOND.peer_id
        assert world.num_given_up == 0, "it waited until the question was given up"


async def test_look_up_does_not_wait_for_one_that_has_not_answered_yet_or_when_it_was_last_asked() -> None:
    world = World()
    world.add(FIRST, record_of(SECOND))
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        world.add(SECOND)
        world.silent.add(SECOND.peer_id)
        user._on_connection(SECOND.peer_id, True)
        await until(lambda: user.num_peers == 2)
        look = asyncio.create_task(user.find(None, timeout_s=PATIENCE_S))
        for _ in range(1000):  # turns of the loop, in which everything happens but the passing of time
            await asyncio.sleep(0)
        assert look.done()


async def test_look_up_in_the_dht_that_fails_when_nobody_waits_for_it_is_no_fault_of_ours() -> None:
    world, told = World(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    world.add(FIRST, record_of(SECOND))
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        ends = asyncio.Event()

        async def look_up(model_id: ModelId | None) -> None:
            await ends.wait()
            raise ControlPlaneDown("the thread has stopped")

        user._look_up = look_up  # type: ignore[method-assign]
        assert await user.find(None, timeout_s=0.1)
        ends.set()
        await asyncio.wait({user._lookups.pop(None)})
    gc.collect()
    assert not told


def paid_record_of(identity: Identity) -> bytes:
    now = time.time()
    shard = ShardRecord("ab" * 32, "tiny", 0, 10, 30, "f16r32", (0.001, 0.001, 0.001), 4096)
    fields = (PROTOCOL_VERSION, identity.peer_id, 1, now, now + 60, (), (), "cpu", 0, (shard,), 0, "test")
    return sign_record(NodeRecord(*fields, puzzle=bytes(NONCE_BYTES)), identity)


async def test_puzzles_of_an_answer_are_not_checked_in_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def evaluate(public_key: bytes, solution: bytes) -> int:
        threads.append(threading.current_thread())
        return 9

    world, others = World(), [Identity.from_seed(bytes([number, 7]) * 16) for number in range(5)]
    world.add(FIRST, *map(paid_record_of, others))
    async with user_of(world, PuzzleChecker(9, evaluate=evaluate)) as user:
        await until(lambda: len(user.table.live(now=UnixS(time.time()))) == len(others))
    assert len(threads) == len(others)
    assert threading.current_thread() not in threads


async def test_a_stranger_that_fills_the_dht_with_junk_leaves_newcomers_their_turn() -> None:
    strangers = [Identity.from_seed(bytes([number, 8]) * 16).peer_id for number in range(2)]
    price = PuzzleChecker(9, evaluate=lambda public_key, solution: solution[0])
    user = DiscoveryInWorld(World(), DiscoveryConfig((), (), mdns=False, serve=True), price)
    junk = Identity.from_seed(b"j" * 32)
    for number in range(600):
        now = time.time()
        record = NodeRecord(
            PROTOCOL_VERSION, junk.peer_id, number, now, now + 60, (), (), "cpu", 0, (), 0, "test",
            puzzle=bytes([0, *number.to_bytes(7, "big")]),
        )  # fmt: skip
        token = SENDER.set(strangers[number % 2])
        with pytest.raises(ValueError, match=r"unchecked|too-cheap"):
            user._sequence_of(record_key(junk.peer_id), sign_record(record, junk))
        SENDER.reset(token)
    assert price.num_evaluated <= 2 * OF_A_STRANGER.burst + 8
    newcomer = Identity.from_seed(b"n" * 32)
    paid = msgspec.structs.replace(record, peer=newcomer.peer_id, puzzle=bytes([9]) + bytes(NONCE_BYTES - 1))
    token = SENDER.set(newcomer.peer_id)
    assert user._sequence_of(record_key(newcomer.peer_id), sign_record(paid, newcomer)) == paid.sequence
    SENDER.reset(token)


async def test_connections_of_the_restarted_thread_are_not_forgotten() -> None:
    world = World()
    world.add(FIRST)
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        world.reachable.clear()
        world.connected_at_start = [SECOND.peer_id]
        world.runners[0].crash()
        await until(lambda: user.num_peers == 0)
        with pytest.raises(NoPeers):
            await user.wait_for_peer(0.0)
        await until(lambda: user._bridge.num_restarts == 1 and user._bridge.is_up and user.num_peers == 1)
        assert user.connected == [SECOND.peer_id]


async def test_many_who_take_long_to_refuse_do_not_keep_the_others_waiting() -> None:
    world = World()
    slow = [Identity.from_seed(number.to_bytes(32, "big")).peer_id for number in range(1, 101)]
    world.add(FIRST)
    async with user_of(world) as user:
        await user.wait_for_peer(PATIENCE_S)
        told: list[PeerId] = []
        never = asyncio.Event()

        async def call(command: Callable[[ControlNode], Awaitable[Any]]) -> Any:
            node = FakeHost(world, world.runners[-1].hooks)

            async def request(peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int) -> bytes:
                if peer in slow:
                    await never.wait()
                told.append(peer)
                return world.reachable[peer].answer(request, source=US.peer_id, now=UnixS(time.time()))

            node.request = request  # type: ignore[method-assign]
            return await command(node)

        user._bridge.call = call  # type: ignore[method-assign]
        for peer in slow:
            user._note_connection(peer, True)
        for sequence in range(1, 6):
            before = len(told)
            announcing = asyncio.create_task(user.announce(record_of(US, sequence=sequence), []))
            await until(lambda before=before: FIRST.peer_id in told[before:])  # type: ignore[misc]
            announcing.cancel()
        assert len(user._waiting_for) <= len(slow)
