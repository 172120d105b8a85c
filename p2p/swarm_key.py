"""The pre-shared key of a private swarm: whoever has it is a member, and nobody else gets an answer.

One key file of two lines, for people to copy and for programs to check:

    fusion-node swarm key 1
    64 hex digits, a space, and 8 more as a checksum

The key itself goes into no protocol. Each use has a key of its own, derived by keyed BLAKE2b under a domain of its own,
so that what one protocol may give away (py-libp2p's private network is a stream cipher without authentication) is of no
use in another. The key is a password of 256 bits: there is nothing to guess, so nothing slow is needed to derive.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from fusion_node.errors import ConfigError

KEY_BYTES = 32
FILE_NAME = "swarm.key"
"""In the home folder, beside ``identity.key``."""

PUBLIC_TAG = "public"
"""``swarm_tag`` of the swarm without a key."""

_HEADER = "fusion-node swarm key 1"
_CHECKSUM_DOMAIN = b"fusion-node/swarm-key-checksum/1:"
_DOMAIN = b"fusion-node/swarm-key/1:"
_MAX_FILE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """A swarm's key. It never appears in ``repr``, in logs or in errors; ``tag`` is the name that may.

    Args:
        secret: 32 bytes of entropy.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ConfigError(f"a swarm key has {KEY_BYTES} bytes, this one has {len(self.secret)}")

    @classmethod
    def generate(cls) -> SwarmKey:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: Path) -> SwarmKey:
        """Reads a key file.

        Raises:
            ConfigError: there is none, it is not a key file, its checksum is wrong, or others may read it.
        """
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the swarm key {path}: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(f"the swarm key {path} can be read by others: run chmod 600 {path}")
        return cls._parse(data, path)

    @classmethod
    def load_or_create(cls, path: Path, key: SwarmKey | None = None) -> tuple[SwarmKey, bool]:
        """Reads the key file, or makes one with mode 0600; also returns whether it was made.

        Args:
            key: to write if there is no file; None makes a new one.

        Raises:
            ConfigError: as ``load``, or when it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # O_EXCL: of two processes that start at once, one creates and the other reads.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return cls.load(path), False
        except OSError as error:
            raise ConfigError(f"cannot write the swarm key {path}: {error.strerror}") from error
        key = key or cls.generate()
        with os.fdopen(descriptor, "w") as file:
            file.write(key.to_text())
        return key, True

    def to_text(self) -> str:
        """What stands in the key file. A secret."""
        return f"{_HEADER}\n{self.secret.hex()} {_checksum(self.secret).hex()}\n"

    @property
    def tag(self) -> str:
        """16 hex digits that stand for the key where it must not be shown: in logs and in the names of files.

        It lets nobody compute the key; whoever sees two of them knows whether the swarms are the same.
        """
        return self._derive("tag", 8).hex()

    @property
    def noise_psk(self) -> bytes:
        """32 bytes for the data plane's handshake."""
        return self._derive("noise-psk", 32)

    @property
    def pnet_psk(self) -> bytes:
        """32 bytes for libp2p's private network."""
        return self._derive("libp2p-pnet", 32)

    @property
    def lan_name(self) -> str:
        """The word of 12 hex digits by which members find one another on a local network, where all can read it."""
        return self._derive("mdns-service", 6).hex()

    @property
    def lan_key(self) -> bytes:
        """32 bytes to encrypt what stands there."""
        return self._derive("mdns-text", 32)

    def _derive(self, use: str, num_bytes: int) -> bytes:
        return hashlib.blake2b(_DOMAIN + use.encode(), key=self.secret, digest_size=num_bytes).digest()

    @classmethod
    def _parse(cls, data: bytes, path: Path) -> SwarmKey:
        # Nothing of the file's content goes into an error: a typing error away from a key is still a key.
        try:
            header, line = data.decode("ascii").strip().splitlines()
            key_hex, checksum_hex = line.split()
            secret, checksum = bytes.fromhex(key_hex), bytes.fromhex(checksum_hex)
        except ValueError:
            header = ""
        if header.strip() != _HEADER or len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is not a swarm key: it has two lines, the first is {_HEADER!r}")
        if len(secret) != KEY_BYTES or checksum != _checksum(secret):
            raise ConfigError(f"the swarm key in {path} is mistyped or cut off: copy the file again")
        return cls(secret)


def swarm_tag(key: SwarmKey | None) -> str:
    """A name for the swarm that may be shown and may be part of a file's name; ``public`` without a key."""
    return PUBLIC_TAG if key is None else key.tag


def _checksum(secret: bytes) -> bytes:
    return hashlib.sha256(_CHECKSUM_DOMAIN + secret).digest()[:4]
