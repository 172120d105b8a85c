"""The weight manifest: trees, ids, bad blocks, proofs, and bytes from strangers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.types import ModelId
from verification.manifest import (
    BLOCK_BYTES,
    BlockProof,
    BlockTable,
    Manifest,
    ManifestBuilder,
    ManifestInvalid,
    decode_manifest,
    encode_manifest,
    hash_blocks,
)
from verification.merkle import (
    EMPTY_ROOT,
    HASH_BYTES,
    inclusion_path,
    inner_hash,
    leaf_hash,
    root_of_path,
    tree_root,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "manifest.json").read_text())

leaf_lists = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40)


def rfc_root(leaves: list[bytes]) -> bytes:
    """RFC 9162 §2.1.1 as written: recursive, split at the largest power of two below n."""
    if len(leaves) <= 1:
        return leaves[0] if leaves else hashlib.sha256(b"").digest()
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return inner_hash(rfc_root(leaves[:split]), rfc_root(leaves[split:]))


def content(num_bytes: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(num_bytes)


def build(tensors: dict[str, bytes], *, name: str = "tiny", config: bytes = b"{}") -> tuple[Manifest, BlockTable]:
    builder = ManifestBuilder(name=name, source="local:tiny", revision="", architecture="LlamaForCausalLM")
    for tensor, data in tensors.items():
        builder.add_tensor(tensor, "U8", (len(data),), [data])
    builder.add_file("config.json", config)
    manifest, leaves = builder.finish()
    return manifest, BlockTable(manifest, leaves)


TENSORS = {"a": content(3 * BLOCK_BYTES + 17, 1), "b.weight": content(BLOCK_BYTES, 2), "c": content(5, 3)}


@pytest.mark.parametrize("vector", VECTORS["trees"], ids=lambda vector: str(len(vector["inputs"])))
def test_tree_root_of_certificate_transparency_vectors(vector: dict[str, list[str]]) -> None:
    leaves = b"".join(leaf_hash(bytes.fromhex(data)) for data in vector["inputs"])
    assert tree_root(leaves).hex() == vector["root"]


def test_manifest_of_known_model_has_known_id_and_path() -> None:
    vector = VECTORS["model"]
    builder = ManifestBuilder(name="any", source="any", revision="any", architecture="any")
    for tensor in vector["tensors"]:
        data = content(tensor["num_bytes"], tensor["seed"])
        builder.add_tensor(tensor["name"], tensor["dtype"], tensor["shape"], [data])
    for name, text in vector["files"].items():
        builder.add_file(name, text.encode())
    manifest, leaves = builder.finish()
    assert {tensor.name: tensor.root for tensor in manifest.tensors} == vector["roots"]
    assert manifest.model_id == vector["model_id"]
    path = BlockTable(manifest, leaves).path(vector["path"]["tensor"], vector["path"]["block"])
    assert [sibling.hex() for sibling in path] == vector["path"]["siblings"]


@given(leaf_lists)
def test_tree_root_equals_recursive_definition(leaves: list[bytes]) -> None:
    assert tree_root(b"".join(leaves)) == rfc_root(leaves)


@given(leaf_lists, st.data())
def test_inclusion_path_leads_to_root_and_no_other_leaf_does(leaves: list[bytes], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(leaves) - 1))
    joined = b"".join(leaves)
    path = inclusion_path(joined, index)
    assert root_of_path(leaves[index], index, len(leaves), path) == tree_root(joined)
    assert root_of_path(bytes(32), index, len(leaves), path) != tree_root(joined) or leaves[index] == bytes(32)
    assert root_of_path(leaves[index], index, len(leaves), (*path, bytes(32))) is None
    assert root_of_path(leaves[index], len(leaves), len(leaves), path) is None


def test_tree_of_nothing_has_the_empty_root_and_no_paths() -> None:
    assert tree_root(b"") == EMPTY_ROOT
    with pytest.raises(ValueError, match="outside"):
        inclusion_path(b"", 0)
    with pytest.raises(ValueError, match="whole number"):
        tree_root(b"abc")


@given(st.binary(max_size=3 * BLOCK_BYTES // 1024), st.integers(1, 97))
def test_builder_hashes_the_same_whatever_the_chunks(seed: bytes, step: int) -> None:
    data = hashlib.shake_128(seed).digest(2 * BLOCK_BYTES + len(seed))
    builder = ManifestBuilder(name="", source="", revision="", architecture="")
    builder.add_tensor("t", "U8", (len(data),), [data[i : i + step * 1000] for i in range(0, len(data), step * 1000)])
    _, leaves = builder.finish()
    assert leaves == hash_blocks(data)


def test_model_id_ignores_name_order_and_source_but_not_content() -> None:
    first, _ = build(TENSORS)
    renamed, _ = build(dict(reversed(TENSORS.items())), name="other")
    assert renamed.model_id == first.model_id
    assert build(TENSORS, config=b'{"a":1}')[0].model_id != first.model_id
    assert build(TENSORS | {"c": content(5, 4)})[0].model_id != first.model_id
    assert build(TENSORS | {"d": content(5, 3)})[0].model_id != first.model_id


@given(st.sampled_from(sorted(TENSORS)), st.data())
def test_verify_tensor_names_the_corrupted_block(name: str, data: st.DataObject) -> None:
    _, table = build(TENSORS)
    position = data.draw(st.integers(0, len(TENSORS[name]) - 1))
    damaged = bytearray(TENSORS[name])
    damaged[position] ^= data.draw(st.integers(1, 255))
    (bad,) = table.verify_tensor(name, damaged)
    assert (bad.tensor, bad.block) == (name, position // BLOCK_BYTES)
    assert bad.start <= position < bad.stop <= len(damaged)
    assert str(bad).startswith(f"tensor {name}, block {bad.block} (bytes ")


def test_verify_tensor_of_whole_cut_and_extended_data() -> None:
    _, table = build(TENSORS)
    assert table.verify_tensor("a", TENSORS["a"]) == ()
    assert [bad.block for bad in table.verify_tensor("a", TENSORS["a"][:-1])] == [3]
    assert [bad.block for bad in table.verify_tensor("a", TENSORS["a"][:BLOCK_BYTES])] == [1, 2, 3]
    assert [bad.block for bad in table.verify_tensor("a", TENSORS["a"] + b"x")] == [3]
    assert [bad.block for bad in table.verify_tensor("a", b"")] == [0, 1, 2, 3]


def test_empty_tensor_has_no_blocks_and_verifies() -> None:
    manifest, table = build({"empty": b"", "full": b"x"})
    assert manifest.tensor("empty").num_blocks == 0
    assert table.verify_tensor("empty", b"") == ()
    assert len(table.verify_tensor("empty", b"x")) == 1


def test_block_table_refuses_leaves_of_another_model() -> None:
    manifest, _ = build(TENSORS)
    with pytest.raises(ManifestInvalid, match="instead of"):
        BlockTable(manifest, bytes(HASH_BYTES))
    forged = BlockTable(manifest, bytes(HASH_BYTES * manifest.num_blocks))
    with pytest.raises(ManifestInvalid, match="do not lead to its root"):
        forged.verify_tensor("a", TENSORS["a"])


def test_verify_block_accepts_only_its_own_place() -> None:
    manifest, table = build(TENSORS)
    block = TENSORS["a"][BLOCK_BYTES : 2 * BLOCK_BYTES]
    path = table.path("a", 1)
    assert manifest.verify_block("a", 1, block, path)
    assert not manifest.verify_block("a", 0, block, path)
    assert not manifest.verify_block("a", 4, block, path)
    assert not manifest.verify_block("a", 1, block[:-1], path)
    assert not manifest.verify_block("a", 1, block, path[:-1])
    with pytest.raises(KeyError):
        manifest.verify_block("zz", 1, block, path)


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_block_proof_proves_against_the_id_alone(name: str) -> None:
    manifest, table = build(TENSORS)
    proof = table.proof(name, 0)
    block = TENSORS[name][:BLOCK_BYTES]
    assert proof.proves(ModelId(manifest.model_id), block)
    assert not proof.proves(ModelId("0" * 64), block)
    assert not proof.proves(ModelId(manifest.model_id), block[:-1] + bytes([block[-1] ^ 1]))
    moved = BlockProof(
        proof.tensor,
        proof.block,
        proof.block_path,
        (proof.tensor_index + 1) % 3,
        proof.num_tensors,
        proof.tensor_path,
        proof.num_files,
        proof.files_root,
    )
    assert not moved.proves(ModelId(manifest.model_id), block)


def test_manifest_round_trips_through_its_encoding() -> None:
    manifest, _ = build(TENSORS)
    assert decode_manifest(encode_manifest(manifest)) == manifest


@given(st.binary(max_size=300))
def test_decode_of_random_bytes_gives_a_clear_error(data: bytes) -> None:
    with pytest.raises(ManifestInvalid, match="not a manifest"):
        decode_manifest(data)


@given(st.data())
def test_decode_of_damaged_manifest_never_crashes(data: st.DataObject) -> None:
    good = bytearray(encode_manifest(build({"a": b"xyz"})[0]))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest = decode_manifest(good)
    except ManifestInvalid:
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest


def altered(**changes: object) -> bytes:
    fields = msgspec.to_builtins(build(TENSORS)[0])
    return msgspec.json.encode(fields | changes)


def altered_tensor(**changes: object) -> bytes:
    fields = msgspec.to_builtins(build(TENSORS)[0])
    fields["tensors"] = [fields["tensors"][0] | changes, *fields["tensors"][1:]]
    return msgspec.json.encode(fields)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (altered(model_id="0" * 64), "has id"),
        (altered(block_bytes=4096), "block_bytes"),
        (altered(format=2), "format"),
        (altered(extra=1), "unknown field"),
        (altered(name="a\x00b"), "name"),
        (altered(tensors=[]), "has id"),
        (altered(files=[{"name": "../x", "num_bytes": 1, "sha256": "0" * 64}]), "name"),
        (altered(tensors=list(reversed(msgspec.to_builtins(build(TENSORS)[0].tensors)))), "ascending"),
        (altered_tensor(dtype="F7"), "dtype"),
        (altered_tensor(shape=[1, 2]), "needs 2"),
        (altered_tensor(shape=[-1]), "shape"),
        (altered_tensor(num_bytes=2**63), "num_bytes"),
        (altered_tensor(name="tensor\n"), "name"),
        (altered_tensor(root="F" * 64), "root"),
        (b"[" * 100_000, "not a manifest"),
        (b'{"extra":' * 100_000, "not a manifest"),
        (b" " * (64 * 2**20 + 1), "larger than"),
    ],
)
def test_decode_of_inconsistent_manifest_says_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(ManifestInvalid, match=message):
        decode_manifest(data)


def test_builder_refuses_what_cannot_be_a_model() -> None:
    builder = ManifestBuilder(name="", source="", revision="", architecture="")
    builder.add_tensor("a", "F32", (2,), [bytes(8)])
    with pytest.raises(ManifestInvalid, match="twice"):
        builder.add_tensor("a", "F32", (2,), [bytes(8)])
    with pytest.raises(ManifestInvalid, match="needs 8"):
        builder.add_tensor("b", "F32", (2,), [bytes(7)])
    builder.add_file("config.json", b"")
    with pytest.raises(ManifestInvalid, match="twice"):
        builder.add_file("config.json", b"")
    builder.add_file("../../etc/passwd", b"")
    with pytest.raises(ManifestInvalid, match="name"):
        builder.finish()
