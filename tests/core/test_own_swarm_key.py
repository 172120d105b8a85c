"""In which swarm a node is, by what it was told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.node import own_swarm_key
from fusion_node.errors import ConfigError
from fusion_node.types import UnixS
from p2p.addresses import PeerAddress
from p2p.identity import Identity
from p2p.invite import Invite
from p2p.swarm_key import FILE_NAME, SwarmKey

KEY = SwarmKey(bytes(range(32)))
ADDRESS = PeerAddress.of("203.0.113.7", 4600, Identity.from_seed(bytes(32)).peer_id)
INVITE = Invite((ADDRESS,), None, KEY).encode()


def node(*, peers: tuple[str, ...] = (), is_private: bool = False, swarm_key_path: Path | None = None) -> NodeConfig:
    return NodeConfig("tiny", peers=peers, is_private=is_private, swarm_key_path=swarm_key_path)


def test_without_a_key_it_is_in_the_public_swarm(tmp_path: Path) -> None:
    assert own_swarm_key(node(peers=(str(ADDRESS), Invite((ADDRESS,)).encode())), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_private_makes_a_key_once(tmp_path: Path) -> None:
    made = own_swarm_key(node(is_private=True), tmp_path)
    assert made == own_swarm_key(node(is_private=True), tmp_path) == SwarmKey.load(tmp_path / FILE_NAME)


def test_an_invite_with_a_key_makes_private_by_itself_and_leaves_no_file(tmp_path: Path) -> None:
    assert own_swarm_key(node(peers=(INVITE,)), tmp_path) == KEY
    assert list(tmp_path.iterdir()) == []


def test_private_keeps_the_key_of_an_invite_for_when_that_has_expired(tmp_path: Path) -> None:
    assert own_swarm_key(node(peers=(INVITE,), is_private=True), tmp_path) == KEY
    assert own_swarm_key(node(is_private=True), tmp_path) == KEY


def test_an_expired_invite_is_refused(tmp_path: Path) -> None:
    expired = Invite((ADDRESS,), UnixS(time.time() - 1), KEY).encode()
    with pytest.raises(ConfigError, match="expired"):
        own_swarm_key(node(peers=(expired,), is_private=True), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_used_where_it_lies(tmp_path: Path) -> None:
    SwarmKey.load_or_create(tmp_path / "elsewhere.key", KEY)
    assert own_swarm_key(node(swarm_key_path=tmp_path / "elsewhere.key"), tmp_path) == KEY
    assert not (tmp_path / FILE_NAME).exists()
    with pytest.raises(ConfigError, match="cannot read the swarm key"):
        own_swarm_key(node(swarm_key_path=tmp_path / "missing.key"), tmp_path)


def test_keys_of_two_swarms_are_refused(tmp_path: Path) -> None:
    SwarmKey.load_or_create(tmp_path / FILE_NAME)
    SwarmKey.load_or_create(tmp_path / "elsewhere.key")
    for config in (
        node(peers=(INVITE,), is_private=True),
        node(swarm_key_path=tmp_path / "elsewhere.key", is_private=True),
        node(peers=(INVITE,), swarm_key_path=tmp_path / "elsewhere.key"),
    ):
        with pytest.raises(ConfigError, match=r"different private swarms|another private swarm"):
            own_swarm_key(config, tmp_path)
