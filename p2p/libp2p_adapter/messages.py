"""Whole messages over the library's streams, and its errors turned into ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IncompleteReadError, MessageTooLarge
from libp2p.network.stream.exceptions import StreamEOF, StreamError

from fusion_node.errors import FusionError, PeerClosed, PeerTimeout, PeerUnreachable, RemoteProtocolError


@asynccontextmanager
async def closing(stream: Any) -> AsyncIterator[None]:
    """Closes a stream at the end, resets it on failure; neither may hang or hide the failure."""
    try:
        yield
    except BaseException:
        with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
            await stream.reset()
        raise
    with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
        await stream.close()


async def write_message(stream: Any, message: bytes) -> None:
    await stream.write(len(message).to_bytes(4, "little") + message)


async def read_message(stream: Any, limit_bytes: int) -> bytes:
    """Reads one message with its length in front: a reset looks like a clean end to the library (trap 11)."""
    length = int.from_bytes(await read_exactly(stream, 4), "little")
    if length > limit_bytes:
        raise MessageTooLarge(f"a message of {length} bytes exceeds the limit of {limit_bytes}")
    return await read_exactly(stream, length)


async def read_exactly(stream: Any, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = await stream.read(size - len(received))
        if not part:
            raise StreamEOF("stream ended inside a message")
        received += part
    return bytes(received)


class translated:
    """Turns the library's errors into ours. It raises whatever its parts raise, groups included."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        match error:
            case None | FusionError():
                return
            case trio.TooSlowError():
                raise PeerTimeout(self._peer, f"{self._peer} did not answer in time") from error
            case MessageTooLarge() | ParseError():
                raise RemoteProtocolError(self._peer, f"{self._peer} sent something malformed or oversized") from error
            case StreamError() | IncompleteReadError() | trio.BrokenResourceError() | trio.ClosedResourceError():
                raise PeerClosed(self._peer, f"{self._peer} closed the stream") from error
            case Exception():
                # The innermost cause says more than the library's wrapping.
                raise PeerUnreachable(self._peer, f"cannot reach {self._peer}: {error}") from error
