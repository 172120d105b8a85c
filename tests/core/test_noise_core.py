"""The handshake and the sealing: known answers, and everything that must be refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.types import PeerId
from p2p.identity import Identity, public_key_of
from p2p.noise_core import (
    MAX_HANDSHAKE_BYTES,
    MAX_SEGMENT_BYTES,
    TAG_BYTES,
    Handshake,
    LinkKeys,
    LinkRefusal,
    LinkRefused,
    Opener,
    Sealer,
)
from p2p.records import PROTOCOL_VERSION
from tests.vectors import make_data_plane

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "data_plane.json").read_text())
US, THEM = Identity.from_seed(bytes([5]) * 32), Identity.from_seed(bytes([6]) * 32)
KEY = bytes(range(32))


def sides(
    *, expect: PeerId | None = None, our_version: int = PROTOCOL_VERSION, their_version: int = PROTOCOL_VERSION
) -> tuple[Handshake, Handshake]:
    ours = Handshake(US, initiator=True, static_private=os.urandom(32), expect=expect, version=our_version)
    return ours, Handshake(THEM, initiator=False, static_private=os.urandom(32), version=their_version)


def shake(ours: Handshake, theirs: Handshake) -> tuple[LinkKeys, LinkKeys]:
    assert theirs.receive(ours.receive(theirs.receive(ours.start()))) == b""
    assert ours.keys is not None
    assert theirs.keys is not None
    return ours.keys, theirs.keys


def refusal(handshake: Handshake, message: bytes) -> LinkRefused:
    with pytest.raises(LinkRefused) as caught:
        handshake.receive(message)
    assert handshake.keys is None
    with pytest.raises(LinkRefused):
        handshake.receive(message)
    return caught.value


def open_refusal(opener: Opener, segment: bytes) -> LinkRefusal:
    with pytest.raises(LinkRefused) as caught:
        opener.open(segment)
    with pytest.raises(LinkRefused):
        opener.open(segment)
    return caught.value.reason


def test_file_of_vectors_is_what_the_code_makes() -> None:
    assert make_data_plane.vectors() == VECTORS


def test_handshake_matches_the_vectors() -> None:
    ours, theirs, messages = make_data_plane.handshake()
    vector = VECTORS["handshake"]
    assert [message.hex() for message in messages] == vector["messages"]
    assert ours.keys is not None
    assert theirs.keys is not None
    assert ours.keys.sending_key.hex() == theirs.keys.receiving_key.hex() == vector["initiator_sending_key"]
    assert ours.keys.receiving_key.hex() == theirs.keys.sending_key.hex() == vector["initiator_receiving_key"]
    assert all(len(message) <= MAX_HANDSHAKE_BYTES // 4 for message in messages)


def test_sealed_segments_match_the_vectors_and_plain_chacha20_poly1305() -> None:
    key = bytes.fromhex(VECTORS["handshake"]["initiator_sending_key"])
    sealer, opener = Sealer(key), Opener(key)
    for counter, vector in enumerate(VECTORS["segments"]):
        plain, segment = bytes.fromhex(vector["content"]), bytes.fromhex(vector["sealed"])
        assert sealer.seal(plain) == segment
        nonce = bytes(4) + counter.to_bytes(8, "little")
        assert ChaCha20Poly1305(key).encrypt(nonce, plain, None) == segment
        assert opener.open(segment) == plain
    longest = sealer.seal(make_data_plane.LONGEST_CONTENT)
    assert hashlib.sha256(longest).hexdigest() == VECTORS["longest_segment"]["sealed_sha256"]
    assert opener.open(longest) == make_data_plane.LONGEST_CONTENT


def test_segment_can_be_opened_where_its_content_is_wanted() -> None:
    segments, opener = segments_of(3, 1000), Opener(KEY)
    buffer = bytearray(3000)
    for number in (0, 1):
        opener.open_into(segments[number], memoryview(buffer)[1000 * number : 1000 * (number + 1)])
    assert buffer == bytes(1000) + bytes([1]) * 1000 + bytes(1000)
    with pytest.raises(LinkRefused):
        opener.open_into(segments[1], memoryview(buffer)[2000:])
    assert open_refusal(opener, segments[2]) is LinkRefusal.REPLAYED_OR_FORGED


def test_both_sides_know_each_other_and_share_keys_of_their_own() -> None:
    ours, theirs = shake(*sides(expect=THEM.peer_id))
    assert (ours.peer, theirs.peer) == (THEM.peer_id, US.peer_id)
    assert ours.sending_key == theirs.receiving_key != ours.receiving_key == theirs.sending_key
    again, _ = shake(*sides())
    assert again.sending_key != ours.sending_key


def test_keys_are_never_shown() -> None:
    ours, _ = shake(*sides())
    assert repr(ours.sending_key) not in repr(ours)


def test_unexpected_identity_is_refused_before_ours_is_shown() -> None:
    ours, theirs = sides(expect=US.peer_id)
    refused = refusal(ours, theirs.receive(ours.start()))
    assert refused.reason is LinkRefusal.WRONG_KEY
    assert refused.reply == b""


@pytest.mark.parametrize(("our_version", "their_version"), [(1, 2), (2, 1), (0, 2**32 - 1)])
def test_other_version_is_told_to_both_sides(our_version: int, their_version: int) -> None:
    ours, theirs = sides(our_version=our_version, their_version=their_version)
    theirs_refused = refusal(theirs, ours.start())
    ours_refused = refusal(ours, theirs_refused.reply)
    for refused, other in ((ours_refused, their_version), (theirs_refused, our_version)):
        assert refused.reason is LinkRefusal.WRONG_VERSION
        assert refused.their_version == other
        assert f"version {our_version}" in str(refused)
        assert f"version {their_version}" in str(refused)


def test_version_changed_on_the_way_fails_the_handshake() -> None:
    """Two new programs cannot be talked down to an old version: the preamble is the prologue."""
    ours, theirs = sides(our_version=2, their_version=1)
    first = bytearray(ours.start())
    first[12] = 1
    second = bytearray(theirs.receive(bytes(first)))
    second[12] = 2
    assert refusal(ours, bytes(second)).reason is LinkRefusal.REPLAYED_OR_FORGED


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", LinkRefusal.MALFORMED),
        (b"GET / HTTP/1.1", LinkRefusal.MALFORMED),
        (b"another-prot" + bytes(100), LinkRefusal.MALFORMED),
        (b"fusion-node\x00\x03\x00\x00\x00", LinkRefusal.MALFORMED),
        (b"fusion-node\x00\x03\x00\x00\x00" + bytes(32), LinkRefusal.MALFORMED),  # a key of small order
        (b"fusion-node\x00\x03\x00\x00\x00" + bytes(MAX_HANDSHAKE_BYTES), LinkRefusal.OVERSIZED),
    ],
)
def test_first_message_that_is_none_is_refused(message: bytes, why: LinkRefusal) -> None:
    assert refusal(sides()[1], message).reason is why


def showing(identity: Identity, payload: bytes, *, initiator: bool) -> Handshake:
    """A side that follows the protocol but for the identity that it shows."""
    handshake = Handshake(identity, initiator=initiator, static_private=os.urandom(32))
    handshake._payload = payload
    return handshake


def test_identity_of_somebody_else_is_refused() -> None:
    """Mallory shows a public key that is not his: with a signature of his own, and with none that fits."""
    mallory, key = Identity.from_seed(bytes([7]) * 32), public_key_of(THEM.peer_id)
    for signature in (mallory.sign(b"fusion-node/noise-static/1:", bytes(32)), bytes(64)):
        ours, honest = sides(expect=THEM.peer_id)
        theirs = showing(mallory, key + signature, initiator=False)
        assert refusal(ours, theirs.receive(ours.start())).reason is LinkRefusal.WRONG_KEY
        dialler = showing(mallory, key + signature, initiator=True)
        assert refusal(honest, dialler.receive(honest.receive(dialler.start()))).reason is LinkRefusal.WRONG_KEY


def test_identity_shown_on_another_link_is_refused() -> None:
    """Mallory replays what our friend showed him: the signature is over another Noise static key."""
    friend = Handshake(THEM, initiator=False, static_private=os.urandom(32))
    ours, _ = sides(expect=THEM.peer_id)
    theirs = showing(Identity.generate(), friend._payload, initiator=False)
    assert refusal(ours, theirs.receive(ours.start())).reason is LinkRefusal.WRONG_KEY


@given(which=st.integers(0, 2), place=st.integers(0, 10_000), difference=st.integers(1, 255))
def test_any_changed_byte_of_the_handshake_ends_it(which: int, place: int, difference: int) -> None:
    ours, theirs = sides(expect=THEM.peer_id)
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


@given(data=st.binary(max_size=1200))
def test_random_bytes_never_pass_a_handshake(data: bytes) -> None:
    ours, theirs = sides()
    ours.start()
    for side in (ours, theirs):
        with contextlib.suppress(LinkRefused):
            side.receive(data)
        assert side.keys is None


def segments_of(num_segments: int, num_bytes: int = 100) -> list[bytes]:
    sealer = Sealer(KEY)
    return [sealer.seal(bytes([n]) * num_bytes) for n in range(num_segments)]


def test_replayed_segment_is_refused() -> None:
    first, _ = segments_of(2)
    opener = Opener(KEY)
    opener.open(first)
    assert open_refusal(opener, first) is LinkRefusal.REPLAYED_OR_FORGED


def test_reordered_and_dropped_segments_are_refused() -> None:
    _, second, _ = segments_of(3)
    assert open_refusal(Opener(KEY), second) is LinkRefusal.REPLAYED_OR_FORGED


def test_segment_sent_back_to_its_sender_is_refused() -> None:
    ours, theirs = shake(*sides())
    segment = Sealer(ours.sending_key).seal(b"hello")
    assert Opener(theirs.receiving_key).open(segment) == b"hello"
    assert open_refusal(Opener(ours.receiving_key), segment) is LinkRefusal.REPLAYED_OR_FORGED


@given(place=st.integers(0, 10_000), difference=st.integers(1, 255), num_bytes=st.integers(0, 300))
def test_any_changed_byte_is_refused(place: int, difference: int, num_bytes: int) -> None:
    (segment,) = segments_of(1, num_bytes)
    changed = bytearray(segment)
    changed[place % len(changed)] ^= difference
    assert open_refusal(Opener(KEY), bytes(changed)) is LinkRefusal.REPLAYED_OR_FORGED


@pytest.mark.parametrize("cut", [1, 16, 17, 120])
def test_truncated_segment_is_refused(cut: int) -> None:
    (segment,) = segments_of(1)
    assert open_refusal(Opener(KEY), segment[:-cut]) is LinkRefusal.REPLAYED_OR_FORGED


def test_oversized_segment_is_refused_before_it_is_decrypted() -> None:
    assert open_refusal(Opener(KEY), bytes(MAX_SEGMENT_BYTES + 1)) is LinkRefusal.OVERSIZED


def test_link_ends_when_its_key_has_been_used_up() -> None:
    segments = segments_of(3)
    sealer, opener = Sealer(KEY, max_segments=2), Opener(KEY, max_segments=2)
    for segment in segments[:2]:
        assert sealer.seal(opener.open(segment)) == segment
    with pytest.raises(LinkRefused, match="one key"):
        sealer.seal(b"more")
    assert open_refusal(opener, segments[2]) is LinkRefusal.OVERSIZED


def test_tag_is_sixteen_bytes() -> None:
    assert len(segments_of(1, 0)[0]) == TAG_BYTES
