"""The gateway over a swarm that is played: a real HTTP server on loopback, asked by OpenAI's own client and by hand."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import Generation, GenerationStats, StageReport
from fusion_node.client.text_stream import TextStream
from fusion_node.client.tokenizer import ChatMessage
from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    ContextTooLong,
    FusionError,
    LocalProtocolError,
    NoPeers,
    NoRoute,
    PeerClosed,
    PeerTimeout,
    ResourceExhausted,
    StoreCorrupted,
)
from fusion_node.gateway.errors import ApiError
from fusion_node.gateway.openai_schema import DEFAULT_MAX_TOKENS, IGNORED, NOT_WANTED, parse_chat_request
from fusion_node.gateway.server import listening, make_app
from fusion_node.types import LayerRange, PeerId

SECRET = "the crown jewels are under the third stone"
HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]
WORDS = ("Hello", " wide", " world", ", how", " are", " you", "?")


@dataclass(frozen=True)
class FakeModel:
    name: str = "Tiny-Model"
    model_id: str = "ab" * 32


@dataclass
class FakeSwarm:
    """Answers every conversation with the same words.

    Attributes:
        fails: raised in front of word number ``fails_at``.
        waits_at: the answer stops in front of this word until ``go_on`` is set.
        waiting: set when ``awaited`` answers have stopped there.
        ended: set whenever an answer has freed what it held.
    """

    words: Sequence[str] = WORDS
    fails: Exception | None = None
    fails_at: int = 0
    waits_at: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[Sequence[ChatMessage], SamplingParams]] = field(default_factory=list)
    awaited: int = 1
    num_waiting: int = 0
    num_open: int = 0
    num_words: int = 0
    model: FakeModel = FakeModel()
    max_context: int = 100

    def chat(self, messages: Sequence[ChatMessage], params: SamplingParams | None = None) -> Generation:
        assert params is not None
        self.asked.append((messages, params))
        stats = GenerationStats(seed=params.seed or 0)
        return Generation(self._run(params, stats), stats)

    async def _run(self, params: SamplingParams, stats: GenerationStats) -> AsyncGenerator[str, None]:
        self.num_open += 1
        try:
            stats.prompt_tokens, stats.cached_tokens = 5, 3
            stats.stages = (StageReport(PeerId("12D3node"), LayerRange(0, 4), "cpu", 0.0125, 7, 0.07, 0.0),)
            text = TextStream(lambda ids: "".join(self.words[i % len(self.words)] for i in ids), params.stop)
            for index in range(len(self.words)):
                if index == self.waits_at:
                    self.num_waiting += 1
                    if self.num_waiting == self.awaited:
                        self.waiting.set()
                    await self.go_on.wait()
                if self.fails is not None and index == self.fails_at:
                    raise self.fails
                if index == params.max_tokens:
                    stats.finish_reason = "length"
                    break
                stats.time_to_first_token_s, stats.decode_s = 0.25, 0.5
                stats.completion_tokens += 1
                self.num_words += 1
                if piece := text.push(index):
                    yield piece
                if text.stopped_by is not None:
                    break
            if piece := text.finish():
                yield piece
            stats.finish_reason = stats.finish_reason or "stop"
        finally:
            self.num_open -= 1
            self.ended.set()


@contextlib.asynccontextmanager
async def gateway(swarm: FakeSwarm, **options: Any) -> AsyncIterator[str]:
    async with listening(make_app(swarm, aliases=["tiny"], **options), "127.0.0.1", 0) as url:
        yield url


@contextlib.asynccontextmanager
async def asking(swarm: FakeSwarm, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client for a gateway over this swarm. It does not try again by itself."""
    async with (
        gateway(swarm, **options) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO} | fields


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes | dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(
        f"{url}/v1/chat/completions", data=io.BytesIO(data), headers={"Content-Type": "application/json"} | headers
    ) as response:
        told = await response.json()
        assert response.status == 200 or told["error"].keys() == {"message", "type", "param", "code"}
        return response.status, told


async def stream_lines(response: aiohttp.ClientResponse) -> list[Any]:
    """The events of a stream; `[DONE]` is None."""
    events = [line for line in (await response.text()).split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    return [None if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


# answers


async def test_answer_whole_has_text_usage_and_plan() -> None:
    async with asking(FakeSwarm()) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, seed=7)
    assert answer.choices[0].message.content == "Hello wide world, how are you?"
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "stop")
    assert (answer.object, answer.model) == ("chat.completion", "Tiny-Model")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 7, 12)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.model_extra == {
        "fusion": {
            "plan": [{"peer": "12D3node", "layers": "0:4", "round_trip_ms": 12.5, "compute_ms_per_step": 10.0}],
            "time_to_first_token_s": 0.25,
            "tokens_per_s": 12.0,
            "seed": 7,
        }
    }


async def test_answer_streamed_begins_with_role_and_ends_with_reason() -> None:
    async with asking(FakeSwarm()) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", *WORDS, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["stop"]
    assert all(chunk.usage is None and "usage" not in chunk.model_fields_set for chunk in chunks)


async def test_answer_streamed_with_usage_has_it_in_a_last_chunk_without_choices() -> None:
    async with asking(FakeSwarm()) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert chunks[-1].usage.model_extra is not None
    assert chunks[-1].usage.model_extra["fusion"]["tokens_per_s"] == 12.0
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])


async def test_stream_on_the_wire_is_server_sent_events_ended_by_done() -> None:
    async with (
        gateway(FakeSwarm()) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert "Access-Control-Allow-Origin" not in response.headers
        events = await stream_lines(response)
    assert events[-1] is None
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert response.headers["X-Request-Id"] == events[0]["id"]


async def test_answer_from_the_synchronous_client() -> None:
    def ask(url: str) -> tuple[str | None, list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=HELLO)
            stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            return whole.choices[0].message.content, [chunk.choices[0].delta.content or "" for chunk in stream]

    async with gateway(FakeSwarm()) as url:
        whole, pieces = await asyncio.to_thread(ask, url)
    assert whole == "".join(pieces) == "Hello wide world, how are you?"


@pytest.mark.parametrize(
    ("stop", "expected"), [(" are", "Hello wide world, how"), (["x", "wor", "how"], "Hello wide ")]
)
async def test_stop_ends_the_answer_before_it(stop: str | list[str], expected: str) -> None:
    async with asking(FakeSwarm()) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, stop=stop)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"


async def test_max_tokens_ends_the_answer_with_length() -> None:
    async with asking(FakeSwarm()) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_completion_tokens=2, max_tokens=5
        )
    assert answer.choices[0].message.content == "Hello wide"
    assert answer.choices[0].finish_reason == "length"


async def test_empty_answer_is_empty_both_ways() -> None:
    async with asking(FakeSwarm(words=())) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].message.content == ""
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None]


async def test_sampling_fields_reach_the_swarm() -> None:
    swarm = FakeSwarm()
    async with asking(swarm) as client:
        await client.chat.completions.create(
            model="TINY-model",
            messages=HELLO,
            temperature=0.5,
            top_p=0.9,
            seed=11,
            max_tokens=3,
            stop=["a", "b"],
            presence_penalty=0,
            frequency_penalty=0,
            n=1,
            user="someone",
            extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
        )
        await client.chat.completions.create(model="ab" * 32, messages=HELLO, top_p=0, extra_body={"top_k": -1})
    assert swarm.asked[0][1] == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=11,
        stop=("a", "b"),
    )
    plain = swarm.asked[1][1]
    assert (plain.max_tokens, plain.temperature, plain.top_k) == (DEFAULT_MAX_TOKENS, 1.0, None)
    assert 0 < plain.top_p < 1e-6
    assert plain.seed is not None
    assert 0 <= plain.seed < 2**53


async def test_conversation_content_parts_and_developer_become_plain_messages() -> None:
    swarm = FakeSwarm()
    first = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": "Hello", "name": "someone"},
        first,
        {"role": "user", "content": parts},
    ]
    async with asking(swarm) as client:
        await client.chat.completions.create(model="tiny", messages=messages)
    assert swarm.asked[0][0] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "one\ntwo"},
    ]


async def test_models_list_and_retrieve() -> None:
    async with asking(FakeSwarm()) as client:
        listed = [model async for model in client.models.list()]
        by_alias = await client.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("huge")
    assert [model.id for model in listed] == ["Tiny-Model"]
    assert by_alias == listed[0]
    assert listed[0].model_extra == {
        "fusion": {"model_id": "ab" * 32, "max_context": 100, "aliases": ["tiny"]},
    }


async def test_health_counts_and_version_tells() -> None:
    swarm = FakeSwarm(waits_at=1)
    async with gateway(swarm, max_running=3) as url, aiohttp.ClientSession() as session:
        asked = asyncio.ensure_future(post(session, url, chat()))
        await swarm.waiting.wait()
        async with session.get(f"{url}/health") as response:
            health = await response.json()
        async with session.get(f"{url}/version") as response:
            version = await response.json()
        swarm.go_on.set()
        assert (await asked)[0] == 200
    assert health == {"status": "ok", "model": "Tiny-Model", "running": 1, "max_running": 3}
    assert version.keys() == {"version", "protocol"}


# refusals


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"text"', None),
        (b'{"model": "tiny", "messages": ' + b"[" * 200_000, None),
        (b'{"model": "tiny", "nested": ' + b"[" * 200_000, None),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}', None),
        (b'{"messages": [{"role": "user", "content": "a"}]}', None),
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (chat(messages=[{"role": "user"}]), "messages[0].content"),
        (chat(messages=[{"role": "king", "content": "a"}]), "messages[0].role"),
        (chat(messages=[{"role": "tool", "content": "a"}]), "messages[0].role"),
        (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": []}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
        (chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), "messages[0].tool_calls"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=2.5), "max_tokens"),
        (chat(max_tokens="3"), "max_tokens"),
        (chat(max_completion_tokens=10**30), "max_completion_tokens"),
        (chat(temperature=-1), "temperature"),
        (chat(temperature="hot"), "temperature"),
        (chat(top_p=2), "top_p"),
        (chat(top_k=-2), "top_k"),
        (chat(min_p=1.5), "min_p"),
        (chat(repetition_penalty=0), "repetition_penalty"),
        (chat(seed=-1), "seed"),
        (chat(seed=2**63), "seed"),
        (chat(stop=["a"] * 17), "stop"),
        (chat(stop=""), "stop"),
        (chat(stop=["a" * 257]), "stop[0]"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(stream=True, stream_options=[]), "stream_options"),
        (chat(n=2), "n"),
        (chat(n=True), "n"),
        (chat(presence_penalty=0.5), "presence_penalty"),
        (chat(frequency_penalty=-0.5), "frequency_penalty"),
        (chat(logprobs=True), "logprobs"),
        (chat(logit_bias={"5": 1}), "logit_bias"),
        (chat(tools=[{"type": "function"}]), "tools"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(response_format={"type": "json_object"}), "response_format"),
        (chat(max_token=3), "max_token"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_wrong_request_is_refused_with_the_field_named(body: bytes | dict[str, Any], param: str | None) -> None:
    swarm = FakeSwarm()
    async with gateway(swarm) as url, aiohttp.ClientSession() as session:
        status, told = await post(session, url, body)
    assert status == 400
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["param"] == param
    assert param is None or param.split("[")[0].split(".")[0] in told["error"]["message"]
    assert swarm.asked == []


def test_unsupported_fields_that_ask_for_nothing_are_accepted() -> None:
    for name, values in NOT_WANTED.items():
        for value in (None, *values):
            parse_chat_request(json.dumps(chat(**{name: value})).encode())
    for name in IGNORED:
        parse_chat_request(json.dumps(chat(**{name: {"any": ["thing"]}})).encode())


async def test_null_fields_are_the_same_as_absent_ones() -> None:
    swarm = FakeSwarm()
    optional = (
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "stream",
        "stream_options",
        "top_k",
        "min_p",
        "unheard_of",
    )
    async with gateway(swarm) as url, aiohttp.ClientSession() as session:
        assert (await post(session, url, chat(seed=1)))[0] == 200
        assert (await post(session, url, chat(seed=1, **dict.fromkeys(optional))))[0] == 200
    assert swarm.asked[0] == swarm.asked[1]


async def test_unknown_model_is_not_found() -> None:
    async with asking(FakeSwarm()) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="huge", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert "Tiny-Model" in caught.value.message


async def test_huge_body_is_refused() -> None:
    async with gateway(FakeSwarm()) as url, aiohttp.ClientSession() as session:
        status, told = await post(session, url, chat(messages=[{"role": "user", "content": "a" * 2**20}]))
        assert (status, told["error"]["code"]) == (413, "request_too_large")
        nearly = chat(messages=[{"role": "user", "content": "a" * (2**20 - 200)}])
        assert (await post(session, url, nearly))[0] == 200


async def test_body_that_is_not_declared_as_json_is_refused() -> None:
    async with gateway(FakeSwarm()) as url, aiohttp.ClientSession() as session:
        assert (await post(session, url, chat(), **{"Content-Type": "text/plain"}))[0] == 415
        assert (await post(session, url, chat(), **{"Content-Type": "application/json; charset=utf-8"}))[0] == 200


async def test_compressed_body_is_refused_without_unpacking_it() -> None:
    async with gateway(FakeSwarm()) as url, aiohttp.ClientSession() as session:
        status, told = await post(session, url, b"\x1f\x8b not even gzip", **{"Content-Encoding": "gzip"})
    assert (status, told["error"]["code"]) == (415, "content_encoding")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("", 403),
        ("[", 403),
    ],
)
async def test_local_gateway_answers_only_requests_to_a_local_host(host: str, status: int) -> None:
    async with (
        gateway(FakeSwarm()) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/models", headers={"Host": host}) as response,
    ):
        assert response.status == status


async def test_public_gateway_answers_under_any_name() -> None:
    async with (
        gateway(FakeSwarm(), only_local=False) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/models", headers={"Host": "llm.example"}) as response,
    ):
        assert response.status == 200


async def test_wrong_path_and_method_are_told_in_the_same_form() -> None:
    async with gateway(FakeSwarm()) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_url")
        async with session.get(f"{url}/v1/chat/completions") as response:
            assert (response.status, (await response.json())["error"]["message"]) == (405, "this path takes POST")


# failures of the swarm


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLong("the prompt has 200 tokens"), 400, "context_length_exceeded"),
        (ConfigError("the chat template refuses"), 400, "invalid_value"),
        (NoRoute("no usable node serves layers 2:4"), 503, "no_route"),
        (NoPeers("nobody is there"), 503, "no_route"),
        (PeerClosed("12D3node", "node is gone"), 503, "node_failed"),
        (ResourceExhausted("no memory"), 503, "resource_exhausted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_failure_before_the_first_text_has_its_own_status(
    error: FusionError, status: int, code: str, stream: bool
) -> None:
    swarm = FakeSwarm(fails=error)
    async with asking(swarm) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert str(error) in caught.value.message
    assert ("retry-after" in caught.value.response.headers) == (status == 503)
    assert swarm.num_open == 0


@pytest.mark.parametrize("error", [ValueError(SECRET), StoreCorrupted(SECRET), LocalProtocolError(SECRET)])
async def test_unforeseen_failure_tells_the_caller_nothing(error: Exception) -> None:
    async with asking(FakeSwarm(fails=error)) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.APIError, match="the gateway failed"):
            async for _ in await client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
                pass
    assert SECRET not in str(caught.value.body)


@pytest.mark.parametrize("error", [PeerTimeout("12D3node", "no result within 30 s"), ValueError(SECRET)])
async def test_failure_in_mid_stream_is_an_event_and_the_end(error: Exception) -> None:
    swarm = FakeSwarm(fails=error, fails_at=3)
    async with (
        gateway(swarm) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        assert response.status == 200
        events = await stream_lines(response)
    texts = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(texts) == "Hello wide world"
    told = events[-1]["error"]
    assert told["type"] == "server_error"
    assert told["message"] == (str(error) if isinstance(error, FusionError) else "the gateway failed; its log says why")
    assert swarm.num_open == 0


async def test_failure_in_mid_stream_is_an_error_of_openais_client() -> None:
    async with asking(FakeSwarm(fails=PeerClosed("12D3node", "node is gone"), fails_at=3)) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        got = []
        with pytest.raises(openai.APIError, match="node is gone"):
            async for chunk in stream:
                got.append(chunk.choices[0].delta.content)
    assert got == ["", "Hello", " wide", " world"]


# callers that leave, that do not read, and too many of them


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits_at", [0, 3])
async def test_caller_that_leaves_frees_the_session(stream: bool, waits_at: int) -> None:
    swarm = FakeSwarm(waits_at=waits_at)
    async with gateway(swarm) as url:
        async with aiohttp.ClientSession() as session:
            asked = asyncio.ensure_future(session.post(f"{url}/v1/chat/completions", json=chat(stream=stream)))
            await swarm.waiting.wait()
            assert swarm.num_open == 1
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                response = await asked
                response.close()
        async with asyncio.timeout(5):
            await swarm.ended.wait()
        assert swarm.num_open == 0


@contextlib.asynccontextmanager
async def reading_nothing(url: str) -> AsyncIterator[None]:
    """A caller that asks for a long stream and reads only how it begins."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(chat(stream=True, max_tokens=100_000)).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        yield
    finally:
        writer.close()


async def test_caller_that_does_not_read_holds_the_answer_back() -> None:
    swarm = FakeSwarm(words=["x" * 1000] * 100_000)
    async with gateway(swarm) as url:
        async with reading_nothing(url):
            # An answer that waits for its caller makes no progress: once none is made, the buffers are full.
            before = -1
            while swarm.num_words != before:
                before = swarm.num_words
                await asyncio.sleep(0.2)
            assert 0 < before < 50_000
            assert swarm.num_open == 1
        async with asyncio.timeout(5):
            await swarm.ended.wait()


async def test_caller_that_does_not_read_for_too_long_loses_the_answer() -> None:
    swarm = FakeSwarm(words=["x" * 1000] * 100_000)
    async with gateway(swarm, write_timeout_s=0.2) as url, reading_nothing(url), asyncio.timeout(5):
        await swarm.ended.wait()
    assert swarm.num_open == 0


async def test_one_more_than_may_run_is_told_to_come_again() -> None:
    swarm = FakeSwarm(waits_at=0, awaited=2)
    async with asking(swarm, max_running=2) as client:
        running = [
            asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO)) for _ in range(2)
        ]
        await swarm.waiting.wait()
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO)
        swarm.go_on.set()
        await asyncio.gather(*running)
        await client.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    assert len(swarm.asked) == 4


# shutdown


async def test_shutdown_ends_a_stream_with_an_error_and_frees_the_session() -> None:
    swarm = FakeSwarm(waits_at=3)
    async with aiohttp.ClientSession() as session:
        async with gateway(swarm, finish_s=0.05) as url:
            response = await session.post(f"{url}/v1/chat/completions", json=chat(stream=True))
            await swarm.waiting.wait()
        events = await stream_lines(response)
    assert events[-1]["error"]["code"] == "shutting_down"
    assert swarm.num_open == 0


async def test_shutdown_lets_an_answer_finish() -> None:
    swarm = FakeSwarm(waits_at=3)
    async with aiohttp.ClientSession() as session:
        async with gateway(swarm) as url:
            asked = asyncio.ensure_future(post(session, url, chat()))
            await swarm.waiting.wait()
            asyncio.get_running_loop().call_later(0.05, swarm.go_on.set)
        status, told = await asked
    assert status == 200
    assert told["choices"][0]["message"]["content"] == "Hello wide world, how are you?"


async def test_port_in_use_is_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(AddressInUse):
        async with listening(make_app(FakeSwarm()), "127.0.0.1", other.getsockname()[1]):
            pass


# what is logged


@pytest.fixture
def written(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What the program writes, with its logs set up as `serve` does, whatever other tests have made of them."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    configure_logs(LogFormat.JSON, verbose=True)
    yield lambda: "".join(capfd.readouterr())
    root.handlers[:] = before[0]
    root.setLevel(before[1])


@pytest.mark.parametrize("fails", [None, PeerClosed("12D3node", "node is gone")])
async def test_log_holds_neither_prompt_nor_answer(fails: Exception | None, written: Callable[[], str]) -> None:
    swarm = FakeSwarm(words=("The answer", " is a secret too"), fails=fails, fails_at=1)
    async with gateway(swarm) as url, aiohttp.ClientSession() as session:
        await post(session, url, chat(messages=[{"role": "user", "content": SECRET}]))
        await post(session, url, chat(messages=[{"role": "user", "content": SECRET}], tool_choice=SECRET))
        await post(session, url, chat(messages=[{"role": SECRET, "content": SECRET}]))
    told = written()
    assert ("answer failed" if fails else "answered") in told
    assert "crown" not in told
    assert "secret" not in told


# fuzzing

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
contents = st.text(max_size=40) | st.lists(
    st.fixed_dictionaries({"type": st.just("text") | st.text(max_size=8)}, optional={"text": st.text() | json_values}),
    max_size=3,
)
messages_strategy = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | json_values},
        optional={"content": contents | json_values, "tool_calls": json_values, "name": json_values},
    ),
    max_size=4,
)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.sampled_from([0, 1, 0.5])
known_fields = {
    "max_tokens": numbers,
    "max_completion_tokens": numbers,
    "temperature": numbers,
    "top_p": numbers,
    "top_k": numbers,
    "min_p": numbers,
    "repetition_penalty": numbers,
    "seed": numbers,
    "stop": st.text(max_size=5) | st.lists(st.text(max_size=5), max_size=18),
    "stream": st.booleans() | json_values,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans() | json_values}) | json_values,
} | dict.fromkeys(NOT_WANTED, json_values)
requests = st.fixed_dictionaries(
    {"model": st.just("tiny") | st.text(max_size=10), "messages": messages_strategy | json_values},
    optional=known_fields,
)
bodies = st.binary(max_size=200) | st.one_of(requests, json_values).map(lambda v: json.dumps(v).encode())


@settings(max_examples=400, deadline=None)
@given(body=bodies)
def test_any_body_is_a_request_or_a_bad_request(body: bytes) -> None:
    refusal: ApiError | None = None
    try:
        request = parse_chat_request(body)
        request.conversation()
        request.sampling(seed=0)
    except ApiError as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and len(refusal.encode()) < 2000)


Post = Callable[[bytes], AbstractAsyncContextManager[aiohttp.ClientResponse]]


def test_any_body_is_answered_without_a_500() -> None:
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()

    async def start() -> Post:
        url = await stack.enter_async_context(gateway(FakeSwarm()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        return lambda body: session.post(
            f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        )

    ask = loop.run_until_complete(start())

    async def check(body: bytes) -> None:
        async with ask(body) as response:
            assert response.status in (200, 400, 404)
            if response.content_type == "text/event-stream":
                assert (await stream_lines(response))[-1] is None
            else:
                assert (await response.json()).keys() & {"error", "choices"}

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(body=bodies)
    def run(body: bytes) -> None:
        loop.run_until_complete(check(body))

    try:
        run()
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()
