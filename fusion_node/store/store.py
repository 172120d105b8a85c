"""The folder that holds the models of this machine.

Layout below ``FUSION_HOME``::

    models/NAME/     config.json, tokenizer files, *.safetensors, manifest.json, manifest.blocks
    partial/NAME/    downloads/ is kept when a pull is interrupted, build/ is thrown away
    locks/NAME.lock  held by the one process that pulls or removes NAME

Guarantees: a folder in ``models/`` is complete. It is built in ``partial/``, written to the disk, and renamed as the
last act, so a pull that is killed at any moment leaves nothing that `list` shows, and the next pull of the same model
continues with what was downloaded. Two pulls of one model at once: the second waits and finds it done.

A name is used once. Pulling it again returns what is there, without asking the source: a model never changes under a
running node. Remove it first to get a newer revision.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from filelock import FileLock
from platformdirs import user_data_path

from fusion_node.errors import ConfigError, FusionError, ResourceExhausted, StoreCorrupted, UnknownModel
from fusion_node.store import builtin
from fusion_node.store.files import (
    DiskFree,
    check_room,
    disk_free,
    parse_json_object,
    read_bounded,
    remove_tree,
    sync_file,
    sync_folder,
    write_durably,
)
from fusion_node.store.hub import Hub, HuggingFaceHub
from fusion_node.store.model import BLOCKS_FILE, MANIFEST_FILE, StoredModel, index_folder, map_slot
from fusion_node.store.progress import NoProgress, Progress
from fusion_node.store.sources import SMALL_FILES, Source, Workplace, check_config, resolve
from fusion_node.types import ModelId
from verification.manifest import BLOCK_BYTES, ManifestBuilder, encode_manifest, hash_blocks

_NAME = re.compile(
    r"^[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)?(:[A-Za-z0-9._+-]+)?(@[A-Za-z0-9._+-]+)?\Z"
)
_ID_PREFIX = re.compile(r"^[0-9a-f]{6,64}\Z")
_MAX_NAME_LENGTH = 200
_HASH_TASK_BYTES = 64 * BLOCK_BYTES
"""Bytes that one task of the hasher reads (4 MiB)."""

_log = structlog.get_logger(__name__)


class ModelStore:
    """The models on this machine.

    Args:
        home: folder of the store; by default FUSION_HOME, else the user's data folder of the platform.
        hub: where ORGANISATION/NAME is looked up; the Hugging Face hub by default.
        free: tells the free bytes of a disk.
    """

    def __init__(self, home: Path | None = None, *, hub: Hub | None = None, free: DiskFree = disk_free) -> None:
        self.home = home if home is not None else default_home()
        self._hub: Hub = hub if hub is not None else HuggingFaceHub()
        self._free = free

    def list(self) -> list[StoredModel]:
        """All complete models by name. A folder whose manifest is damaged is left out with a warning."""
        models = []
        for path in self._folders():
            try:
                models.append(StoredModel.open(path))
            except StoreCorrupted as error:
                _log.warning("model left out", folder=path.name, reason=str(error))
        return sorted(models, key=lambda model: model.name)

    def find(self, name_or_id: str) -> StoredModel:
        """The model of that name, or whose id starts with that (6 or more digits).

        Raises:
            UnknownModel: when there is none, or when several ids start so. The message says what to do.
            StoreCorrupted: when there is one, but its manifest is damaged.
        """
        wanted = builtin.NAME if name_or_id.lower() in builtin.ALIASES else name_or_id
        folder = self._models / _folder_name(wanted) if _is_name(wanted) else None
        if folder is not None and (folder / MANIFEST_FILE).is_file():
            model = StoredModel.open(folder)
            if model.name == wanted:
                return model
        models = self.list()
        found = [model for model in models if model.name.lower() == wanted.lower()]
        if not found and _ID_PREFIX.match(wanted.lower()):
            found = [model for model in models if model.model_id.startswith(wanted.lower())]
        if found and len({model.model_id for model in found}) == 1:
            return found[0]  # several names of one id are the same weights
        if found:
            raise UnknownModel(f"{name_or_id} fits several models: {', '.join(model.name for model in found)}")
        raise UnknownModel(self._not_found(name_or_id, models))

    def pull(
        self,
        source: str,
        *,
        revision: str | None = None,
        file: str | None = None,
        progress: Progress | None = None,
    ) -> StoredModel:
        """Fetches a model, unless it is here already.

        Args:
            source: the built-in model's name, a folder, a .gguf file, or ORGANISATION/NAME on the Hugging Face hub.
            revision: branch, tag or commit of a repository.
            file: which .gguf file of a folder or repository.
            progress: told how far it is.

        Raises:
            UnknownModel: when the source does not exist.
            ConfigError: when the model is of a kind that cannot be served, or the name is taken by another model.
            DownloadFailed: when the source cannot be reached; what was fetched is kept.
            ResourceExhausted: when the disk has no room for it.
            StoreCorrupted: when what was fetched is not sound.
        """
        told = progress if progress is not None else NoProgress()
        origin = self._resolve(source, revision, file)
        if isinstance(origin, StoredModel):
            return origin
        if not _is_name(origin.name):
            raise ConfigError(f"{origin.name!r} cannot be a name in the store: use letters, digits and . _ + -")
        with self._lock(origin.name):
            stored = self._stored(origin)
            if stored is not None and not origin.may_have_changed:
                return stored
            try:
                return self._build(origin, stored, told)
            except OSError as error:
                raise _translated(error, self.home) from error

    def remove(self, name_or_id: str) -> None:
        """Deletes a model, also one whose manifest is damaged. A node that serves it keeps its open files.

        Raises:
            UnknownModel: when there is none.
        """
        try:
            model = self.find(name_or_id)
            folder, name = model.path, model.name
        except (UnknownModel, StoreCorrupted):
            folder, name = self._models / _folder_name(name_or_id), name_or_id
            if not _is_name(name_or_id) or not _is_damaged(folder):
                raise
        with self._lock(name):
            # Renamed first: a folder that is half deleted must not be listed.
            doomed = self._partial / _folder_name(name) / "removed"
            remove_tree(doomed)
            doomed.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(doomed)
            remove_tree(doomed.parent)

    @property
    def _models(self) -> Path:
        return self.home / "models"

    @property
    def _partial(self) -> Path:
        return self.home / "partial"

    def _folders(self) -> Iterator[Path]:
        if self._models.is_dir():
            yield from (path for path in self._models.iterdir() if (path / MANIFEST_FILE).is_file())

    def _resolve(self, source: str, revision: str | None, file: str | None) -> Source | StoredModel:
        try:
            return resolve(source, revision=revision, file=file, hub=self._hub)
        except UnknownModel as unknown:
            # The name of something that is here is a fine thing to pull, although it says nothing about its source.
            for model in self.list():
                if model.name == source:
                    return model
            close = difflib.get_close_matches(source, [builtin.NAME, *(model.name for model in self.list())], n=1)
            if close:
                raise UnknownModel(f"{unknown}. Did you mean {close[0]}?") from unknown
            raise

    def _stored(self, origin: Source) -> StoredModel | None:
        folder = self._models / _folder_name(origin.name)
        if not folder.is_dir():
            return None
        stored = StoredModel.open(folder)
        if stored.manifest.source != origin.label:
            raise ConfigError(
                f"the name {stored.name} is taken by a model from {stored.manifest.source}: "
                f"run `fusion-node models rm {stored.name}` first"
            )
        return stored

    def _build(self, origin: Source, stored: StoredModel | None, progress: Progress) -> StoredModel:
        place = self._partial / _folder_name(origin.name)
        downloads, folder = place / "downloads", place / "build"
        remove_tree(folder)
        downloads.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        work = Workplace(downloads, folder, progress, lambda num_bytes: check_room(self.home, num_bytes, self._free))
        revision = origin.build(work)
        model = write_manifest(folder, name=origin.name, source=origin.label, revision=revision, progress=progress)
        if stored is not None:
            remove_tree(place)
            if stored.model_id != model.model_id:
                raise ConfigError(
                    f"{origin.label} has changed since it was pulled: "
                    f"run `fusion-node models rm {stored.name}` first, then pull it again"
                )
            return stored
        for path in folder.iterdir():
            sync_file(path)
        sync_folder(folder)
        target = self._models / _folder_name(origin.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        sync_folder(target.parent)
        remove_tree(place)
        return StoredModel.open(target)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        locks = self.home / "locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            lock = FileLock(locks / f"{_folder_name(name)}.lock")
            lock.acquire()
        except OSError as error:
            raise ConfigError(f"the store {self.home} is not writable ({error.strerror}): set FUSION_HOME") from error
        try:
            yield
        finally:
            lock.release()

    def _not_found(self, wanted: str, models: Sequence[StoredModel]) -> str:
        names = [model.name for model in models]
        close = difflib.get_close_matches(wanted, [*names, builtin.NAME], n=1)
        if close and close[0] in names:
            return f"model {wanted!r} is not in the store: did you mean {close[0]}?"
        target = close[0] if close else wanted
        return f"model {wanted!r} is not in the store: run `fusion-node models pull {target}` first"


def default_home() -> Path:
    """FUSION_HOME, else the platform's folder for a user's data."""
    configured = os.environ.get("FUSION_HOME")
    return Path(configured).expanduser() if configured else user_data_path("fusion-node")


def write_manifest(folder: Path, *, name: str, source: str, revision: str, progress: Progress) -> StoredModel:
    """Hashes the files of a model folder and writes manifest and block table beside them.

    Raises:
        StoreCorrupted: when a file is not sound or a tensor occurs twice.
        ConfigError: when the config asks for code.
    """
    small = {path.name: read_bounded(path) for path in sorted(folder.iterdir()) if path.name in SMALL_FILES}
    config = parse_json_object(small.get("config.json", b""), "config.json")
    check_config(config)
    builder = ManifestBuilder(name=name, source=source, revision=revision, architecture=_architecture(config))
    for file_name, data in small.items():
        builder.add_file(file_name, data)
    index = index_folder(folder)
    progress.start("Hashing weights", sum(slot.num_bytes for _, slot in index.values()))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "hash-weights") as pool:
        for tensor, (file, slot) in index.items():
            leaves = bytearray()
            mapped = map_slot(file, slot)
            starts = range(0, slot.num_bytes, _HASH_TASK_BYTES)
            chunks = [mapped[start : start + _HASH_TASK_BYTES] for start in starts]
            for chunk, hashes in zip(chunks, pool.map(hash_blocks, chunks), strict=True):
                leaves += hashes
                progress.advance(len(chunk))
            builder.add_leaves(tensor, slot.dtype, slot.shape, slot.num_bytes, bytes(leaves))
    manifest, table = builder.finish()
    write_durably(folder / BLOCKS_FILE, table)
    write_durably(folder / MANIFEST_FILE, encode_manifest(manifest))
    return StoredModel(folder, name, ModelId(manifest.model_id), manifest)


def _translated(error: OSError, home: Path) -> FusionError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(
            f"the disk of {home} became full: free some space, or set FUSION_HOME to a larger disk"
        )
    return ConfigError(f"cannot read or write {error.filename or home}: {error.strerror or error}")


def _architecture(config: dict[str, Any]) -> str:
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return classes[0]
    return str(config.get("model_type", "unknown"))


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME_LENGTH and _NAME.match(name) is not None


def _is_damaged(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        StoredModel.open(folder)
    except StoreCorrupted:
        return True
    return False


def _folder_name(name: str) -> str:
    """One folder name for a model name, which `_is_name` has admitted: no separators, no leading dot."""
    return name.replace("/", "--").replace(":", "+")
