import stat
from pathlib import Path

import pytest

from fusion_node.errors import ConfigError
from p2p.swarm_key import SwarmKey, swarm_tag

KEY = SwarmKey(bytes(range(32)))


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_is_made_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "swarm.key"
    made, was_made = SwarmKey.load_or_create(path)
    again, was_made_again = SwarmKey.load_or_create(path)
    assert (was_made, was_made_again) == (True, False)
    assert made == again == SwarmKey.load(path)
    assert made != SwarmKey.generate()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "swarm.key", KEY.to_text(), 0o640)
    with pytest.raises(ConfigError, match="can be read by others: run chmod 600"):
        SwarmKey.load(path)
    with pytest.raises(ConfigError, match="can be read by others"):
        SwarmKey.load_or_create(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: "", "is not a swarm key"),
        (lambda text: text.splitlines()[1], "is not a swarm key"),
        (lambda text: text.replace("swarm key 1", "swarm key 2"), "is not a swarm key"),
        (lambda text: text + text, "is not a swarm key"),
        (lambda text: text + " " * 2000, "is not a swarm key"),
        (lambda text: text.replace("0001", "000g"), "is not a swarm key"),
        (lambda text: text.replace("0001", "0002"), "mistyped or cut off"),
        (lambda text: text.replace("1e1f", "1e"), "mistyped or cut off"),
        (lambda text: text[:-3] + "\n", "mistyped or cut off"),
    ],
)
def test_a_damaged_key_file_is_refused_without_being_quoted(tmp_path: Path, change: object, complaint: str) -> None:
    assert callable(change)
    path = write(tmp_path / "swarm.key", change(KEY.to_text()))
    with pytest.raises(ConfigError, match=complaint) as raised:
        SwarmKey.load(path)
    assert "02030405" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the swarm key .*none\.key: No such file"):
        SwarmKey.load(tmp_path / "none.key")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the swarm key"):
        SwarmKey.load_or_create(tmp_path / "file" / "folder" / "swarm.key")


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 32 bytes, this one has 31"):
        SwarmKey(bytes(31))


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "swarm.key", KEY.to_text().replace("\n", "\r\n"))
    assert SwarmKey.load(path) == KEY


def test_the_key_is_in_no_repr_and_each_use_has_its_own() -> None:
    derived = [KEY.noise_psk, KEY.pnet_psk, KEY.lan_key]
    names = [KEY.tag, KEY.lan_name]
    assert len({*derived, KEY.secret}) == 4
    for name in names:
        assert not any(secret.hex().startswith(name) or name in secret.hex() for secret in (*derived, KEY.secret))
    assert KEY.secret.hex() not in f"{KEY!r} {KEY}"
    assert repr(KEY.secret) not in repr(KEY)
    assert all(
        one != other
        for one, other in [
            (KEY.tag, SwarmKey(bytes(32)).tag),
            (KEY.noise_psk, SwarmKey(bytes(32)).noise_psk),
        ]
    )


def test_derived_keys_are_those_of_the_protocol_page() -> None:
    """Known answers: a change here locks every private swarm out of itself."""
    assert KEY.tag == "057f993b6cf91d36"
    assert KEY.noise_psk.hex() == "57ae571e7428447153c17d45d309638dda70bee669ab9d8729d5df8c54a82b43"
    assert KEY.pnet_psk.hex() == "9677c5d0480d49982616c3f90c90973fb6af57a41c4983de19ecf7bb6f00348a"
    assert KEY.lan_key.hex() == "9afe8ebe8e041bdabffa91c7643d210a6561a3e60b9d05be1e152450d924e658"
    assert KEY.lan_name == "8f98ab9b2cb7"


def test_the_tag_of_a_swarm_says_whether_it_has_a_key() -> None:
    assert swarm_tag(None) == "public"
    assert swarm_tag(KEY) == KEY.tag
