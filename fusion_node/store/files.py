"""Small things about files that the store's parts share: bounded reads, durable writes, links, room on the disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fusion_node.errors import ResourceExhausted, StoreCorrupted
from fusion_node.store.progress import Progress

MAX_SMALL_FILE_BYTES = 64 * 2**20
"""Bound of a config or tokenizer file; the largest tokenizer.json in use (262,144 entries) is 34 MB."""

MAX_CONFIG_BYTES = 4 * 2**20
"""Bound of a config.json, which is a few kilobytes; mixtures with per-layer lists reach some hundred."""

DISK_RESERVE_BYTES = 256 * 2**20
"""Left free beyond what a pull needs: a full disk breaks more than this program."""

DiskFree = Callable[[Path], int]
"""Bytes that can still be written to the file system of a path."""

_COPY_BYTES = 8 * 2**20


def disk_free(path: Path) -> int:
    """Bytes that this user can still write to the file system of ``path``."""
    return shutil.disk_usage(path).free


def check_room(path: Path, needed_bytes: int, free: DiskFree) -> None:
    """Raises ResourceExhausted, saying how much is missing, when ``needed_bytes`` and the reserve do not fit."""
    available = free(path)
    missing = needed_bytes + DISK_RESERVE_BYTES - available
    if missing > 0:
        raise ResourceExhausted(
            f"not enough disk space in {path}: {megabytes(missing)} are missing "
            f"({megabytes(needed_bytes + DISK_RESERVE_BYTES)} needed, {megabytes(available)} free); "
            "free some, or set FUSION_HOME to a larger disk"
        )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def read_bounded(path: Path, max_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """The content of a small file.

    Raises:
        StoreCorrupted: when it is missing, unreadable or larger than ``max_bytes``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise StoreCorrupted(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise StoreCorrupted(f"{path} is larger than the {max_bytes} bytes that such a file may have")
    return data


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """Decodes a JSON object from outside; StoreCorrupted when it is anything else."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise StoreCorrupted(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StoreCorrupted(f"{what} is not a JSON object")
    return value


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""Waits until a folder's entries (creations, renames) are on the disk: the same call on POSIX."""


def link_or_copy(source: Path, target: Path, progress: Progress) -> None:
    """Gives ``target`` the content of ``source``: a hard link where the file system allows, else a durable copy.

    Symbolic links are followed first, so that a snapshot in a Hugging Face cache yields its blob.
    """
    real = source.resolve(strict=True)
    try:
        target.hardlink_to(real)
    except OSError:
        with real.open("rb") as reader, target.open("wb") as writer:
            while chunk := reader.read(_COPY_BYTES):
                writer.write(chunk)
                progress.advance(len(chunk))
            writer.flush()
            os.fsync(writer.fileno())
    else:
        progress.advance(real.stat().st_size)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file in hex, in constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress.advance(len(chunk))
    return digest.hexdigest()


def remove_tree(path: Path) -> None:
    """Removes a folder with everything in it; nothing happens when there is none."""
    if path.exists():
        shutil.rmtree(path)
