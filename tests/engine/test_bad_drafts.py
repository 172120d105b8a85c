"""What guesses and does not fit is refused by a client before anything is asked of the swarm, with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fusion_node.client.swarm import SwarmClient
from fusion_node.engine.trained_head import HeadConfig, TrainedHead
from fusion_node.errors import ConfigError, FusionError, UnknownModel
from fusion_node.store import ModelStore
from tests.engine.tiny import tiny_model

CHARACTERS = [chr(code) for code in range(32, 127)]


def pull(home: Path, folder: Path, characters: list[str], vocab_size: int) -> None:
    """Stores a tiny model that reads characters, under the folder's name."""
    folder.mkdir()
    tiny = tiny_model("llama", num_hidden_layers=2, vocab_size=vocab_size)
    save_file(tiny.stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny.config))
    words = {word: index for index, word in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *characters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ModelStore(home).pull(str(folder))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model, one of another tokenizer, and one of another vocabulary."""
    home, sources = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("sources")
    pull(home, sources / "tiny", CHARACTERS, 131)
    pull(home, sources / "reversed", CHARACTERS[::-1], 131)
    pull(home, sources / "smaller", CHARACTERS[:20], 64)
    return home


def refused(home: Path, draft_model: str | Path) -> FusionError:
    """What a client says, at the latest when it has loaded what it needs of the model."""
    with pytest.raises(FusionError) as caught:
        SwarmClient("tiny", home=home, mdns=False, speculation="tree", draft_model=str(draft_model))._load()
    return caught.value


@pytest.mark.parametrize(("name", "shared"), [("reversed", "5"), ("smaller", "24")])
def test_draft_model_with_other_tokens_is_refused(home: Path, name: str, shared: str) -> None:
    error = refused(home, name)
    assert isinstance(error, ConfigError), error
    assert f"{name} cannot draft: of the model's 99 tokens it has {shared}; choose a draft model" in str(error)


def save_head(folder: Path, vocabulary: int) -> None:
    config = HeadConfig(
        hidden_size=48, vocab_size=vocabulary, draft_vocab_size=131, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, intermediate_size=64, feature_layers=(2,),
    )  # fmt: skip
    TrainedHead(config).save(folder)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_head(tmp_path, 131)
    return tmp_path


def test_draft_head_whose_weights_are_cut_off_is_refused(home: Path, head: Path) -> None:
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    error = refused(home, head)
    assert isinstance(error, ConfigError), error
    assert "model.safetensors" in str(error)


def test_draft_head_of_another_vocabulary_is_refused(home: Path, tmp_path: Path) -> None:
    save_head(tmp_path, 4096)
    error = refused(home, tmp_path)
    assert isinstance(error, ConfigError), error
    assert "4096" in str(error)
    assert "131" in str(error)


def test_draft_head_without_a_sound_configuration_is_refused(home: Path, head: Path) -> None:
    (head / "config.json").write_text("{]")
    error = refused(home, head)
    assert isinstance(error, ConfigError), error
    assert "config.json" in str(error)


def test_draft_model_that_is_not_there_is_named(home: Path, tmp_path: Path) -> None:
    error = refused(home, tmp_path / "nowhere")
    assert isinstance(error, UnknownModel), error
    assert "nowhere" in str(error)
