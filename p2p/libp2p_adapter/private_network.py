"""The private network below libp2p's handshakes: TCP connections on which only holders of the swarm's key get anywhere.

It takes the place of the library's PskConn, by way of its hook (traps 21 to 24 of docs/protocol-network.md). That one
lets a listener speak first, so that a stranger gets bytes to look at; it leaves a dialer with another key waiting; it
breaks off when the first 8 bytes come in two pieces; it has lost the attributes of the connection that it wraps; and
the library wraps the inbound end of a relayed connection with it, and not the outbound one.

Each side's first 48 bytes are a random nonce (32) and a proof (16), keyed BLAKE2b of the nonce; what follows is AES-256
in counter mode under a key made of the same two. Who accepted the connection sends nothing before the other's proof has
come, and hangs up on a wrong one. The stream cipher is not authenticated: Noise is, on top of it. It hides from the
path what is spoken there, and binds the proof to what follows: who takes the connection over after the proof cannot
write a plaintext of his choice. A recorded proof can be sent again, and is answered by bytes that mean nothing without
the key.

Relayed connections run inside such a connection at both ends and are not wrapped again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

import trio
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection

NONCE_BYTES = 32
PROOF_BYTES = 16
HELLO_BYTES = NONCE_BYTES + PROOF_BYTES

_PUBLIC_HELLO = b"\x13/multistream/1.0.0\n"
"""How libp2p begins without a private network. 20 bytes, after which a public dialer waits: hang up on it at once."""

_PERSON_PROOF = b"fusion/pnet/1/pr"
_PERSON_CIPHER = b"fusion/pnet/1/ci"


def protected(connection: Any, psk_hex: str) -> Any:
    """Replaces the library's new_protected_conn."""
    if isinstance(connection, RawConnection) and isinstance(connection.stream, TrioTCPStream):
        return PrivateConnection(connection, bytes.fromhex(psk_hex))
    return connection


class PrivateConnection(RawConnection):  # type: ignore[misc]
    """A TCP connection between two members.

    States: before the other's hello, after it; the own hello goes out with the first write.
    """

    def __init__(self, wrapped: RawConnection, psk: bytes) -> None:
        super().__init__(wrapped.stream, wrapped.is_initiator, wrapped.get_connection_type(), wrapped._actual_addresses)
        self._psk = psk
        self._opening = trio.Lock()
        self._read_cipher: CipherContext | None = None
        self._write_cipher: CipherContext | None = None

    async def write(self, data: bytes) -> None:
        if not self.is_initiator and self._read_cipher is None:
            await self._receive_hello()
        # From here to the socket's own queue nothing waits: what is enciphered first is written first.
        hello = b""
        if self._write_cipher is None:
            hello, self._write_cipher = hello_and_cipher(self._psk, os.urandom(NONCE_BYTES))
        await super().write(hello + self._write_cipher.update(data))

    async def read(self, n: int | None = None) -> bytes:
        cipher = self._read_cipher or await self._receive_hello()
        data: bytes = await super().read(n)
        return cipher.update(data)

    async def _receive_hello(self) -> CipherContext:
        async with self._opening:
            if self._read_cipher is None:
                hello = bytearray()
                while len(hello) < HELLO_BYTES:
                    part = await super().read(HELLO_BYTES - len(hello))
                    hello += part
                    if not part or hello.startswith(_PUBLIC_HELLO):
                        await self._hang_up()
                expected, cipher = hello_and_cipher(self._psk, bytes(hello[:NONCE_BYTES]))
                if not hmac.compare_digest(hello, expected):
                    await self._hang_up()
                self._read_cipher = cipher
            return self._read_cipher

    async def _hang_up(self) -> None:
        await self.close()
        # Of the kind that the library expects here: another one would end the whole host.
        raise ConnectionClosedError("the other end does not have the key of this private swarm")


def hello_and_cipher(psk: bytes, nonce: bytes) -> tuple[bytes, CipherContext]:
    """What a side sends first when it has drawn this nonce, and the cipher of all that it sends after it."""
    proof, key = (
        hashlib.blake2b(nonce, key=psk, person=person, digest_size=num_bytes).digest()
        for person, num_bytes in ((_PERSON_PROOF, PROOF_BYTES), (_PERSON_CIPHER, 32))
    )
    # A key of its own for each direction of each connection, so the counter begins at zero. Not ChaCha20: its counter
    # of 32 bits ends after 256 GiB, which a hole-punched path may carry.
    return nonce + proof, Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
