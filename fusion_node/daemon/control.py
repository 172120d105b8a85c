"""The local control socket: what a node tells its operator on this machine, and takes from them.

HTTP over a Unix domain socket, one per node, ``PEER-ID.sock`` in the home's ``run`` folder: ``GET /state``,
``POST /pause`` (``{"at_once": true}``) and ``POST /resume``, each answered with a Reply as JSON; ``GET /network``,
answered with a NetworkReport (``?measure=1`` measures bandwidth before, which takes some seconds); ``GET /peers``, with
a PeersReply; ``POST /invite``, with an InviteReply, which may hold the key of a private swarm; and ``POST /bans``,
which bans and lifts bans, with a BansReply. The folder has mode 0700 and the socket 0600, so whoever can connect is the
node's own user; there is no other access control. A path that is too long for a socket (sun_path, unix(7)) is a
symbolic link to a short one.

Both sides are here: the node listens, the command line asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import aiohttp
import msgspec
import structlog
from aiohttp import web

from fusion_node.daemon.network_report import NetworkReport
from fusion_node.daemon.swarm_report import InviteReply, InviteRequest, PeersReply
from fusion_node.errors import ConfigError
from p2p.bans import Ban

MAX_REQUEST_BYTES = 4 * 1024
MAX_REPLY_BYTES = 16 * 1024
MAX_REPORT_BYTES = 512 * 1024
"""A node has at most some hundred links, of about 200 bytes each."""
MAX_PEERS_BYTES = 16 * 1024 * 1024
"""A node may know 20,000 records, of which each becomes some 300 bytes here."""
MAX_BANS_BYTES = 8 * 1024 * 1024
"""A file of bans is no longer."""
MAX_NODES = 32
"""Of one home that are asked."""

MAX_PATH_BYTES = 103
"""Of a socket's path: 104 with its zero byte on macOS, 108 on Linux."""

ASK_TIMEOUT_S = 5.0
"""The event loop of a node never computes: one that is silent for so long is stopped or broken."""

MEASURE_TIMEOUT_S = 120.0
"""For a report with measurements: a minute for each of two peers on a line of 0.5 Mbit/s."""

_CLOSE_S = 1.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Phase(enum.StrEnum):
    """Where a node is between its start and its end."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING_UP = "warming-up"
    READY = "ready"
    PAUSED = "paused"
    BACKING_OFF = "backing-off"
    LEAVING = "leaving"

    @property
    def in_words(self) -> str:
        """For people."""
        return self.value.replace("-", " ")


class NodeState(msgspec.Struct, frozen=True):
    """A node at one moment.

    Attributes:
        layers: ``START:STOP``; empty until they are chosen.
        slice: which part of these layers, as ``0/3``; empty: all of them.
        loaded_percent: of the weights; None before loading begins.
        ends_in_s: how long running sessions may still go on; None unless a pause is on its way.
        num_rows: computed since the start.
        rows_per_s: of the last seconds: about the tokens per second that pass through this node.
        memory_bytes: resident memory of the process.
        device_memory_bytes: what the process holds on a GPU; None on a CPU.
        kv_reserved_bytes, kv_budget_bytes: of all sessions together.
    """

    peer: str
    pid: int
    model: str
    phase: Phase
    device: str = ""
    layers: str = ""
    loaded_percent: int | None = None
    ends_in_s: float | None = None
    num_sessions: int = 0
    num_rows: int = 0
    rows_per_s: float = 0.0
    memory_bytes: int = 0
    device_memory_bytes: int | None = None
    kv_reserved_bytes: int = 0
    kv_budget_bytes: int = 0
    uptime_s: float = 0.0
    slice: str = ""


class Reply(msgspec.Struct, frozen=True):
    """The answer to every request: how the node is now, and the phase that it was in before the request."""

    state: NodeState
    before: Phase


class PauseRequest(msgspec.Struct, frozen=True):
    """Body of ``POST /pause``; ``at_once`` ends running sessions without a grace period."""

    at_once: bool = False


class BansRequest(msgspec.Struct, frozen=True):
    """Body of ``POST /bans``: bans to add, and targets whose bans are lifted. With neither, it asks what there is."""

    add: tuple[Ban, ...] = ()
    lift: tuple[str, ...] = ()


class BansReply(msgspec.Struct, frozen=True):
    """The bans that hold now, the last made first.

    Attributes:
        num_lifted: of the targets to be lifted, those that were banned.
        problem: why the request had no effect, or will not outlast the process; empty when all is well.
    """

    bans: tuple[Ban, ...] = ()
    num_lifted: int = 0
    problem: str = ""


class Controllable(Protocol):
    """What a control socket controls."""

    def state(self) -> NodeState: ...

    def pause(self, *, at_once: bool) -> None:
        """Stops serving; sessions are refused when this returns."""
        ...

    def resume(self) -> None:
        """Serves again."""
        ...

    async def network(self, *, measure: bool) -> NetworkReport | None:
        """What it knows of its place in the network; None while it starts. ``measure``: and its bandwidth, now."""
        ...

    def invite(self, request: InviteRequest) -> InviteReply | None:
        """How others can enter its swarm; None while it starts."""
        ...

    async def peers(self) -> PeersReply | None:
        """With whom it is in touch; None while it starts."""
        ...

    async def change_bans(self, request: BansRequest) -> BansReply:
        """Bans and lifts bans, with effect on what is open when this returns, and tells those that hold now.

        Raises:
            ConfigError: a target is none, or the change cannot be written.
        """
        ...


# the node's side


@contextlib.asynccontextmanager
async def control_socket(folder: Path, peer: str, node: Controllable) -> AsyncIterator[None]:
    """Listens for as long as the context lasts. A socket that cannot be made is logged, and no reason not to serve."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            listener = stack.enter_context(_listener(folder, peer))
            runner = web.AppRunner(_application(node), access_log=None, shutdown_timeout=_CLOSE_S)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.SockSite(runner, listener).start()
        except OSError as error:
            log.warning("no control socket: this node cannot be paused", folder=str(folder), reason=str(error))
        yield


def _application(node: Controllable) -> web.Application:
    async def state(_: web.Request) -> web.Response:
        return reply(node.state().phase)

    async def pause(request: web.Request) -> web.Response:
        try:
            wish = msgspec.json.decode(await request.read() or b"{}", type=PauseRequest)
        except msgspec.MsgspecError as error:
            raise web.HTTPBadRequest from error
        before = node.state().phase
        node.pause(at_once=wish.at_once)
        return reply(before)

    async def resume(_: web.Request) -> web.Response:
        before = node.state().phase
        node.resume()
        return reply(before)

    async def network(request: web.Request) -> web.Response:
        return if_started(await node.network(measure=request.query.get("measure") == "1"))

    async def invite(request: web.Request) -> web.Response:
        try:
            wish = msgspec.json.decode(await request.read() or b"{}", type=InviteRequest)
        except msgspec.MsgspecError as error:
            raise web.HTTPBadRequest from error
        return if_started(node.invite(wish))

    async def peers(_: web.Request) -> web.Response:
        return if_started(await node.peers())

    async def bans(request: web.Request) -> web.Response:
        try:
            return as_json(await node.change_bans(msgspec.json.decode(await request.read(), type=BansRequest)))
        except msgspec.MsgspecError as error:
            raise web.HTTPBadRequest from error
        except ConfigError as error:
            return as_json(BansReply(problem=str(error)))

    def if_started(value: msgspec.Struct | None) -> web.Response:
        if value is None:
            raise web.HTTPServiceUnavailable
        return as_json(value)

    def reply(before: Phase) -> web.Response:
        return as_json(Reply(node.state(), before))

    def as_json(value: msgspec.Struct) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    application = web.Application(client_max_size=MAX_REQUEST_BYTES)
    application.add_routes([web.get("/state", state), web.get("/network", network), web.get("/peers", peers)])
    application.add_routes([web.post("/pause", pause), web.post("/resume", resume), web.post("/invite", invite)])
    application.add_routes([web.post("/bans", bans)])
    return application


@contextlib.contextmanager
def _listener(folder: Path, peer: str) -> Iterator[socket.socket]:
    _make_private(folder)
    known = path = folder / f"{peer}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"fusion-node-{os.getuid()}"
        _make_private(runtime)
        path = runtime / f"{peer[-16:]}.sock"
    # Under its name only when it listens: whoever finds a socket that nobody answers takes it for one of a dead node.
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(unfinished))
            unfinished.chmod(0o600)
            listener.listen()
            unfinished.replace(path)
            if known != path:
                known.unlink(missing_ok=True)
                known.symlink_to(path)
            yield listener
        finally:
            for left in (known, path, unfinished):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    """Raises PermissionError for a folder in which somebody else could have put something."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user's own")
    if found.st_mode & 0o077:
        folder.chmod(0o700)


# the operator's side


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one node of this machine said.

    Attributes:
        reply: None when it did not answer.
        problem: why it did not, for people; empty when it did.
    """

    peer: str
    reply: T | None
    problem: str = ""


def known_peers(folder: Path) -> list[str]:
    """Peer ids of the nodes that have a control socket here, dead ones included."""
    return [path.stem for path in sorted(folder.glob("*.sock"))[:MAX_NODES]]


async def ask_nodes(
    folder: Path, peers: Sequence[str], command: str, request: PauseRequest | None = None
) -> list[Answer[Reply]]:
    """Sends a command to nodes of this machine, all at once; those that are dead are left out and their files removed.

    Args:
        command: ``state``, ``pause`` or ``resume``.
    """
    asked = _Question("GET" if command == "state" else "POST", command, Reply, MAX_REPLY_BYTES, ASK_TIMEOUT_S, request)
    return await _ask_each(folder, peers, asked)


async def ask_network(folder: Path, peers: Sequence[str], *, measure: bool) -> list[Answer[NetworkReport]]:
    """What nodes of this machine know of the network, as ``ask_nodes``."""
    path, timeout_s = ("network?measure=1", MEASURE_TIMEOUT_S) if measure else ("network", ASK_TIMEOUT_S)
    return await _ask_each(folder, peers, _Question("GET", path, NetworkReport, MAX_REPORT_BYTES, timeout_s))


async def ask_peers(folder: Path, peers: Sequence[str]) -> list[Answer[PeersReply]]:
    """With whom nodes of this machine are in touch, as ``ask_nodes``."""
    return await _ask_each(folder, peers, _Question("GET", "peers", PeersReply, MAX_PEERS_BYTES, ASK_TIMEOUT_S))


async def ask_invites(folder: Path, peers: Sequence[str], request: InviteRequest) -> list[Answer[InviteReply]]:
    """Invites to the swarms of nodes of this machine, as ``ask_nodes``."""
    question = _Question("POST", "invite", InviteReply, MAX_REPLY_BYTES, ASK_TIMEOUT_S, request)
    return await _ask_each(folder, peers, question)


async def ask_bans(folder: Path, peers: Sequence[str], request: BansRequest) -> list[Answer[BansReply]]:
    """Changes and lists the bans of nodes of this machine, as ``ask_nodes``."""
    return await _ask_each(folder, peers, _Question("POST", "bans", BansReply, MAX_BANS_BYTES, ASK_TIMEOUT_S, request))


@dataclass(frozen=True, slots=True)
class _Question(Generic[T]):
    """One request, and what its answer is."""

    method: str
    path: str
    reply: type[T]
    limit_bytes: int
    timeout_s: float
    body: PauseRequest | InviteRequest | BansRequest | None = None


async def _ask_each(folder: Path, peers: Sequence[str], question: _Question[T]) -> list[Answer[T]]:
    answers = await asyncio.gather(*(_ask(folder / f"{peer}.sock", question) for peer in peers))
    return [answer for answer in answers if answer is not None]


async def _ask(path: Path, question: _Question[T]) -> Answer[T] | None:
    peer = path.stem
    try:
        body = await _request(_target(path), question)
        return Answer(peer, msgspec.json.decode(body, type=question.reply))
    except msgspec.MsgspecError:
        return Answer(peer, None, "it answers in a way that this version does not know")
    except TimeoutError:
        return Answer(peer, None, f"it did not answer within {question.timeout_s:.0f} s")
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, ConnectionRefusedError | FileNotFoundError):
            _remove(path)  # its node was killed
            return None
        return Answer(peer, None, f"its control socket cannot be used: {error.os_error.strerror}")
    except aiohttp.ClientResponseError as error:
        return Answer(peer, None, "it is still starting" if error.status == 503 else f"it answered {error.status}")
    except (aiohttp.ClientError, OSError) as error:
        return Answer(peer, None, f"it broke off: {type(error).__name__}")


def _target(path: Path) -> Path:
    return path.readlink() if path.is_symlink() else path


def _remove(path: Path) -> None:
    for each in (_target(path), path):
        with contextlib.suppress(OSError):
            each.unlink(missing_ok=True)


async def _request(path: Path, question: _Question[T]) -> bytes:
    limit = aiohttp.ClientTimeout(total=question.timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=limit) as session:
        data = None if question.method == "GET" else msgspec.json.encode(question.body)
        async with session.request(question.method, f"http://node/{question.path}", data=data) as response:
            response.raise_for_status()
            body = bytearray()
            while chunk := await response.content.read(question.limit_bytes + 1 - len(body)):
                body += chunk
            return bytes(body) if len(body) <= question.limit_bytes else b""
