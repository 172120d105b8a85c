"""One model of the store: its manifest, its config, and its tensors by byte range, checked before anyone sees them.

Guarantees: a tensor that ``open_tensors`` hands out had, block by block, the hashes of the manifest when it was read.
Only the byte ranges asked for are touched. They are mapped, never copied, so memory holds what the caller keeps and
what the system caches.

Assumes that nobody rewrites the files in place while a node runs: a mapped page that the system dropped is read again
from the file without a second check. The live-weight proofs cover what is resident.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fusion_node.errors import LocalProtocolError, StoreCorrupted
from fusion_node.store.files import parse_json_object, read_bounded
from fusion_node.store.quantization import quantization_settings
from fusion_node.store.safetensors_file import TensorSlot, read_header
from fusion_node.types import ModelId
from verification.manifest import (
    BLOCK_BYTES,
    MAX_MANIFEST_BYTES,
    BadBlock,
    BlockTable,
    Manifest,
    ManifestInvalid,
    decode_manifest,
)

MANIFEST_FILE = "manifest.json"
BLOCKS_FILE = "manifest.blocks"

_CHUNK_BLOCKS = 64
"""Blocks that one task of the verifier hashes (4 MiB): long enough that starting it costs nothing, short enough that
two cores share one tensor."""

_WINDOW_BYTES = 32 * 2**20
"""How far the verifier runs ahead of the caller: a chunk for each thread. Resident beside what the caller keeps."""

_MAX_THREADS = 8
"""SHA-256 on eight cores (12 GB/s) is faster than any disk."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this disk.

    Attributes:
        path: its folder.
        name: what `find` and the command line call it.
        model_id: root of its manifest.
        manifest: what it consists of.
    """

    path: Path
    name: str
    model_id: ModelId
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> StoredModel:
        """Reads the manifest in ``path``; StoreCorrupted when there is none or it is not sound."""
        try:
            manifest = decode_manifest(read_bounded(path / MANIFEST_FILE, MAX_MANIFEST_BYTES))
        except StoreCorrupted as error:
            raise StoreCorrupted(f"{path / MANIFEST_FILE}: {error}: {_remedy(path.name)}") from error
        return cls(path, manifest.name, ModelId(manifest.model_id), manifest)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, checked against the manifest.

        Raises:
            StoreCorrupted: when the file is not the manifest's.
        """
        return parse_json_object(self.read_file("config.json"), f"config.json of {self.name}")

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(tensor.name for tensor in self.manifest.tensors)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return num_layers_of(self.config)

    @property
    def quantization(self) -> str:
        """How the weights are quantised, in a few words; empty when they are plain."""
        settings = quantization_settings(self.config)
        return "" if settings is None else settings.label

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of the model, as the manifest knows them."""
        return self.manifest.num_tensor_bytes + sum(file.num_bytes for file in self.manifest.files)

    def read_file(self, name: str) -> bytes:
        """The content of a small file (config, tokenizer), checked against the manifest.

        Raises:
            LocalProtocolError: when the manifest has no such file.
            StoreCorrupted: when the content is not the manifest's.
        """
        try:
            self.manifest.file(name)
        except KeyError:
            raise LocalProtocolError(f"model {self.name} has no file {name}") from None
        data = read_bounded(self.path / name)
        if not self.manifest.verify_file(name, data):
            raise StoreCorrupted(f"{self.path / name} does not match the manifest: {_remedy(self.name)}")
        return data

    def tensor_location(self, name: str) -> tuple[Path, int, int]:
        """Where a tensor lies: file, byte offset in it, byte length.

        Raises:
            LocalProtocolError: when the model has no such tensor.
            StoreCorrupted: when the files do not hold it as the manifest says.
        """
        file, slot = self._slot(name)
        return file, slot.offset, slot.num_bytes

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """Maps and verifies tensors, in the order asked for.

        The verification of the next tensors runs in threads while the caller uses one. A view is writable but private
        (copy on write), because torch warns about buffers that it may not write; what is written never reaches the
        file. It stays valid for as long as anything refers to it.

        Yields:
            Name, safetensors dtype name (``F32``, ``BF16``…), shape, and the tensor's bytes.

        Raises:
            LocalProtocolError: when the model has no such tensor.
            StoreCorrupted: naming tensor and block, when a block is not the manifest's. No byte of that tensor has
                been handed out then.
        """
        blocks = self.blocks()
        pending: deque[_Opened] = deque()
        ahead_bytes = 0
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "verify-weights") as pool:
            try:
                for name in names:
                    opened = self._open(name, blocks, pool)
                    pending.append(opened)
                    ahead_bytes += len(opened.data)
                    while ahead_bytes > _WINDOW_BYTES:
                        ahead_bytes -= len(pending[0].data)
                        yield self._checked(pending.popleft())
                while pending:
                    yield self._checked(pending.popleft())
            finally:
                for opened in pending:
                    for future in opened.checks:
                        future.cancel()

    def bad_blocks(self, names: Iterable[str] | None = None) -> tuple[BadBlock, ...]:
        """Every block that is not the manifest's, of the tensors named or of all of them."""
        blocks, bad = self.blocks(), list[BadBlock]()
        chosen = [tensor.name for tensor in self.manifest.tensors] if names is None else names
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "verify-weights") as pool:
            for name in chosen:
                for future in self._open(name, blocks, pool).checks:
                    bad.extend(future.result())
        return tuple(bad)

    def blocks(self) -> BlockTable:
        """The block hashes beside the manifest; StoreCorrupted when the file is missing or has the wrong length."""
        path = self.path / BLOCKS_FILE
        try:
            # Mapped: the table of a 140 GB model has 68 MB, of which a node needs the part of its layers.
            with path.open("rb") as file:
                table = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.manifest.num_blocks else b""
            return BlockTable(self.manifest, memoryview(table))
        except (OSError, ValueError, ManifestInvalid) as error:
            raise StoreCorrupted(f"{path}: {error}: {_remedy(self.name)}") from error

    def _open(self, name: str, blocks: BlockTable, pool: ThreadPoolExecutor) -> _Opened:
        file, slot = self._slot(name)
        data = map_slot(file, slot)
        try:
            blocks.leaves(name)  # in this thread: the table's cache of believed tensors is not shared then
        except ManifestInvalid as error:
            raise StoreCorrupted(f"{self.path / BLOCKS_FILE}: {error}: {_remedy(self.name)}") from error
        num_blocks = -(-slot.num_bytes // BLOCK_BYTES)
        checks = [
            pool.submit(blocks.verify_blocks, name, data, first, min(first + _CHUNK_BLOCKS, num_blocks))
            for first in range(0, num_blocks, _CHUNK_BLOCKS)
        ]
        return _Opened(slot, data, checks)

    def _checked(self, opened: _Opened) -> tuple[str, str, tuple[int, ...], memoryview]:
        for future in opened.checks:
            for bad in future.result():
                raise StoreCorrupted(f"model {self.name}: {bad} does not match the manifest: {_remedy(self.name)}")
        return opened.slot.name, opened.slot.dtype, opened.slot.shape, opened.data

    def _slot(self, name: str) -> tuple[Path, TensorSlot]:
        try:
            record = self.manifest.tensor(name)
        except KeyError:
            raise LocalProtocolError(f"model {self.name} has no tensor {name}") from None
        found = _index(self.path, self.model_id).get(name)
        if found is None:
            raise StoreCorrupted(f"no file in {self.path} holds tensor {name}: {_remedy(self.name)}")
        file, slot = found
        if (slot.dtype, slot.shape) != (record.dtype, record.shape):
            raise StoreCorrupted(f"tensor {name} in {file} has not the manifest's shape: {_remedy(self.name)}")
        return file, slot


@dataclass(frozen=True, slots=True)
class _Opened:
    slot: TensorSlot
    data: memoryview
    checks: list[Future[tuple[BadBlock, ...]]]


def _remedy(name: str) -> str:
    return f"run `fusion-node models rm {name}` and pull it again"


def num_layers_of(config: dict[str, Any]) -> int:
    """Decoder layers by a Hugging Face config; models with several parts keep it in ``text_config``.

    Raises:
        StoreCorrupted: when the config does not say.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        value = part.get("num_hidden_layers", part.get("n_layer"))
        if isinstance(value, int) and 0 < value < 100_000:
            return value
    raise StoreCorrupted("config.json does not say how many layers the model has (num_hidden_layers)")


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted."""
    return sorted(folder.glob("*.safetensors"))


def index_folder(folder: Path) -> dict[str, tuple[Path, TensorSlot]]:
    """Place of every tensor of a folder; StoreCorrupted when a file is unsound or a name occurs twice."""
    index: dict[str, tuple[Path, TensorSlot]] = {}
    for file in tensor_files(folder):
        for name, slot in read_header(file).items():
            if name in index:
                raise StoreCorrupted(f"tensor {name} is in {index[name][0].name} and in {file.name}")
            index[name] = (file, slot)
    return index


@lru_cache(maxsize=16)
def _index(folder: Path, _model_id: ModelId) -> dict[str, tuple[Path, TensorSlot]]:
    """Cached, because the headers of a large model take a tenth of a second to parse. The id is part of the key:
    another model may be pulled under the same name during the life of this process."""
    return index_folder(folder)


def map_slot(file: Path, slot: TensorSlot) -> memoryview:
    """The bytes of a tensor as a private mapping of its pages alone.

    One mapping for each tensor, because a writable mapping of a whole file of 140 GB is refused on a smaller machine,
    and because dropping a tensor then gives its pages back.
    """
    if slot.num_bytes == 0:
        return memoryview(bytearray())
    skipped = slot.offset % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as handle:
            mapped = mmap.mmap(
                handle.fileno(),
                slot.num_bytes + skipped,
                access=mmap.ACCESS_COPY,
                offset=slot.offset - skipped,
            )
    except (OSError, ValueError) as error:
        raise StoreCorrupted(f"{file} cannot be mapped: {error}") from error
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_WILLNEED)
    return memoryview(mapped)[skipped:]
