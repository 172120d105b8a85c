"""Keeps the frames that one node is sent, values included, for a report on what it can read of them.

Off unless the operator asks for it (``join --record-received``), and of no use to the node: it shows its operator what
any node can keep. It hangs where the audit log does (p2p.audit_log), where frames come from a connection, so that it
has what the node was sent in real answers and nothing that it was not. What is kept is what an attack on a session
reads: who opened it under which plan, its steps, and contributions of other members; never the keys of masks.

The file holds states of users' prompts. It is readable by its owner alone, never overwritten, never sent, and ends
after a number of bytes. It begins with MAGIC and the node's peer id; then follow frames, each with its sender::

    u8 length, peer id | u8 length, sender | u32 length (little-endian), frame of p2p.messages | ...

A frame that is cut off at the end, as of a process that was killed, is no error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from fusion_node.wire import MAX_FRAME_BYTES, WireError
from p2p.connection import Payload, Recorder
from p2p.messages import AnyMessage, OpenSession, Partials, Step, decode_message, encode_message

MAGIC = b"fusion-received-1\n"
MAX_FILE_BYTES = 512 * 2**20
"""Of one file. A member of three that serves the built-in model whole is sent 0.42 MB with each row."""

_KEPT = (OpenSession, Step, Partials)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """One frame, and who sent it."""

    sender: PeerId
    message: AnyMessage
    payload: memoryview


class FrameFile:
    """See the head of this file; a Recorder.

    Args:
        path: of the file, which must not be there yet.
        peer: whose frames these are.
        max_bytes: after which nothing more is kept.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, path: Path, peer: PeerId, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        try:
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made to record what is received: {error.strerror}") from error
        self._path = path
        self._left_bytes = max_bytes
        self._write(MAGIC + _named(peer))
        _log.warning(
            "KEEPS WHAT USERS SEND: everything that this node is sent of their prompts goes into a file",
            path=str(path),
            max_bytes=max_bytes,
        )

    def sent(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """Nothing of it is kept."""

    def received(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """A frame of ``peer`` has arrived."""
        if self._fd is not None and isinstance(message, _KEPT):
            if isinstance(message, OpenSession) and message.mask_keys:
                message = msgspec.structs.replace(message, mask_keys=b"")
            head = encode_message(message)
            size = len(head) + len(payload)
            self._write(b"".join((_named(peer), size.to_bytes(4, "little"), head, payload)))

    def gone(self, peer: PeerId) -> None:
        """Nothing of it is kept."""

    def close(self) -> None:
        """Ends the file. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, record: bytes) -> None:
        if self._fd is None:
            return
        if len(record) > self._left_bytes:
            _log.warning("the file of what is received is full: nothing more is kept", path=str(self._path))
            self.close()
            return
        self._left_bytes -= len(record)
        try:
            while record:
                record = record[os.write(self._fd, record) :]
        except OSError as error:
            # It costs the file, and not the answer; what is there is read up to here.
            _log.warning("what is received cannot be kept", path=str(self._path), error=error.strerror)
            self.close()


class Recorders:
    """Several recorders as one."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def sent(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """See Recorder."""
        for each in self._recorders:
            each.sent(peer, message, payload)

    def received(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """See Recorder."""
        for each in self._recorders:
            each.received(peer, message, payload)

    def gone(self, peer: PeerId) -> None:
        """See Recorder."""
        for each in self._recorders:
            each.gone(peer)


def read_frames(path: Path) -> tuple[PeerId, Iterator[ReceivedFrame]]:
    """Whose file it is, and what is in it, in the order in which it came.

    Raises:
        ConfigError: at once or while iterating: it cannot be read, or is no file of a FrameFile.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than what a node records: it holds {MAX_FILE_BYTES} bytes at most")
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise ConfigError(f"{path} is not what `fusion-node join --record-received` writes")
    peer, at = _name_at(content, len(MAGIC), path)
    return peer, _frames(content, at, path)


def _frames(content: memoryview, at: int, path: Path) -> Iterator[ReceivedFrame]:
    while at < len(content):
        start = at
        sender, at = _name_at(content, at, path)
        size = int.from_bytes(content[at : at + 4], "little")
        at += 4
        if at + size > len(content):
            return
        if size > MAX_FRAME_BYTES:
            raise ConfigError(f"{path}: the frame at byte {start} is longer than any")
        try:
            message, payload = decode_message(content[at : at + size])
        except WireError as error:
            raise ConfigError(f"{path}: the frame at byte {start} cannot be read: {error}") from error
        at += size
        yield ReceivedFrame(sender, message, payload)


def _named(peer: PeerId) -> bytes:
    text = peer.encode()
    return len(text).to_bytes(1, "little") + text


def _name_at(content: memoryview, at: int, path: Path) -> tuple[PeerId, int]:
    stop = at + 1 + content[at] if at < len(content) else at
    try:
        return PeerId(str(content[at + 1 : stop], "ascii")), stop
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no peer id at byte {at}") from error
