"""The gateway: an HTTP server with OpenAI's API in front of a swarm.

Guarantees: an answer occupies nodes only as long as its caller is connected and reads; the number of answers at a time
is bounded; an error before the first text has its own HTTP status, a later one is an event of the stream, and the
stream ends; neither prompts nor answers are logged.

Assumes: whoever can connect may use it. It listens on loopback by default, and then answers only requests that name a
loopback host, so that a web page cannot reach it through a name that it resolves to 127.0.0.1 (DNS rebinding). No CORS
header is ever sent, and bodies must be declared as JSON, which a page of another origin cannot do without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from aiohttp import web
from msgspec import UNSET
from msgspec.json import encode
from yarl import URL

import fusion_node
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.tokenizer import ChatMessage
from fusion_node.errors import ConfigError, FusionError, UnknownModel
from fusion_node.gateway.errors import ApiError, api_error, bad_request
from fusion_node.gateway.openai_schema import (
    AnswerMessage,
    ChatRequest,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    FusionUsage,
    GuessesUsage,
    PromptTokensDetails,
    SpeculationUsage,
    StageUsage,
    Usage,
    parse_chat_request,
)
from p2p.addresses import check_bindable, is_loopback
from p2p.records import PROTOCOL_VERSION

if TYPE_CHECKING:
    from fusion_node.client.speculation import SpeculationReport
    from fusion_node.client.swarm import GenerationStats

MAX_BODY_BYTES = 2**20
MAX_RUNNING = 32
"""Answers at a time. Each holds a session on every node of its route; more would wait there instead of here."""

BODY_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 75.0
"""For a connection that sends no complete request header: nginx's default for keep-alive."""

WRITE_TIMEOUT_S = 60.0
"""How long a caller may leave its stream unread before the answer is given up; its buffers hold hundreds of chunks."""

FINISH_S = 4.0
SHUTDOWN_S = 5.0
"""A gateway that is told to stop lets answers run for FINISH_S, ends the rest, and is gone after SHUTDOWN_S."""

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_WRITE_TIMEOUT = web.AppKey("write_timeout_s", float)
_STREAM = web.RequestKey("stream", web.StreamResponse)
"""Key of the request under which the stream is kept that has begun to answer it."""

log = structlog.get_logger(__name__)


class Answer(Protocol):
    """An answer on its way; fusion_node.client.swarm.Generation is one."""

    @property
    def stats(self) -> GenerationStats: ...

    def __aiter__(self) -> AsyncIterator[str]: ...

    async def aclose(self) -> None: ...


class ServedModel(Protocol):
    """The model that a swarm serves."""

    @property
    def name(self) -> str: ...

    @property
    def model_id(self) -> str: ...


class Swarm(Protocol):
    """What the gateway needs of a SwarmClient."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def max_context(self) -> int: ...

    def chat(self, messages: Sequence[ChatMessage], params: SamplingParams | None = None) -> Answer: ...


def make_app(
    swarm: Swarm,
    *,
    aliases: Sequence[str] = (),
    max_running: int = MAX_RUNNING,
    only_local: bool = True,
    finish_s: float = FINISH_S,
    write_timeout_s: float = WRITE_TIMEOUT_S,
) -> web.Application:
    """The gateway as an aiohttp application; ``listening`` serves it.

    Args:
        aliases: further names under which the model may be asked for.
        max_running: answers at a time.
        only_local: refuse requests whose Host header names another host than this machine.
        finish_s: how long running answers may go on after a shutdown has begun.
        write_timeout_s: how long a caller may leave its stream unread.
    """
    gateway = _Gateway(swarm, aliases, max_running, finish_s)
    middlewares = [_answer_errors, *([_check_host] if only_local else [])]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app[_WRITE_TIMEOUT] = write_timeout_s
    app.add_routes(
        [
            web.get("/health", gateway.health),
            web.get("/version", gateway.version),
            web.get("/v1/models", gateway.models),
            web.get("/v1/models/{name:.+}", gateway.model),
            web.post("/v1/chat/completions", gateway.chat_completions),
        ]
    )
    app.on_shutdown.append(gateway.finish)
    return app


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncGenerator[str, None]:
    """Serves the application; yields its URL. Leaving finishes or ends the running answers within SHUTDOWN_S.

    Raises:
        AddressInUse: another program listens there.
        ConfigError: the address cannot be listened on.
    """
    if port:
        check_bindable(host, port)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=IDLE_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_S,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield str(URL.build(scheme="http", host=host, port=runner.addresses[0][1]))
    finally:
        await runner.cleanup()


class _Gateway:
    def __init__(self, swarm: Swarm, aliases: Sequence[str], max_running: int, finish_s: float) -> None:
        self._swarm = swarm
        self._aliases = tuple(aliases)
        self._names = {name.lower() for name in (swarm.model.name, swarm.model.model_id, *aliases)}
        self._max_running = max_running
        self._finish_s = finish_s
        self._created = int(time.time())
        self._running: set[asyncio.Timeout] = set()
        self._stopping = False

    # handlers

    async def health(self, _request: web.Request) -> web.Response:
        """This process answers; whether the swarm can, only an answer shows."""
        state = "stopping" if self._stopping else "ok"
        return _json(
            {
                "status": state,
                "model": self._swarm.model.name,
                "running": len(self._running),
                "max_running": self._max_running,
            }
        )

    async def version(self, _request: web.Request) -> web.Response:
        return _json({"version": fusion_node.__version__, "protocol": PROTOCOL_VERSION})

    async def models(self, _request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._describe()]})

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return _json(self._describe())

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        chat = parse_chat_request(await _read_json(request))
        self._check_model(chat.model)
        # 53 bits, so that a seed that is read out of the usage survives every language's JSON.
        messages, params = chat.conversation(), chat.sampling(seed=secrets.randbits(53))
        writer = _Writer(chat, self._swarm.model)
        answer = self._swarm.chat(messages, params)
        with _logged(writer.id, answer.stats):
            async with self._slot():
                try:
                    return await (_stream(request, writer, answer) if chat.stream else _whole(writer, answer))
                finally:
                    await answer.aclose()

    async def finish(self, _app: web.Application) -> None:
        """Lets running answers go on for a moment, and no new ones begin."""
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + self._finish_s
        for limit in self._running:
            limit.reschedule(deadline)

    # inside

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None, None]:
        """A place among the running answers, which ends at the latest when the gateway shuts down.

        Raises:
            ApiError: there is none, or it has ended.
        """
        if self._stopping:
            raise _shutting_down()
        if len(self._running) >= self._max_running:
            raise ApiError(
                429,
                f"{self._max_running} answers are running, which is the most at a time: ask again later",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._running.add(limit)
                try:
                    yield
                finally:
                    self._running.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _shutting_down() from None

    def _check_model(self, name: str) -> None:
        if name.lower() not in self._names:
            raise UnknownModel(f"the model {name[:256]!r} is not served here: ask for {self._swarm.model.name!r}")

    def _describe(self) -> dict[str, Any]:
        model = self._swarm.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fusion-node",
            "fusion": {
                "model_id": model.model_id,
                "max_context": self._swarm.max_context,
                "aliases": [name for name in self._aliases if name != model.name],
            },
        }


class _Writer:
    """Makes the objects of one answer."""

    def __init__(self, chat: ChatRequest, model: ServedModel) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.wants_usage = chat.wants_usage
        self._created = int(time.time())
        self._model = model.name
        # The weights are what an answer depends on, beside the seed.
        self._fingerprint = f"fp_{model.model_id[:16]}"

    def completion(self, text: str, stats: GenerationStats) -> bytes:
        choice = Choice(AnswerMessage(text), stats.finish_reason or "stop")
        return encode(
            Completion(self.id, self._created, self._model, (choice,), usage_of(stats), self._fingerprint),
        )

    def event(self, delta: Delta, finish_reason: str | None = None) -> bytes:
        return self._event((ChunkChoice(delta, finish_reason),), None)

    def usage_event(self, stats: GenerationStats) -> bytes:
        return self._event((), usage_of(stats))

    def _event(self, choices: tuple[ChunkChoice, ...], usage: Usage | None) -> bytes:
        # A stream whose caller asked for usage has the field, null at first, in every chunk.
        shown = usage if self.wants_usage else UNSET
        chunk = Chunk(self.id, self._created, self._model, choices, self._fingerprint, shown)
        return b"data: " + encode(chunk) + b"\n\n"


def usage_of(stats: GenerationStats) -> Usage:
    """The statistics of an answer as the API has them, and what it has no place for."""
    plan = tuple(
        StageUsage(
            peer=stage.peer,
            layers=str(stage.layers),
            round_trip_ms=round(1000 * stage.round_trip_s, 3),
            compute_ms_per_step=round(1000 * stage.compute_s / max(stage.steps, 1), 3),
        )
        for stage in stats.stages
    )
    first_s, speed = stats.time_to_first_token_s, stats.tokens_per_s
    return Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        total_tokens=stats.prompt_tokens + stats.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(stats.cached_tokens),
        fusion=FusionUsage(
            plan=plan,
            time_to_first_token_s=None if first_s is None else round(first_s, 4),
            tokens_per_s=None if speed is None else round(speed, 2),
            seed=stats.seed,
            speculation=UNSET if stats.speculation is None else _speculation_of(stats.speculation),
        ),
    )


def _speculation_of(report: SpeculationReport) -> SpeculationUsage:
    return SpeculationUsage(
        mode=report.mode,
        acceptance=None if report.acceptance is None else round(report.acceptance, 4),
        rows_per_token=round(report.rows_per_token, 2),
        depth=round(report.depth, 2),
        latency_ms=round(1000 * report.latency_s, 3),
        price_ms=round(1000 * report.price_s, 3),
        by_depth=tuple(GuessesUsage(each.num_guessed, each.num_right) for each in report.by_depth),
    )


async def _whole(writer: _Writer, answer: Answer) -> web.Response:
    text = "".join([piece async for piece in answer])
    return web.Response(
        body=writer.completion(text, answer.stats),
        content_type="application/json",
        charset="utf-8",
        headers={"X-Request-Id": writer.id},
    )


async def _stream(request: web.Request, writer: _Writer, answer: Answer) -> web.StreamResponse:
    pieces = aiter(answer)
    # Headers wait for the first text, so that what fails before it has an HTTP status that callers understand.
    piece = await anext(pieces, None)
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "X-Request-Id": writer.id,
        }
    )
    await response.prepare(request)
    request[_STREAM] = response
    events = writer.event(Delta(role="assistant", content=""))
    while piece is not None:
        await _write(request, response, events + writer.event(Delta(content=piece)))
        events = b""
        piece = await anext(pieces, None)
    events += writer.event(Delta(), answer.stats.finish_reason or "stop")
    if writer.wants_usage:
        events += writer.usage_event(answer.stats)
    await _write(request, response, events + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Writes, and waits while the caller's buffers are full.

    Raises:
        ConnectionError: the caller is gone, or has not read for too long.
    """
    try:
        async with asyncio.timeout(request.app[_WRITE_TIMEOUT]) as limit:
            await response.write(data)
    except TimeoutError:
        if limit.expired() and request.transport is not None:
            request.transport.abort()
            raise ConnectionAbortedError("the caller does not read its stream") from None
        raise


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        # The caller is gone: nobody is left to be told.
        gone: web.StreamResponse = request.get(_STREAM, web.Response(status=499))
        return gone
    except Exception as error:  # noqa: BLE001 - a fault in one request is that request's error
        told = api_error(error)
        if told.status == 500:
            # Where it happened, without values and without the text of a foreign error: either may hold a prompt.
            place = "".join(traceback.format_tb(error.__traceback__))
            reason = str(error) if isinstance(error, FusionError) else ""
            log.error("request failed", path=request.path, error=type(error).__name__, reason=reason, place=place)
        stream: web.StreamResponse | None = request.get(_STREAM)
        if stream is None:
            return told.response()
        with contextlib.suppress(ConnectionError):
            await _write(request, stream, b"data: " + told.encode() + b"\n\n")
            await stream.write_eof()
        return stream


@web.middleware
async def _check_host(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        host = URL.build(scheme="http", authority=request.headers.get("Host", "")).host or ""
    except ValueError:
        host = ""
    if host.lower() not in _LOCAL_NAMES and not is_loopback(host):
        raise ApiError(
            403, "this gateway serves its own machine only: ask for http://127.0.0.1 or http://localhost", code="host"
        )
    return await handler(request)


async def _read_json(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        raise ApiError(415, "send the body with the header Content-Type: application/json", code="content_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without Content-Encoding", code="content_encoding")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except web.RequestPayloadError:
        raise bad_request("the body is not what its headers announce") from None


@contextlib.contextmanager
def _logged(request_id: str, stats: GenerationStats) -> Iterator[None]:
    """Tells the log how an answer ended, in numbers."""
    began = time.perf_counter()
    event, reason = "answer failed", None
    try:
        yield
        event = "answered"
    except FusionError as error:
        reason = str(error)
        raise
    except (asyncio.CancelledError, ConnectionError):
        event = "answer abandoned"
        raise
    finally:
        log.info(
            event,
            id=request_id,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            finish_reason=stats.finish_reason,
            seconds=round(time.perf_counter() - began, 3),
            **({} if reason is None else {"reason": reason}),
        )


def _json(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json", charset="utf-8")


def _shutting_down() -> ApiError:
    return ApiError(503, "the gateway is shutting down", code="shutting_down", retry_after_s=5)
