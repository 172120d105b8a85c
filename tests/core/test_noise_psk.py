"""The handshake with the key of a private swarm: who has it gets a link, and who has it not gets nothing."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.types import PeerId
from p2p.identity import Identity, public_key_of
from p2p.noise_core import Handshake, LinkKeys, LinkRefusal, LinkRefused

US, THEM = Identity.from_seed(bytes([5]) * 32), Identity.from_seed(bytes([6]) * 32)
PSK, OTHER_PSK = bytes([1]) * 32, bytes([2]) * 32


def side(identity: Identity, psk: bytes | None, *, initiator: bool, version: int = 1) -> Handshake:
    expect: PeerId | None = THEM.peer_id if initiator else None
    static = os.urandom(32)
    return Handshake(identity, initiator=initiator, static_private=static, expect=expect, psk=psk, version=version)


def sides(our_psk: bytes | None, their_psk: bytes | None) -> tuple[Handshake, Handshake]:
    return side(US, our_psk, initiator=True), side(THEM, their_psk, initiator=False)


def shake(ours: Handshake, theirs: Handshake) -> tuple[LinkKeys, LinkKeys]:
    assert theirs.receive(ours.receive(theirs.receive(ours.start()))) == b""
    assert ours.keys is not None
    assert theirs.keys is not None
    return ours.keys, theirs.keys


def refusal(handshake: Handshake, message: bytes) -> LinkRefused:
    with pytest.raises(LinkRefused) as caught:
        handshake.receive(message)
    assert handshake.keys is None
    return caught.value


def test_members_know_each_other() -> None:
    ours, theirs = shake(*sides(PSK, PSK))
    assert (ours.peer, theirs.peer) == (THEM.peer_id, US.peer_id)
    assert ours.sending_key == theirs.receiving_key != ours.receiving_key == theirs.sending_key


@pytest.mark.parametrize("their_psk", [OTHER_PSK, None])
def test_a_stranger_gets_no_answer_from_a_private_responder(their_psk: bytes | None) -> None:
    stranger, member = sides(their_psk, PSK)
    refused = refusal(member, stranger.start())
    assert refused.reason is LinkRefusal.OTHER_SWARM
    assert refused.reply == b""


def test_a_stranger_that_knows_the_form_but_not_the_key_gets_no_answer() -> None:
    """The preamble of a private swarm can be written by anybody; message 1 cannot."""
    stranger, member = sides(OTHER_PSK, PSK)
    first = stranger.start()
    for message in (first[:48], first[:-1], first + bytes(1), first[:16] + os.urandom(48)):
        refused = refusal(side(THEM, PSK, initiator=False), message)
        assert refused.reason is LinkRefusal.OTHER_SWARM
        assert refused.reply == b""
    assert refusal(member, first).reply == b""


def test_who_dials_the_public_swarm_with_a_key_is_told_so() -> None:
    member, public = sides(PSK, None)
    theirs = refusal(public, member.start())
    assert theirs.reason is LinkRefusal.OTHER_SWARM
    assert theirs.reply
    ours = refusal(member, theirs.reply)
    assert ours.reason is LinkRefusal.OTHER_SWARM
    assert "it is in the public swarm" in str(ours)


def test_a_private_responder_that_is_asked_for_another_version_says_which_is_its_own() -> None:
    ours, theirs = side(US, PSK, initiator=True, version=2), side(THEM, PSK, initiator=False, version=1)
    refused = refusal(theirs, ours.start())
    assert (refused.reason, refused.their_version) == (LinkRefusal.WRONG_VERSION, 2)
    assert refusal(ours, refused.reply).their_version == 1


def test_a_recorded_first_message_gets_an_answer_that_its_replayer_cannot_use() -> None:
    """What psk0 cannot prevent: the identity in the answer stays sealed, and without message 3 there is no link."""
    recorded = side(US, PSK, initiator=True).start()
    theirs = side(THEM, PSK, initiator=False)
    answer = theirs.receive(recorded)
    assert public_key_of(THEM.peer_id) not in answer
    replayer = side(US, PSK, initiator=True)
    replayer.start()
    assert refusal(replayer, answer).reason is LinkRefusal.REPLAYED_OR_FORGED
    assert refusal(theirs, os.urandom(160)).reason is LinkRefusal.REPLAYED_OR_FORGED


def test_the_privacy_of_a_preamble_cannot_be_changed_on_the_way() -> None:
    ours, theirs = sides(None, None)
    first = bytearray(ours.start())
    first[:12] = b"fusion-priv\x00"
    assert refusal(theirs, bytes(first)).reason is LinkRefusal.OTHER_SWARM
    ours, theirs = sides(PSK, PSK)
    first = bytearray(ours.start())
    first[:12] = b"fusion-node\x00"
    assert refusal(theirs, bytes(first)).reason is LinkRefusal.OTHER_SWARM


@given(which=st.integers(0, 2), place=st.integers(0, 10_000), difference=st.integers(1, 255))
def test_any_changed_byte_of_a_private_handshake_ends_it(which: int, place: int, difference: int) -> None:
    ours, theirs = sides(PSK, PSK)
    refused = False
    message, receiver, other = ours.start(), theirs, ours
    for number in range(3):
        if number == which:
            changed = bytearray(message)
            changed[place % len(changed)] ^= difference
            message = bytes(changed)
        try:
            message = receiver.receive(message)
        except LinkRefused:
            refused = True
            break
        receiver, other = other, receiver
    assert refused
    assert theirs.keys is None
