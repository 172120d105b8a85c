"""What was measured of nodes' speeds, kept in the home folder: a new process plans with what the last one has learned.

One file per model and numerics class, of MAX_NODES nodes that were measured within KEPT_S. Whoever writes merges with
what the file holds by then, node by node the newer one; of two that write in the same moment one is lost. A file that
cannot be read is set aside under another name, with a warning, and never keeps a program from starting; nothing is
written that could not be read again.

Assumes nothing of the file: every number is bounded when it is read, and the worst that a wrong one does is a bad plan.
It tells with whom this machine has been in touch, hence mode 0600. Ages come from Unix time, as that is all that two
processes have in common; what is dated ahead of the clock is dropped.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from fusion_node.types import ModelId, PeerId, UnixS
from p2p.records import PeerText, Time
from scheduler.claims import (
    MAX_MESSAGE_S,
    MAX_ROUNDS,
    MAX_SAMPLE_ROWS,
    MAX_SAMPLES,
    SLOWEST_S,
    ClaimBook,
    Measurements,
)
from scheduler.topology import SPEED_ROWS

FOLDER = "claims"

MAX_NODES = 1000
"""Of at most a kilobyte each; whoever comes back within hours meets far fewer again."""

MAX_FILE_BYTES = 4 * 1024 * 1024

KEPT_S = 12 * 3600.0
"""Twelve half-lives of a measurement: what is older weighs nothing any more."""

_VERSION = 1
_NUM_WIDTHS = len(SPEED_ROWS)

_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=SLOWEST_S)]
_Sample = tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLE_ROWS)], _Seconds]
_Samples = Annotated[tuple[_Sample, ...], msgspec.Meta(max_length=MAX_SAMPLES)]
_Message = Annotated[float, msgspec.Meta(ge=-MAX_MESSAGE_S, le=MAX_MESSAGE_S)]

log = structlog.get_logger(__name__)


class _Node(msgspec.Struct, frozen=True):
    """``at`` is Unix time by width; None where nothing was measured."""

    peer: PeerText
    samples: Annotated[tuple[_Samples, ...], msgspec.Meta(min_length=_NUM_WIDTHS, max_length=_NUM_WIDTHS)]
    at: Annotated[tuple[Time | None, ...], msgspec.Meta(min_length=_NUM_WIDTHS, max_length=_NUM_WIDTHS)]
    excess_s: Annotated[tuple[_Seconds, ...], msgspec.Meta(min_length=_NUM_WIDTHS, max_length=_NUM_WIDTHS)]
    num_explained: Annotated[int, msgspec.Meta(ge=0, le=1000)]

    @property
    def last(self) -> float:
        return max((at for at in self.at if at is not None), default=0.0)


class _File(msgspec.Struct, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=_VERSION, le=_VERSION)]
    nodes: Annotated[list[_Node], msgspec.Meta(max_length=MAX_NODES)]
    messages: Annotated[list[_Message], msgspec.Meta(max_length=MAX_ROUNDS)] = []
    messages_at: Time = 0.0


def path_of(home: Path, model: ModelId, numerics: str) -> Path:
    """Where the measurements of a model's nodes are kept."""
    return home / FOLDER / f"{model[:16]}-{numerics}.json"


def load(book: ClaimBook, path: Path, *, now: float, unix_now: UnixS) -> None:
    """Fills a book in which nothing is yet."""
    kept = _fresh(_read(path), unix_now)
    book.restore(
        [
            Measurements(
                PeerId(node.peer),
                node.samples,
                tuple(None if at is None else unix_now - at for at in node.at),
                node.excess_s,
                node.num_explained,
            )
            for node in sorted(kept.nodes, key=lambda node: node.last)
        ],
        kept.messages,
        unix_now - kept.messages_at,
        now=now,
    )


def save(book: ClaimBook, path: Path, *, now: float, unix_now: UnixS) -> None:
    """Merges with the file and replaces it. Failing to write is no reason not to go on: it is logged."""
    before = _fresh(_read(path), unix_now)
    nodes = {node.peer: node for node in before.nodes}
    for each in book.measurements(now):
        at = tuple(None if age_s is None else max(unix_now - age_s, 0.0) for age_s in each.ages_s)
        node = _Node(each.peer, each.samples, at, each.excess_s, each.num_explained)
        if each.peer not in nodes or nodes[each.peer].last < node.last:
            nodes[each.peer] = node
    messages, age_s = book.message_samples(now)
    messages_at = unix_now - age_s if messages else 0.0
    if messages_at <= before.messages_at:
        messages, messages_at = before.messages, before.messages_at
    newest = sorted(nodes.values(), key=lambda node: -node.last)[:MAX_NODES]
    file = _fresh(_File(_VERSION, newest, messages, messages_at), unix_now)
    data = msgspec.json.encode(file)
    try:
        _decode(data)
    except msgspec.MsgspecError as error:
        log.warning("measured speeds are not written: they could not be read again", reason=str(error))
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(data)
        os.utime(temporary, (unix_now, unix_now))
        temporary.replace(path)
        _drop_old(path.parent, unix_now)
    except OSError as error:
        log.warning("measured speeds cannot be written", path=str(path), reason=error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _drop_old(folder: Path, unix_now: UnixS) -> None:
    """Files of models that were not used within KEPT_S, so that the folder is bounded by what is in use."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if unix_now - path.stat().st_mtime > KEPT_S:
                path.unlink()


def _fresh(file: _File, unix_now: UnixS) -> _File:
    """Without what is too old, or dated ahead of the clock."""
    nodes = [node for node in file.nodes if 0.0 <= unix_now - node.last <= KEPT_S]
    is_fresh = 0.0 <= unix_now - file.messages_at <= KEPT_S
    return _File(_VERSION, nodes, file.messages if is_fresh else [], file.messages_at if is_fresh else 0.0)


def _read(path: Path) -> _File:
    nothing = _File(_VERSION, [])
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return nothing
    except OSError as error:
        log.warning("measured speeds cannot be read", path=str(path), reason=error.strerror)
        return nothing
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        aside = path.with_name(f"{path.name}.unreadable")
        log.warning("measured speeds cannot be understood, and begin anew", path=str(path), reason=str(error))
        with contextlib.suppress(OSError):
            path.replace(aside)
        return nothing


def _decode(data: bytes) -> _File:
    """Raises msgspec.MsgspecError or UnicodeDecodeError."""
    if len(data) > MAX_FILE_BYTES:
        raise msgspec.ValidationError("the file is too large")
    return msgspec.json.decode(data, type=_File)
