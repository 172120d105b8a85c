"""`fusion-node draft`: from a stored model to a head on the disk, measured, in one command each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_node.cli.main import app
from fusion_node.client import swarm
from fusion_node.client.drafters.suffix import SuffixDrafter
from fusion_node.client.swarm import SwarmClient
from fusion_node.engine import shipped_heads
from fusion_node.engine.draft_training import Trainer
from fusion_node.engine.drafts import Verified
from fusion_node.engine.trained_head import TrainedHead
from fusion_node.errors import ConfigError, UnknownModel
from tests.engine.tiny import home_with_tiny

SMALL = ["--tokens", "400", "--answer-tokens", "8", "--batch", "16", "--draft-vocab", "64", "--epochs", "1"]
ON_CPU = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a tiny model that reads characters."""
    return home_with_tiny(tmp_path_factory, num_hidden_layers=3, max_position_embeddings=1024)


def run(home: Path, *words: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["draft", *words, "--home", str(home)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def refused(home: Path, *words: str) -> BaseException:
    result = CliRunner().invoke(app, ["draft", *words, "--home", str(home)])
    assert result.exception is not None
    return result.exception


@pytest.fixture(scope="module")
def trained(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], str]:
    folder = tmp_path_factory.mktemp("out")
    text = folder / "given.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 120)
    out, err = run(home, "train", "tiny", "--out", str(folder / "head"), "--text", str(text), *SMALL, *ON_CPU, "--json")
    return folder / "head", json.loads(out), err


def test_train_leaves_a_head_and_nothing_else(trained: tuple[Path, dict[str, object], str]) -> None:
    folder, result, err = trained
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    head = TrainedHead.load(folder)
    assert head.config.feature_layers == (3,)
    assert len(head.config.target_model_id) == 64
    assert 400 <= int(str(result["num_positions"])) < 800
    assert "min for the answers" in err
    assert "acceptance by depth" in err


def test_train_does_not_overwrite_a_head(home: Path, trained: tuple[Path, dict[str, object], str]) -> None:
    error = refused(home, "train", "tiny", "--out", str(trained[0]), *SMALL, *ON_CPU)
    assert isinstance(error, ConfigError)
    assert "holds a draft head already" in str(error)


def test_eval_measures_by_kind_of_text(home: Path, trained: tuple[Path, dict[str, object], str]) -> None:
    out, _ = run(home, "eval", "tiny", str(trained[0]), "--answer-tokens", "8", *ON_CPU, "--json")
    found = json.loads(out)
    assert list(found) == ["novel", "copy"]
    for acceptance in found.values():
        assert len(acceptance["top1"]) == len(acceptance["top8"]) == 6
        assert all(0 <= one <= eight <= 1 for one, eight in zip(acceptance["top1"], acceptance["top8"], strict=True))
    out, _ = run(home, "eval", "tiny", str(trained[0]), "--answer-tokens", "8", *ON_CPU)
    assert "DEPTH 6" in out


def test_train_that_was_stopped_goes_on(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "tiny", "--out", str(tmp_path / "head"), *SMALL, *ON_CPU, "--features", "three"]
    with monkeypatch.context() as patched:

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(Trainer, "run", stop)
        assert CliRunner().invoke(app, ["draft", *words, "--home", str(home)]).exit_code != 0
    shards = sorted((tmp_path / "head" / "work" / "train").glob("*.safetensors"))
    before = [path.stat().st_mtime_ns for path in shards]
    assert shards
    run(home, *words, "--keep-data")
    assert [path.stat().st_mtime_ns for path in shards] == before
    assert TrainedHead.load(tmp_path / "head").config.feature_layers == (1, 2, 3)


def test_dry_run_only_measures(home: Path, tmp_path: Path) -> None:
    out, _ = run(home, "train", "tiny", "--out", str(tmp_path / "head"), *SMALL, *ON_CPU, "--dry-run", "--json")
    estimate = json.loads(out)
    assert estimate["disk_bytes"] == 540 * (48 * 2 + 16 * 6 + 4)
    assert all(value > 0 for value in estimate.values())
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--prompts", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--disk", "1kB"], "--disk allows"),
        (["--disk", "much"], "is not a size"),
        (["--epochs", "0"], "must be above 0"),
        (["--features", "two"], "--features is three or last"),
        (["--numerics", "fp7"], "unknown numerics"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_train_refuses_what_makes_no_sense(home: Path, tmp_path: Path, words: list[str], message: str) -> None:
    error = refused(home, "train", "tiny", "--out", str(tmp_path / "head"), *SMALL, *ON_CPU, *words)
    assert isinstance(error, ConfigError), error
    assert message in str(error)


def test_text_that_is_not_utf8_or_too_little_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    words = ["train", "tiny", "--out", str(tmp_path / "head"), *SMALL, *ON_CPU]
    assert "is not text in UTF-8" in str(refused(home, *words, "--text", str(tmp_path / "latin.txt")))
    (tmp_path / "empty.txt").write_text("\n")
    assert "has no prompts" in str(refused(home, *words, "--prompts", str(tmp_path / "empty.txt")))
    (tmp_path / "folder").mkdir()
    assert "no .txt or .md files" in str(refused(home, *words, "--text", str(tmp_path / "folder")))


def test_a_model_that_is_not_there_is_refused(home: Path, tmp_path: Path) -> None:
    assert isinstance(refused(home, "train", "nothing", "--out", str(tmp_path)), UnknownModel)
    assert "holds no draft head" in str(refused(home, "eval", "tiny", str(tmp_path)))


def test_a_second_training_into_the_same_folder_is_refused_until_the_first_has_ended(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "tiny", "--out", str(tmp_path / "head"), *SMALL, *ON_CPU]
    found: list[BaseException] = []
    whole = Trainer.run

    def meanwhile(self: Trainer, *told: Any) -> TrainedHead:
        monkeypatch.setattr(Trainer, "run", whole)
        found.append(refused(home, *words))
        return whole(self, *told)

    monkeypatch.setattr(Trainer, "run", meanwhile)
    run(home, *words)
    assert isinstance(found[0], ConfigError)
    assert "another training writes to" in str(found[0])
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_train_into_what_is_no_folder_is_refused(home: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "head").write_text("")
    out = tmp_path / "head" / "deep" if where == "below a file" else tmp_path / "head"
    error = refused(home, "train", "tiny", "--out", str(out), *SMALL, *ON_CPU)
    assert isinstance(error, ConfigError), error
    assert "cannot write to" in str(error)


def test_client_guesses_with_the_head_in_a_folder(
    home: Path, trained: tuple[Path, dict[str, object], str], tmp_path: Path
) -> None:
    client = SwarmClient("tiny", home=home, mdns=False, speculation="tree", draft_model=str(trained[0]))
    client._load()
    assert client._drafts is not None
    (maker,) = client._drafts._makers[2:]
    drafter = maker(20)
    drafter.begin([5, 6])
    drafter.extend(Verified([7], rows_TD=np.ones((1, 48), dtype=np.float32)))
    assert len(drafter.propose([(), (9,)], 4)[1]) == 4


def test_client_guesses_with_the_head_that_comes_with_the_program_unless_told_otherwise(
    home: Path, trained: tuple[Path, dict[str, object], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(**told: Any) -> object:
        client = SwarmClient("tiny", home=home, mdns=False, **told)
        client._load()
        num_without_model = 2
        if client._drafts is not None and "drafters" not in told:
            assert (len(client._drafts._makers) > num_without_model) is (client._draft_source is not None)
        return client._draft_source

    assert source(speculation="tree") is None, "the program brings none for this model"
    monkeypatch.setattr(shipped_heads, "SHIPPED_HEADS", trained[0].parent)
    assert source(speculation="tree") == trained[0]
    assert source(speculation="tree", draft_model="none") is None
    assert source(speculation="off") is None
    assert source(speculation="off", draft_model="none") is None
    assert source(speculation="tree", drafters=[lambda _: SuffixDrafter(None)]) is None
    config = TrainedHead.load(trained[0]).config
    TrainedHead(msgspec.structs.replace(config, target_model_id="ab" * 32)).save(trained[0].parent / "other" / "head")
    monkeypatch.setattr(shipped_heads, "SHIPPED_HEADS", trained[0].parent / "other")
    assert source(speculation="tree") is None


def test_client_asks_for_the_layers_that_its_own_drafters_read(home: Path) -> None:
    def client(*tap_layers: int) -> SwarmClient:
        return SwarmClient(
            "tiny", home=home, mdns=False, speculation="tree", drafters=[lambda _: SuffixDrafter(None)],
            tap_layers=tap_layers,
        )  # fmt: skip

    drafts = client(2, 1, 2)._drafts
    assert drafts is not None
    assert drafts.tap_layers == (1, 2)
    num_layers = client().num_layers
    for wrong in (0, num_layers + 1):
        with pytest.raises(ConfigError, match=f"of the layers from 1 to {num_layers}"):
            client(1, wrong)


def test_client_asks_for_the_layers_that_a_head_reads_and_refuses_one_that_reads_too_many(
    home: Path, trained: tuple[Path, dict[str, object], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(TrainedHead.load(trained[0]).config, feature_layers=(1, 2, 3))
    TrainedHead(config).save(tmp_path / "head")
    client = SwarmClient("tiny", home=home, mdns=False, speculation="tree", draft_model=str(tmp_path / "head"))
    client._load()
    assert client._drafts is not None
    assert client._drafts.tap_layers == (1, 2)
    monkeypatch.setattr(swarm, "MAX_TAPS", 1)
    with pytest.raises(ConfigError, match=r"rows of \d inner layers, and nodes return those of 1"):
        client._load()
    with pytest.raises(UnknownModel, match="nowhere"):
        SwarmClient("tiny", home=home, mdns=False, speculation="tree", draft_model=str(tmp_path / "nowhere"))
