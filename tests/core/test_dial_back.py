"""The side that is asked to dial back: whom it dials, whom it does not, and how often."""

from __future__ import annotations

import asyncio
import functools
import random

import msgspec
import pytest

from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p.control import ConnectionEnds
from p2p.dial_back import (
    MAX_ADDRESSES,
    MAX_ANSWER_BYTES,
    MAX_DIALS,
    MAX_REQUEST_BYTES,
    REQUESTS_PER_HOST,
    REQUESTS_PER_PEER,
    REQUESTS_PER_WINDOW,
    VERSION,
    WINDOW_S,
    DialBack,
    DialBackAnswer,
    DialBackRequest,
    DialMe,
    decode_answer,
    encode_request,
)
from p2p.reachability_verdict import Address, Outcome, Plane

ASKER = "203.0.113.7"
ANSWERER = "198.51.100.1"
NONCE = bytes(range(16))


class Asked:
    """A DialBack whose dials are only noted."""

    def __init__(self, *seen: str, now: float = 0.0) -> None:
        self.seen = list(seen)
        self.now = now
        self.dialled: list[tuple[str, str, int]] = []
        self.dialling = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.dial_back = DialBack(
            self._ends_of,
            {plane: functools.partial(self._deliver, plane) for plane in Plane},
            own_hosts=lambda: {ANSWERER, "127.0.0.1", "192.168.0.2"},
            clock=lambda: self.now,
        )

    async def _ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        return [ConnectionEnds(ANSWERER, 4600, host, 50_000 + n, False) for n, host in enumerate(self.seen)]

    async def _deliver(self, plane: Plane, host: str, port: int, nonce: bytes) -> Outcome:
        assert nonce == NONCE
        self.dialled.append((plane, host, port))
        await self.gate.wait()
        return Outcome.DELIVERED

    async def ask(self, *hosts: str, peer: str = "asker", port: int = 4600) -> DialBackAnswer:
        nonces = [(Address(Plane.CONTROL, host, port), NONCE) for host in hosts]
        return decode_answer(await self.dial_back.answer(PeerId(peer), encode_request(nonces)))


async def test_asker_is_dialled_where_it_is_seen_and_told_where_that_is() -> None:
    asked = Asked(ASKER)
    request = encode_request([(Address(Plane.CONTROL, ASKER, 4600), NONCE), (Address(Plane.DATA, ASKER, 4601), NONCE)])
    answer = decode_answer(await asked.dial_back.answer(PeerId("asker"), request))
    assert answer == DialBackAnswer(VERSION, ASKER, 50_000, ("delivered", "delivered"))
    assert sorted(asked.dialled) == [("control", ASKER, 4600), ("data", ASKER, 4601)]


@pytest.mark.parametrize(
    "victim",
    [
        "8.8.8.8",
        "203.0.113.8",  # the asker's neighbour
        "192.168.0.3",  # ours
        ANSWERER,
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "0.0.0.0",  # noqa: S104
        "169.254.169.254",
        "224.0.0.1",
        "localhost",
        "no-such-name.invalid",
        "not a host",
    ],
)
async def test_nobody_else_is_dialled(victim: str) -> None:
    asked = Asked(ASKER)
    assert (await asked.ask(victim)).outcomes == (Outcome.OTHER_HOST,)
    assert asked.dialled == []
    assert asked.dial_back.refused == {Outcome.OTHER_HOST: 1}


async def test_neighbour_on_a_private_network_is_dialled_at_its_own_address_only() -> None:
    asked = Asked("192.168.0.9")
    assert (await asked.ask("192.168.0.9", "192.168.0.10")).outcomes == (Outcome.DELIVERED, Outcome.OTHER_HOST)


async def test_who_is_seen_at_loopback_has_this_machines_addresses_dialled_but_not_loopback() -> None:
    asked = Asked("127.0.0.1")
    outcomes = (await asked.ask("192.168.0.2", "127.0.0.1", "192.168.0.3")).outcomes
    assert outcomes == (Outcome.DELIVERED, Outcome.OTHER_HOST, Outcome.OTHER_HOST)


async def test_who_comes_through_a_relay_is_seen_nowhere_and_not_dialled() -> None:
    asked = Asked()
    answer = await asked.ask(ASKER)
    assert (answer.seen_host, answer.seen_port, answer.outcomes) == ("", 0, (Outcome.OTHER_HOST,))


async def test_several_writings_of_one_address_are_one() -> None:
    asked = Asked("2001:db8::7")
    assert (await asked.ask("2001:0db8:0:0::0007")).outcomes == (Outcome.DELIVERED,)
    assert asked.dialled == [("control", "2001:db8::7", 4600)]


async def test_flood_of_one_peer_is_refused_and_others_are_served() -> None:
    asked = Asked(ASKER)
    outcomes = [(await asked.ask(ASKER)).outcomes[0] for _ in range(3 * REQUESTS_PER_PEER)]
    assert outcomes.count(Outcome.DELIVERED) == REQUESTS_PER_PEER == len(asked.dialled)
    asked.seen = ["203.0.113.200"]
    assert (await asked.ask("203.0.113.200", peer="other")).outcomes == (Outcome.DELIVERED,)
    asked.seen = [ASKER]
    asked.now += WINDOW_S
    assert (await asked.ask(ASKER)).outcomes == (Outcome.DELIVERED,)


async def test_flood_of_many_identities_at_one_address_is_refused() -> None:
    asked = Asked(ASKER)
    for number in range(10 * REQUESTS_PER_HOST):
        await asked.ask(ASKER, peer=f"sybil-{number}")
    assert len(asked.dialled) == REQUESTS_PER_HOST


async def test_flood_of_many_addresses_is_bounded_and_so_is_what_is_remembered_of_it() -> None:
    asked = Asked()
    for number in range(5_000):
        asked.now += 0.1
        asked.seen = [f"9.{number // 250}.{number % 250}.1"]
        await asked.ask(asked.seen[0], peer=f"sybil-{number}")
    assert len(asked.dialled) <= REQUESTS_PER_WINDOW * (1 + 500 / WINDOW_S)
    assert len(asked.dial_back._budget._taken) <= 4 * REQUESTS_PER_WINDOW + 8


async def test_dials_at_once_are_bounded() -> None:
    asked = Asked(ASKER)
    asked.gate.clear()
    waiting = [asyncio.create_task(asked.ask(*[ASKER] * MAX_ADDRESSES, peer=f"peer-{n}")) for n in range(6)]
    while len(asked.dialled) < MAX_DIALS:  # noqa: ASYNC110  # of tasks that have just been made
        await asyncio.sleep(0)
    asked.gate.set()
    outcomes = [outcome for answer in await asyncio.gather(*waiting) for outcome in answer.outcomes]
    assert len(asked.dialled) == MAX_DIALS
    assert outcomes.count(Outcome.BUSY) == 6 * MAX_ADDRESSES - MAX_DIALS


async def test_only_asking_where_one_is_seen_is_free() -> None:
    asked = Asked(ASKER)
    for _ in range(3 * REQUESTS_PER_PEER):
        assert (await asked.ask()).seen_host == ASKER
    assert (await asked.ask(ASKER)).outcomes == (Outcome.DELIVERED,)


def _request(**changes: object) -> bytes:
    fields: dict[str, object] = {"plane": "control", "host": ASKER, "port": 4600, "nonce": NONCE} | changes
    return msgspec.msgpack.encode([VERSION, [list(fields.values())]])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        bytes(MAX_REQUEST_BYTES + 1),
        msgspec.msgpack.encode([2, []]),
        msgspec.msgpack.encode([VERSION, [["control", ASKER, 4600, NONCE]] * (MAX_ADDRESSES + 1)]),
        _request(plane="other"),
        _request(host=""),
        _request(host="h" * 65),
        _request(port=0),
        _request(port=65_536),
        _request(nonce=bytes(15)),
        _request(nonce=bytes(17)),
    ],
)
async def test_malformed_request_is_refused(request_bytes: bytes) -> None:
    asked = Asked(ASKER)
    with pytest.raises(WireError):
        await asked.dial_back.answer(PeerId("asker"), request_bytes)
    assert asked.dialled == []


def test_largest_messages_are_within_their_limits() -> None:
    request = msgspec.msgpack.encode(
        DialBackRequest(VERSION, (DialMe(Plane.CONTROL, "h" * 64, 65_535, NONCE),) * MAX_ADDRESSES)
    )
    assert len(request) <= MAX_REQUEST_BYTES
    answer = msgspec.msgpack.encode(DialBackAnswer(VERSION, "f" * 64, 65_535, ("u" * 16,) * MAX_ADDRESSES))
    assert len(answer) <= MAX_ANSWER_BYTES
    assert decode_answer(answer).seen_port == 65_535


def test_random_answers_are_refused_or_read() -> None:
    chance = random.Random(7)
    good = bytearray(msgspec.msgpack.encode(DialBackAnswer(VERSION, ASKER, 4600, ("delivered",))))
    for _ in range(2_000):
        answer = bytearray(good)
        answer[chance.randrange(len(answer))] = chance.randrange(256)
        try:
            assert decode_answer(bytes(answer)).version == VERSION
        except WireError:
            continue
