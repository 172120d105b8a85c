"""Records every tensor that leaves or enters this process, where frames are handed to a connection or come from one.

A connection (p2p.connection) calls this for each of its frames, whatever code has sent it, so that no tensor goes past
it on the data plane. What a line holds, and why no value of a tensor can be told from it: fusion_node.audit_records.

A line is written in the call that records it, in one piece, so that a process that is killed loses none; it costs about
5 µs (docs/audit.md). Tensors above LARGE_BYTES are hashed on a thread of their own, and their lines may come a little
later than their numbers. What cannot be written costs the log, and not the answer: the log then lacks its end, and the
logs of others show frames that it does not have.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import structlog

from fusion_node.audit_records import (
    MASKED,
    PLAIN,
    VERSION,
    AnyLine,
    AnyTensor,
    EndLine,
    FullLine,
    GoneLine,
    GrantLine,
    LogLine,
    OpenLine,
    OrderLine,
    PartialsLine,
    PeerLine,
    PlanSeen,
    ProbeLine,
    ReleaseLine,
    ResultLine,
    RevokeLine,
    SaidLine,
    SessionLine,
    StageSeen,
    StepLine,
    TapsLine,
    digest_of,
    encode_line,
    name_of,
)
from fusion_node.errors import ConfigError
from fusion_node.slices import MASKED_BYTES, VALUE_BYTES, Exchange
from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p.compression import LARGE_BYTES
from p2p.messages import (
    AnyMessage,
    BandwidthProbe,
    OpenSession,
    Partials,
    RenewGrant,
    Resend,
    RevokeGrant,
    SessionReleased,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    alias_of,
)
from p2p.records import Plan, plan_claim_of
from p2p.tensor_wire import Buffer, decompress

MAX_LOG_BYTES = 2**30
"""Of one run. 180 bytes a tensor: about 20,000 tokens of a member of a group of three that serves thirty layers."""

MAX_PENDING_BYTES = 256 * 2**20
"""Of tensors that wait to be hashed on the thread; what is more is hashed in the call that records it."""

MAX_SESSIONS = 16_384
"""Whose ids and numbers are kept, the last ones: strangers may name as many as they like. One that comes back after
that is introduced again, by another number, and entries of ``p``, which name sessions by an alias, stand for none."""

MAX_PEERS = 16_384
"""The same of peers."""

_EXCHANGES = {exchange.value: exchange.name.lower() for exchange in Exchange}

_log = structlog.get_logger(__name__)


class AuditLog:
    """See the head of this file.

    Args:
        path: of the file, which is made if absent and never overwritten.
        peer: whose log this is.
        software: for people.
        max_bytes: after which nothing more is recorded, and the log says so.
        clock: monotonic seconds.
        now: Unix time, of the head.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        peer: PeerId,
        *,
        software: str = "",
        max_bytes: int = MAX_LOG_BYTES,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._clock = clock
        self._began = clock()
        self._left_bytes = max_bytes
        self._number = 0
        self._peers: OrderedDict[PeerId, int] = OrderedDict()
        self._sessions: OrderedDict[bytes, int] = OrderedDict()
        self._num_peers = self._num_sessions = 0
        self._aliases: OrderedDict[int, tuple[bytes, int, bool]] = OrderedDict()
        """Of sessions under one plan: which, and whether its sums are masked."""
        self._lock = threading.Lock()
        self._hashing: ThreadPoolExecutor | None = None
        self._pending_bytes = 0
        try:
            # To be read by whoever has started the process, and by those that this one hands it to.
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the audit log {path} cannot be written: {error.strerror}") from error
        self._write(LogLine(VERSION, peer, _ascii(software), now()))

    def sent(self, peer: PeerId, message: AnyMessage, payload: Buffer) -> None:
        """A frame is handed to the connection with ``peer``."""
        if self._fd is not None:
            self._record(message, payload, to=self._peer(peer), from_=0)

    def received(self, peer: PeerId, message: AnyMessage, payload: Buffer) -> None:
        """A frame of ``peer`` has arrived, and is about to be handled."""
        if self._fd is not None:
            self._record(message, payload, to=0, from_=self._peer(peer))

    def gone(self, peer: PeerId) -> None:
        """The connection with ``peer`` is over."""
        if self._fd is not None:
            self._write(GoneLine(*self._now(), self._peer(peer)))

    def close(self) -> None:
        """Ends the log, when all connections are over. Safe to call twice."""
        if self._hashing is not None:
            self._hashing.shutdown(wait=True)
            self._hashing = None
        if self._fd is not None:
            self._write(EndLine(*self._now()))
            self._stop()

    # inside

    def _record(self, message: AnyMessage, payload: Buffer, *, to: int, from_: int) -> None:
        match message:
            case Partials():
                self._partials(message, payload, to, from_)
            case Step():
                step = StepLine(
                    *self._event(to, from_, message.session, message.epoch),
                    sequence=message.sequence,
                    first=message.first_node,
                    nodes=message.node_count,
                    live=message.live.hex(),
                    wanted=len(message.want),
                    covers=message.covers,
                    stop=message.stop_stage,
                    is_tree=bool(message.parents) or message.advance != message.first_node + message.node_count - 1,
                )
                self._tensor(step, message.session, message.tensor, payload)
            case StepResult():
                result = ResultLine(*self._event(to, from_, message.session, message.epoch), sequence=message.sequence)
                self._tensor(result, message.session, message.tensor, payload)
            case StepTaps():
                taps = TapsLine(
                    *self._event(to, from_, message.session, message.epoch),
                    sequence=message.sequence,
                    layer=message.layer,
                )
                self._tensor(taps, message.session, message.tensor, payload)
            case OpenSession():
                self._open(message, to, from_)
            case RenewGrant():
                event = self._event(to, from_, message.session, message.epoch)
                self._write(GrantLine(*event, grant=message.grant.hex()))
            case RevokeGrant():
                event = self._event(to, from_, message.session, message.epoch)
                self._write(RevokeLine(*event, grant=message.grant.hex()))
            case SessionReleased():
                event = self._event(to, from_, message.session, message.epoch)
                self._write(ReleaseLine(*event, release=message.release.hex()))
            case Resend():
                order = OrderLine(
                    *self._event(to, from_, message.session, message.epoch),
                    sequence=message.sequence,
                    covers=message.covers,
                    first=message.first_position,
                    rows=message.num_positions,
                    stop=message.stop_stage,
                )
                self._write(order)
            case BandwidthProbe():
                if payload:
                    is_zero = bytes(payload).count(0) == len(payload)
                    self._write(ProbeLine(*self._now(), to, from_, bytes=len(payload), zeros=is_zero))
            case _:
                session = getattr(message, "session", None)
                if session is not None:
                    epoch = getattr(message, "epoch", 0)
                    what = str(message.__struct_config__.tag)
                    self._write(SaidLine(*self._event(to, from_, session, epoch), what=what))

    def _open(self, message: OpenSession, to: int, from_: int) -> None:
        plan = plan_claim_of(message.plan)
        is_masked = plan is not None and plan.masks
        self._aliases[alias_of(message.session, message.epoch)] = message.session, message.epoch, is_masked
        if len(self._aliases) > MAX_SESSIONS:
            self._aliases.popitem(last=False)
        line = OpenLine(
            *self._event(to, from_, message.session, message.epoch),
            stage=message.stage,
            member=message.member,
            resumes=message.resumes,
            folds=message.folds,
            digest=digest_of(message.plan, message.session),
            plan=None if plan is None else _seen(plan),
            grant=message.grant.hex(),
        )
        self._write(line)

    def _partials(self, message: Partials, payload: Buffer, to: int, from_: int) -> None:
        """A line for each entry: they may be of different sessions."""
        view = memoryview(payload)
        row_bytes = len(view) // message.num_rows
        exchange = _EXCHANGES[message.exchange]
        lines: list[AnyLine] = []
        start = 0
        for entry in message.entries:
            stop = start + entry.num_rows * row_bytes
            session, epoch, is_masked = self._aliases.get(entry.session, (b"", 0, False))
            line = PartialsLine(
                *self._event(to, from_, session, epoch),
                rows=entry.num_rows,
                width=row_bytes // (MASKED_BYTES if is_masked else VALUE_BYTES),
                dtype=MASKED if is_masked else PLAIN,
                bytes=stop - start,
                digest=digest_of(view[start:stop], session),
                layer=message.layer,
                exchange=exchange,
                node=entry.node,
                alias="" if session else f"{entry.session:08x}",
            )
            lines.append(line)
            start = stop
        self._write(*lines)

    def _tensor(self, line: AnyTensor, session: bytes, tensor: TensorMeta, payload: Buffer) -> None:
        work = partial(self._hashed, line, session, tensor, payload)
        num_bytes = tensor.num_bytes
        if num_bytes <= LARGE_BYTES or self._pending_bytes + num_bytes > MAX_PENDING_BYTES:
            self._write(work())
            return
        if self._hashing is None:
            self._hashing = ThreadPoolExecutor(1, thread_name_prefix="audit-log")
        with self._lock:
            self._pending_bytes += num_bytes
        self._hashing.submit(self._hash_later, work, num_bytes)

    def _hash_later(self, work: Callable[[], AnyTensor], num_bytes: int) -> None:
        try:
            self._write(work())
        finally:
            with self._lock:
                self._pending_bytes -= num_bytes

    def _hashed(self, line: AnyTensor, session: bytes, tensor: TensorMeta, payload: Buffer) -> AnyTensor:
        try:
            digest = digest_of(decompress(payload, tensor).data if tensor.codec else payload, session)
        except WireError:
            digest = ""
        return msgspec.structs.replace(
            line,
            rows=tensor.num_rows,
            width=tensor.row_size,
            dtype=tensor.dtype,
            bytes=tensor.num_bytes,
            digest=digest,
        )

    def _event(self, to: int, from_: int, session: bytes, epoch: int) -> tuple[int, int, int, int, int, int]:
        """The fields that all lines about a session have. A session that is new is introduced first."""
        number = 0
        if session:
            found = self._sessions.get(session)
            if found is None:
                self._num_sessions += 1
                found = self._sessions[session] = self._num_sessions
                self._write(SessionLine(found, name_of(session)))
                if len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)
            else:
                self._sessions.move_to_end(session)
            number = found
        return (*self._now(), to, from_, number, epoch)

    def _now(self) -> tuple[int, int]:
        self._number += 1
        return self._number, int((self._clock() - self._began) * 1000.0)

    def _peer(self, peer: PeerId) -> int:
        number = self._peers.get(peer)
        if number is None:
            self._num_peers += 1
            number = self._peers[peer] = self._num_peers
            self._write(PeerLine(number, peer))
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(peer)
        return number

    def _write(self, *lines: AnyLine) -> None:
        data = b"".join([encode_line(line) + b"\n" for line in lines])
        with self._lock:
            if self._fd is None:
                return
            try:
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    os.write(self._fd, encode_line(FullLine(self._number + 1, 0)) + b"\n")
                    _log.error("the audit log is full: nothing more is recorded", path=str(self._path))
                    self._stop()
                elif os.write(self._fd, data) != len(data):
                    raise OSError("written in part")
            except OSError as error:
                _log.error("the audit log cannot be written: nothing more is recorded", error=type(error).__name__)
                self._stop()

    def _stop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _seen(plan: Plan) -> PlanSeen:
    stages = tuple(
        StageSeen(stage.start, stage.stop, tuple(place.peer for place in stage.places), stage.weights)
        for stage in plan.stages
    )
    return PlanSeen(plan.user, plan.model_id, _ascii(plan.numerics), stages, _ascii(plan.wire), plan.masks)


def _ascii(text: str) -> str:
    """What a line may hold of a text that somebody else chose."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:96])


__all__ = ["MAX_LOG_BYTES", "AuditLog"]
