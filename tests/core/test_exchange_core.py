"""Exchanges between members: any order gives the same sums, and nobody can make another one hold or believe much."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.daemon.exchange_core import (
    GROW_AFTER,
    LATE_S,
    MAX_ALL_EARLY_BYTES,
    MAX_BEGUN_BYTES,
    MAX_BEGUN_ROWS,
    MAX_EARLY_BYTES,
    MAX_PHASE_ROWS,
    MAX_SKIPPED_BATCHES,
    QUEUE_S,
    Batch,
    Exchanges,
    Fault,
    Form,
    Unit,
    begun_rows,
    unit_rows,
)
from fusion_node.engine.batching_core import Overload
from fusion_node.slices import Dims, Exchange, split
from fusion_node.types import LayerRange, MonotonicS, PeerId
from fusion_node.wire import MAX_PAYLOAD_BYTES
from p2p.messages import MAX_UNIT_ROWS, Partials, PartialsEntry, Standing, decode_message, encode_message

PEERS = tuple(PeerId(f"peer{n}") for n in range(6))
LAYERS = LayerRange(3, 5)
DENSE = (Exchange.QKV, Exchange.O, Exchange.GATE_UP, Exchange.DOWN)
NUM_EXCHANGES = len(LAYERS) * len(DENSE)
NOW = MonotonicS(100.0)


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def contribution(state: object, member: int, target: int, num_rows: int) -> bytes:
    """What a member sends to another one: a number, for each row, made of all that it has been through."""
    return digest(state, member, target).to_bytes(4, "little") * num_rows


def after(before: object, received: Sequence[bytes]) -> object:
    """The state of a unit in a member that has passed an exchange: another one for any other order."""
    return digest(before, [bytes(part[:4]) for part in received])


@dataclass
class Member:
    """One member: the core, and digests in the place of a model."""

    index: int
    peers: tuple[PeerId, ...]
    core: Exchanges = field(default_factory=lambda: Exchanges(dict.fromkeys(DENSE, 1)))
    states: dict[Unit, object] = field(default_factory=dict)
    done: list[Unit] = field(default_factory=list)
    running: Batch | None = None
    out: list[tuple[int, Partials, bytes]] = field(default_factory=list)

    def enter(self, session: int, *, layers: LayerRange = LAYERS) -> None:
        self.core.enter(session, user="user", alias=session, members=self.peers, own=self.index, layers=layers)

    def add(self, session: int, node: int, num_rows: int, *, is_alone: bool = False, is_batch: bool = False) -> Unit:
        unit = Unit(session, node, num_rows, is_alone, is_batch)
        assert self.core.add([unit], now=NOW) == []
        self.core.check_integrity()
        return unit

    def start(self) -> Batch | None:
        assert self.running is None
        self.running = self.core.next_batch()
        self.core.check_integrity()
        return self.running

    def finish(self) -> None:
        """The batch is computed; what others are to get goes out in one message for each."""
        batch, own, entries = self.running, [], []
        assert batch is not None
        self.running = None
        for index, unit in enumerate(batch.units):
            if batch.received is None:
                self.states[unit] = digest("rows", self.index, unit.session, unit.node)
            else:
                self.states[unit] = after(self.states[unit], batch.received[index])
            own.append(contribution(self.states[unit], self.index, self.index, unit.num_rows))
            if unit.num_rows and unit.position + 1 < NUM_EXCHANGES:
                entries.append(unit)
        layer, place = divmod(batch.units[0].position + 1, len(DENSE))
        self.done += self.core.passed(batch, own, now=NOW)
        self.core.check_integrity()
        for target in range(len(self.peers)) if entries else ():
            if target != self.index:
                message = Partials(
                    LAYERS.start + layer,
                    DENSE[place],
                    tuple(PartialsEntry(unit.session, unit.node, unit.num_rows) for unit in entries),
                )
                parts = [contribution(self.states[u], self.index, target, u.num_rows) for u in entries]
                self.out.append((target, message, b"".join(parts)))

    def receive(self, peer: PeerId, message: Partials, payload: bytes) -> list[Fault]:
        decoded = decode_message(encode_message(message) + payload)
        assert isinstance(decoded.message, Partials)
        faults = self.core.receive(peer, decoded.message, decoded.payload)
        self.core.check_integrity()
        return faults

    def get(self, peer: PeerId, node: int, num_rows: int = 1, *, at: int = 0, session: int = 1) -> list[Fault]:
        """A contribution of a peer to the exchange of that number."""
        layer, place = divmod(at, len(DENSE))
        message = Partials(LAYERS.start + layer, DENSE[place], (PartialsEntry(session, node, num_rows),))
        return self.receive(peer, message, bytes(4 * num_rows))


def expected(num_members: int, session: int, node: int, num_rows: int) -> list[object]:
    """The states in which a unit ends, member by member, if each exchange is passed by all at once."""
    states: list[object] = [digest("rows", index, session, node) for index in range(num_members)]
    for _ in range(NUM_EXCHANGES):
        states = [
            after(states[to], [contribution(states[index], index, to, num_rows) for index in range(num_members)])
            for to in range(num_members)
        ]
    return states


SIZES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 1, 2, 7, 256]), st.booleans()), max_size=6)


@settings(max_examples=40, deadline=None)
@given(num_members=st.integers(1, 4), sizes=SIZES, rng=st.randoms(use_true_random=False))
def test_whatever_comes_when_all_members_sum_the_same_in_the_same_order(
    num_members: int, sizes: list[tuple[int, int, bool]], rng: object
) -> None:
    """Messages of one member to another may overtake one another, and units come to each member when they like."""
    peers = PEERS[:num_members]
    members = [Member(index, peers) for index in range(num_members)]
    nodes = {0: 1, 1: 1}
    units = []
    for session, num_rows, is_alone in sizes:
        units.append((session, nodes[session], num_rows, is_alone))
        nodes[session] += num_rows
    to_come = [deque(units) for _ in members]
    for member in members:
        for session in (0, 1):
            member.enter(session)
    flying: list[tuple[PeerId, int, Partials, bytes]] = []
    while True:
        moves: list[tuple[str, int]] = [("add", i) for i in range(num_members) if to_come[i]]
        moves += [("finish", i) for i, m in enumerate(members) if m.running is not None]
        moves += [("start", i) for i, m in enumerate(members) if m.running is None and m.core.num_ready]
        moves += [("deliver", i) for i in range(len(flying))]
        if not moves:
            break
        what, index = rng.choice(moves)  # type: ignore[attr-defined]
        if what == "add":
            session, node, num_rows, is_alone = to_come[index].popleft()
            members[index].add(session, node, num_rows, is_alone=is_alone)
        elif what == "start":
            members[index].start()
        elif what == "finish":
            members[index].finish()
            flying += [(peers[index], *each) for each in members[index].out]
            members[index].out.clear()
        else:
            source, target, message, payload = flying.pop(index)
            assert members[target].receive(source, message, payload) == []
    for index, member in enumerate(members):
        assert member.core.num_rows == 0
        for session in (0, 1):
            ended = [(u.node, u.num_rows) for u in member.done if u.session == session]
            assert ended == [(node, num_rows) for s, node, num_rows, _ in units if s == session]
        for unit in member.done:
            assert member.states[unit] == expected(num_members, unit.session, unit.node, unit.num_rows)[index]


def pair() -> Member:
    """The first of two members, with a session."""
    member = Member(0, PEERS[:2])
    member.enter(1)
    return member


def compute(member: Member) -> Batch:
    batch = member.start()
    assert batch is not None
    member.finish()
    return batch


def pass_all(member: Member, node: int, num_rows: int = 1, *, session: int = 1) -> None:
    """The other member contributes to each exchange of a unit that begins now."""
    compute(member)
    for at in range(NUM_EXCHANGES):
        assert member.get(PEERS[1], node, num_rows, at=at, session=session) == []
        compute(member)


def test_a_unit_follows_the_one_before_exchange_by_exchange() -> None:
    member = pair()
    first, second = member.add(1, 1, 1), member.add(1, 2, 1)
    assert compute(member).units == (first,)
    assert compute(member).units == (second,)
    assert member.get(PEERS[1], 2) == []
    assert member.start() is None  # all contributions are there, and the KV of the first is not
    assert member.get(PEERS[1], 1) == []
    assert compute(member).units == (first,)
    assert compute(member).units == (second,)


def test_a_unit_that_moves_kv_begins_when_nothing_before_it_is_under_way() -> None:
    member = pair()
    member.add(1, 1, 1)
    alone = member.add(1, 2, 1, is_alone=True)
    compute(member)
    for at in range(NUM_EXCHANGES):
        assert member.start() is None
        member.get(PEERS[1], 1, at=at)
        compute(member)
    assert compute(member).units == (alone,)


def test_a_unit_without_rows_is_done_in_its_turn() -> None:
    member = pair()
    first, empty, last = member.add(1, 1, 1), member.add(1, 2, 0, is_alone=True), member.add(1, 3, 1)
    pass_all(member, 1)
    assert compute(member).units == (empty,)
    pass_all(member, 3)
    assert member.done == [first, empty, last]


def test_a_unit_without_rows_lets_nothing_overtake_what_is_before_it() -> None:
    member = pair()
    first, empty, last = member.add(1, 1, 1), member.add(1, 2, 0), member.add(1, 3, 1)
    compute(member)
    assert member.start() is None  # done now, it would be before its time, and the last would not wait for the first
    for at in range(NUM_EXCHANGES):
        member.get(PEERS[1], 1, at=at)
        compute(member)
    assert compute(member).units == (empty,)
    pass_all(member, 3)
    assert member.done == [first, empty, last]


def test_sessions_at_one_exchange_are_computed_together_and_keep_together() -> None:
    member = pair()
    member.enter(2)
    units = (member.add(1, 1, 1), member.add(2, 9, 3))
    assert compute(member).units == units
    message = Partials(LAYERS.start, Exchange.QKV, (PartialsEntry(2, 9, 3), PartialsEntry(1, 1, 1)))
    assert member.receive(PEERS[1], message, bytes(16)) == []
    batch = compute(member)
    assert (set(batch.units), batch.layer, batch.exchange) == (set(units), LAYERS.start, Exchange.QKV)


def test_what_is_ready_for_longest_goes_first_and_a_batch_has_so_many_rows() -> None:
    member = pair()
    for session in (2, 3, 4):
        member.enter(session)
    sizes = {1: 200, 2: 200, 3: 200, 4: 1}
    for session, num_rows in sizes.items():
        member.add(session, 1, num_rows)
    assert [unit.session for unit in compute(member).units] == [1, 2]
    assert [unit.session for unit in compute(member).units] == [3, 4]
    for session in (4, 2):
        member.get(PEERS[1], 1, sizes[session], session=session)
    assert [unit.session for unit in compute(member).units] == [4, 2]


def test_batch_work_gives_way_for_some_time() -> None:
    member = pair()
    member.enter(2, layers=LayerRange(3, 4))  # of other layers, so that they never begin together
    member.add(2, 1, 1, is_batch=True)
    nodes = iter(range(1, 10_000))
    for _ in range(MAX_SKIPPED_BATCHES):
        member.enter(1)
        member.add(1, next(nodes), 1)
        assert [unit.session for unit in compute(member).units] == [1]
    member.enter(1)
    member.add(1, next(nodes), 1)
    assert [unit.session for unit in compute(member).units] == [2]


def test_one_session_has_so_many_rows_under_way() -> None:
    member = pair()
    for number in range(5):
        member.add(1, 1 + MAX_UNIT_ROWS * number, MAX_UNIT_ROWS)
    for _ in range(4):
        compute(member)
    assert member.start() is None
    for at in range(NUM_EXCHANGES):
        member.get(PEERS[1], 1, MAX_UNIT_ROWS, at=at)
        compute(member)
    assert compute(member).units[0].node == 1 + 4 * MAX_UNIT_ROWS


def test_sessions_of_two_forms_are_beside_one_another_and_each_keeps_its_own() -> None:
    member = pair()
    form = Form(dict.fromkeys(DENSE, 16), max_unit_rows=2, max_begun_rows=2)
    member.core.enter(2, user="user", alias=2, members=member.peers, own=0, layers=LAYERS, form=form)
    for session in (1, 2):
        member.add(session, 1, 1)
        compute(member)
    place = LAYERS.start, DENSE[0]
    for session, wrong, right in ((1, 16, 4), (2, 4, 16)):
        message = Partials(*place, (PartialsEntry(session, 1, 1),))
        (fault,) = member.core.receive(PEERS[1], message, bytes(wrong))
        assert (fault.session, fault.reason) == (session, f"rows of another size than {right} bytes in QKV")
        assert member.core.receive(PEERS[1], message, bytes(right)) == []
    assert member.core.num_ready == 1
    (fault,) = member.core.receive(PEERS[1], Partials(*place, (PartialsEntry(2, 5, 3),)), bytes(3 * 16))
    assert fault.reason == "rows of a unit that cannot be there yet"
    assert member.core.receive(PEERS[1], Partials(*place, (PartialsEntry(1, 5, 3),)), bytes(3 * 4)) == []


FAULTS = {
    "twice": [(1, 1, 0), (1, 1, 0)],
    "twice before the step": [(9, 1, 0), (9, 1, 0)],
    "another number of rows": [(1, 2, 0)],
    "an exchange too far ahead": [(1, 1, 2)],
    "ahead before the step": [(9, 1, 1)],
    "a node within the unit before": [(3, 1, 0)],
    "a unit that is too long": [(9, 256, 0)],
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_cannot_come_is_the_fault_of_who_sends_it(what: str) -> None:
    member = Member(0, PEERS[:2], Exchanges(dict.fromkeys(DENSE, 1), max_unit_rows=255))
    member.enter(1)
    member.enter(2)
    member.add(1, 1, 1)
    member.add(1, 2, 2)
    compute(member)
    *before, last = FAULTS[what]
    for node, num_rows, at in before:
        assert member.get(PEERS[1], node, num_rows, at=at) == []
    (fault,) = member.get(PEERS[1], last[0], last[1], at=last[2])
    assert (fault.session, fault.code, fault.culprit, fault.is_kept) == (1, "bad-partials", PEERS[1], True)


def test_layer_exchange_or_width_that_there_is_not_is_a_fault() -> None:
    member = pair()
    member.add(1, 1, 1)
    compute(member)
    entry = (PartialsEntry(1, 1, 1),)
    for message, payload in (
        (Partials(2, 0, entry), bytes(4)),
        (Partials(5, 0, entry), bytes(4)),
        (Partials(3, Exchange.ROUTER, entry), bytes(4)),
        (Partials(3, 0, entry), bytes(8)),
    ):
        (fault,) = member.receive(PEERS[1], message, payload)
        assert (fault.code, fault.culprit) == ("bad-partials", PEERS[1])
    assert member.get(PEERS[1], 1) == []


def test_a_done_unit_and_rows_of_no_unit_are_faults() -> None:
    member = pair()
    member.add(1, 1, 1)
    pass_all(member, 1)
    (fault,) = member.get(PEERS[1], 1)
    assert fault.code == "bad-partials"
    member.enter(1)
    assert member.get(PEERS[1], 5) == []
    (fault,) = faults_of(member, Unit(1, 4, 1), Unit(1, 7, 1))
    assert (fault.code, fault.culprit) == ("bad-partials", PEERS[1])


def faults_of(member: Member, *units: Unit) -> list[Fault]:
    """What shows when a step comes."""
    faults = member.core.add(units, now=NOW)
    assert isinstance(faults, list)
    return faults


def test_other_number_of_rows_than_the_step_has_is_found_when_it_comes() -> None:
    member = Member(0, PEERS[:3])
    member.enter(1)
    assert member.get(PEERS[1], 1, 2) == []
    assert member.get(PEERS[2], 1, 3) == []
    (fault,) = faults_of(member, Unit(1, 1, 3))
    assert (fault.code, fault.culprit) == ("bad-partials", PEERS[1])
    member.core.check_integrity()


def test_strangers_and_what_is_not_open_change_nothing() -> None:
    member = pair()
    member.add(1, 1, 1)
    compute(member)
    assert member.get(PEERS[2], 1) == []
    assert member.get(PEERS[0], 1) == []  # itself
    assert member.get(PEERS[1], 1, session=2) == []
    assert member.start() is None
    assert member.core.counters == {"partials_of_strangers": 2, "partials_without_session": 1}
    assert member.get(PEERS[1], 1) == []
    compute(member)


def test_one_bad_session_in_a_message_leaves_the_others() -> None:
    member = pair()
    member.enter(2)
    member.add(1, 1, 1)
    member.add(2, 1, 1)
    compute(member)
    entries = (PartialsEntry(1, 1, 2), PartialsEntry(1, 5, 1), PartialsEntry(2, 1, 1))
    (fault,) = member.receive(PEERS[1], Partials(3, 0, entries), bytes(16))
    assert fault.session == 1
    member.core.leave(1)
    assert [unit.session for unit in compute(member).units] == [2]


def test_what_comes_early_is_bounded_for_a_session_of_a_member() -> None:
    member = Member(0, PEERS[:3])
    member.enter(1)
    for number in range(4):
        assert member.get(PEERS[1], 1 + MAX_UNIT_ROWS * number, MAX_UNIT_ROWS) == []
    (fault,) = member.get(PEERS[1], 1 + MAX_BEGUN_ROWS, 1)
    assert (fault.code, fault.culprit) == ("flooded", PEERS[1])
    assert member.get(PEERS[2], 1, MAX_UNIT_ROWS) == []
    # Also of units that are there and have not begun.
    for number in range(5):
        member.add(1, 1 + MAX_UNIT_ROWS * number, MAX_UNIT_ROWS)
    (fault,) = member.get(PEERS[1], 1 + 4 * MAX_UNIT_ROWS, MAX_UNIT_ROWS)
    assert (fault.code, fault.culprit) == ("flooded", PEERS[1])
    compute(member)
    assert member.get(PEERS[1], 1 + 4 * MAX_UNIT_ROWS, MAX_UNIT_ROWS) == []


def test_what_comes_early_is_bounded_for_a_peer_and_for_all() -> None:
    width = 2**15  # 1,024 rows are 128 MiB
    member = Member(0, PEERS[:6], Exchanges({Exchange.QKV: width, Exchange.O: 1}))
    row = bytes(4 * width)
    rows_of_peer = MAX_EARLY_BYTES // len(row)
    for session in (1, 2):
        member.enter(session)

    def send(peer: int, session: int, node: int, num_rows: int) -> list[Fault]:
        message = Partials(LAYERS.start, Exchange.QKV, (PartialsEntry(session, node, num_rows),))
        return member.core.receive(PEERS[peer], message, row * num_rows)

    for number in range(rows_of_peer // 128):
        assert send(1, 1, 1 + 128 * number, 128) == []
    (fault,) = send(1, 2, 1, 1)
    assert (fault.session, fault.code, fault.culprit) == (2, "flooded", "")
    for peer in range(2, 1 + MAX_ALL_EARLY_BYTES // MAX_EARLY_BYTES):
        for number in range(rows_of_peer // 128):
            assert send(peer, 1, 1 + 128 * number, 128) == []
    (fault,) = send(5, 1, 1, 1)
    assert (fault.code, fault.culprit) == ("flooded", "")
    member.core.check_integrity()
    member.core.leave(1)
    member.core.check_integrity()
    assert send(5, 2, 1, 1) == []


def test_a_message_of_which_little_is_wanted_is_not_held() -> None:
    member = pair()
    payload = bytearray(4 * 1000)
    entries = (PartialsEntry(1, 1, 1), *(PartialsEntry(9, node, 1) for node in range(1, 1000)))
    assert member.core.receive(PEERS[1], Partials(3, 0, entries), payload) == []
    payload.extend(b"x")  # which a view of it would forbid


def test_nothing_is_left_of_a_session_that_is_over_or_has_another_plan() -> None:
    member = pair()
    member.add(1, 1, 1)
    member.add(1, 2, 1)
    member.get(PEERS[1], 1)
    member.get(PEERS[1], 8, 100)
    running = member.start()
    assert running is not None
    member.core.enter(1, user="user", alias=77, members=PEERS[:2], own=0, layers=LAYERS)
    assert member.core.num_rows == 0
    member.finish()
    assert member.done == []
    assert member.get(PEERS[1], 1) == []
    assert member.core.counters["partials_without_session"] == 1
    again = member.core.add([Unit(1, 1, 1)], now=NOW)
    assert again == []
    assert compute(member).num_rows == 1
    member.core.leave(1)
    member.core.leave(1)
    assert (member.core.num_rows, member.core.num_ready, member.core.get_timer()) == (0, 0, None)
    member.core.check_integrity()


def test_too_many_rows_are_not_taken() -> None:
    member = Member(0, PEERS[:2], Exchanges(dict.fromkeys(DENSE, 1), max_waiting_rows=100))
    for session in (1, 2, 3):
        member.core.enter(session, user=f"user{session}", alias=session, members=PEERS[:2], own=0, layers=LAYERS)
    assert member.core.add([Unit(1, 1, 51)], now=NOW) is Overload.USER
    assert member.core.add([Unit(1, 1, 50)], now=NOW) == []
    assert member.core.add([Unit(2, 1, 50)], now=NOW) == []
    assert member.core.add([Unit(2, 51, 1)], now=NOW) is Overload.NODE
    assert member.core.add([Unit(3, 1, 1)], now=NOW) == []  # a step of a session that has nothing else
    member.core.check_integrity()


def test_the_only_member_for_whom_one_waits_is_named_after_some_time() -> None:
    member = Member(0, PEERS[:3])
    member.enter(1)
    member.add(1, 1, 1)
    compute(member)
    member.get(PEERS[2], 1)
    assert member.core.get_timer() == NOW + LATE_S
    assert member.core.handle_timer(now=MonotonicS(NOW + LATE_S - 0.1)) == []
    (fault,) = member.core.handle_timer(now=MonotonicS(NOW + LATE_S))
    assert (fault.code, fault.culprit, fault.is_kept) == ("late-partials", PEERS[1], True)
    assert fault.standing == Standing(1, 1, (1,), int(1000 * LATE_S))
    member.get(PEERS[1], 1)
    assert member.core.get_timer() is None  # it waits for the device


def test_while_this_process_itself_stood_still_nobody_is_late() -> None:
    member = Member(0, PEERS[:2])
    for session in (1, 2):
        member.enter(session)
    member.add(1, 1, 1)
    compute(member)
    woken = MonotonicS(NOW + 5.0 + 60.0)
    member.core.add([Unit(2, 1, 1)], now=MonotonicS(woken - 1.0))  # began to wait amid it
    member.core.stood_still(60.0, now=woken)
    assert member.core.handle_timer(now=woken) == []
    standing = member.core.standing(1, now=woken)
    assert standing is not None
    assert standing.waited_ms == 5000
    assert member.core.get_timer() == NOW + 60.0 + LATE_S
    (fault,) = member.core.handle_timer(now=MonotonicS(NOW + 60.0 + LATE_S))
    assert (fault.session, fault.code, fault.culprit) == (1, "late-partials", PEERS[1])
    standing = member.core.standing(2, now=woken)
    assert standing is not None
    assert standing.waited_ms == 0


def test_how_far_a_session_is_says_for_whom_it_waits_and_what_it_has_sent() -> None:
    member = Member(0, PEERS[:3])
    later = MonotonicS(NOW + 2.0)

    def standing(*full: PeerId) -> Standing | None:
        return member.core.standing(1, now=later, full=frozenset(full))

    assert standing() is None
    member.enter(1)
    assert standing() == Standing(1, 0, has_rows=False)
    member.add(1, 1, 2)
    member.add(1, 3, 1)
    assert standing() == Standing(1, 0, (), 2000)
    assert standing(PEERS[2]) == Standing(1, 0, (2,), 2000)  # which takes nothing: it is not begun for its sake
    assert member.start() is not None
    assert standing(PEERS[2]) == Standing(1, 0, (), 2000)
    member.finish()
    assert standing() == Standing(1, 1, (1, 2), 2000)
    member.get(PEERS[2], 1, 2)
    assert standing() == Standing(1, 1, (1,), 2000)
    member.get(PEERS[1], 1, 2)
    assert standing() == Standing(1, 1, (), 2000)
    compute(member)  # the second begins
    compute(member)
    assert standing() == Standing(1, 2, (1, 2), 2000)
    member.core.leave(1)
    assert standing() is None


def test_a_session_whose_rows_are_all_done_waits_for_the_next_ones() -> None:
    member = pair()
    member.add(1, 1, 2)
    pass_all(member, 1, 2)
    assert member.core.standing(1, now=NOW) == Standing(3, 0, has_rows=False)


def test_who_of_several_is_late_is_not_said() -> None:
    member = Member(0, PEERS[:3])
    member.enter(1)
    member.add(1, 1, 1)
    compute(member)
    (fault,) = member.core.handle_timer(now=MonotonicS(NOW + LATE_S))
    assert (fault.code, fault.culprit) == ("late-partials", "")


def test_a_step_that_never_begins_is_given_back() -> None:
    member = pair()
    member.add(1, 1, 1)
    (fault,) = member.core.handle_timer(now=MonotonicS(NOW + QUEUE_S))
    assert (fault.code, fault.culprit, fault.is_kept) == ("overloaded", "", False)


def test_a_step_waits_for_the_node_only_when_what_is_before_it_is_done() -> None:
    member = pair()
    member.add(1, 1, 1)
    member.add(1, 2, 1, is_alone=True)
    for at in range(NUM_EXCHANGES):
        batch = member.core.next_batch()
        assert batch is not None
        now = MonotonicS(NOW + 10 * at)
        assert member.core.handle_timer(now=now) == []
        member.core.passed(batch, [b"own"], now=now)
        member.get(PEERS[1], 1, at=at)
    batch = member.core.next_batch()
    assert batch is not None
    done_at = MonotonicS(NOW + 10 * NUM_EXCHANGES)
    member.core.passed(batch, [b"own"], now=done_at)
    assert done_at > NOW + QUEUE_S
    assert member.core.handle_timer(now=MonotonicS(done_at + QUEUE_S - 0.1)) == []
    (fault,) = member.core.handle_timer(now=MonotonicS(done_at + QUEUE_S))
    assert fault.code == "overloaded"


def test_a_batch_that_was_too_large_is_done_in_smaller_ones_for_a_while() -> None:
    member = pair()
    member.enter(2)
    member.add(1, 1, 200)
    member.add(2, 1, 200)
    batch = member.start()
    assert batch is not None
    member.running = None
    assert member.core.again(batch)
    member.core.check_integrity()
    assert member.core.max_rows == 200
    assert [unit.session for unit in compute(member).units] == [1]
    (single,) = (member.start(),)
    assert single is not None
    assert not member.core.again(single)
    member.finish()
    member.enter(2)
    for number in range(GROW_AFTER):
        member.enter(1)
        member.add(1, 1, 1)
        compute(member)
        if number == 0:
            assert member.core.max_rows == 200
    assert member.core.max_rows == min(400, MAX_PHASE_ROWS)


def test_what_one_session_has_under_way_is_less_than_a_link_is_given_up_for() -> None:
    small = Dims(hidden=576, heads=9, kv_heads=3, head_dim=64, channels=1536)
    large = Dims(hidden=8192, heads=64, kv_heads=8, head_dim=128, channels=28672)
    assert begun_rows(small, split(small, (1, 1))) == MAX_BEGUN_ROWS
    num_rows = begun_rows(large, split(large, (1, 1)))
    assert MAX_BEGUN_BYTES / 2 < num_rows * 4 * 28673 <= MAX_BEGUN_BYTES
    member = Member(0, PEERS[:2], Exchanges(dict.fromkeys(DENSE, 1), max_begun_rows=num_rows))
    member.enter(1)
    member.add(1, 1, 100)
    member.add(1, 101, 100)
    compute(member)
    assert member.start() is None
    for at in range(NUM_EXCHANGES):
        member.get(PEERS[1], 1, 100, at=at)
        compute(member)
    assert compute(member).units[0].node == 101


def test_what_is_for_a_member_whose_link_is_full_waits_and_nothing_else_does() -> None:
    core = Exchanges(dict.fromkeys(DENSE, 1))
    core.enter("slow", user="user", alias=1, members=PEERS[:2], own=0, layers=LAYERS)
    core.enter("other", user="user", alias=2, members=(PEERS[0], PEERS[2]), own=0, layers=LAYERS)
    assert core.members == {PEERS[1]: 1, PEERS[2]: 1}
    for session in ("slow", "other"):
        assert core.add([Unit(session, 1, 1)], now=NOW) == []
    batch = core.next_batch({PEERS[1]})
    assert batch is not None
    assert [unit.session for unit in batch.units] == ["other"]
    core.check_integrity()
    assert core.next_batch({PEERS[1]}) is None
    assert core.num_ready == 1
    batch = core.next_batch()
    assert batch is not None
    assert [unit.session for unit in batch.units] == ["slow"]
    core.check_integrity()
    core.leave("slow")
    assert core.members == {PEERS[2]: 1}


def test_a_batch_grows_to_no_more_than_a_link_may_hold() -> None:
    core = Exchanges(dict.fromkeys(DENSE, 1), max_phase_rows=150)
    for session in range(3):
        core.enter(session, user="user", alias=session, members=PEERS[:2], own=0, layers=LAYERS)
        assert core.add([Unit(session, 1, 100)], now=NOW) == []
    batch = core.next_batch()
    assert batch is not None
    assert batch.num_rows == 100


def test_units_fit_into_frames() -> None:
    built_in = Dims(hidden=576, heads=9, kv_heads=3, head_dim=64, channels=1536)
    assert unit_rows(built_in, split(built_in, (1, 1, 1))) == MAX_UNIT_ROWS
    large = Dims(hidden=16384, heads=128, kv_heads=8, head_dim=128, channels=53248)
    assert unit_rows(large, split(large, (1, 1))) == 128
    assert 128 * 53249 * 4 <= MAX_PAYLOAD_BYTES < 256 * 53249 * 4
