"""The model store: sources, names, interrupted pulls, damaged files. Everything is tiny and offline."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from fusion_node.cli.models import models_app
from fusion_node.errors import (
    ConfigError,
    DownloadFailed,
    FusionError,
    LocalProtocolError,
    ResourceExhausted,
    StoreCorrupted,
    UnknownModel,
)
from fusion_node.store import ModelStore, NoProgress, Progress, StoredModel
from fusion_node.store.hub import HubFile, HuggingFaceHub, Listing
from fusion_node.store.safetensors_file import TensorSpec, read_header, write_safetensors

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": random.standard_normal((400, 96), dtype=np.float32),
        "model.layers.0.w.weight": random.standard_normal((64, 96)).astype(np.float16),
        "model.norm.weight": np.ones(96, np.float32),
    }


def make_model(folder: Path, *, seed: int = 0, config: dict[str, object] | None = None, shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text("not part of the model")
    tensors = tiny_tensors(seed)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        for index, name in enumerate(tensors):
            save_file({name: tensors[name]}, folder / f"model-{index + 1:05d}-of-{len(tensors):05d}.safetensors")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def model(store: ModelStore, tmp_path: Path) -> StoredModel:
    return store.pull(str(make_model(tmp_path / "tiny")))


class FakeHub:
    """A hub whose repository is a folder; can break off after some files."""

    def __init__(self, folder: Path, *, breaks_after: int | None = None) -> None:
        self.folder = folder
        self.breaks_after = breaks_after
        self.fetched: list[str] = []

    def describe(self, repository: str, revision: str | None) -> Listing:
        files = {
            str(path.relative_to(self.folder)): HubFile(path.stat().st_size, None)
            for path in self.folder.rglob("*")
            if path.is_file()
        }
        return Listing(repository, f"commit-of-{revision or 'main'}", files)

    def download(self, listing: Listing, names: Collection[str], folder: Path, progress: Progress) -> None:
        for name in names:
            if (folder / name).exists():
                continue
            if self.breaks_after is not None and len(self.fetched) >= self.breaks_after:
                raise DownloadFailed("the line went dead")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((self.folder / name).read_bytes())
            self.fetched.append(name)


# What is stored


def test_pull_of_folder_keeps_tensors_and_small_files(model: StoredModel) -> None:
    assert (model.name, model.num_layers, model.manifest.source) == ("tiny", 2, "local:tiny")
    assert model.config == CONFIG
    assert [file.name for file in model.manifest.files] == ["config.json", "tokenizer.json"]
    expected = tiny_tensors()
    for name, dtype, shape, data in model.open_tensors(expected):
        assert dtype == {"float32": "F32", "float16": "F16"}[str(expected[name].dtype)]
        array = np.frombuffer(data, expected[name].dtype).reshape(shape)
        np.testing.assert_array_equal(array, expected[name])
    assert model.size_bytes == sum(array.nbytes for array in expected.values()) + sum(
        file.num_bytes for file in model.manifest.files
    )


def test_model_id_does_not_depend_on_file_layout_or_name(store: ModelStore, tmp_path: Path) -> None:
    whole = store.pull(str(make_model(tmp_path / "whole")))
    sharded = store.pull(str(make_model(tmp_path / "sharded", shards=3)))
    other = store.pull(str(make_model(tmp_path / "other", seed=1)))
    assert whole.model_id == sharded.model_id != other.model_id
    # Two names of the same weights are not two models.
    assert store.find(whole.model_id[:10]).model_id == whole.model_id


def test_tensor_location_gives_the_byte_range(model: StoredModel) -> None:
    file, offset, length = model.tensor_location("model.norm.weight")
    with file.open("rb") as handle:
        handle.seek(offset)
        assert handle.read(length) == np.ones(96, np.float32).tobytes()
    with pytest.raises(LocalProtocolError, match="no tensor nothing"):
        model.tensor_location("nothing")


def test_open_tensors_views_outlive_the_iterator_and_are_private(model: StoredModel) -> None:
    views = {name: data for name, _, _, data in model.open_tensors(tiny_tensors())}
    views["model.norm.weight"][:4] = b"\0\0\0\0"
    again = next(iter(model.open_tensors(["model.norm.weight"])))[3]
    assert bytes(again[:4]) == struct.pack("<f", 1.0)
    assert len(views["model.embed_tokens.weight"]) == 400 * 96 * 4


def test_find_by_name_prefix_and_full_id(store: ModelStore, model: StoredModel) -> None:
    for wanted in ("tiny", "TINY", model.model_id, model.model_id[:6], model.model_id[:9].upper()):
        assert store.find(wanted) == model


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("tinny", "did you mean tiny"),
        ("smollm2-135n", "run `fusion-node models pull smollm2-135m`"),
        ("abc", "fusion-node models pull abc"),
        ("../tiny", "not in the store"),
        ("", "not in the store"),
        ("x" * 5000, "not in the store"),
    ],
)
def test_find_of_unknown_model_says_what_to_do(
    store: ModelStore, model: StoredModel, wanted: str, message: str
) -> None:
    with pytest.raises(UnknownModel, match=message):
        store.find(wanted)


def test_remove_takes_the_model_away(store: ModelStore, model: StoredModel) -> None:
    store.remove("tiny")
    assert store.list() == []
    assert not model.path.exists()
    with pytest.raises(UnknownModel):
        store.remove("tiny")


def test_home_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "elsewhere"))
    assert ModelStore().home == tmp_path / "elsewhere"


# Damage


def test_corrupted_block_is_named_and_nothing_of_the_tensor_is_handed_out(model: StoredModel) -> None:
    file, offset, _ = model.tensor_location("model.embed_tokens.weight")
    data = bytearray(file.read_bytes())
    data[offset + 65_536 + 5] ^= 1
    file.unlink()  # a hard link to the source: write a new file
    file.write_bytes(data)
    seen = []
    with pytest.raises(StoreCorrupted, match=r"tensor model\.embed_tokens\.weight, block 1 \(bytes 65536 to 131072\)"):
        for name, *_ in model.open_tensors(["model.norm.weight", "model.embed_tokens.weight"]):
            seen.append(name)
    assert seen == ["model.norm.weight"]
    assert [bad.block for bad in model.bad_blocks()] == [1]
    assert model.bad_blocks(["model.norm.weight"]) == ()


def test_changed_config_is_refused(model: StoredModel) -> None:
    (model.path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    with pytest.raises(StoreCorrupted, match=r"config\.json does not match the manifest: run `fusion-node models rm"):
        _ = model.config


@pytest.mark.parametrize("damage", ["missing", "short", "forged"])
def test_damaged_block_table_is_refused(model: StoredModel, damage: str) -> None:
    path = model.path / "manifest.blocks"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-32] if damage == "short" else bytes(len(data)))
    with pytest.raises(StoreCorrupted, match=r"manifest\.blocks"):
        list(model.open_tensors(["model.norm.weight"]))


def test_missing_weight_file_is_refused(store: ModelStore, model: StoredModel) -> None:
    (model.path / "model.safetensors").unlink()
    with pytest.raises(StoreCorrupted, match="holds tensor"):
        model.tensor_location("model.norm.weight")


def test_model_with_damaged_manifest_is_not_listed_but_can_be_removed(store: ModelStore, model: StoredModel) -> None:
    (model.path / "manifest.json").write_text("{}")
    assert store.list() == []
    with pytest.raises(StoreCorrupted, match="models rm tiny"):
        store.find("tiny")
    store.remove("tiny")
    assert not model.path.exists()


@pytest.mark.parametrize("content", [None, b"{}"], ids=["no manifest", "another manifest"])
def test_pull_over_a_damaged_model_says_to_remove_it_and_that_works(
    store: ModelStore, model: StoredModel, tmp_path: Path, content: bytes | None
) -> None:
    (model.path / "manifest.json").unlink()
    if content is not None:
        (model.path / "manifest.json").write_bytes(content)
    with pytest.raises(StoreCorrupted, match="run `fusion-node models rm tiny` and pull it again"):
        store.pull(str(tmp_path / "tiny"))
    store.remove("tiny")
    assert store.pull(str(tmp_path / "tiny")) == model


def test_remove_by_folder_name_does_not_hit_a_sound_model(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "home", hub=FakeHub(make_model(tmp_path / "origin")))
    model = store.pull("org/name")
    with pytest.raises(UnknownModel):
        store.remove("org--name")
    assert store.list() == [model]


def test_disk_that_fills_up_during_a_pull_is_resource_exhausted(store: ModelStore, tmp_path: Path) -> None:
    class Fills(NoProgress):
        def start(self, what: str, total_bytes: int | None) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceExhausted, match="became full"):
        store.pull(str(make_model(tmp_path / "tiny")), progress=Fills())
    assert store.list() == []


# Interrupted and concurrent pulls


class Breaks(NoProgress):
    """Raises KeyboardInterrupt at the n-th thing it is told."""

    def __init__(self, left: int) -> None:
        self.left = left

    def start(self, what: str, total_bytes: int | None) -> None:
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_pull_interrupted_anywhere_leaves_nothing_and_can_be_repeated(store: ModelStore, tmp_path: Path) -> None:
    source = str(make_model(tmp_path / "tiny"))
    steps = 0
    while True:
        try:
            model = store.pull(source, progress=Breaks(steps))
            break
        except KeyboardInterrupt:
            assert store.list() == []
            assert not (store.home / "models" / "tiny").exists()
            steps += 1
    assert steps >= 4
    assert model.bad_blocks() == ()
    assert not (store.home / "partial" / "tiny").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from fusion_node.store import ModelStore, NoProgress

class Kills(NoProgress):
    def start(self, what, total_bytes):
        if what.startswith(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

ModelStore(Path(sys.argv[1])).pull(sys.argv[2], progress=Kills())
"""


@pytest.mark.parametrize("moment", ["Taking over", "Hashing"])
def test_pull_killed_leaves_no_lock_and_nothing_listed(store: ModelStore, tmp_path: Path, moment: str) -> None:
    source = str(make_model(tmp_path / "tiny"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(store.home), source, moment]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.list() == []
    assert store.pull(source).bad_blocks() == ()


def test_interrupted_download_continues_with_what_is_there(tmp_path: Path) -> None:
    origin = make_model(tmp_path / "origin", shards=3)
    hub = FakeHub(origin, breaks_after=4)
    store = ModelStore(tmp_path / "home", hub=hub)
    with pytest.raises(DownloadFailed):
        store.pull("org/name")
    assert store.list() == []
    first = list(hub.fetched)
    hub.breaks_after = None
    model = store.pull("org/name")
    assert len(hub.fetched) == len(set(hub.fetched)) == 5
    assert hub.fetched[:4] == first
    assert (model.name, model.manifest.source, model.manifest.revision) == (
        "org/name",
        "hf:org/name",
        "commit-of-main",
    )
    assert "README.md" not in hub.fetched
    assert not (store.home / "partial" / "org--name").exists()


def test_two_pulls_at_once_fetch_once(tmp_path: Path) -> None:
    hub = FakeHub(make_model(tmp_path / "origin"))
    stores = [ModelStore(tmp_path / "home", hub=hub) for _ in range(2)]
    results: list[StoredModel] = []
    threads = [threading.Thread(target=lambda s=s: results.append(s.pull("org/name"))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    assert len(hub.fetched) == len(set(hub.fetched))


def test_pull_again_returns_what_is_there_without_asking(tmp_path: Path) -> None:
    hub = FakeHub(make_model(tmp_path / "origin"))
    store = ModelStore(tmp_path / "home", hub=hub)
    first = store.pull("org/name")
    hub.folder = tmp_path / "gone"
    assert store.pull("org/name") == first
    assert store.pull("org/name", progress=NoProgress()) == first


def test_pull_of_a_revision_has_a_name_of_its_own(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "home", hub=FakeHub(make_model(tmp_path / "origin")))
    model = store.pull("org/name", revision="refs/pr/1")
    assert model.name == "org/name@refs-pr-1"
    assert model.manifest.revision == "commit-of-refs/pr/1"
    assert store.find("org/name@refs-pr-1") == model


def test_pull_of_changed_folder_is_refused_and_keeps_the_stored_model(store: ModelStore, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a" / "tiny")
    first = store.pull(str(folder))
    assert store.pull(str(folder)) == first
    assert store.pull("tiny") == first
    with pytest.raises(ConfigError, match="has changed since it was pulled: run `fusion-node models rm tiny`"):
        store.pull(str(make_model(tmp_path / "b" / "tiny", seed=1)))
    assert store.find("tiny") == first


def test_pull_under_a_taken_name_is_refused(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "home", hub=FakeHub(make_model(tmp_path / "origin")))
    store.pull(str(make_model(tmp_path / "org--name")))
    with pytest.raises(ConfigError, match="taken by a model from local:org--name"):
        store.pull("org/name")


# What is refused


def test_pull_without_room_says_how_much_is_missing(tmp_path: Path) -> None:
    hub = FakeHub(make_model(tmp_path / "origin"))
    store = ModelStore(tmp_path / "home", hub=hub, free=lambda path: 100_000_000)
    with pytest.raises(ResourceExhausted, match=r"168\.6 MB are missing"):
        store.pull("org/name")
    assert not any(name.endswith(".safetensors") for name in hub.fetched)
    with pytest.raises(ResourceExhausted, match=r"MB are missing .* set FUSION_HOME"):
        store.pull("smollm2-135m")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_model_that_needs_remote_code_is_refused_before_its_weights_are_fetched(tmp_path: Path, file: str) -> None:
    origin = make_model(tmp_path / "origin")
    (origin / file).write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "modeling_x.X"}}))
    hub = FakeHub(origin)
    with pytest.raises(ConfigError, match=f"auto_map in {file}"):
        ModelStore(tmp_path / "home", hub=hub).pull("org/name")
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "only as pickles"),
        (["model.gguf", "pytorch_model.bin"], r"--file \(model\.gguf\)"),
        ([], "no safetensors"),
        (["model-00001-of-00002.safetensors"], "1 of 2 weight files"),
    ],
)
def test_repository_without_usable_weights_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    for name in ("config.json", *files):
        (origin / name).write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=message):
        ModelStore(tmp_path / "home", hub=FakeHub(origin)).pull("org/name")


def test_python_and_pickles_beside_safetensors_are_left_behind(tmp_path: Path) -> None:
    origin = make_model(tmp_path / "origin")
    for name in ("modeling_x.py", "pytorch_model.bin", "consolidated.safetensors"):
        (origin / name).write_bytes(b"harm")
    hub = FakeHub(origin)
    ModelStore(tmp_path / "home", hub=hub).pull("org/name")
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("source", ["../../etc", "org/../x", "org/name/../../x", "/nonexistent", "a b", "", "org/.."])
def test_source_that_leads_out_of_the_store_is_unknown(store: ModelStore, tmp_path: Path, source: str) -> None:
    with pytest.raises(FusionError):
        store.pull(source)
    assert not (store.home / "models").exists()


def test_folder_with_an_odd_name_gets_a_harmless_one(store: ModelStore, tmp_path: Path) -> None:
    assert store.pull(str(make_model(tmp_path / ".. my model!"))).name == "my-model"


@pytest.mark.parametrize("file", ["../x.gguf", "/x.gguf", "x.bin"])
def test_gguf_file_outside_the_repository_is_refused(store: ModelStore, file: str) -> None:
    with pytest.raises(ConfigError, match=r"must be the name of a \.gguf file"):
        store.pull("org/name", file=file)


def test_revision_of_a_folder_is_refused(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision"):
        store.pull(str(make_model(tmp_path / "tiny")), revision="main")


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"{", b'{"num_hidden_layers": "2"}', b"[" * 100_000, b" " * (4 * 2**20 + 1)]
)
def test_unusable_config_is_refused(store: ModelStore, tmp_path: Path, config: bytes) -> None:
    folder = make_model(tmp_path / "tiny")
    (folder / "config.json").write_bytes(config)
    with pytest.raises(StoreCorrupted, match=r"config\.json"):
        store.pull(str(folder))
    assert store.list() == []


# Safetensors


def header(value: object, tail: bytes = b"") -> bytes:
    encoded = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(encoded)) + encoded + tail


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off"),
        (b"\xff" * 8, "cut off"),
        (struct.pack("<Q", 50) + b"{}", "cut off"),
        (header(b"nonsense"), "malformed"),
        (header(b"[" * 100_000), "malformed"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "its header describes"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "contradicts"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "contradicts"),
        (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "malformed"),
        (header({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "dtype Q4"),
        (header({}, b"hidden"), "its header describes"),
    ],
)
def test_unsound_safetensors_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(StoreCorrupted, match=message):
        read_header(path)


def test_written_safetensors_are_read_by_the_reference_library(tmp_path: Path) -> None:
    path, values = tmp_path / "x.safetensors", np.arange(12, dtype="<f4").reshape(3, 4)
    chunks = iter([values[:2].tobytes(), values[2:].tobytes()])
    write_safetensors(path, [(TensorSpec("a", "F32", (3, 4)), chunks), (TensorSpec("b", "U8", (0,)), iter(()))])
    np.testing.assert_array_equal(load_file(path)["a"], values)
    assert read_header(path)["a"].offset % 64 == 0
    with pytest.raises(LocalProtocolError, match="4 of 8 bytes"):
        write_safetensors(path, [(TensorSpec("a", "F32", (2,)), iter([bytes(4)]))])


# GGUF

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED = 4, 2, 8, 32, 64
TOKENS = ["<s>", "</s>", "a", "b", "Ġ", "ab", "1", "2"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores query and key rows (LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(path: Path, arch: str = "llama", *, extra: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Writes a one-layer model and returns its weights under their Hugging Face names."""
    random = np.random.default_rng(1)

    def weight(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": weight(len(TOKENS), HIDDEN),
        "model.norm.weight": weight(HIDDEN),
        layer + "input_layernorm.weight": weight(HIDDEN),
        layer + "post_attention_layernorm.weight": weight(HIDDEN),
        layer + "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
        layer + "self_attn.q_proj.bias": weight(HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": weight(FEED, HIDDEN),
        layer + "mlp.up_proj.weight": weight(FEED, HIDDEN),
        layer + "mlp.down_proj.weight": weight(HIDDEN, FEED),
    }
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        layer + "input_layernorm": "blk.0.attn_norm",
        layer + "post_attention_layernorm": "blk.0.ffn_norm",
        layer + "self_attn.q_proj": "blk.0.attn_q",
        layer + "self_attn.k_proj": "blk.0.attn_k",
        layer + "self_attn.v_proj": "blk.0.attn_v",
        layer + "self_attn.o_proj": "blk.0.attn_output",
        layer + "mlp.gate_proj": "blk.0.ffn_gate",
        layer + "mlp.up_proj": "blk.0.ffn_up",
        layer + "mlp.down_proj": "blk.0.ffn_down",
    }
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in expected.items():
        stem, kind = name.rsplit(".", 1)
        stored = values
        if arch == "llama" and ".q_proj" in name:
            stored = permuted(values, HEADS)
        elif arch == "llama" and ".k_proj" in name:
            stored = permuted(values, KV_HEADS)
        if ".mlp." in name:
            quantised = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{names[stem]}.{kind}", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            expected[name] = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0).astype(np.float16)
        else:
            writer.add_tensor(f"{names[stem]}.{kind}", stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_becomes_the_hugging_face_weights(store: ModelStore, tmp_path: Path, arch: str) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", arch)
    model = store.pull(str(tmp_path / "tiny.gguf"))
    tensors = load_file(model.path / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)
        assert tensors[name].dtype == values.dtype
    config = model.config
    assert config["model_type"] == arch
    assert config["rope_parameters"] == {"rope_theta": 500_000.0, "rope_type": "default"}
    assert (config["rms_norm_eps"], config["vocab_size"], config["tie_word_embeddings"]) == (1e-5, 8, True)
    assert (config["head_dim"], config["num_key_value_heads"], config["attention_bias"]) == (8, 2, True)


def test_gguf_tokenizer_is_written_as_its_pre_tokenizer_says(store: ModelStore, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "tiny.gguf")
    model = store.pull(str(tmp_path / "tiny.gguf"))
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    assert tokenizer.encode("ab12</s>").tokens == ["<s>", "ab", "1", "2", "</s>"]
    settings = json.loads(model.read_file("tokenizer_config.json"))
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_gguf_of_llama3_gets_its_rotary_scaling_back(store: ModelStore, tmp_path: Path) -> None:
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    blend = np.clip((8192 / wavelengths - 1.0) / 3.0, 0, 1)
    factors = (1 / ((1 - blend) / 32.0 + blend)).astype(np.float32)
    write_gguf(tmp_path / "good.gguf", extra={"rope_freqs.weight": factors})
    assert store.pull(str(tmp_path / "good.gguf")).config["rope_parameters"] == {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_gguf(tmp_path / "bad.gguf", extra={"rope_freqs.weight": factors * np.float32(1.5)})
    with pytest.raises(ConfigError, match="rotary factors"):
        store.pull(str(tmp_path / "bad.gguf"))


def test_gguf_of_unknown_architecture_lists_the_known_ones(store: ModelStore, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "mamba")
    with pytest.raises(ConfigError, match=r"'mamba', .* \(supported: llama, qwen2, qwen3\)"):
        store.pull(str(tmp_path / "tiny.gguf"))


def test_gguf_with_a_tensor_of_no_counterpart_is_refused(store: ModelStore, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra={"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)})
    with pytest.raises(ConfigError, match="ffn_gate_exps"):
        store.pull(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + b"\xff" * 40, b"GGUF\x03\0\0\0" + bytes(16)])
def test_damaged_gguf_is_refused(store: ModelStore, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(StoreCorrupted, match="gguf"):
        store.pull(str(tmp_path / "x.gguf"))


def test_gguf_cut_off_anywhere_is_refused(store: ModelStore, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    whole = (tmp_path / "x.gguf").read_bytes()
    for length in range(0, len(whole), 997):
        (tmp_path / "x.gguf").write_bytes(whole[:length])
        with pytest.raises(StoreCorrupted):
            store.pull(str(tmp_path / "x.gguf"))


def test_gguf_in_a_folder_and_in_a_repository_are_chosen_by_name(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    (origin / "sub").mkdir(parents=True)
    write_gguf(origin / "sub" / "tiny.gguf")
    hub = FakeHub(origin)
    store = ModelStore(tmp_path / "home", hub=hub)
    remote = store.pull("org/name", file="sub/tiny.gguf")
    local = store.pull(str(origin), file="sub/tiny.gguf")
    assert (remote.name, remote.manifest.source) == ("org/name:tiny", "hf:org/name/sub/tiny.gguf")
    assert local.model_id == remote.model_id
    assert store.find("org/name:tiny") == remote
    with pytest.raises(UnknownModel, match=r"its GGUF files are: sub/tiny\.gguf"):
        store.pull("org/name", file="other.gguf")


# The hub's functions


def test_hub_listing_resolves_the_revision_to_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub as hf
    from huggingface_hub.hf_api import ModelInfo

    def model_info(self: object, repo_id: str, *, revision: str | None, files_metadata: bool) -> ModelInfo:
        assert (repo_id, revision, files_metadata) == ("org/name", "main", True)
        lfs = {"size": 9, "sha256": "ab", "pointerSize": 1}
        siblings = [
            {"rfilename": "config.json", "size": 3},
            {"rfilename": "x.safetensors", "size": 9, "lfs": lfs},
        ]
        return ModelInfo(id=repo_id, sha="c0ffee", siblings=siblings, private=False, downloads=0, likes=0, tags=[])

    monkeypatch.setattr(hf.HfApi, "model_info", model_info)
    listing = HuggingFaceHub().describe("org/name", "main")
    assert listing.commit == "c0ffee"
    assert listing.files == {"config.json": HubFile(3, None), "x.safetensors": HubFile(9, "ab")}


def test_hub_download_asks_for_the_commit_and_checks_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub as hf

    calls = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append((repo_id, options["revision"], options["allow_patterns"]))
        bar = options["tqdm_class"](desc="Reconstructing", total=0, unit="B")  # type: ignore[operator]
        bar.update(2)
        bar.close()
        (tmp_path / "a.safetensors").write_bytes(b"xy")
        return str(tmp_path)

    class Counts(NoProgress):
        total = 0

        def advance(self, num_bytes: int) -> None:
            self.total += num_bytes

    monkeypatch.setattr(hf, "snapshot_download", snapshot_download)
    good = "769b5a8f2a9a1d9a1e0cbd4a3b2d0f4b"
    progress = Counts()
    listing = Listing("org/name", "c0ffee", {"a.safetensors": HubFile(2, good)})
    with pytest.raises(DownloadFailed, match="arrived damaged"):
        HuggingFaceHub().download(listing, ["a.safetensors"], tmp_path, progress)
    assert calls == [("org/name", "c0ffee", ["a.safetensors"])]
    assert progress.total == 4  # two downloaded, two checked
    listing = Listing("org/name", "c0ffee", {"a.safetensors": HubFile(3, None)})
    with pytest.raises(DownloadFailed, match="did not arrive whole"):
        HuggingFaceHub().download(listing, ["a.safetensors"], tmp_path, progress)


def test_hub_repository_of_impossible_name_is_unknown() -> None:
    with pytest.raises(UnknownModel, match="cannot be a repository"):
        HuggingFaceHub().describe("org/a--b", None)


def test_hub_that_cannot_be_reached_is_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub as hf

    def model_info(self: object, *_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hf.HfApi, "model_info", model_info)
    with pytest.raises(DownloadFailed, match=r"cannot be reached for org/name: no route$"):
        HuggingFaceHub().describe("org/name", None)


# Command line


def test_models_commands_print_tables_and_json(
    store: ModelStore, model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_HOME", str(store.home))
    run = CliRunner().invoke
    listed = json.loads(run(models_app, ["list", "--json"], catch_exceptions=False).stdout)
    assert [entry["name"] for entry in listed] == ["tiny"]
    shown = json.loads(run(models_app, ["show", "tiny", "--json", "--verify"], catch_exceptions=False).stdout)
    assert shown["model_id"] == model.model_id
    assert (shown["num_tensors"], shown["verified"], shown["num_layers"]) == (3, True, 2)
    assert {"name": "config.json", "num_bytes": len(json.dumps(CONFIG))} in shown["files"]
    assert "tiny" in run(models_app, ["list"], catch_exceptions=False).stdout
    assert model.model_id[:12] in run(models_app, ["show", "tiny"], catch_exceptions=False).stdout
    assert "removed tiny" in run(models_app, ["rm", "tiny"], catch_exceptions=False).stdout
    assert "models pull smollm2-135m" in run(models_app, ["list"], catch_exceptions=False).stdout


def test_models_pull_prints_name_and_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    folder = make_model(tmp_path / "tiny")
    result = CliRunner().invoke(models_app, ["pull", str(folder)], catch_exceptions=False)
    assert result.stdout.split()[:2] == ["tiny", ModelStore().find("tiny").model_id]


def test_models_errors_reach_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    with pytest.raises(UnknownModel):
        CliRunner().invoke(models_app, ["show", "nothing"], catch_exceptions=False)
