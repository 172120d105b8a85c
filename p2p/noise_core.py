"""Handshake and sealing of one data-plane link, without any I/O.

Guarantees: after the handshake both sides know the other's Ed25519 peer identity, proven freshly; every frame arrives
unchanged, in order and once, or the link is dead. Forward secrecy: the keys of a link live as long as the link.

Assumes: messages keep their boundaries (a WebSocket does that). Nobody needs to be trusted on the path; whoever sits
on it sees sizes and times, and can cut the link.

Three handshake messages, then sealed segments (``docs/protocol-data-plane.md`` has the bytes):

    initiator -> responder    preamble, Noise message 1
    responder -> initiator    preamble, Noise message 2
    initiator -> responder    Noise message 3

The preamble names the protocol and its version in the clear and has the same form in every version, so that two
programs of different age can tell each other so before any cryptography. It is also the Noise prologue: whoever
changes it on the way makes the handshake fail. The Noise pattern is XX (Noise Protocol Framework rev. 34, §7.5) with
25519, ChaChaPoly and SHA256; the payload of messages 2 and 3 is the Ed25519 public key and a signature over the
sender's Noise static key, as in libp2p's noise specification.

In a private swarm the pattern is XXpsk0 (§9): the key goes in before anything else, so that message 1 already proves it
and a responder answers no stranger, not even with its identity. With psk3, which may look safer because the key then
follows all Diffie-Hellman results, the responder would have shown its identity in message 2. What psk0 cannot prevent:
whoever has recorded a message 1 can send it again, and gets a message 2 that only the first sender could have opened.
The preamble has another magic then, so that public and private programs can tell each other what is wrong; only a
private responder says nothing to a public program.

A sealed segment is what Noise calls a transport message (§5.1: counter nonces, one key per direction), only that it may
be a little longer than the 65,535 bytes that Noise permits, so that a payload of 64 KiB needs one and not two. What is
in it concerns p2p.transfer_core. Short segments stay in the processor's cache, let the receiver decrypt while the
sender still encrypts, bound what a stranger can make a receiver buffer, and count as signs of life one by one.

Randomness: the static private key is handed in; the ephemeral key is drawn by the ``noiseprotocol`` package (from the
operating system), except where a known-answer test hands one in. No timers; the shell bounds the handshake's duration.

Ugly: ``noiseprotocol`` neither zeroes keys nor offers the transport keys by name, hence the access to ``.k``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from noise.connection import Keypair, NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

from fusion_node.types import PeerId
from p2p.identity import Identity, is_signed_by, peer_id_of, public_key_of
from p2p.records import PROTOCOL_VERSION

NOISE_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
PRIVATE_NOISE_NAME = b"Noise_XXpsk0_25519_ChaChaPoly_SHA256"

MAX_HANDSHAKE_BYTES = 1024
"""The longest honest handshake message has 208 bytes; the rest is room for a longer payload in another version."""

TAG_BYTES = 16
MAX_SEGMENT_BYTES = 68 * 1024
"""64 KiB of payload, as rows of a power of two often have, and room for the header. Noise's own limit of 65,535 (§3) is
for implementations with 16 bits of length; the cipher has none that matters (RFC 8439 §2.8: 256 GiB)."""

MAX_SEGMENT_PLAIN_BYTES = MAX_SEGMENT_BYTES - TAG_BYTES

MAX_SEGMENTS = 2**48
"""Per direction and link. A million segments a second would need nine years; far below the 2^64 of the nonce."""

_MAGIC = b"fusion-node\x00"
_PRIVATE_MAGIC = b"fusion-priv\x00"
_PREAMBLE = struct.Struct("<12sI")
_STATIC_KEY_DOMAIN = b"fusion-node/noise-static/1:"
_PAYLOAD_BYTES = 32 + 64
_pack_nonce = struct.Struct("<4xQ").pack


class LinkRefusal(enum.StrEnum):
    """Why a handshake or a frame was not accepted. The shell counts each."""

    WRONG_KEY = "wrong-key"
    REPLAYED_OR_FORGED = "replayed-or-forged"
    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    WRONG_VERSION = "wrong-version"
    OTHER_SWARM = "other-swarm"
    HANDSHAKE_TIMEOUT = "handshake-timeout"


_NOT_IN_ITS_PLACE = (LinkRefusal.REPLAYED_OR_FORGED, "a segment does not authenticate in its place")


class LinkRefused(ValueError):
    """Something on this link was not acceptable; the link is dead. The message never repeats the bytes.

    Attributes:
        reason: what the shell counts.
        their_version: the version that the other side speaks, when that is the reason.
        reply: what to send before closing, so that the other side learns the reason too; may be empty.
    """

    def __init__(
        self, reason: LinkRefusal, message: str, *, their_version: int | None = None, reply: bytes = b""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.their_version = their_version
        self.reply = reply


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """What a finished handshake leaves behind."""

    peer: PeerId
    sending_key: bytes = field(repr=False)
    receiving_key: bytes = field(repr=False)


class Handshake:
    """One side of the handshake.

    States: started, then finished (``keys`` is set) or failed (every call raises).

    Args:
        identity: who we are.
        initiator: True for the side that dialled.
        static_private: 32 random bytes, the Noise static key. A fresh one per link leaves nothing to correlate.
        expect: the peer that must answer; only the initiator can know.
        psk: 32 bytes that both sides must have, in a private swarm; None in a public one.
        version: of the protocol; another than the default only in tests.
        ephemeral_private: only in known-answer tests.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        initiator: bool,
        static_private: bytes,
        expect: PeerId | None = None,
        psk: bytes | None = None,
        version: int = PROTOCOL_VERSION,
        ephemeral_private: bytes | None = None,
    ) -> None:
        self.keys: LinkKeys | None = None
        self._initiator = initiator
        self._expect = expect
        self._version = version
        self._is_private = psk is not None
        self._preamble = _PREAMBLE.pack(_PRIVATE_MAGIC if self._is_private else _MAGIC, version)
        self._failure: LinkRefused | None = None
        static_public = X25519PrivateKey.from_private_bytes(static_private).public_key().public_bytes_raw()
        self._payload = _identity_payload(identity, static_public)
        self._noise = NoiseConnection.from_name(NOISE_NAME if psk is None else PRIVATE_NOISE_NAME)
        if psk is not None:
            self._noise.set_psks(psk)
        self._noise.set_prologue(self._preamble)
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, static_private)
        if ephemeral_private is not None:
            self._noise.set_keypair_from_private_bytes(Keypair.EPHEMERAL, ephemeral_private)
        if initiator:
            self._noise.set_as_initiator()
        else:
            self._noise.set_as_responder()
        self._noise.start_handshake()
        self._state = self._noise.noise_protocol.handshake_state
        self._received = 0

    @property
    def was_answered(self) -> bool:
        """Whether anything has come from the other side."""
        return self._received > 0

    def start(self) -> bytes:
        """The initiator's first message."""
        return self._preamble + bytes(self._noise.write_message())

    def receive(self, message: bytes) -> bytes:
        """Takes the next message of the other side and returns the answer to send; empty when none is due.

        Raises:
            LinkRefused: the other side is not who or what it should be. Send ``reply`` and close.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._receive(bytes(message))
        except LinkRefused as refused:
            self._failure = refused
            raise
        except InvalidTag as error:
            if self._is_private and not self._initiator and self._received == 1:
                self._failure = LinkRefused(LinkRefusal.OTHER_SWARM, "it does not have the key of this private swarm")
            else:
                self._failure = LinkRefused(LinkRefusal.REPLAYED_OR_FORGED, "a handshake message does not authenticate")
            raise self._failure from error
        except (ValueError, NoiseValueError, NoiseHandshakeError, NoiseInvalidMessage) as error:
            self._failure = LinkRefused(LinkRefusal.MALFORMED, f"malformed handshake: {type(error).__name__}")
            raise self._failure from error

    def _receive(self, message: bytes) -> bytes:
        if len(message) > MAX_HANDSHAKE_BYTES:
            raise LinkRefused(LinkRefusal.OVERSIZED, f"handshake message of {len(message)} bytes")
        self._received += 1
        if self._initiator:
            payload = self._noise.read_message(self._without_preamble(message))
            peer = self._check_identity(bytes(payload))
            if self._expect is not None and peer != self._expect:
                raise LinkRefused(LinkRefusal.WRONG_KEY, f"{peer} answers where {self._expect} was expected")
            answer = bytes(self._noise.write_message(self._payload))
            self._finish(peer)
            return answer
        if self._received == 1:
            self._noise.read_message(self._without_preamble(message))
            return self._preamble + bytes(self._noise.write_message(self._payload))
        self._finish(self._check_identity(bytes(self._noise.read_message(message))))
        return b""

    def _without_preamble(self, message: bytes) -> bytes:
        if len(message) < _PREAMBLE.size:
            raise LinkRefused(LinkRefusal.MALFORMED, "handshake message without preamble")
        magic, version = _PREAMBLE.unpack_from(message)
        if magic not in (_MAGIC, _PRIVATE_MAGIC):
            raise LinkRefused(LinkRefusal.MALFORMED, "the other side speaks another protocol")
        is_private = magic == _PRIVATE_MAGIC
        if is_private and not self._is_private:
            reply = b"" if self._initiator else self._preamble
            raise LinkRefused(LinkRefusal.OTHER_SWARM, "it is in a private swarm: its key is needed", reply=reply)
        if self._is_private and not is_private:
            raise LinkRefused(LinkRefusal.OTHER_SWARM, "it is in the public swarm, and this program in a private one")
        if version != self._version:
            raise LinkRefused(
                LinkRefusal.WRONG_VERSION,
                f"it speaks protocol version {version} and this program version {self._version}: "
                "update the older of the two",
                their_version=version,
                reply=b"" if self._initiator else self._preamble,
            )
        return message[_PREAMBLE.size :]

    def _check_identity(self, payload: bytes) -> PeerId:
        if len(payload) != _PAYLOAD_BYTES:
            raise LinkRefused(LinkRefusal.MALFORMED, "identity payload of the wrong length")
        peer = peer_id_of(payload[:32])
        if not is_signed_by(peer, _STATIC_KEY_DOMAIN, self._state.rs.public_bytes, payload[32:]):
            raise LinkRefused(LinkRefusal.WRONG_KEY, "the identity is not proven by its signature")
        return peer

    def _finish(self, peer: PeerId) -> None:
        protocol = self._noise.noise_protocol
        self.keys = LinkKeys(peer, bytes(protocol.cipher_state_encrypt.k), bytes(protocol.cipher_state_decrypt.k))


class Sealer:
    """Seals the segments of one direction. Every one must be sent, in that order."""

    def __init__(self, key: bytes, *, max_segments: int = MAX_SEGMENTS) -> None:
        self._max_segments = max_segments
        self._encrypt = ChaCha20Poly1305(key).encrypt
        self._counter = 0

    def seal(self, plain: bytes) -> bytes:
        """The segment with this content, of 1 to MAX_SEGMENT_PLAIN_BYTES.

        Raises:
            LinkRefused: the link has sealed as much as it may.
        """
        if self._counter >= self._max_segments:
            raise LinkRefused(LinkRefusal.OVERSIZED, "the link has carried as much as one key may: open a new link")
        sealed = self._encrypt(_pack_nonce(self._counter), plain, None)
        self._counter += 1
        return sealed


class Opener:
    """Opens the segments of one direction. Dead after the first that is refused."""

    def __init__(self, key: bytes, *, max_segments: int = MAX_SEGMENTS) -> None:
        self._max_segments = max_segments
        aead = ChaCha20Poly1305(key)
        self._decrypt = aead.decrypt
        self._decrypt_into = aead.decrypt_into
        self._counter = 0
        self._failure: LinkRefused | None = None

    def open(self, segment: bytes | bytearray | memoryview) -> bytes:
        """The content of the next segment.

        Raises:
            LinkRefused: the segment is not the next one that the peer sealed, or breaks a limit.
        """
        counter = self._counter
        if self._failure is not None or len(segment) > MAX_SEGMENT_BYTES or counter >= self._max_segments:
            self._check(segment)
        try:
            plain = self._decrypt(_pack_nonce(counter), segment, None)
        except InvalidTag as error:
            raise self._refuse(_NOT_IN_ITS_PLACE) from error
        self._counter = counter + 1
        return plain

    def open_into(self, segment: bytes | bytearray | memoryview, place: memoryview) -> None:
        """Like ``open``, into ``place``, which has the length of the content. Whatever was there is overwritten.

        Raises:
            LinkRefused: as ``open``; ``place`` then holds nonsense.
        """
        self._check(segment)
        try:
            self._decrypt_into(_pack_nonce(self._counter), segment, None, place)
        except InvalidTag as error:
            raise self._refuse(_NOT_IN_ITS_PLACE) from error
        self._counter += 1

    def _check(self, segment: bytes | bytearray | memoryview) -> None:
        if self._failure is not None:
            raise self._failure
        if len(segment) > MAX_SEGMENT_BYTES or self._counter >= self._max_segments:
            raise self._refuse((LinkRefusal.OVERSIZED, f"segment {self._counter} of {len(segment)} bytes"))

    def _refuse(self, why: tuple[LinkRefusal, str]) -> LinkRefused:
        self._failure = LinkRefused(*why)
        return self._failure


def _identity_payload(identity: Identity, static_public: bytes) -> bytes:
    return public_key_of(identity.peer_id) + identity.sign(_STATIC_KEY_DOMAIN, static_public)
