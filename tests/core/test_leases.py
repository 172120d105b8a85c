"""Leases: what a node has promised is there, for one user alone, until it is over; and what is over is free."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fusion_node.daemon.admission_core import LEASE_S, Session
from fusion_node.daemon.serving_core import LEASE_EXPIRED
from fusion_node.types import LayerRange, PeerId
from p2p.identity import Identity
from p2p.messages import (
    KEPT_S,
    RETAIN_S,
    SUCCESSOR_UNREACHABLE,
    CloseSession,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    Step,
)
from p2p.records import Lease, Plan, open_lease, sign_lease
from tests.core.serving_world import PEERS, T0, Node, embed, entry, open_, plan_of

USERS = PEERS[20:25]
OURS, BEFORE, AFTER = PEERS[0], PEERS[1], PEERS[2]
BLOCK_SLOTS = 4
KEYS = [bytes([n]) * 16 for n in range(8)]
"""Few, so that ids are opened anew, also by others."""


@dataclass(frozen=True)
class Promise:
    """A lease as its user was told of it."""

    epoch: int
    num_positions: int
    until: float


@dataclass
class Crowd:
    """Users who open, use, resume, forget, close and lose sessions on one node, in any order."""

    rng: random.Random
    promises: dict[tuple[PeerId, bytes], Promise] = field(default_factory=dict)
    num_adopted: int = 0
    replaced: set[tuple[PeerId, bytes]] = field(default_factory=set)
    """Sessions that the event at hand asks to replace by others."""

    def __post_init__(self) -> None:
        self.node = Node(OURS, LayerRange(3, 5), num_blocks=self.rng.choice((8, 20, 40)))
        self.neighbours = [Node(BEFORE, LayerRange(0, 3)), self.node, Node(AFTER, LayerRange(5, 7))]
        self.epochs: dict[tuple[PeerId, bytes], int] = {}

    @property
    def sessions(self) -> list[Session]:
        return self.node.admission.sessions

    def plan(self, user: PeerId, key: bytes, epoch: int, positions: int) -> Plan:
        return plan_of(user, self.neighbours, epoch, session=key, max_positions=positions)

    def open(self) -> None:
        user, key = self.rng.choice(USERS), self.rng.choice(KEYS)
        positions = self.rng.randrange(1, 60)
        held = self.node.admission.held(key, user=user)
        resumes = self.rng.random() < 0.5
        if held is not None and resumes and self.rng.random() < 0.8:
            positions = held.plan.max_positions
        epoch = self.epochs.get((user, key), -1) + self.rng.choice((1, 1, 1, 0))
        epoch = max(epoch, 0)
        if held is not None and resumes and positions != held.plan.max_positions and epoch > held.plan.epoch:
            self.replaced.add((user, key))
        self.epochs[user, key] = epoch
        prefix, asked = (self.rng.choice(KEYS), self.rng.randrange(20)) if self.rng.random() < 0.4 else (b"", 0)
        open_(self.node, self.plan(user, key, epoch, positions), resumes=resumes, prefix=prefix, asked=asked)

    def resume(self) -> None:
        if self.sessions:
            session = self.rng.choice(self.sessions)
            epoch = session.plan.epoch + self.rng.choice((1, 1, 7, 0))
            self.epochs[session.user, session.key] = epoch
            positions = session.plan.max_positions + self.rng.choice((0, 0, 0, 1))
            if positions != session.plan.max_positions and epoch > session.plan.epoch:
                self.replaced.add((session.user, session.key))
            open_(self.node, self.plan(session.user, session.key, epoch, positions), resumes=True)

    def connect(self) -> None:
        if self.node.connecting:
            self.node.connected(is_reachable=self.rng.random() < 0.9)

    def step(self) -> None:
        if not self.sessions:
            return
        session = self.rng.choice(self.sessions)
        first = session.log.num_committed
        num_rows = self.rng.randrange(1, 9)
        message = entry(session.plan, session.log.next_sequence, first, num_rows)
        fields = {name: getattr(message, name) for name in message.__struct_fields__} | {"timings": ((0, 0),)}
        rows = tuple(embed(first + i) for i in range(num_rows))
        self.node.receive(BEFORE, Step(**fields), rows)

    def compute(self) -> None:
        if self.node.waiting:
            self.node.compute()

    def close(self) -> None:
        user, key = self.rng.choice(USERS), self.rng.choice(KEYS)
        epoch = self.epochs.get((user, key), 0) - self.rng.choice((0, 0, 0, 1))
        held = self.node.admission.held(key, user=user)
        self.node.receive(user, CloseSession(key, max(epoch, 0), retain=self.rng.random() < 0.4))
        if held is not None and not self.node.admission.holds(held):
            self.promises.pop((user, key), None)

    def query(self) -> None:
        user, key = self.rng.choice(USERS), self.rng.choice(KEYS)
        self.node.receive(user, SessionQuery(key, 0, 1))

    def lose(self) -> None:
        peer = self.rng.choice((*USERS, BEFORE, AFTER))
        self.node.lose(peer)
        for user, key in [place for place in self.promises if place[0] == peer]:
            del self.promises[user, key]

    def drain(self) -> None:
        chosen = [session for session in self.sessions if self.rng.random() < 0.3]
        self.node.core.drain(now=self.node.now, grace_s=self.rng.choice((5.0, 50.0)), reason="x", sessions=chosen)  # type: ignore[arg-type]
        self.node.carry_out()

    def wait(self) -> None:
        self.node.tick(self.rng.choice((0.1, 1.0, KEPT_S / 2, LEASE_S / 2, LEASE_S, RETAIN_S / 3)))

    def listen(self) -> None:
        """What the node has told since the last time changes what its users may count on."""
        for peer, message, _ in self.node.sent:
            match message:
                case SessionOpened() | SessionProgress():
                    session = self.node.admission.held(message.session, user=peer)
                    if session is not None and session.plan.epoch == message.epoch:
                        promise = Promise(message.epoch, session.plan.max_positions, self.node.now + message.lease_s)
                        self.promises[peer, message.session] = promise
                case SessionFailed() if message.is_kept:
                    self._shorten(peer, message.session, self.node.now + KEPT_S)
                case SessionFailed():
                    promise_before = self.promises.get((peer, message.session))
                    if message.code == LEASE_EXPIRED and promise_before is not None:
                        assert promise_before.until <= self.node.now
                    self.promises.pop((peer, message.session), None)
                case SessionRefused() if message.code == SUCCESSOR_UNREACHABLE:
                    if self.node.admission.held(message.session, user=peer) is None:
                        self.promises.pop((peer, message.session), None)
                    else:
                        self._shorten(peer, message.session, self.node.now + KEPT_S)
                case SessionRefused() if (place := (peer, message.session)) in self.replaced:
                    self.promises.pop(place, None)  # what could not be adopted is dropped, and nothing else fitted
                case SessionDraining():
                    self._shorten(peer, message.session, self.node.now + message.grace_s)
        self.node.sent.clear()

    def _shorten(self, user: PeerId, key: bytes, until: float) -> None:
        before = self.promises.get((user, key))
        if before is not None:
            self.promises[user, key] = Promise(before.epoch, before.num_positions, min(before.until, until))

    def check(self) -> None:
        """Every promise in force is kept, and no block is in two users' hands."""
        reserved = 0
        for (user, key), promise in self.promises.items():
            if promise.until <= self.node.now:
                continue
            session = self.node.admission.held(key, user=user)
            assert session is not None, "a session is gone before its lease is over"
            assert session.plan.max_positions >= promise.num_positions or session.plan.epoch > promise.epoch
            reserved += session.plan.max_positions
        owners: dict[int, PeerId] = {}
        blocks = self.node.admission.blocks
        for session in self.sessions:
            num_slots = session.num_computed
            for slot in blocks.slots(session.key, 0, num_slots):
                owner = owners.setdefault(slot // BLOCK_SLOTS, session.user)
                assert owner == session.user, "two users hold one block"
        assert blocks.reserved_slots <= self.node.admission.max_positions

    def run(self, num_events: int) -> None:
        events = [self.open] * 5 + [self.resume] * 3 + [self.connect] * 5 + [self.step] * 8 + [self.compute] * 8
        events += [self.close, self.close, self.query, self.query, self.lose, self.drain, self.wait]
        for _ in range(num_events):
            self.replaced.clear()
            self.rng.choice(events)()
            self.listen()
            self.check()
            self.fits()
        self.num_adopted = self.node.core.counters["sessions_adopted"]
        self.release()

    def fits(self) -> None:
        """What is said to be free can be reserved by anybody, and one position more cannot."""
        free = self.node.admission.free_positions
        key = b"probe".ljust(16)
        if free:
            open_(self.node, self.plan(PEERS[29], key, 0, free))
            assert self.node.admission.held(key, user=PEERS[29]) is not None, f"{free} positions are not free"
            self.node.receive(PEERS[29], CloseSession(key, 0))
        open_(self.node, self.plan(PEERS[29], key, 0, free + 1))
        assert self.node.admission.held(key, user=PEERS[29]) is None
        assert self.node.admission.free_positions == free
        self.node.connecting = [each for each in self.node.connecting if each.session.key != key]
        self.node.sent.clear()

    def release(self) -> None:
        """All go, one way or the other: everything is free."""
        if self.rng.random() < 0.5:
            for user in USERS:
                self.node.lose(user)
            self.node.tick(RETAIN_S)
        else:
            while self.node.waiting:
                self.node.compute()
            self.node.tick(LEASE_S)
            self.node.tick(RETAIN_S)
        assert not self.sessions
        assert self.node.admission.free_positions == self.node.admission.max_positions
        assert (self.node.admission.blocks.used_blocks, len(self.node.outputs)) == (0, 0)
        assert self.node.core.get_timer() is None


def crowd(seed: int) -> Crowd:
    made = Crowd(random.Random(seed))
    try:
        made.run(120)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return made


@pytest.mark.parametrize("part", range(6))
def test_promises_are_kept_and_blocks_are_one_users_alone(part: int) -> None:
    assert sum(crowd(seed).num_adopted for seed in range(10 * part, 10 * part + 10)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_promises_are_kept_in_a_thousand_crowds(part: int) -> None:
    for seed in range(1000 + 50 * part, 1050 + 50 * part):
        crowd(seed)


def test_lease_says_what_was_reserved_and_nobody_else_can_have_signed_it() -> None:
    node = Node(OURS, LayerRange(3, 5))
    plan = plan_of(USERS[0], [Node(BEFORE, LayerRange(0, 3)), node, Node(AFTER, LayerRange(5, 7))], 4)
    open_(node, plan)
    (session,) = node.admission.sessions
    identity = Identity.from_seed(bytes([1]) * 32)
    assert identity.peer_id == OURS
    signed = sign_lease(session.lease(OURS, issued_at=5000.0, lease_s=LEASE_S), identity)
    lease = open_lease(signed, now=5001.0)  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    assert (lease.node, lease.user, lease.session, lease.epoch) == (OURS, USERS[0], plan.session, 4)
    assert (lease.start, lease.stop, lease.num_positions) == (3, 5, plan.max_positions)
    assert (lease.issued_at, lease.expires_at) == (5000.0, 5000.0 + LEASE_S)
    assert session.lease_until == T0 + LEASE_S
