"""The weight manifest: what a model is, down to 64 KiB blocks, and the id that follows from it.

Guarantees: the model id is a function of the tensors (name, dtype, shape, bytes) and of the small files that decide the
text (config, tokenizer, generation defaults), never of the model's name, its source or how its tensors were spread over
files. Two people who obtained the same weights in different ways have the same id. Everything decoded here may come
from a stranger: it is bounded, validated, and either yields a consistent manifest or raises ManifestInvalid.

The tokenizer is inside the id on purpose: a peer that seeds a model could otherwise swap the chat template under an id
that the user trusts.

How the id is computed (H is SHA-256; msgpack arrays in the shortest encoding; trees as in ``merkle.py``)::

    block leaf   H(0x00 || block)                    blocks of 65,536 bytes, the last one of a tensor may be shorter
    tensor root  tree over the tensor's block leaves; little-endian row-major bytes as in safetensors
    tensor leaf  H(0x02 || msgpack [name, dtype, shape, num_bytes, tensor root])
    file leaf    H(0x03 || msgpack [name, num_bytes, sha256])
    model id     H(0x04 || msgpack [1, 65536, num tensors, tree over tensor leaves, num files, tree over file leaves])

Tensors and files are sorted by name (bytes of its ASCII). Roots and digests are msgpack ``bin`` of 32 bytes. The prefix
bytes keep the kinds of hashes apart, so that none can be passed off as another.

The leaves of the blocks (32 bytes for each 64 KiB, 0.05 %) are kept beside the manifest, not in it: the manifest stays
small enough to open in milliseconds and to send to anyone, and a reader checks the leaves of a tensor against its root
before it believes them.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from fusion_node.errors import StoreCorrupted
from fusion_node.types import ModelId
from verification.merkle import (
    HASH_BYTES,
    ByteBuffer,
    inclusion_path,
    leaf_hash,
    root_of_path,
    tree_root,
)

__all__ = [
    "BLOCK_BYTES",
    "DTYPE_BYTES",
    "BadBlock",
    "BlockProof",
    "BlockTable",
    "FileRecord",
    "Manifest",
    "ManifestBuilder",
    "ManifestInvalid",
    "TensorRecord",
    "decode_manifest",
    "encode_manifest",
    "hash_blocks",
]

BLOCK_BYTES = 65_536
"""Bytes of one block. Small enough for one network frame, large enough that its leaf hash is 0.05 % of it."""

MAX_MANIFEST_BYTES = 64 * 2**20
"""Bound of an encoded manifest; one of a mixture of experts with 36,000 tensors is 8 MB."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one element, by the dtype names of safetensors. Sub-byte dtypes are not served."""

_FORMAT = 1
_TENSOR = b"\x02"
_FILE = b"\x03"
_MODEL = b"\x04"

_TensorName = Annotated[str, Meta(pattern=r"^[!-~]+\Z", max_length=512)]
_FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z", max_length=128)]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", max_length=512)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]


class ManifestInvalid(StoreCorrupted):
    """A manifest is malformed, contradicts itself or is larger than a manifest may be."""


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its safetensors dtype name, shape, bytes, and the root over its blocks in hex."""

    name: _TensorName
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[_Count, ...], Meta(max_length=16)]
    num_bytes: _Count
    root: _Digest

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // BLOCK_BYTES)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One small file of the model (config, tokenizer): its bytes and SHA-256 in hex."""

    name: _FileName
    num_bytes: _Count
    sha256: _Digest


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model consists of. Built by ManifestBuilder or decode_manifest, which check that it is consistent.

    Attributes:
        model_id: root over everything below ``architecture``.
        name: what people call it. Not part of the id.
        source: where it came from, for example ``hf:org/name``. Not part of the id.
        revision: which version of the source, a commit or a file digest; empty when there is none. Not part of the id.
        architecture: class name of the Hugging Face model. Not part of the id: the config, which is, decides it.
        tensors: sorted by name.
        files: sorted by name.
    """

    format: Annotated[int, Meta(ge=_FORMAT, le=_FORMAT)]
    model_id: _Digest
    name: _Text
    source: _Text
    revision: _Text
    architecture: _Text
    block_bytes: Annotated[int, Meta(ge=BLOCK_BYTES, le=BLOCK_BYTES)]
    tensors: Annotated[tuple[TensorRecord, ...], Meta(max_length=1_000_000)]
    files: Annotated[tuple[FileRecord, ...], Meta(max_length=256)]

    def tensor(self, name: str) -> TensorRecord:
        """The record of one tensor.

        Raises:
            KeyError: when the model has no such tensor.
        """
        return self.tensors[self.tensor_index(name)]

    def tensor_index(self, name: str) -> int:
        """Position of a tensor in ``tensors``; KeyError when the model has none of that name."""
        index = bisect_left(self.tensors, name, key=lambda record: record.name)
        if index == len(self.tensors) or self.tensors[index].name != name:
            raise KeyError(name)
        return index

    def file(self, name: str) -> FileRecord:
        """The record of one small file; KeyError when the model has none of that name."""
        for record in self.files:
            if record.name == name:
                return record
        raise KeyError(name)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def num_tensor_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_blocks(self) -> int:
        return sum(tensor.num_blocks for tensor in self.tensors)

    def verify_block(self, name: str, block: int, data: ByteBuffer, path: tuple[bytes, ...]) -> bool:
        """Whether ``data`` is block ``block`` of tensor ``name``, by its Merkle path alone.

        Raises:
            KeyError: when the model has no such tensor. Anything else that is wrong is False.
        """
        record = self.tensor(name)
        if not 0 <= block < record.num_blocks or len(data) != _block_length(record, block):
            return False
        root = root_of_path(leaf_hash(data), block, record.num_blocks, path)
        return root is not None and root.hex() == record.root

    def verify_file(self, name: str, data: ByteBuffer) -> bool:
        """Whether ``data`` is the small file ``name``; KeyError when the model has none of that name."""
        record = self.file(name)
        return len(data) == record.num_bytes and hashlib.sha256(data).hexdigest() == record.sha256


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block whose bytes are not those of the manifest: tensor, index, and byte range ``[start, stop)`` within it."""

    tensor: str
    block: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"tensor {self.tensor}, block {self.block} (bytes {self.start} to {self.stop})"


@dataclass(frozen=True, slots=True)
class BlockProof:
    """Proves one block against a model id without the manifest.

    Attributes:
        tensor: record of the tensor that the block belongs to.
        block: index of the block.
        block_path: siblings from the block to the tensor's root.
        tensor_index, num_tensors, tensor_path: place of the tensor's record in the tree over tensors.
        num_files, files_root: the other half of the model id.
    """

    tensor: TensorRecord
    block: int
    block_path: tuple[bytes, ...]
    tensor_index: int
    num_tensors: int
    tensor_path: tuple[bytes, ...]
    num_files: int
    files_root: bytes

    def proves(self, model_id: ModelId, data: ByteBuffer) -> bool:
        """Whether ``data`` is this block of the model ``model_id``. Every field may come from a stranger."""
        record = self.tensor
        if not 0 <= self.block < record.num_blocks or len(data) != _block_length(record, self.block):
            return False
        root = root_of_path(leaf_hash(data), self.block, record.num_blocks, self.block_path)
        if root is None or root.hex() != record.root:
            return False
        top = root_of_path(_tensor_leaf(record), self.tensor_index, self.num_tensors, self.tensor_path)
        return top is not None and model_id == _model_id(self.num_tensors, top, self.num_files, self.files_root)


class BlockTable:
    """The block leaves of a model, beside its manifest: names bad blocks and makes Merkle paths.

    The leaves of a tensor are believed only after they reproduced the tensor's root; that check runs once per tensor.

    Args:
        manifest: the manifest that the leaves belong to.
        leaves: the leaf hashes of all tensors in manifest order, 32 bytes each; may be a mapped file.

    Raises:
        ManifestInvalid: when the number of leaves is not that of the manifest.
    """

    def __init__(self, manifest: Manifest, leaves: ByteBuffer) -> None:
        if len(leaves) != manifest.num_blocks * HASH_BYTES:
            raise ManifestInvalid(
                f"the block table has {len(leaves)} bytes instead of {manifest.num_blocks * HASH_BYTES}"
            )
        self.manifest = manifest
        self._leaves = memoryview(leaves)
        self._starts: dict[str, int] = {}
        self._believed: set[str] = set()
        start = 0
        for tensor in manifest.tensors:
            self._starts[tensor.name] = start
            start += tensor.num_blocks * HASH_BYTES

    def leaves(self, name: str) -> memoryview:
        """The concatenated leaf hashes of one tensor.

        Raises:
            KeyError: when the model has no such tensor.
            ManifestInvalid: when the leaves do not lead to the tensor's root.
        """
        record = self.manifest.tensor(name)
        start = self._starts[name]
        view = self._leaves[start : start + record.num_blocks * HASH_BYTES]
        if name not in self._believed:
            if tree_root(view).hex() != record.root:
                raise ManifestInvalid(f"the block hashes of tensor {name} do not lead to its root")
            self._believed.add(name)
        return view

    def verify_tensor(self, name: str, data: ByteBuffer) -> tuple[BadBlock, ...]:
        """The blocks of ``data`` that are not the manifest's, in order; empty when the tensor is whole.

        Data of the wrong length is bad in every block that is missing, cut or too long.
        """
        record = self.manifest.tensor(name)
        bad = self.verify_blocks(name, data, 0, record.num_blocks)
        if len(data) > record.num_bytes and not bad:
            last = max(record.num_blocks - 1, 0)
            bad = (BadBlock(name, last, last * BLOCK_BYTES, record.num_bytes),)
        return bad

    def verify_blocks(self, name: str, data: ByteBuffer, first: int, stop: int) -> tuple[BadBlock, ...]:
        """As verify_tensor for blocks ``[first, stop)`` of a whole tensor's ``data``: the unit of parallel work."""
        record, leaves, view = self.manifest.tensor(name), self.leaves(name), memoryview(data)
        bad = []
        for block in range(first, stop):
            start, end = block * BLOCK_BYTES, block * BLOCK_BYTES + _block_length(record, block)
            content = view[start:end]
            if leaf_hash(content) != leaves[block * HASH_BYTES : (block + 1) * HASH_BYTES]:
                bad.append(BadBlock(name, block, start, end))
        return tuple(bad)

    def path(self, name: str, block: int) -> tuple[bytes, ...]:
        """Merkle path of a block to its tensor's root; ValueError when there is no such block."""
        return inclusion_path(self.leaves(name), block)

    def proof(self, name: str, block: int) -> BlockProof:
        """Proof of a block against the model id; ValueError when there is no such block."""
        tensor_leaves = b"".join(map(_tensor_leaf, self.manifest.tensors))
        index = self.manifest.tensor_index(name)
        return BlockProof(
            tensor=self.manifest.tensors[index],
            block=block,
            block_path=self.path(name, block),
            tensor_index=index,
            num_tensors=len(self.manifest.tensors),
            tensor_path=inclusion_path(tensor_leaves, index),
            num_files=len(self.manifest.files),
            files_root=tree_root(b"".join(map(_file_leaf, self.manifest.files))),
        )


class ManifestBuilder:
    """Collects tensors and files in any order and makes the manifest and its block table."""

    def __init__(self, *, name: str, source: str, revision: str, architecture: str) -> None:
        self._labels = {"name": name, "source": source, "revision": revision, "architecture": architecture}
        self._tensors: dict[str, tuple[TensorRecord, bytes]] = {}
        self._files: dict[str, FileRecord] = {}

    def add_tensor(self, name: str, dtype: str, shape: Iterable[int], chunks: Iterable[ByteBuffer]) -> None:
        """Adds a tensor whose bytes arrive in chunks of any size.

        Raises:
            ManifestInvalid: when the bytes do not fit dtype and shape, or the name was added before.
        """
        hasher = _BlockHasher()
        for chunk in chunks:
            hasher.update(chunk)
        self.add_leaves(name, dtype, shape, hasher.num_bytes, hasher.finish())

    def add_leaves(self, name: str, dtype: str, shape: Iterable[int], num_bytes: int, leaves: bytes) -> None:
        """Adds a tensor whose blocks are hashed already (``hash_blocks``), for callers that hash in parallel."""
        record = TensorRecord(name, dtype, tuple(shape), num_bytes, tree_root(leaves).hex())
        if name in self._tensors:
            raise ManifestInvalid(f"tensor {name} occurs twice")
        if len(leaves) != record.num_blocks * HASH_BYTES:
            raise ManifestInvalid(f"tensor {name} has {len(leaves)} bytes of hashes for {record.num_blocks} blocks")
        _check_tensor(record)
        self._tensors[name] = (record, leaves)

    def add_file(self, name: str, data: ByteBuffer) -> None:
        """Adds a small file by its whole content."""
        if name in self._files:
            raise ManifestInvalid(f"file {name} occurs twice")
        self._files[name] = FileRecord(name, len(data), hashlib.sha256(data).hexdigest())

    def finish(self) -> tuple[Manifest, bytes]:
        """The manifest and the leaves of its block table.

        Raises:
            ManifestInvalid: when a name or a label is not one that a manifest may hold.
        """
        tensors = tuple(self._tensors[name][0] for name in sorted(self._tensors))
        files = tuple(self._files[name] for name in sorted(self._files))
        model_id = _identity(tensors, files)
        manifest = Manifest(
            format=_FORMAT,
            model_id=model_id,
            block_bytes=BLOCK_BYTES,
            tensors=tensors,
            files=files,
            **self._labels,
        )
        # Struct constructors do not check constraints, the decoder does: never write what cannot be read.
        return decode_manifest(encode_manifest(manifest)), b"".join(self._tensors[tensor.name][1] for tensor in tensors)


def hash_blocks(data: ByteBuffer) -> bytes:
    """Concatenated leaf hashes of the blocks of ``data``, whose start must be the start of a block."""
    view = memoryview(data)
    return b"".join(leaf_hash(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES))


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as indented JSON: people read it, and its bytes are not what the id is computed from."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: ByteBuffer) -> Manifest:
    """Reads and checks a manifest, which may come from a stranger.

    Raises:
        ManifestInvalid: when it is too large, malformed, unsorted or does not lead to the id that it states.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(f"a manifest of {len(data)} bytes is larger than {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ManifestInvalid(f"not a manifest: {error}") from error
    for kind, names in (
        ("tensor", [tensor.name for tensor in manifest.tensors]),
        ("file", [file.name for file in manifest.files]),
    ):
        if any(left >= right for left, right in pairwise(names)):
            raise ManifestInvalid(f"the {kind} names of the manifest are not in strictly ascending order")
    for tensor in manifest.tensors:
        _check_tensor(tensor)
    computed = _identity(manifest.tensors, manifest.files)
    if computed != manifest.model_id:
        raise ManifestInvalid(f"the manifest states id {manifest.model_id} but its content has id {computed}")
    return manifest


class _BlockHasher:
    """Cuts a stream into blocks and hashes them; holds at most one partial block."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._partial = bytearray()
        self._leaves = bytearray()

    def update(self, chunk: ByteBuffer) -> None:
        view = memoryview(chunk).cast("B")
        self.num_bytes += len(view)
        if self._partial:
            missing = BLOCK_BYTES - len(self._partial)
            self._partial += view[:missing]
            view = view[missing:]
            if len(self._partial) < BLOCK_BYTES:
                return
            self._leaves += leaf_hash(self._partial)
            self._partial.clear()
        whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
        self._leaves += hash_blocks(view[:whole])
        self._partial += view[whole:]

    def finish(self) -> bytes:
        return bytes(self._leaves) + hash_blocks(self._partial)


def _block_length(record: TensorRecord, block: int) -> int:
    return min(BLOCK_BYTES, record.num_bytes - block * BLOCK_BYTES)


def _check_tensor(record: TensorRecord) -> None:
    size = DTYPE_BYTES.get(record.dtype)
    if size is None:
        raise ManifestInvalid(
            f"tensor {record.name} has dtype {record.dtype!r}, which is not one of {', '.join(DTYPE_BYTES)}"
        )
    if record.num_elements * size != record.num_bytes:
        raise ManifestInvalid(
            f"tensor {record.name} has {record.num_bytes} bytes, but {record.dtype} of shape {list(record.shape)} "
            f"needs {record.num_elements * size}"
        )


def _tensor_leaf(record: TensorRecord) -> bytes:
    fields = [record.name, record.dtype, list(record.shape), record.num_bytes, bytes.fromhex(record.root)]
    return hashlib.sha256(_TENSOR + msgspec.msgpack.encode(fields)).digest()


def _file_leaf(record: FileRecord) -> bytes:
    fields = [record.name, record.num_bytes, bytes.fromhex(record.sha256)]
    return hashlib.sha256(_FILE + msgspec.msgpack.encode(fields)).digest()


def _model_id(num_tensors: int, tensors_root: bytes, num_files: int, files_root: bytes) -> ModelId:
    fields = [_FORMAT, BLOCK_BYTES, num_tensors, tensors_root, num_files, files_root]
    return ModelId(hashlib.sha256(_MODEL + msgspec.msgpack.encode(fields)).hexdigest())


def _identity(tensors: tuple[TensorRecord, ...], files: tuple[FileRecord, ...]) -> ModelId:
    return _model_id(
        len(tensors),
        tree_root(b"".join(map(_tensor_leaf, tensors))),
        len(files),
        tree_root(b"".join(map(_file_leaf, files))),
    )
