"""Who a process is: an Ed25519 key pair, and the peer id that is made of the public key.

The peer id is libp2p's for Ed25519: base58btc of an identity multihash over the protobuf public key
(libp2p "Peer Ids and Keys", §"Peer IDs"). The public key can be read back out of it, so a signature by a peer id can be
checked without asking anybody. The key file is libp2p's protobuf private key with the 32-byte seed.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import base58
import nacl.exceptions
import nacl.signing

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId, members_of

_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
"""identity multihash (0x00), 36 bytes long (0x24), protobuf: key type Ed25519 (08 01), 32 data bytes (12 20)."""

_KEY_FILE_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])
_PEER_ID_CHARACTERS = 52


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair. The seed never appears in ``repr``, in logs or in errors."""

    seed: bytes = field(repr=False)
    peer_id: PeerId

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Args: seed: 32 bytes of entropy."""
        if len(seed) != 32:
            raise ConfigError(f"an identity seed has 32 bytes, this one has {len(seed)}")
        public = bytes(nacl.signing.SigningKey(seed).verify_key)
        return cls(seed=seed, peer_id=peer_id_of(public))

    @classmethod
    def generate(cls) -> Identity:
        """A new identity that lives as long as the process."""
        return cls.from_seed(secrets.token_bytes(32))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Reads the key file, or makes one with mode 0600.

        Raises:
            ConfigError: when the file is not a key file, or others may read it.
        """
        try:
            # O_EXCL: of two processes that start at once, one creates and the other reads.
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return cls._load(path)
        except OSError as error:
            raise ConfigError(f"cannot write the identity file {path}: {error.strerror}") from error
        identity = cls.generate()
        with os.fdopen(descriptor, "wb") as file:
            file.write(_KEY_FILE_PREFIX + identity.seed)
        return identity

    @classmethod
    def _load(cls, path: Path) -> Identity:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = path.read_bytes() if path.stat().st_size < 1024 else b""
        except OSError as error:
            raise ConfigError(f"cannot read the identity file {path}: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(f"the identity file {path} can be read by others: run chmod 600 {path}")
        if len(data) != 36 or not data.startswith(_KEY_FILE_PREFIX):
            raise ConfigError(f"{path} is not an identity file: move it away and a new identity is made")
        return cls.from_seed(data[4:])

    def sign(self, domain: bytes, body: bytes) -> bytes:
        """Ed25519 signature (64 bytes) over ``domain || body``."""
        return nacl.signing.SigningKey(self.seed).sign(domain + body).signature


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a 32-byte Ed25519 public key."""
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def public_key_of(peer_id: str) -> bytes:
    """The 32-byte public key inside a peer id.

    Raises:
        ValueError: when the text is not the peer id of an Ed25519 key.
    """
    if len(peer_id) != _PEER_ID_CHARACTERS:
        raise ValueError("not the peer id of an Ed25519 key")
    raw = base58.b58decode(peer_id)
    if len(raw) != 38 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError("not the peer id of an Ed25519 key")
    return bytes(raw[6:])


def is_signed_by(peer_id: str, domain: bytes, body: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is the peer's over ``domain || body``. False for every malformed input."""
    try:
        nacl.signing.VerifyKey(public_key_of(peer_id)).verify(domain + body, signature)
    except (ValueError, nacl.exceptions.CryptoError, nacl.exceptions.TypeError):
        return False
    return True


def short(peer_id: str) -> str:
    """The last eight characters, as people read them in tables; Ed25519 ids begin alike. Of a group each member's."""
    return "+".join(f"…{member[-8:]}" for member in members_of(PeerId(peer_id)))
