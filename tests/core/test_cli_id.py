from pathlib import Path

from typer.testing import CliRunner

from fusion_node.cli.main import app
from p2p.identity import Identity


def test_the_id_of_a_key_file_is_printed_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    first, again = (CliRunner().invoke(app, ["id", "--identity", str(path)]).stdout for _ in range(2))
    assert first == again == f"{Identity.load_or_create(path).peer_id}\n"


def test_without_a_file_it_is_that_of_the_homes_node(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["id", "--home", str(tmp_path)]).stdout
    assert told == f"{Identity.load_or_create(tmp_path / 'identity.key').peer_id}\n"
