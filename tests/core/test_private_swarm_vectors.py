"""Known answers of private swarms and invites: another implementation must give the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fusion_node.types import UnixS
from p2p.invite import Invite
from p2p.mdns import PrivateWords
from p2p.swarm_key import SwarmKey
from tests.vectors import make_private_swarm

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "private_swarm.json").read_text())


def test_file_of_vectors_is_what_the_code_makes() -> None:
    assert make_private_swarm.vectors() == VECTORS


def test_key_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    path.write_text(VECTORS["key_file"])
    path.chmod(0o600)
    assert SwarmKey.load(path).secret.hex() == VECTORS["key"]


@pytest.mark.parametrize("vector", VECTORS["invites"], ids=["plain", "many", "secret"])
def test_invites_are_read(vector: dict[str, object]) -> None:
    invite = Invite.parse(str(vector["text"]), now=UnixS(0.0))
    # Of several peers the addresses are put together.
    assert sorted(map(str, invite.addresses)) == sorted(vector["addresses"])  # type: ignore[call-overload]
    assert invite.expires_at == vector["expires_at"]
    assert (None if invite.swarm_key is None else invite.swarm_key.secret.hex()) == vector["key"]


def test_hello_of_the_private_network_is_followed_by_plain_aes() -> None:
    told, psk = VECTORS["private_network"], bytes.fromhex(VECTORS["derived"]["libp2p-pnet"])
    nonce = bytes.fromhex(told["nonce"])
    key = hashlib.blake2b(nonce, key=psk, person=b"fusion/pnet/1/ci", digest_size=32).digest()
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    assert cipher.update(bytes.fromhex(told["plain"])).hex() == told["enciphered"]


def test_attribute_on_the_local_network_is_plain_chacha20_poly1305() -> None:
    told, value = VECTORS["mdns"], bytes.fromhex(VECTORS["mdns"]["attribute"])
    key = bytes.fromhex(VECTORS["derived"]["mdns-text"])
    assert ChaCha20Poly1305(key).decrypt(value[:12], value[12:], None).decode() == told["address"]
    words = PrivateWords(SwarmKey(bytes.fromhex(VECTORS["key"])))
    assert [str(address) for address in words.read({b"a0": value})] == [told["address"]]
