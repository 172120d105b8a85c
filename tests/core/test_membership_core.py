"""Membership, one peer at a time: what each event leads to. Many peers at once are in tests/sim."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TypeVar

import msgspec
import pytest

from fusion_node.types import ModelId, MonotonicS, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.identity import Identity
from p2p.membership_core import (
    CLOCK_WARN_S,
    DHT_JOINS,
    HEARTBEAT_S,
    HIGH_PEERS,
    LONELY_AFTER_S,
    LOW_PEERS,
    MAX_ASKS_OF_ONE,
    MAX_DIALS,
    MAX_NEAR,
    MAX_REFUSALS,
    MESH_PEERS,
    REDIAL_MAX_S,
    REUNITE_EVERY_S,
    SAVE_EVERY_S,
    SHUFFLE_EVERY_S,
    USER_PEERS,
    Ask,
    Command,
    Dial,
    Disconnect,
    JoinDht,
    Membership,
    Met,
    Moment,
    Notice,
    SaveBook,
    Silence,
    WayIn,
)
from p2p.mesh_core import MAX_PER_PLACE
from p2p.peer_book import PeerBook
from p2p.publication_core import PROVIDE_INTERVAL_S, Publish
from p2p.record_exchange import ExchangeRequest, RecordExchange
from p2p.records import PROTOCOL_VERSION, NodeRecord, RecordTable, Refusal, ShardRecord, sign_record

MODEL = ModelId("ab" * 32)
EPOCH_S = 1_800_000_000.0
US = Identity.from_seed(b"u" * 32)
OTHERS = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(60)]
FIRST, SECOND, THIRD = OTHERS[:3]

C = TypeVar("C", bound=Command)


def address_of(identity: Identity, host: str | None = None) -> str:
    number = OTHERS.index(identity) if identity in OTHERS else 99
    return f"/ip4/{host or f'{20 + number}.1.2.3'}/tcp/4600/p2p/{identity.peer_id}"


def record_of(identity: Identity, now: float, *, sequence: int = 1, shards: bool = True, host: str = "") -> bytes:
    shard = ShardRecord(MODEL, "tiny", 0, 10, 30, "f16r32", (0.001, 0.001, 0.001), 4096)
    return sign_record(
        NodeRecord(
            version=PROTOCOL_VERSION,
            peer=identity.peer_id,
            sequence=sequence,
            issued_at=EPOCH_S + now,
            expires_at=EPOCH_S + now + 60,
            data_addresses=(),
            libp2p_addresses=(address_of(identity, host or None),),
            device="cpu",
            memory_free_bytes=0,
            shards=(shard,) if shards else (),
            num_sessions=0,
            software="test",
        ),
        identity,
    )


class Driver:
    """A core with a clock, and peers that answer when they are told to."""

    def __init__(self, *named: Identity, serve: bool = True, book: PeerBook | None = None, seed: int = 1) -> None:
        self.now = 0.0
        self.core = Membership(
            US.peer_id,
            serve=serve,
            named=[WayIn(identity.peer_id, (address_of(identity),)) for identity in named],
            book=book or PeerBook(),
            exchange=RecordExchange(RecordTable(), Random(seed)),
            chance=Random(seed),
        )
        self.peers = {other.peer_id: RecordExchange(RecordTable(), Random(seed)) for other in OTHERS}
        self.commands: list[Command] = []
        self.core.start(self.moment)

    @property
    def moment(self) -> Moment:
        return Moment(MonotonicS(self.now), UnixS(EPOCH_S + self.now))

    def take(self, kind: type[C]) -> list[C]:
        """The commands of one kind since they were last taken."""
        self.commands += self.core.commands()
        found = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def wait(self, seconds: float) -> None:
        """Lets time pass, timer by timer."""
        until = self.now + seconds
        while (at := self.core.get_timer()) is not None and at <= until:
            self.now = max(at, self.now)
            self.core.handle_timer(self.moment)
        self.now = until

    def answer(self, asks: Iterable[Ask] | None = None, *, skew_s: float = 0.0) -> list[Ask]:
        asks = self.take(Ask) if asks is None else list(asks)
        for ask in asks:
            answer = self.peers[ask.peer].answer(ask.request, source=US.peer_id, now=UnixS(EPOCH_S + self.now + skew_s))
            self.core.answered(ask.token, answer, self.moment)
        return asks

    def dial_through(self) -> list[PeerId]:
        """All that is to be dialled is reached, and answers."""
        reached = [dial.peer for dial in self.take(Dial)]
        for peer in reached:
            self.core.connection_opened(peer, self.moment)
            self.core.dialled(peer, self.moment)
        self.answer()
        return reached

    def meet(self, *identities: Identity) -> None:
        """Peers that connect by themselves, and ask something."""
        for identity in identities:
            self.core.connection_opened(identity.peer_id, self.moment)
            request = RecordExchange(RecordTable(), Random(1)).request(None, limit=0, now=self.moment.unix_s)
            self.core.asked(identity.peer_id, request, self.moment)

    def know(self, *identities: Identity, host: str = "") -> None:
        for identity in identities:
            record = record_of(identity, self.now, sequence=int(self.now) + 1, host=host)
            self.core.exchange.table.receive(record, now=self.moment.unix_s)


def dialled(driver: Driver) -> set[PeerId]:
    return {dial.peer for dial in driver.take(Dial)}


def beats(asks: Iterable[Ask]) -> list[Ask]:
    """Heartbeats and probes: requests that ask for nothing."""
    return [ask for ask in asks if not msgspec.msgpack.decode(ask.request, type=ExchangeRequest).limit]


def warnings(driver: Driver) -> list[str]:
    return [notice.text for notice in driver.take(Notice) if notice.is_warning]


def book_of(*identities: Identity) -> PeerBook:
    book = PeerBook()
    for identity in identities:
        book.met(identity.peer_id, [address_of(identity)], now=UnixS(EPOCH_S))
    return book


# entering


def test_peers_named_by_the_user_are_dialled_at_once_and_forever() -> None:
    driver = Driver(FIRST, SECOND)
    driver.wait(0.0)
    assert dialled(driver) == {FIRST.peer_id, SECOND.peer_id}
    last, longest_s = 0.0, 0.0
    for _ in range(40):
        for identity in (FIRST, SECOND):
            driver.core.dialled(identity.peer_id, driver.moment, error="nobody is there")
        while not (again := dialled(driver)):
            driver.wait(0.25)
        longest_s = max(longest_s, driver.now - last)
        last = driver.now
        driver.commands += [Dial(peer, ()) for peer in again]
        driver.take(Dial)
    assert REDIAL_MAX_S / 2 < longest_s <= 1.25 * REDIAL_MAX_S + 0.25


def test_start_without_any_answer_is_told_once_and_so_is_the_end_of_it() -> None:
    driver = Driver(FIRST)
    driver.wait(0.0)
    driver.core.dialled(FIRST.peer_id, driver.moment, error="connection refused")
    assert len(warnings(driver)) == 1  # this one does not answer
    driver.wait(LONELY_AFTER_S)
    assert ["running alone" in text and "connection refused" in text for text in warnings(driver)] == [True]
    driver.take(Dial)
    driver.core.dialled(FIRST.peer_id, driver.moment)
    driver.answer()
    assert [met.peer for met in driver.take(Met)] == [FIRST.peer_id]
    assert any("entered the swarm" in notice.text for notice in driver.take(Notice))


def test_newcomer_tells_and_asks_whom_it_meets_and_joins_the_dht_through_several() -> None:
    driver = Driver(*OTHERS[:5])
    own = record_of(US, 0.0)
    driver.core.announce(own, [MODEL], driver.moment)
    driver.wait(10.0)
    assert len(driver.dial_through()) == 5
    assert all(
        driver.peers[other.peer_id].table.record_of(US.peer_id, now=driver.moment.unix_s) for other in OTHERS[:5]
    )
    assert len(driver.take(JoinDht)) == DHT_JOINS
    assert driver.take(Publish) == [Publish(True, (None, MODEL))]


def test_node_connects_with_those_it_hears_of_some_at_a_time_and_stops_when_it_has_enough() -> None:
    driver = Driver(FIRST)
    now = driver.moment.unix_s
    for other in OTHERS:
        driver.peers[FIRST.peer_id].table.receive(record_of(other, 0.0), now=now)
    driver.wait(0.0)
    driver.dial_through()
    driver.wait(0.0)
    first = driver.take(Dial)
    assert len(first) == MAX_DIALS
    for dial in first:
        driver.core.connection_opened(dial.peer, driver.moment)
        driver.core.dialled(dial.peer, driver.moment)
    driver.answer()
    driver.wait(30.0)
    driver.dial_through()
    driver.wait(30.0)
    assert len(driver.core.connected) == MESH_PEERS
    assert not driver.take(Dial)


def test_user_connects_with_a_few_and_never_relies_on_one() -> None:
    driver = Driver(FIRST, serve=False)
    for other in OTHERS[:20]:
        driver.peers[FIRST.peer_id].table.receive(record_of(other, 0.0), now=driver.moment.unix_s)
    driver.wait(0.0)
    driver.dial_through()
    driver.wait(20.0)
    driver.dial_through()
    assert len(driver.core.connected) == USER_PEERS


def test_mesh_prefers_different_networks_but_takes_one_when_there_is_no_other() -> None:
    crowded, elsewhere = OTHERS[1:40], OTHERS[40:44]
    driver = Driver(FIRST)
    driver.know(*crowded, host="52.1.2.3")
    driver.know(*elsewhere)
    for _ in range(6):
        driver.wait(6.0)
        driver.dial_through()
        driver.know(*crowded, host="52.1.2.3")
        driver.know(*elsewhere)
    connected = set(driver.core.connected)
    assert {other.peer_id for other in elsewhere} <= connected
    assert len(connected) == 1 + len(elsewhere) + MAX_PER_PLACE


def test_mesh_of_one_data_centre_is_half_as_large_and_not_two_peers() -> None:
    driver = Driver()
    for _ in range(6):
        driver.know(*OTHERS, host="52.1.2.3")
        driver.wait(6.0)
        driver.dial_through()
    assert len(driver.core.connected) == MESH_PEERS // 2


def test_known_peers_are_tried_when_those_named_do_not_answer() -> None:
    book = PeerBook()
    for other in OTHERS[10:20]:
        book.met(other.peer_id, [address_of(other)], now=UnixS(EPOCH_S))
    driver = Driver(FIRST, book=book)
    driver.wait(0.0)
    assert dialled(driver) == {FIRST.peer_id}
    driver.wait(4.0)
    tried = dialled(driver)
    assert len(tried) == 4
    assert tried <= {other.peer_id for other in OTHERS[10:20]}
    alone = Driver(book=book)
    alone.wait(0.0)
    assert len(dialled(alone)) == 4


def test_only_who_was_dialled_and_answered_gets_into_the_book() -> None:
    driver = Driver(FIRST, SECOND)
    driver.wait(0.0)
    for dial in driver.take(Dial):
        driver.core.dialled(dial.peer, driver.moment)
    (one, other) = driver.take(Ask)
    driver.answer([one])
    driver.core.not_answered(other.token, Silence.TIMEOUT, "silent", driver.moment)
    driver.meet(THIRD)
    assert [entry.peer for entry in driver.core.book.entries()] == [one.peer]
    driver.wait(2 * SAVE_EVERY_S)
    assert driver.take(SaveBook)


# staying


def test_silent_peer_is_suspected_probed_and_only_then_dropped() -> None:
    driver = Driver()
    driver.meet(FIRST)
    driver.wait(1.3 * HEARTBEAT_S)
    (beat,) = driver.take(Ask)
    driver.wait(5.0)
    driver.core.not_answered(beat.token, Silence.TIMEOUT, "silent", driver.moment)
    assert not driver.take(Disconnect)
    driver.wait(1.0)
    (probe,) = driver.take(Ask)
    driver.core.not_answered(probe.token, Silence.TIMEOUT, "silent", driver.moment)
    assert [command.peer for command in driver.take(Disconnect)] == [FIRST.peer_id]


@pytest.mark.parametrize("sign", ["answer", "request", "refusal"])
def test_any_sign_of_life_ends_the_suspicion(sign: str) -> None:
    driver = Driver()
    driver.meet(FIRST)
    driver.wait(1.3 * HEARTBEAT_S)
    (beat,) = driver.take(Ask)
    driver.wait(5.0)
    driver.core.not_answered(beat.token, Silence.TIMEOUT, "silent", driver.moment)
    driver.wait(1.0)
    (probe,) = driver.take(Ask)
    if sign == "answer":
        driver.answer([probe])
    elif sign == "refusal":
        driver.core.not_answered(probe.token, Silence.REFUSED, "busy", driver.moment)
    else:
        driver.meet(FIRST)
        driver.wait(0.1)
        driver.meet(FIRST)
        driver.core.not_answered(probe.token, Silence.TIMEOUT, "silent", driver.moment)
    driver.wait(10.0)
    assert not driver.take(Disconnect)
    assert driver.core.connected == [FIRST.peer_id]


def test_peer_that_is_heard_meanwhile_is_not_suspected_for_an_older_silence() -> None:
    driver = Driver()
    driver.meet(FIRST)
    driver.wait(1.3 * HEARTBEAT_S)
    (beat,) = driver.take(Ask)
    driver.wait(2.0)
    driver.meet(FIRST)
    driver.wait(3.0)
    driver.core.not_answered(beat.token, Silence.TIMEOUT, "silent", driver.moment)
    driver.wait(5.0)
    assert not beats(driver.take(Ask))


def test_mute_connections_do_not_keep_a_node_out_when_its_last_peer_is_gone() -> None:
    mute = OTHERS[40:55]
    driver = Driver(FIRST, book=book_of(THIRD))
    driver.wait(0.0)
    driver.dial_through()
    for other in mute:
        driver.core.connection_opened(other.peer_id, driver.moment)
    driver.core.connection_closed(FIRST.peer_id, driver.moment)
    assert not driver.core.has_met
    driver.wait(4.0)
    assert dialled(driver) == {FIRST.peer_id, THIRD.peer_id}


def test_connections_that_never_say_anything_do_not_count_among_those_that_a_node_seeks() -> None:
    driver = Driver()
    for other in OTHERS[40:55]:
        driver.core.connection_opened(other.peer_id, driver.moment)
    driver.meet(FIRST)
    driver.know(*OTHERS[1:30])
    driver.wait(6.0)
    assert len(dialled(driver)) == MAX_DIALS


def test_who_only_refuses_is_dropped_and_is_no_reason_to_stop_seeking() -> None:
    driver = Driver()
    driver.core.connection_opened(FIRST.peer_id, driver.moment)
    dropped: list[Disconnect] = []
    while not dropped and driver.now < 5 * HEARTBEAT_S:
        driver.wait(1.0)
        for ask in driver.take(Ask):
            driver.core.not_answered(ask.token, Silence.REFUSED, "reset", driver.moment)
        dropped = driver.take(Disconnect)
    assert [(command.peer, command.if_spare) for command in dropped] == [(FIRST.peer_id, True)]


def test_who_has_been_met_is_refused_by_often_and_then_probed() -> None:
    """It may be busy: three times in a row are silence, which a probe that is answered ends."""
    driver = Driver()
    driver.meet(FIRST)
    refusals = 0
    while refusals < MAX_REFUSALS:
        driver.wait(1.0)
        for ask in driver.take(Ask):
            driver.core.not_answered(ask.token, Silence.REFUSED, "busy", driver.moment)
            refusals += 1
    driver.wait(1.5)
    (probe,) = driver.take(Ask)
    driver.answer([probe])
    driver.wait(1.3 * HEARTBEAT_S)
    for ask in driver.take(Ask):
        driver.core.not_answered(ask.token, Silence.REFUSED, "busy", driver.moment)
    assert not driver.take(Disconnect), "the answer has ended the row"
    while refusals < 2 * MAX_REFUSALS + 1:
        driver.wait(1.0)
        for ask in driver.take(Ask):
            driver.core.not_answered(ask.token, Silence.REFUSED, "busy", driver.moment)
            refusals += 1
    assert [command.peer for command in driver.take(Disconnect)] == [FIRST.peer_id]


def test_hearsay_leads_to_a_probe_and_to_nothing_else() -> None:
    driver = Driver()
    driver.meet(FIRST)
    driver.wait(1.0)
    driver.core.suspect(FIRST.peer_id, driver.moment)
    driver.core.suspect(SECOND.peer_id, driver.moment)
    driver.wait(0.0)
    asks = driver.answer()
    assert [ask.peer for ask in asks] == [FIRST.peer_id]
    driver.wait(5.0)
    assert not driver.take(Disconnect)


def test_peer_that_answers_with_nonsense_is_dropped() -> None:
    driver = Driver()
    driver.meet(FIRST)
    driver.wait(1.3 * HEARTBEAT_S)
    (beat,) = driver.take(Ask)
    driver.core.answered(beat.token, b"nonsense", driver.moment)
    assert [command.peer for command in driver.take(Disconnect)] == [FIRST.peer_id]


def test_peer_that_asks_nonsense_is_refused_and_stays_unmet() -> None:
    driver = Driver()
    driver.core.connection_opened(FIRST.peer_id, driver.moment)
    with pytest.raises(WireError):
        driver.core.asked(FIRST.peer_id, b"nonsense", driver.moment)
    assert not driver.core.has_met


def test_heartbeat_of_a_busy_connection_is_not_sent() -> None:
    driver = Driver()
    driver.meet(FIRST)
    for _ in range(20):
        driver.wait(0.4 * HEARTBEAT_S)
        driver.meet(FIRST)
        asks = driver.answer()
        assert not beats(asks)
    driver.core.suspect(FIRST.peer_id, driver.moment)
    driver.wait(0.0)
    assert beats(driver.take(Ask))


def test_connections_above_the_limit_are_given_up_but_not_those_in_use() -> None:
    driver = Driver()
    protected = OTHERS[0].peer_id
    driver.core._protected = {protected}  # as the shell's set, changed later
    driver.meet(*OTHERS[: HIGH_PEERS + 5])
    dropped = set()
    for _ in range(20):
        driver.wait(1.0)
        driver.answer()
        for command in driver.take(Disconnect):
            driver.core.connection_closed(command.peer, driver.moment)
            dropped.add(command.peer)
    assert len(dropped) == HIGH_PEERS + 5 - LOW_PEERS
    assert protected not in dropped


def test_one_connection_of_a_full_mesh_is_replaced_now_and_then() -> None:
    driver = Driver()
    for _ in range(6):
        driver.know(*OTHERS)
        driver.wait(6.0)
        driver.dial_through()
    before = set(driver.core.connected)
    assert len(before) == MESH_PEERS
    while driver.now < 1.5 * SHUFFLE_EVERY_S:
        driver.know(*OTHERS)
        driver.wait(10.0)
        driver.answer()
        dials, drops = driver.take(Dial), driver.take(Disconnect)
        if dials or drops:
            assert len(dials) == len(drops) == 1
            assert dials[0].peer not in before
            assert drops[0].peer in before
            return
    pytest.fail("nothing was replaced")


def test_known_peer_that_is_in_no_view_is_dialled_for_it_may_be_in_another_part_of_the_swarm() -> None:
    book = PeerBook()
    book.met(THIRD.peer_id, [address_of(THIRD)], now=UnixS(EPOCH_S))
    driver = Driver(FIRST, book=book)
    driver.wait(0.0)
    driver.dial_through()
    seen: set[PeerId] = set()
    while driver.now < 1.5 * REUNITE_EVERY_S:
        driver.wait(2.0)
        seen |= dialled(driver)
        driver.answer()
    assert THIRD.peer_id in seen


def test_lost_connection_with_a_peer_named_by_the_user_is_sought_again() -> None:
    driver = Driver(FIRST)
    driver.wait(0.0)
    driver.dial_through()
    driver.core.connection_closed(FIRST.peer_id, driver.moment)
    assert not driver.core.has_met
    driver.wait(1.0)
    assert dialled(driver) == {FIRST.peer_id}


def test_peer_that_rested_long_is_tried_soon_when_nobody_else_is_left() -> None:
    driver = Driver(FIRST, SECOND)
    driver.wait(0.0)
    for _ in range(12):  # SECOND answers, FIRST never does
        for dial in driver.take(Dial):
            error = "nobody is there" if dial.peer == FIRST.peer_id else None
            driver.core.dialled(dial.peer, driver.moment, error=error)
        driver.answer()
        driver.wait(30.0)
    driver.take(Dial)
    driver.core.connection_closed(SECOND.peer_id, driver.moment)
    driver.wait(2 * REDIAL_MAX_S)
    assert FIRST.peer_id in dialled(driver)


def test_address_on_the_local_network_is_tried_beside_those_that_the_user_named() -> None:
    driver = Driver(FIRST)
    driver.wait(0.0)
    driver.take(Dial)
    driver.core.dialled(FIRST.peer_id, driver.moment, error="nobody is there")
    driver.core.found(FIRST.peer_id, [address_of(FIRST, "192.168.1.7")], driver.moment)
    (dial,) = driver.take(Dial)
    assert dial.addresses == (address_of(FIRST), address_of(FIRST, "192.168.1.7"))
    driver.core.found(THIRD.peer_id, [address_of(THIRD, "192.168.1.8")], driver.moment)
    assert [dial.addresses for dial in driver.take(Dial)] == [(address_of(THIRD, "192.168.1.8"),)]


def test_peer_of_the_local_network_that_does_not_answer_is_dialled_again() -> None:
    driver = Driver()
    driver.core.found(THIRD.peer_id, [address_of(THIRD, "192.168.1.8")], driver.moment)
    num_dials = 0
    while driver.now < 120.0:
        for dial in driver.take(Dial):
            assert dial.addresses == (address_of(THIRD, "192.168.1.8"),)
            driver.core.dialled(dial.peer, driver.moment, error="no route to host")
            num_dials += 1
        driver.wait(1.0)
    assert 5 <= num_dials <= 20
    assert driver.core.ways_in == [address_of(THIRD, "192.168.1.8")]
    assert any("running alone" in text for text in warnings(driver))


@pytest.mark.parametrize("is_wanted", [True, False])
def test_peer_of_the_local_network_is_a_way_back_when_all_others_are_lost(is_wanted: bool) -> None:
    driver = Driver()
    others = [FIRST] if is_wanted else OTHERS[10 : 10 + MESH_PEERS]
    driver.meet(*others)
    driver.core.found(THIRD.peer_id, [address_of(THIRD, "192.168.1.8")], driver.moment)
    assert [peer == THIRD.peer_id for peer in driver.dial_through()] == [True] * is_wanted
    driver.core.connection_closed(THIRD.peer_id, driver.moment)
    for _ in range(200):
        driver.wait(1.0)
        for dial in driver.take(Dial):
            driver.core.dialled(dial.peer, driver.moment, error="asleep")
    for other in others:
        driver.core.connection_closed(other.peer_id, driver.moment)
    driver.wait(2.0)
    assert dialled(driver) == {THIRD.peer_id}


def test_what_the_local_network_tells_is_bounded_and_forgotten_when_it_fails() -> None:
    driver = Driver()
    driver.meet(FIRST)
    for other in OTHERS[5:55]:
        driver.core.found(other.peer_id, [address_of(other, "192.168.1.8")] * 50, driver.moment)
    assert len(driver.core.ways_in) <= MAX_NEAR
    for _ in range(2000):
        for dial in driver.take(Dial):
            driver.core.dialled(dial.peer, driver.moment, error="no route to host")
        driver.wait(10.0)
        driver.answer()
    assert not driver.core.ways_in


def test_host_that_went_down_is_entered_and_published_from_anew() -> None:
    driver = Driver(FIRST)
    driver.core.announce(record_of(US, 0.0), [MODEL], driver.moment)
    driver.wait(0.0)
    driver.dial_through()
    assert driver.take(Publish)
    driver.core.published(driver.moment, is_done=True)
    asked = driver.core.pull(None, driver.moment)
    driver.core.host_down()
    for ask in driver.take(Ask):
        driver.core.not_answered(ask.token, Silence.DOWN, "down", driver.moment)
    assert len(asked) == 1
    assert not driver.core.connected
    driver.core.host_resumed(driver.moment)
    driver.core.announce(record_of(US, 0.0, sequence=2), [MODEL], driver.moment)
    driver.wait(0.0)
    assert driver.dial_through() == [FIRST.peer_id]
    assert driver.take(Publish) == [Publish(True, (None, MODEL))]
    assert driver.take(JoinDht)


def test_host_that_went_down_leads_back_to_known_peers_though_none_was_named() -> None:
    driver = Driver(book=book_of(THIRD))
    driver.wait(0.0)
    assert driver.dial_through() == [THIRD.peer_id]
    driver.wait(4 * LONELY_AFTER_S)
    driver.answer()
    driver.core.host_down()
    driver.wait(LONELY_AFTER_S)
    assert not driver.take(Dial), "there is no host to dial with"
    driver.take(Notice)
    driver.core.host_resumed(driver.moment)
    driver.wait(LONELY_AFTER_S)
    assert dialled(driver) == {THIRD.peer_id}
    assert any("running alone" in text for text in warnings(driver))
    driver.core.dialled(THIRD.peer_id, driver.moment, error="nobody is there")
    driver.wait(REUNITE_EVERY_S)
    assert driver.dial_through() == [THIRD.peer_id]
    assert driver.core.has_met


def test_host_that_went_down_and_tells_of_a_connection_before_it_is_back_is_not_alone() -> None:
    driver = Driver(book=book_of(THIRD))
    driver.meet(FIRST)
    driver.core.host_down()
    driver.meet(SECOND)
    driver.core.host_resumed(driver.moment)
    driver.wait(LONELY_AFTER_S)
    assert not warnings(driver)
    assert driver.core.connected == [SECOND.peer_id]


def test_dial_that_our_own_host_has_broken_off_is_no_failure_of_the_peer() -> None:
    driver = Driver(FIRST, book=book_of(THIRD))
    driver.wait(3.5)
    assert dialled(driver) == {FIRST.peer_id, THIRD.peer_id}
    driver.core.host_down()
    for peer in (FIRST.peer_id, THIRD.peer_id):
        driver.core.dialled(peer, driver.moment, error="the host is down", is_own_fault=True)
    assert not warnings(driver)
    assert driver.core.named[0].problem == ""
    driver.core.host_resumed(driver.moment)
    driver.wait(1.0)
    assert dialled(driver) == {FIRST.peer_id, THIRD.peer_id}


def test_failed_dials_count_against_a_known_peer_only_while_somebody_else_is_met() -> None:
    """While nobody is, it may be our own line that is down."""
    driver = Driver(book=book_of(*OTHERS[1:30]))

    def fail_for(seconds: float) -> None:
        until = driver.now + seconds
        while driver.now < until:
            driver.wait(1.0)
            for dial in driver.take(Dial):
                driver.core.dialled(dial.peer, driver.moment, error="no route to host")

    fail_for(3600.0)
    assert {entry.num_failures for entry in driver.core.book.entries()} == {0}
    driver.meet(FIRST)
    for _ in range(20):
        fail_for(REUNITE_EVERY_S)
        driver.answer()
    assert max(entry.num_failures for entry in driver.core.book.entries()) > 0


def test_known_peers_are_all_tried_again_within_two_minutes_while_nobody_is_met() -> None:
    driver = Driver(book=book_of(*OTHERS[1:10]))
    last: dict[PeerId, float] = {}
    longest_s = 0.0
    while driver.now < 1800.0:
        driver.wait(1.0)
        for dial in driver.take(Dial):
            longest_s = max(longest_s, driver.now - last.get(dial.peer, driver.now))
            last[dial.peer] = driver.now
            driver.core.dialled(dial.peer, driver.moment, error="no route to host")
    assert len(last) == 9
    assert longest_s < 120.0


# records


def test_announcement_goes_to_every_connected_peer_once() -> None:
    driver = Driver()
    driver.meet(FIRST, SECOND)
    record, pushes = driver.core.announce(record_of(US, 0.0), [MODEL], driver.moment)
    assert isinstance(record, NodeRecord)
    asks = driver.answer()
    assert [ask.token for ask in asks] == pushes
    assert {ask.peer for ask in asks} == {FIRST.peer_id, SECOND.peer_id}
    # What they have is not sent again with the next question.
    driver.core.pull(None, driver.moment)
    assert max(len(ask.request) for ask in driver.take(Ask)) < 200


def test_peer_that_is_slow_is_sent_the_newest_announcement_and_none_between() -> None:
    driver = Driver()
    driver.meet(FIRST)
    for sequence in range(1, 6):
        driver.core.announce(record_of(US, driver.now, sequence=sequence), [MODEL], driver.moment)
        driver.wait(0.1)
    (push,) = driver.take(Ask)
    driver.answer([push])
    (push,) = driver.answer()
    record = driver.peers[FIRST.peer_id].table.record_of(US.peer_id, now=driver.moment.unix_s)
    assert record is not None
    assert record.sequence == 5
    assert not driver.take(Ask)


def test_a_withdrawal_does_not_wait_for_the_answer_to_an_announcement() -> None:
    driver = Driver()
    driver.meet(FIRST)
    driver.core.announce(record_of(US, driver.now), [MODEL], driver.moment)
    driver.take(Ask)
    _, pushes = driver.core.withdraw(record_of(US, driver.now, sequence=2, shards=False), driver.moment)
    assert [ask.token for ask in driver.take(Ask)] == pushes
    assert len(pushes) == 1


def test_what_is_asked_of_one_peer_at_once_is_bounded() -> None:
    driver = Driver()
    driver.meet(FIRST, SECOND)
    driver.know(FIRST)
    for sequence in range(1, 20):
        driver.core.announce(record_of(US, driver.now, sequence=sequence), [MODEL], driver.moment)
        driver.core.pull(MODEL, driver.moment)
        driver.wait(HEARTBEAT_S)
    asks = driver.take(Ask)
    assert {sum(ask.peer == peer.peer_id for ask in asks) for peer in (FIRST, SECOND)} == {MAX_ASKS_OF_ONE}


def test_who_has_not_answered_lately_is_not_relied_on() -> None:
    driver = Driver(FIRST)
    driver.wait(0.0)
    driver.core.dialled(FIRST.peer_id, driver.moment)
    (first,) = driver.take(Ask)
    assert first.is_sure, "whom we have chosen"
    driver.meet(SECOND)
    driver.core.pull(None, driver.moment)
    asks = {ask.peer: ask for ask in driver.take(Ask)}
    assert not asks[SECOND.peer_id].is_sure, "it has answered nothing yet"
    driver.core.not_answered(first.token, Silence.REFUSED, "busy", driver.moment)
    driver.answer([asks[SECOND.peer_id]])
    driver.core.not_answered(asks[FIRST.peer_id].token, Silence.REFUSED, "busy", driver.moment)
    driver.core.pull(None, driver.moment)
    assert {ask.peer: ask.is_sure for ask in driver.take(Ask)} == {FIRST.peer_id: False, SECOND.peer_id: True}


def test_those_who_refuse_are_given_up_before_others() -> None:
    driver = Driver()
    driver.meet(*OTHERS[: HIGH_PEERS + 5])
    useless = {other.peer_id for other in OTHERS[10:20]}
    dropped = set()
    for sequence in range(1, 16):
        driver.core.announce(record_of(US, driver.now, sequence=sequence), [MODEL], driver.moment)
        for ask in driver.take(Ask):
            if ask.peer not in useless:
                driver.answer([ask])
            elif ask.peer == OTHERS[10].peer_id:
                driver.core.not_answered(ask.token, Silence.REFUSED, "busy", driver.moment)
        driver.wait(1.0)
        for command in driver.take(Disconnect):
            driver.core.connection_closed(command.peer, driver.moment)
            dropped.add(command.peer)
    assert len(dropped) == HIGH_PEERS + 5 - LOW_PEERS
    assert useless < dropped


def test_record_of_somebody_else_is_not_announced() -> None:
    driver = Driver()
    assert driver.core.announce(record_of(FIRST, 0.0), [], driver.moment) == (Refusal.WRONG_KEY, [])
    assert driver.core.announce(b"nonsense", [], driver.moment)[0] is Refusal.MALFORMED


def test_look_up_asks_nodes_before_users() -> None:
    driver = Driver()
    driver.meet(*OTHERS[:40])
    nodes = OTHERS[20:36]
    driver.know(*nodes)
    asked = driver.core.pull(MODEL, driver.moment)
    asks = [ask for ask in driver.take(Ask) if ask.token in asked]
    assert {ask.peer for ask in asks} == {other.peer_id for other in nodes}


def test_dht_provider_is_asked_only_when_its_record_is_missing_or_old() -> None:
    driver = Driver()
    driver.know(FIRST)
    wanted = [FIRST.peer_id, SECOND.peer_id, US.peer_id]
    assert driver.core.missing(wanted, driver.moment) == [SECOND.peer_id]
    driver.wait(31.0)
    assert driver.core.missing(wanted, driver.moment) == [FIRST.peer_id, SECOND.peer_id]


def test_publication_that_failed_is_repeated_with_the_next_announcement() -> None:
    driver = Driver()
    driver.meet(FIRST)
    for sequence in (1, 2):
        driver.core.announce(record_of(US, driver.now, sequence=sequence), [MODEL], driver.moment)
        assert driver.take(Publish) == [Publish(True, (None, MODEL))]
        assert not driver.take(Publish)
        driver.core.published(driver.moment, is_done=False)
        driver.wait(1.0)


def test_provider_records_are_sent_every_two_minutes_and_records_more_often() -> None:
    driver = Driver()
    driver.meet(FIRST)
    published: list[tuple[float, Publish]] = []
    sequence = 0
    while driver.now < 2 * PROVIDE_INTERVAL_S:
        sequence += 1
        driver.core.announce(record_of(US, driver.now, sequence=sequence), [MODEL], driver.moment)
        for publish in driver.take(Publish):
            published.append((driver.now, publish))
            driver.core.published(driver.moment, is_done=True)
        driver.wait(10.0)
    late = [publish for at, publish in published if at > 30.0]
    assert 4 <= sum(publish.put for publish in late) <= 6
    assert sum(bool(publish.provide) for publish in late) <= 2
    driver.core.withdraw(record_of(US, driver.now, sequence=sequence + 1, shards=False), driver.moment)
    driver.wait(60.0)
    assert not driver.take(Publish)


# clocks


def test_own_clock_is_doubted_only_by_the_middle_of_several_peers() -> None:
    driver = Driver()
    driver.meet(*OTHERS[:5])
    driver.core.pull(None, driver.moment)
    asks = driver.take(Ask)
    driver.answer(asks[:1], skew_s=1e6)
    driver.answer(asks[1:2])
    assert driver.core.clock_offset_s is None
    driver.answer(asks[2:3])
    assert driver.core.clock_offset_s == pytest.approx(0.0)
    assert not warnings(driver)
    driver.core.pull(None, driver.moment)
    driver.answer(skew_s=CLOCK_WARN_S + 5)
    driver.core.pull(None, driver.moment)
    driver.answer(skew_s=CLOCK_WARN_S + 5)
    assert driver.core.clock_offset_s == pytest.approx(CLOCK_WARN_S + 5)
    assert len(warnings(driver)) == 1
