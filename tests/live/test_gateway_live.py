"""The gateway as a user runs it: a node process, a gateway process, and OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fusion_node.client.connection import SwarmConnection
from fusion_node.store import StoredModel
from tests.live.swarm_process import NodeProcess, fork_of, run_cli

pytestmark = pytest.mark.live

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
LONG: list[Any] = [{"role": "user", "content": "Count from 1 to 300, one number per line."}]


@contextlib.asynccontextmanager
async def started(home: Path, folder: Path, *arguments: str) -> AsyncIterator[NodeProcess]:
    """A process of the command line that has told that it is ready."""
    line = (*arguments, "--no-mdns", "--threads", "1", "--log-format", "json")
    process = NodeProcess("", folder, fork_of(line, home=home, folder=folder))
    try:
        yield await asyncio.to_thread(process.wait_ready)
    finally:
        await asyncio.to_thread(process.end)


@contextlib.asynccontextmanager
async def started_both(home: Path, folder: Path) -> AsyncIterator[tuple[NodeProcess, NodeProcess, openai.AsyncOpenAI]]:
    key = str(folder / "identity.key")
    async with started(home, folder / "node", "join", "smollm2-135m", "--layers", "0:30", "--identity", key) as node:
        address = node.ready["addresses"][0]
        serve = ("serve", "smollm2-135m", "--peer", address, "--listen", "127.0.0.1:0")
        async with started(home, folder / "gateway", *serve) as gateway:
            url = gateway.ready["url"]
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                yield node, gateway, client


async def open_sessions(node: NodeProcess) -> float:
    """Sessions that a node holds, by its own word."""
    async with SwarmConnection([node.ready["addresses"][0]], mdns=False) as connection:
        (measured,) = await connection.measure(await connection.find(None))
        return (await connection.status_of(measured))["open_sessions"]


async def test_gateway_answers_leaves_nothing_behind_and_tells_when_a_node_dies(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    # One test, because starting the two processes takes longer than everything that is asked of them.
    async with started_both(test_home, tmp_path) as (node, gateway, client):
        answer = await client.chat.completions.create(model="smollm2-135m", messages=CAPITAL, temperature=0)
        text = answer.choices[0].message.content or ""
        assert "Paris" in text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.model_extra is not None
        assert answer.usage.model_extra["fusion"]["plan"][0]["layers"] == "0:30"

        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

        sampled = [
            await client.chat.completions.create(
                model="smollm2-135m", messages=CAPITAL, temperature=1, seed=seed, max_tokens=12
            )
            for seed in (5, 5)
        ]
        assert len({each.choices[0].message.content for each in sampled}) == 1

        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(
                model="smollm2-135m", messages=[{"role": "user", "content": "word " * 9000}]
            )
        assert too_long.value.code == "context_length_exceeded"

        async with await client.chat.completions.create(model="smollm2-135m", messages=LONG, stream=True) as left:
            await anext(aiter(left))
            assert await open_sessions(node) == 1
        async with asyncio.timeout(10):
            while await open_sessions(node):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)

        dying = await client.chat.completions.create(
            model="smollm2-135m", messages=LONG, temperature=0, max_tokens=400, stream=True
        )
        await anext(aiter(dying))
        node.signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(openai.APIError, match="peer") as died:
            async for _ in dying:
                pass
        assert time.monotonic() - began < 30
        assert died.value.code == "no_route"  # nobody else serves its layers

        gateway.signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait, 15.0) == 0


async def test_gateway_told_to_stop_ends_its_streams_within_seconds(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    async with started_both(test_home, tmp_path) as (_node, gateway, client):
        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=LONG, temperature=0, max_tokens=2000, stream=True
        )
        await anext(aiter(stream))
        gateway.signal(signal.SIGINT)
        began = time.monotonic()
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
        assert time.monotonic() - began < 6
        assert await asyncio.to_thread(gateway.wait, 15.0) == 0


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_serve_on_a_taken_port_exits_with_5_before_it_loads_anything(taken_port: int, tmp_path: Path) -> None:
    done = run_cli("serve", "any", "--listen", f"127.0.0.1:{taken_port}", home=tmp_path)
    assert done.returncode == 5
    assert "choose another port with --listen" in done.stderr
