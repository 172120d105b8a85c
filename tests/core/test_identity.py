"""Key files and peer ids."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.errors import ConfigError
from p2p.identity import Identity, is_signed_by, peer_id_of, public_key_of, short

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "data_plane.json").read_text())

# libp2p specification "Peer Ids and Keys", test vectors: the Ed25519 key. The peer id is what py-libp2p 0.8.1 and
# go-libp2p make of it.
SPEC_SEED = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
SPEC_PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
SPEC_PEER_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


def test_peer_id_of_the_specification_key_is_libp2p_s() -> None:
    assert Identity.from_seed(SPEC_SEED).peer_id == SPEC_PEER_ID
    assert peer_id_of(SPEC_PUBLIC) == SPEC_PEER_ID
    assert public_key_of(SPEC_PEER_ID) == SPEC_PUBLIC


def test_peer_ids_match_the_vectors() -> None:
    for vector in VECTORS["identities"]:
        assert Identity.from_seed(bytes.fromhex(vector["seed"])).peer_id == vector["peer_id"]


def test_new_key_file_is_private_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == bytes([0x08, 0x01, 0x12, 0x20]) + made.seed
    assert Identity.load_or_create(path) == made


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666])
def test_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"x" * 36, b"\x08\x01\x12\x20" + b"k" * 31, b"x" * 5000])
def test_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not an identity file"):
        Identity.load_or_create(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_a_config_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write"):
        Identity.load_or_create(tmp_path / "identity.key")


def test_seed_is_never_shown() -> None:
    identity = Identity.generate()
    assert identity.seed.hex() not in repr(identity)
    assert repr(identity.seed) not in repr(identity)


def test_signature_holds_for_its_domain_key_and_body_only() -> None:
    identity = Identity.generate()
    signature = identity.sign(b"a:", b"body")
    assert is_signed_by(identity.peer_id, b"a:", b"body", signature)
    assert not is_signed_by(identity.peer_id, b"b:", b"body", signature)
    assert not is_signed_by(identity.peer_id, b"a:", b"other", signature)
    assert not is_signed_by(Identity.generate().peer_id, b"a:", b"body", signature)


@given(peer=st.one_of(st.text(max_size=60), st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabc", min_size=52, max_size=52)))
def test_text_that_is_no_peer_id_signs_nothing(peer: str) -> None:
    assert not is_signed_by(peer, b"a:", b"body", bytes(64))


@given(signature=st.binary(max_size=80))
def test_bytes_that_are_no_signature_are_refused(signature: bytes) -> None:
    assert not is_signed_by(SPEC_PEER_ID, b"a:", b"body", signature)


def test_short_form_is_the_end_of_the_id() -> None:
    assert short(SPEC_PEER_ID) == "…" + SPEC_PEER_ID[-8:]
